"""Checkpoints: whole or not there, and a run that goes on from one as if nothing had happened."""

import errno
import functools
import multiprocessing
import os
import pickle
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
from harness import change_json, finish, forkserver, program, read_rows, run_program, train
from transformers import AutoModelForCausalLM

from engine.core.files import write_atomically
from engine.run import resuming, saving

# Whole runs


def test_a_run_that_ran_out_of_memory_goes_on_with_smaller_batches(tmp_path, rotary_model_folder):
    """Bug: README advised it, and the resumed run was refused."""
    batches = ["training.micro_batch_tokens=512", "sampling.max_batch_tokens=4096"]
    batches.append("model.gradient_checkpointing=true")
    train(tmp_path, rotary_model_folder, "training.num_steps=1")
    output = train(tmp_path, rotary_model_folder, "training.num_steps=2", *batches)
    assert "resumed after step 1" in output
    for override in batches:
        assert f"{override.split('=')[0]} has changed: from here on no longer bit for bit" in output


def run_with_full_disk(arguments: list[str], log: Path) -> None:
    """A limit on the size of files, which the weights exceed, stands for the full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    run_program(arguments, (), log)


def test_a_full_disk_is_logged_and_the_run_goes_on(tmp_path, rotary_model_folder):
    settings, log = ["training.num_steps=2", "logging.rollouts_every=0"], tmp_path / "log"
    given = program(tmp_path, rotary_model_folder, *settings)
    process = forkserver().Process(target=run_with_full_disk, args=(given, log))
    process.start()
    assert finish(process) == [1], log.read_text()  # not all is well
    output = log.read_text()
    assert output.count("nothing saved at step") >= 3  # best/ at 0, checkpoints at 1 and 2
    assert "checkpoint.keep" in output
    assert "there is no model in" in output  # the summary claims nothing else
    assert len(read_rows(tmp_path / "x")) == 3
    assert not list((tmp_path / "x/checkpoints").iterdir())


# A folder is there whole, or not at all


FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


class CopyBeforeEvents:
    """An audit hook that copies `root` before each event that touches a file."""

    def __init__(self, root: Path, copies: Path) -> None:
        self.root, self.copies, self.is_copying = root, copies, False

    def __call__(self, event: str, arguments: tuple) -> None:
        if event in FILE_EVENTS and not self.is_copying:
            self.is_copying = True
            shutil.copytree(self.root, self.copies / f"{len(list(self.copies.iterdir())):03d}")
            self.is_copying = False


def save_best(root: Path, text: str, copies: Path | None = None) -> None:
    """Save two files as best/; `copies` gets a copy of `root` before each file event."""
    if copies is not None:
        sys.addaudithook(CopyBeforeEvents(root, copies))
    with saving.save_folder(root / "best") as temporary:
        for name in ("config", "weights"):
            (temporary / name).write_text(text)


def test_a_full_disk_leaves_the_folder_that_was_there(tmp_path):
    save_best(tmp_path, "old")
    with (
        pytest.raises(OSError, match=r"best could not be written: .*No space left"),
        saving.save_folder(tmp_path / "best") as temporary,
    ):
        (temporary / "weights").write_text("n")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (tmp_path / "best/weights").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


@pytest.mark.parametrize("name", ["best", "best.old"])
def test_a_kill_at_any_file_event_leaves_the_old_or_the_new_folder(tmp_path, name):
    """A kill leaves what is on the disk at that moment: a copy of it is made before each event.

    Another kill may have come between the two renames of the save before, and left best.old.
    """
    root, copies = tmp_path / "root", tmp_path / "copies"
    copies.mkdir()
    save_best(root, "old")
    (root / "best").rename(root / name)
    # In a process of its own, because an audit hook cannot be removed.
    arguments = (root, "new", copies)
    process = multiprocessing.get_context("fork").Process(target=save_best, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    seen, is_between_renames = [], False
    for copy in sorted(copies.iterdir()):
        is_between_renames |= not (copy / "best").exists()
        resuming.mend(copy / "best")
        (text,) = {(copy / "best" / name).read_text() for name in ("config", "weights")}
        seen.append(text)
        save_best(copy, "next")  # whatever the kill has left does no harm
        assert [path.name for path in copy.iterdir()] == ["best"]
    assert seen == sorted(seen, reverse=True) and set(seen) == {"old", "new"}
    assert is_between_renames and len(seen) > 10


def test_a_start_gives_what_a_kill_has_left_between_two_renames_its_name_back(tmp_path, parts):
    """Else the best model and the newest checkpoint, both whole, would be taken for gone."""
    save_best(tmp_path, "old")
    newest = save(tmp_path / "checkpoints", parts, step=1)
    for folder in (tmp_path / "best", newest):
        folder.rename(folder.with_name(f"{folder.name}.old"))
    assert resuming.find_start(tmp_path, may_resume=True, warn=pytest.fail) == newest
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
    """Until all of the new text is on the disk, a kill must leave the old one."""
    file, seen, fsync = tmp_path / "config.yaml", [], os.fsync

    def look(descriptor: int) -> None:
        fsync(descriptor)
        seen.append(file.read_text())

    file.write_text("old")
    monkeypatch.setattr(os, "fsync", look)
    write_atomically(file, "new")
    assert seen == ["old", "new"]  # the new file is on the disk; then its name is
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("kind", ["link", "dangling link", "file"])
@pytest.mark.parametrize("name", ["best", "best.old", "best.tmp"])
def test_what_stands_in_the_place_of_a_folder_is_no_obstacle(tmp_path, name, kind):
    """Bug: a link or file best.old stayed, and after it no best model could be saved."""
    place, elsewhere = tmp_path / "run" / name, tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "note").write_text("mine")
    place.parent.mkdir()
    if kind == "file":
        place.write_text("")
    else:
        place.symlink_to(elsewhere if kind == "link" else tmp_path / "nowhere")
    for text in ("one", "two", "three"):
        save_best(tmp_path / "run", text)
        assert (tmp_path / "run/best/weights").read_text() == text
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["best"]
    if name == "best" and kind != "file":  # moved to a larger disk: it is written there
        assert place.is_symlink() and (place.resolve() / "weights").read_text() == "three"
    else:  # what a link leads to is not ours
        assert (elsewhere / "note").read_text() == "mine"


@pytest.fixture
def parts(rotary_model_folder, tokenizer) -> dict:
    """A model with its tokenizer, and an optimizer that has taken a step."""
    model = AutoModelForCausalLM.from_pretrained(rotary_model_folder)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([[2, 3]])).logits.sum().backward()
    optimizer.step()
    return {"model": model, "tokenizer": tokenizer, "optimizer": optimizer}


def save(root: Path, parts: dict, *, step: int, keep: int | None = 2) -> Path:
    write = functools.partial(saving.write_model, **parts)
    saving.write_checkpoint(root, {"state": {"step": step}}, step=step, write=write, keep=keep)
    return root / f"step-{step:06d}"


def test_all_checkpoints_are_kept_where_no_number_is_given(tmp_path, parts):
    saved = [save(tmp_path, parts, step=step, keep=None) for step in range(1, 5)]
    assert resuming.list_checkpoints(tmp_path) == saved[::-1]
    save(tmp_path, parts, step=5)
    assert [resuming.step_of(path) for path in resuming.list_checkpoints(tmp_path)] == [5, 4]


def test_what_a_killed_save_left_goes_with_the_next(tmp_path, parts):
    """Bug: it stayed for ever where no later save had the same step, as after a signal."""
    for step in (1, 2):
        save(tmp_path, parts, step=step)
    for name in ("step-000003.tmp", "step-000003.old"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000007.tmp").symlink_to(tmp_path)
    save(tmp_path, parts, step=4)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["last", "step-000002", "step-000004"]
    assert (tmp_path / "last").resolve() == tmp_path / "step-000004"


def test_only_plain_digits_make_a_checkpoint(tmp_path):
    """Bug: the digits of other scripts counted too, and such a folder could be the newest."""
    for name in ("step-000001", "step-٣", "step-²", "step-", "step-1.tmp"):
        (tmp_path / name).mkdir()
    assert resuming.list_checkpoints(tmp_path) == [tmp_path / "step-000001"]


def test_a_checkpoint_gives_back_weights_optimizer_and_state(tmp_path, rotary_model_folder, parts):
    folder = save(tmp_path, parts, step=1)
    model = AutoModelForCausalLM.from_pretrained(rotary_model_folder)
    resuming.load_weights(folder, model)
    assert all(map(torch.equal, parts["model"].parameters(), model.parameters()))
    saved = resuming.load_optimizer_state(folder)["state"]
    for index, values in parts["optimizer"].state_dict()["state"].items():
        assert all(torch.equal(values[name], saved[index][name]) for name in values)
    assert resuming.load_state(folder) == {"state": {"step": 1}}


def test_a_checkpoint_is_loaded_with_the_attention_of_the_run(tmp_path, parts):
    """Bug: a kernel that the checkpoint's config.json names was looked for."""
    folder = save(tmp_path, parts, step=1)
    change_json(folder / "config.json", _attn_implementation="flash_attention_2")
    resuming.load_weights(folder, parts["model"])


# Damage is noticed


def test_an_optimizer_that_was_tampered_with_is_one_line_and_runs_nothing(tmp_path):
    """Bug: a traceback. Only sizes are checked before, so it shows when the file is read."""
    file = tmp_path / "training_state/optimizer.pt"
    file.parent.mkdir()
    for content in (pickle.dumps(os.mkdir, 2), pickle.dumps([os.remove], 2), b"", bytes(999)):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"optimizer\.pt cannot be read \(\w+\): delete ") as e:
            resuming.load_optimizer_state(tmp_path)
        assert "\n" not in str(e.value)


class Attack:
    """What makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.folder),)


def test_an_optimizer_that_holds_code_is_refused_before_that_runs(tmp_path):
    """Checkpoints are copied from machine to machine, and a pickle runs what it names."""
    (tmp_path / "training_state").mkdir()
    torch.save({"state": Attack(tmp_path / "made")}, tmp_path / "training_state/optimizer.pt")
    with pytest.raises(ValueError, match=r"optimizer\.pt cannot be read"):
        resuming.load_optimizer_state(tmp_path)
    assert not (tmp_path / "made").exists()


@pytest.fixture
def two_checkpoints(tmp_path, parts) -> Path:
    """The folder of the checkpoints of steps 1 and 2."""
    for step in (1, 2):
        save(tmp_path, parts, step=step)
    return tmp_path


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (Path.unlink, "config.json"),
        (Path.unlink, "training_state/files.json"),
        (cut, "training_state/files.json"),
        (cut, "training_state/optimizer.pt"),
        (cut, "model.safetensors"),
        (functools.partial(Path.write_text, data="[]"), "training_state/files.json"),
        (functools.partial(Path.write_text, data="{}"), "training_state/files.json"),
        (functools.partial(Path.write_text, data='{"a": 3}'), "training_state/files.json"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    two_checkpoints, parts, damage, name
):
    folder = save(two_checkpoints, parts, step=3)
    (folder / ".DS_Store").write_text("")  # what others have put there is no damage
    assert resuming.newest_whole(two_checkpoints, pytest.fail) == folder
    damage(folder / name)
    warnings = []
    newest = resuming.newest_whole(two_checkpoints, warnings.append)
    assert newest == two_checkpoints / "step-000002"
    assert len(warnings) == 1 and "step-000003" in warnings[0]
