"""A run's folder: what is saved is there whole or not at all, and nothing of a user's is lost."""

import itertools
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import change_json
from transformers import AutoModelForCausalLM

from engine.core.files import append_durably, write_atomically
from engine.run import checkpoint, resume


def save_best(root: Path, text: str) -> None:
    with checkpoint.save_folder(root / "best") as temporary:
        for name in ("config", "weights"):
            (temporary / name).write_text(text)


def write(folder: Path) -> None:
    """What stands for a model and an optimizer."""
    for name in ("config.json", "model.safetensors", "training_state/optimizer.pt"):
        (folder / name).write_text("text")


def save(root: Path, step: int, keep: int | None = 2) -> Path:
    checkpoint.write_checkpoint(root / f"step-{step:06d}", {"state": {"step": step}}, write, keep)
    return root / f"step-{step:06d}"


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_start_gives_what_a_kill_has_left_between_two_renames_its_name_back(tmp_path):
    """Else the best model and the newest checkpoint, both whole, would be taken for gone."""
    save_best(tmp_path, "old")
    newest = save(tmp_path / "checkpoints", 1)
    for folder in (tmp_path / "best", newest):
        folder.rename(folder.with_name(f"{folder.name}.old"))
    assert resume.find_start(tmp_path, may_resume=True, warn=pytest.fail) == newest
    assert (tmp_path / "best/weights").read_text() == "old"


def test_all_of_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced, fsync, rename = set(), os.fsync, Path.rename

    def note(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def check(path: Path, target: Path) -> None:
        assert {file.stat().st_ino for file in (path, *path.rglob("*"))} <= synced
        rename(path, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "rename", check)
    for text in ("old", "new"):
        save_best(tmp_path, text)
        assert tmp_path.stat().st_ino in synced  # the folder that has the name
        synced.discard(tmp_path.stat().st_ino)


def test_a_file_is_whole_on_the_disk_before_it_takes_the_old_ones_place(tmp_path, monkeypatch):
    """A kill before that leaves the old one; what it had written is no part of the next one."""
    file, seen, fsync = tmp_path / "config.yaml", [], os.fsync

    def look(descriptor: int) -> None:
        fsync(descriptor)
        seen.append(file.read_text())

    file.write_text("old")
    (tmp_path / "config.yaml.tmp").write_text("to")  # of a killed run
    monkeypatch.setattr(os, "fsync", look)
    write_atomically(file, "new")
    assert seen == ["old", "new"]  # the new file is on the disk; then its name is
    assert names_in(tmp_path) == ["config.yaml"]


@pytest.mark.parametrize("num_moved", range(4))
def test_a_kill_while_a_killed_run_is_moved_aside_leaves_the_rest_to_the_next_start(
    tmp_path, monkeypatch, num_moved
):
    """A folder is a run's if it has a metrics.jsonl, which therefore moves last."""
    names, rename = ["config.yaml", "metrics.csv", "metrics.jsonl", "samples.jsonl"], Path.rename
    for name in names:
        (tmp_path / name).touch()

    def move(path: Path, target: Path) -> None:
        if len(list(tmp_path.glob("killed-*/*"))) == num_moved:
            raise KeyboardInterrupt
        rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", move)
        resume.find_start(tmp_path, may_resume=True, warn=print)
    assert resume.find_start(tmp_path, may_resume=True, warn=print) is None
    assert sorted(path.name for path in tmp_path.glob("killed-*/*")) == names
    assert all(name.startswith("killed-") for name in names_in(tmp_path))


@pytest.mark.parametrize("name", ["best", "best.old", "best.tmp"])
def test_what_stands_in_the_place_of_a_folder_is_no_obstacle(tmp_path, name):
    """Bug: a link or file best.old stayed, and after it no best model could be saved."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for folder in (run, elsewhere):
        folder.mkdir()
    (elsewhere / "weights").write_text("mine")
    (run / name).symlink_to(elsewhere)
    for text in ("one", "two"):
        save_best(run, text)
        assert names_in(run) == ["best"] and (run / "best/weights").read_text() == text
    is_ours = name == "best"  # moved to a larger disk: it is written there
    assert (run / "best").is_symlink() == is_ours
    assert (elsewhere / "weights").read_text() == ("two" if is_ours else "mine")


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl"])
def test_a_file_behind_a_link_is_never_written(tmp_path, name):
    """Bug: the lock was opened through a link, and the file at its end was emptied."""
    other, place = tmp_path / "precious", tmp_path / "run" / name
    other.write_text("mine")
    place.parent.mkdir()
    place.symlink_to(other)
    with pytest.raises((OSError, ValueError), match=f"run/{name}"):
        if name == "lock":
            resume.lock_folder(place.parent, pytest.fail)
        else:
            append_durably(place, "ours")
    assert other.read_text() == "mine"


def test_checkpoints_are_kept_as_the_config_says_and_what_a_killed_save_left_goes(tmp_path):
    """Bugs: it stayed for ever where no later save had the same step, as after a signal."""
    saved = [save(tmp_path, step, keep=None) for step in range(1, 5)]
    assert checkpoint.list_checkpoints(tmp_path) == saved[::-1]
    for name in ("step-000003.tmp", "step-000003.old", "step-٣", "step-²", "step-"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000007.tmp").symlink_to(tmp_path)
    (tmp_path / "last").unlink()
    (tmp_path / "last").mkdir()  # as `scp -r` leaves it
    save(tmp_path, 5)
    assert [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(tmp_path)] == [5, 4]
    not_ours = {"step-٣", "step-²", "step-"}
    assert {*names_in(tmp_path)} - not_ours == {"last", "step-000004", "step-000005"}
    assert (tmp_path / "last").resolve() == tmp_path / "step-000005"


def test_whichever_checkpoints_are_damaged_the_newest_whole_ones_are_used_and_kept(tmp_path):
    """Those newer than the one that is used are named; none that is damaged is counted."""
    damages = [
        (Path.unlink, "config.json"),
        (lambda file: os.truncate(file, 3), "training_state/files.json"),
        (lambda file: os.truncate(file, 3), "model.safetensors"),  # of 4 bytes
        (lambda file: file.write_text('{"a": 3}'), "training_state/files.json"),
    ]
    for number, is_damaged in enumerate(itertools.product((False, True), repeat=4)):
        root, keep, warnings = tmp_path / str(number), 1 + number % 3, []
        saved = [save(root, step, keep=None) for step in range(1, 5)]
        for place, folder in enumerate(saved):
            (folder / ".DS_Store").write_text("")  # what others have put there is no damage
            if is_damaged[place]:
                damage, name = damages[(number + place) % 4]
                damage(folder / name)
        whole = [folder for folder, is_out in zip(saved, is_damaged, strict=True) if not is_out]
        damaged = [folder for folder in saved if folder not in whole]
        assert checkpoint.newest_whole(root, warnings.append) == (whole or [None])[-1]
        named = [folder for folder in damaged if not whole or folder > whole[-1]]
        assert len(named) == len(warnings)
        assert all(str(one) in line for one, line in zip(named[::-1], warnings, strict=True))
        kept = [*whole, save(root, 5, keep)][-keep:]
        assert {*checkpoint.list_checkpoints(root)} == {*kept, *damaged}


def test_a_checkpoint_is_loaded_with_the_attention_of_the_run(tmp_path, rotary_model_folder):
    """Bug: a kernel that the checkpoint's config.json names was looked for."""
    folder = shutil.copytree(rotary_model_folder, tmp_path / "step-000001")
    change_json(folder / "config.json", _attn_implementation="flash_attention_2")
    checkpoint.load_weights(folder, AutoModelForCausalLM.from_pretrained(rotary_model_folder))


def test_an_optimizer_that_holds_code_runs_nothing(tmp_path, monkeypatch):
    """Checkpoints are copied from machine to machine, and a pickle runs what it names."""
    file, made = tmp_path / "training_state/optimizer.pt", tmp_path / "made"
    file.parent.mkdir()
    monkeypatch.setattr(checkpoint, "load_weights", lambda *given: None)
    run = SimpleNamespace(policy=SimpleNamespace(model=None))
    maker = type("Maker", (), {"__reduce__": lambda self: (os.mkdir, (str(made),))})
    torch.save({"state": maker()}, file)
    code = [file.read_bytes(), pickle.dumps(os.mkdir, 2), pickle.dumps([os.remove], 2)]
    for content in code:
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"optimizer\.pt is damaged \(UnpicklingError"):
            resume.load_checkpoint(run, tmp_path)
    assert not made.exists()
