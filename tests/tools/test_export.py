"""`python -m tools.export`: what it refuses, and whom it shows an upload; see test_lora.py too."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import ROOT

from tools import export


@pytest.fixture
def run(tmp_path) -> Path:
    """A folder as a run leaves it, whose best model is the embedded one."""
    (tmp_path / "best").symlink_to(ROOT / "tiny")
    (tmp_path / "config.yaml").write_text("model: {attn_implementation: flash_attention_2}\n")
    return tmp_path


@pytest.fixture
def asked(monkeypatch):
    """Calls the command."""

    def call(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["export", *map(str, arguments)])
        export.main()

    return call


@pytest.mark.parametrize(
    ("arguments", "token", "problem"),
    [
        ([], "a", "give --merge, --4bit or --push user/name"),
        (["--merge"], "a", "--merge: RUN/best is no adapter"),
        (["--push", "nobody"], "a", "--push needs user/name and a token"),
        (["--push", "a/b"], None, "--push needs user/name and a token: `hf auth login`"),
        (["--push", "a/b"], "a", "offline"),
    ],
)
def test_what_is_not_possible_costs_one_line(
    arguments, token, problem, run, asked, monkeypatch, capsys
):
    monkeypatch.setattr(export, "get_token", lambda: token)
    with pytest.raises(SystemExit) as ended:
        asked(run, *arguments)
    line = capsys.readouterr().err
    assert ended.value.code == 2 and line.startswith("error: ") and line.count("\n") == 1
    assert problem.replace("RUN", str(run)) in line


def test_a_folder_that_is_no_runs_is_named(tmp_path, asked, capsys):
    with pytest.raises(SystemExit):
        asked(tmp_path, "--merge")
    line = f"error: {tmp_path / 'best'}: there is no model; give the folder of a run\n"
    assert capsys.readouterr().err == line


def test_no_file_that_was_found_chooses_the_attention(run, asked):
    """Bug: export took that of the run's config.yaml, which may name a kernel on the hub."""
    asked(run, "--4bit")
    assert (run / "merged-4bit/config.json").is_file()


@pytest.mark.parametrize("public", [[], ["--public"]])
def test_a_new_repository_is_private_unless_it_is_to_be_public(run, asked, monkeypatch, public):
    made = {}
    hub = SimpleNamespace(
        create_repo=lambda name, **settings: made.update(settings, name=name),
        upload_folder=lambda **settings: made.update(settings),
    )
    monkeypatch.setattr(export, "get_token", lambda: "some token")
    monkeypatch.setattr(export, "HfApi", lambda: hub)
    asked(run, "--push", "a/b", *public)
    best = {"repo_id": "a/b", "folder_path": run / "best"}
    assert made == {"name": "a/b", "private": not public, "exist_ok": True} | best
