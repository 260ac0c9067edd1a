"""The configuration: what is read of files and arguments, and what is written.

Mistakes in it are in tests/run/test_mistakes.py.
"""

import argparse
import ast
import importlib
import re
import shutil
import subprocess
import sys
from itertools import pairwise

import pytest
import yaml
from harness import table

from engine import ROOT
from engine.core.config import SECTIONS, ConfigError, differences, dotted, dotted_values, explained
from engine.core.text import show
from engine.questions.tasks import built_in_tasks
from engine.run.config_file import WORDS_ELSEWHERE, dump, load_config, parse_override, read_file
from engine.run.fingerprint import check_same_run
from engine.run.folder import run_name
from tools.write_config import write_defaults

GUESSING = """
from engine.core.config import Section
REWARD_PARTS = ("answer", "length")
class Options(Section):
    tolerance: float = 0.5
    '''How far off a guess may be.'''
    low: int | None = None
    note: str | None = None
def generate_prompt(example, *, options): ...
def reward_function(completion, example, *, options, num_tokens): ...
"""
RATE = "training.learning_rate=6e-4"


def load(*arguments):
    return load_config(list(arguments))


def lines_raised(function, *arguments):
    """The lines of the ConfigError that the function raises."""
    with pytest.raises(ConfigError) as caught:
        function(*arguments)
    return caught.value.lines


def file_with(folder, text):
    (folder / "some.yaml").write_text(text)
    return f"--config={folder / 'some.yaml'}"


@pytest.fixture
def guessing(tmp_path, monkeypatch):
    """A folder in which the user's own task `guessing` is, and from which main.py is run."""
    (tmp_path / "guessing.py").write_text(GUESSING)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# What a file has, the arguments, and what a key is then; here texts that YAML could read otherwise
TEXTS = ("1e-5", "010", "no", "null", "2024-01-01")
READ = {f"the text {text}": ("", f'run.name="{text}"', {"run.name": text}) for text in TEXTS}
READ["escapes"] = ("", r'model.revision="#:\n\"\u00e9"', {"model.revision": '#:\n"é'})
READ |= table("core/read.yaml")


@pytest.mark.parametrize("name", READ)
def test_what_is_given_is_read_and_reads_the_same_once_it_is_written(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    text, given, expected = READ[name]
    file_with(tmp_path, text)
    config = load("--config=~/some.yaml", *given.split())
    values = dotted_values(config) | {"run_name": run_name(config)}
    for key, value in expected.items():
        is_path = str(value).startswith("~/")
        assert values[key] == (value.replace("~", str(tmp_path)) if is_path else value)
    (tmp_path / "some.yaml").write_text(f"\ufeff{text}", newline="\r\n")
    assert load("--config=~/some.yaml", *given.split()) == config
    assert load(file_with(tmp_path, dump(config))) == config
    written = dotted(yaml.safe_load(dump(config)))  # by any other program
    assert written == {key: values[key] for key in written}


def test_the_checkouts_model_is_found_from_every_folder(tmp_path, monkeypatch):
    """Bug: elsewhere `tiny` was asked of the hub, which took 71 s to fail without a network."""
    monkeypatch.chdir(tmp_path)
    assert load().model.name == str(ROOT / "tiny")
    assert load("model.name=engine", "mode=evaluate").model.name == "engine"  # no model
    (tmp_path / "tiny").mkdir()
    assert load().model.name == "tiny"


def test_each_word_of_others_names_a_key():
    elsewhere = read_file(WORDS_ELSEWHERE)
    ours = elsewhere["keys"].keys() | elsewhere["values"].keys()
    assert {key for key in ours if key.count(".") == 1} <= dotted_values(load()).keys()
    load("model.lora={r: 1, alpha: 1, dropout: 0, target_modules: [a]}")  # what has two dots
    words = [word for theirs in elsewhere["keys"].values() for word in theirs]
    assert len({*words}) == len(words)


@pytest.mark.parametrize("key", ["task.prompt", "task.note"])
def test_the_words_of_a_text_key_on_the_command_line_stand_as_typed(key, guessing):
    """Bug: behind " #" they were cut without a word, and `Date: {words}` was an error."""
    texts = ["A #1", "Date: {words}", "{prompt}", "a\n  b", "[a", "1e-5", '"a" # "b"', "'a' or 'b'"]
    read = {"null": None, "'null'": "null", r'"a\nb"': "a\nb", "'it''s'": "it's"}
    for text, meant in ({text: text for text in texts} | read).items():
        config = load("task.name=guessing", f"{key}={text}", "task.low=3")
        assert getattr(config.task, key[5:]) == meant and config.task.low == 3


OVERRIDE = rf"(?:{'|'.join(SECTIONS)})\.[\w.]+=(?:'[^']*'|{{[^}}]*}}|\[[^]]*\]|[^\s,;:)`'\"{{[]+)"
COMMAND = rf"python -m tools\.\w+(?: (?:{OVERRIDE}|[\w/.@*-]+))+|{OVERRIDE}"


def commands_in(file):
    """What a file's texts tell users to type; 1 stands for what an f-string fills in."""
    for node in ast.walk(ast.parse(file.read_text())):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        texts = [part.value if isinstance(part, ast.Constant) else "1" for part in parts]
        if isinstance(node, ast.JoinedStr | ast.Constant) and {*map(type, texts)} == {str}:
            yield from re.findall(COMMAND, "".join(texts))


def test_what_the_program_tells_one_to_type_passes_the_shell_and_the_parser(monkeypatch):
    """Bug: of a hint of task.reward_weights={format: 1.0} a shell makes two words."""
    files = [*ROOT.glob("*.py"), *ROOT.glob("engine/*/*.py"), *ROOT.glob("tools/*.py")]
    commands = sorted({command for file in files for command in commands_in(file)})
    assert len(commands) > 25 and "task.prompt='{prompt}'" in commands

    def parse(parser, *_):
        parser.parse_known_args(sys.argv[1:])
        raise LookupError

    monkeypatch.setattr("signal.signal", lambda *_: None)  # tools.chat's
    for method in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, method, parse)
    keys = dotted_values(load()) | dotted_values(load("task.name=gsm8k"))
    for command in commands:
        words = subprocess.check_output(["bash", "-c", f"printf '%s\\0' {command}"], text=True)
        words = words.split("\0")[:-1]
        if words[0] == "python" and words[2] != "tools.write_config":
            monkeypatch.setattr(sys, "argv", words[2:])
            with pytest.raises(LookupError):
                importlib.import_module(words[2]).main()
        for word in words:
            if "=" in word or words[0] != "python":
                assert parse_override(word)[0] in keys


def test_tinys_learning_rate_is_refused_for_other_models(tmp_path, monkeypatch):
    """Bug: SmolLM2 at tiny's rate, which nobody had given, had no gradient after four steps."""
    (line,) = lines_raised(load, "model.name=a/b")
    for recipe in ("arithmetic-smollm2", "countdown-qwen2.5-3b", "gsm8k-lora"):
        settings = yaml.safe_load((ROOT / f"configs/{recipe}.yaml").read_text())["training"]
        assert f"{settings['learning_rate']:g} " in line and "--config" not in line
    monkeypatch.chdir(ROOT)
    assert lines_raised(load, "--config", "config.yaml", "model.name=a/b") == [line]
    assert lines_raised(load, file_with(tmp_path, "model: {name: a/b}")) == [line]
    load(file_with(tmp_path, "model: {name: a/b}\ntraining: {learning_rate: 6.0e-4}"))
    load(RATE, "model.name=a/b")
    load("model.name=a/b", "mode=evaluate")
    load(f"model.name={ROOT / 'tiny'}")


def test_a_run_that_goes_on_from_a_runs_model_has_its_name_and_may_have_its_rate(tmp_path):
    """Bug: all were named after `best`, so the second of two was refused as another run."""
    for name, rate in (("x", RATE), ("y", "training.learning_rate=1e-3")):
        (tmp_path / f"disk/{name}/best").mkdir(parents=True)  # best/ is a link to another disk
        (tmp_path / f"{name}/checkpoints/step-000010").mkdir(parents=True)
        (tmp_path / f"{name}/checkpoints/last").symlink_to("step-000010")
        (tmp_path / f"{name}/best").symlink_to(tmp_path / f"disk/{name}/best")
        (tmp_path / f"{name}/metrics.jsonl").touch()
        (tmp_path / f"{name}/config.yaml").write_text(dump(load(rate)))
        for model in ("best", "checkpoints/last"):
            config = load(f"model.name={tmp_path / name / model}", RATE)
            assert run_name(config).split("-")[1] == name
    load(f"model.name={tmp_path}/x/best")
    (line,) = lines_raised(load, f"model.name={tmp_path}/y/checkpoints/last")
    assert "tiny's and ruins" in line


def test_a_run_goes_on_with_other_keys_than_those_that_shape_what_it_learns():
    saved = dotted_values(load("model.name=a", RATE))
    free = ["mode=evaluate", "validation.every=3", "checkpoint.keep=1", "run.dir=b"]
    free += ["logging.samples=0", "training.stop_on_collapse=true", "validation.pass_k=[1]"]
    for length in ("training.num_epochs=7", "training.num_steps=7"):
        assert check_same_run(saved, load("model.name=a", RATE, length, *free)) == []
    fix = "restore it to continue countdown-b-grpo-s1, or set run.name for another run"
    other = load("model.name=b", RATE, "task.max_target=98", "training.seed=1")
    assert lines_raised(check_same_run, saved, other) == [
        f"model.name = b, but the run was started with a: {fix}",
        f"task.max_target = 98, but the run was started with 99: {fix}",
        f"training.seed = 1, but the run was started with 0: {fix}",
    ]


def test_a_run_of_before_a_key_was_there_had_its_default():
    """A checkpoint from before there were modes can be resumed."""
    saved = dotted_values(load())
    del saved["mode"], saved["training.tis_clip"]
    check_same_run(saved | {"export.merge": True}, load())  # and a key that is gone is not asked
    (line,) = lines_raised(check_same_run, saved, load("training.tis_clip=2"))
    assert re.match(r"training\.tis_clip = 2\.0, but .* with null", line)


def test_each_key_that_differs_from_its_default_is_listed_with_both_values():
    assert differences(load("mode=evaluate", "training.learning_rate=1e-5", "model.lora.r=4")) == [
        "mode: evaluate (default train)",
        f"model.lora: {show(READ['lora'][2]['model.lora'])} (default null)",
        f"training.learning_rate: 1.0e-05 (default {load().training.learning_rate})",
    ]
    assert dump(load("mode=evaluate")).startswith("mode: evaluate\nrun:\n")


def test_config_yaml_is_written_by_the_schema_and_not_before_git_holds_it(tmp_path):
    """`python -m tools.write_config` writes it."""
    file, git = tmp_path / "config.yaml", ["git", "-C", tmp_path]
    written = shutil.copy(ROOT / "config.yaml", file).read_text()
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "config.yaml"], check=True)
    write_defaults(file)
    assert file.read_text() == written
    file.write_text(edited := written.replace("num_steps: 20", "num_steps: 21"))
    with pytest.raises(SystemExit, match="is changed: git add it, or restore it, first"):
        write_defaults(file)
    assert file.read_text() == edited


@pytest.mark.parametrize("task", built_in_tasks())
def test_every_key_is_written_with_its_default_below_its_explanation(task):
    """A task's own keys too, behind a # that can be removed; and each default is accepted."""
    config = load(f"task.name={task}")
    text = re.sub(r"^  #(\w+:)", r"  \1", explained(config), flags=re.MULTILINE)
    assert show(yaml.safe_load(text)) == show(config.model_dump())  # 1 is not 1.0
    for before, line in pairwise(["", *text.splitlines()]):
        if match := re.match("( *)\\w+:", line):
            assert re.match(f"{match[1]}# \\S", before), f"{line}: has no explanation"
    default = type(config)()
    assert type(default).model_validate(default.model_dump()) == default


def test_help_prints_config_yaml_or_the_keys_of_a_named_task(capsys, monkeypatch, guessing):
    own = "  # How far off a guess may be.\n  #tolerance: 0.5\n  #low: null\n  #note: null\n\n"
    _, _, keys = (ROOT / "config.yaml").read_text().partition("\n\n")
    for given, folder, expected in (("a.b", ROOT, keys), ("task.name=guessing", guessing, own)):
        monkeypatch.chdir(folder)
        with pytest.raises(SystemExit) as ended:
            load("--help", given)
        printed = capsys.readouterr().out
        assert ended.value.code == 0 and printed.startswith("usage: ") and expected in printed
