"""The configuration: what is read, what is refused and in which words, what is written."""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import pytest
import yaml
from pydantic import Field

import countdown
import gsm8k
import math500
from config import (
    Config,
    ConfigError,
    check_world,
    differences,
    dump,
    flatten,
    known_keys,
    load_config,
    options_for,
    run_name,
    schema,
)
from distributed import questions_per_rank

ROOT = Path(__file__).parent.parent
TASKS = {"countdown": countdown, "gsm8k": gsm8k, "math500": math500}


def load(*arguments):
    return load_config(list(arguments), tasks=TASKS)


def lines_of(*arguments, tasks=TASKS):
    """The lines of the ConfigError that the arguments raise."""
    with pytest.raises(ConfigError) as caught:
        load_config(list(arguments), tasks=tasks)
    assert all("\n" not in line for line in caught.value.lines)
    return caught.value.lines


def line_of(*arguments, tasks=TASKS):
    (line,) = lines_of(*arguments, tasks=tasks)
    return line


def load_guessing(*arguments):
    return load_config(list(arguments), tasks=TASKS | {"guessing": GUESSING})


def file_with(folder, text):
    path = folder / "some.yaml"
    path.write_text(text, encoding="utf-8")
    return f"--config={path}"


Tolerance = Annotated[float, Field(ge=0, description="How far off an answer may be.")]


def load_nothing(source, split, *, num_examples, seed=0, low: int = 1):
    """Stands for the load_examples of a task with an option of its own."""


def grade(completion, example, *, tolerance: Tolerance = 0.5):
    """Stands for the reward_function of a task with an option of its own."""


def no_options(anything):
    """Stands for a task's function without options."""


GUESSING = ModuleType("guessing")
GUESSING.REWARD_PARTS = ("answer", "length")
GUESSING.load_examples = load_nothing
GUESSING.generate_prompt = GUESSING.extract_answer = no_options
GUESSING.reward_function = grade

# What is read


def test_without_arguments_every_key_has_its_default():
    assert load() == schema(countdown)()
    assert differences(load()) == []


def test_later_overrides_win_over_earlier_ones_and_these_over_the_file(tmp_path):
    file = file_with(tmp_path, "training: {num_steps: 30, seed: 7, warmup_steps: 2}")
    config = load(file, "training.num_steps=40", "training.num_steps=50")
    assert config.training.num_steps == 50
    assert config.training.seed == 7
    assert config.training.num_samples_per_step == Config().training.num_samples_per_step


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.0e-5", "0.00001", "10e-6", "+1e-05", ".1e-4"])
def test_a_number_in_scientific_notation_is_a_number(text, tmp_path):
    """PyYAML reads 1e-5 as text, so that a learning rate became a string."""
    assert load(f"training.learning_rate={text}").training.learning_rate == pytest.approx(1e-5)
    file = file_with(tmp_path, f"training: {{learning_rate: {text}}}")
    assert load(file).training.learning_rate == pytest.approx(1e-5)


def test_an_integer_is_accepted_for_a_number():
    temperature = load("sampling.temperature=2").sampling.temperature
    assert temperature == 2.0 and isinstance(temperature, float)


@pytest.mark.parametrize("text", ["", "# nothing yet", "training:\nlogging:\n"])
def test_an_empty_file_or_section_sets_nothing(text, tmp_path):
    assert load(file_with(tmp_path, text)) == load()


def test_a_key_in_a_file_may_be_dotted(tmp_path):
    assert load(file_with(tmp_path, "training.seed: 5")).training.seed == 5


def test_one_reward_weight_can_be_set_alone():
    weights = load("task.reward_weights.format=0.5").task.reward_weights
    assert weights == {"format": 0.5, "answer": 1.0}


def test_a_mapping_that_is_off_can_be_set_in_part_and_switched_off_again(tmp_path):
    assert load().model.lora is None
    assert load("model.lora.r=4").model.lora.model_dump() == {"r": 4, "alpha": 32, "dropout": 0.0}
    file = file_with(tmp_path, "model: {lora: {r: 16, alpha: 8}}")
    assert load(file, "model.lora.r=2").model.lora.alpha == 8
    assert load(file, "model.lora=null").model.lora is None
    assert differences(load(file)) == ["model.lora: {r: 16, alpha: 8, dropout: 0.0} (default null)"]
    for comments in (False, True):
        text = dump(load("model.lora.dropout=0.1"), comments=comments)
        assert load(file_with(tmp_path, text)).model.lora.dropout == 0.1


def test_the_options_of_a_task_are_keys_of_its_section():
    config = load("task.max_target=100")
    assert config.task.max_target == 100
    options = options_for(countdown.load_examples, config)
    assert options["max_target"] == 100 and options["min_target"] == 10
    assert not {"seed", "num_examples", "held_out"} & set(options)


def test_another_task_brings_its_own_options_and_reward_parts(tmp_path):
    file = file_with(tmp_path, "task: {name: guessing, tolerance: 1}")
    config = load_guessing(file, "task.reward_weights.length=-0.5")
    assert options_for(grade, config) == {"tolerance": 1.0}
    assert options_for(load_nothing, config) == {"low": 1}
    assert config.task.reward_weights == {"answer": 1.0, "length": -0.5}
    assert not hasattr(config.task, "max_target")


def test_annotations_of_a_task_may_be_text(tmp_path, monkeypatch):
    """`from __future__ import annotations` turns every annotation of a module into text."""
    text = (
        "from __future__ import annotations\ndef load_examples(*, low: int | None = None): pass\n"
    )
    text += "generate_prompt = reward_function = extract_answer = load_examples\n"
    (tmp_path / "late_task.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import late_task

    tasks = {"late": late_task}
    file = file_with(tmp_path, "task: {name: late, low: 3}")
    assert load_config([file], tasks=tasks).task.low == 3
    assert "an integer or null" in line_of(file, "task.low=x", tasks=tasks)


def test_a_configuration_cannot_be_changed_after_it_was_checked():
    with pytest.raises(ValueError, match="frozen"):
        load().training.num_steps = 3


# What is refused


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("training.num_step=5", "training.num_step = 5: unknown key, the nearest"),
        ("sampling.learning_rate=1", "unknown key, the nearest is training.learning_rate"),
        ("num_steps=5", "num_steps = 5: unknown key, the nearest is training.num_steps"),
        ("--num_steps=5", "--num_steps = 5: unknown key, the nearest is training.num_steps"),
        ("trainig.seed=5", "trainig = {seed: 5}: unknown key, the nearest is training;"),
        ("task.max_numbr=5", "unknown key of task countdown, the nearest is task.max_number"),
        ("zzz=5", "zzz = 5: unknown key; --help lists the keys"),
        ("training.seed='3'", "training.seed = '3': must be an integer >= 0"),
        ("training.seed=true", "training.seed = true: must be an integer >= 0"),
        ("training.seed=1.0", "training.seed = 1.0: must be an integer >= 0"),
        ("training.seed=-1", "training.seed = -1: must be an integer >= 0"),
        ("training.num_steps=", "training.num_steps = null: must be an integer > 0"),
        ("training.num_steps.x=3", "training.num_steps = {x: 3}: must be an integer > 0"),
        ("training.learning_rate=true", "training.learning_rate = true: must be a number > 0"),
        ("training.learning_rate='1e-5'", "training.learning_rate = '1e-5': must be a number > 0"),
        ("training.learning_rate=.nan", "training.learning_rate = .nan: must be a number > 0"),
        ("training.learning_rate=1e999", "training.learning_rate = .inf: must be a number > 0"),
        ("training.learning_rate=0", "training.learning_rate = 0: must be a number > 0"),
        ("training.micro_batch_tokens=0", "micro_batch_tokens = 0: must be an integer > 0"),
        ("training.num_iterations=0", "num_iterations = 0: must be an integer > 0"),
        ("training.muon_learning_rate=0", "muon_learning_rate = 0: must be a number > 0"),
        ("training.kl_coef=-0.1", "training.kl_coef = -0.1: must be a number >= 0"),
        ("training.learning_type=ppo", "learning_type = ppo: must be one of grpo, sil"),
        ("training.k_best_of_n=16", "k_best_of_n = 16: must be a list of 2, each an integer > 0"),
        ("training.k_best_of_n=[16]", "= [16]: must be a list of 2, each an integer > 0"),
        ("training.k_best_of_n=[0, 16]", "= [0, 16]: must be a list of 2, each an integer > 0"),
        ("training.clip_eps_high=x", "clip_eps_high = x: must be a number > 0 or null"),
        ("sampling.top_p=0", "sampling.top_p = 0: must be a number > 0 and <= 1"),
        ("sampling.top_p=1.1", "sampling.top_p = 1.1: must be a number > 0 and <= 1"),
        ("sampling.top_k=-1", "sampling.top_k = -1: must be an integer >= 0"),
        ("sampling.temperature=0", "sampling.temperature = 0: must be a number > 0"),
        ("validation.pass_k=[]", "validation.pass_k = []: must be a list, each an integer > 0"),
        ("logging.mlflow=1", "logging.mlflow = 1: must be true or false"),
        ("logging=3", "logging = 3: is a section, set its keys, such as logging."),
        ("model.name=12", "in quotes it is text, as in model.name="),
        ("model.name=''", "model.name = '': must be text that is not empty"),
        ("run.name=a/b", "run.name = a/b: must be text matching"),
        ("run.name=..", "run.name = ..: must be text matching"),
        ("task.name=chess", "task.name = chess: must be one of countdown"),
        ("task.name=[1]", "task.name = [1]: must be one of countdown"),
        ("task=3", "task = 3: is a section, set its keys, such as task."),
        ("task.max_target=big", "task.max_target = big: must be an integer"),
        ("task.seed=3", "unknown key of task countdown, the nearest is training.seed"),
        ("task.reward_weights=", "task.reward_weights = null: must be a mapping from"),
        ("model.lora=8", "model.lora = 8: must be a mapping of r (an integer > 0), alpha"),
        ("model.lora.r=0", "model.lora = {r: 0}: must be a mapping of r (an integer > 0), alpha"),
        ("model.lora.rank=8", "dropout (a number >= 0 and < 1) or null"),
        ("model.lora_r=8", "unknown key, the nearest is model.lora;"),
        ("export.push_to_hub=nobody", "export.push_to_hub = nobody: must be text matching"),
        ("task.reward_weights=1", "task.reward_weights = 1: must be a mapping from"),
        ("task.reward_weights.answer=x", "task.reward_weights = {format: 0.1, answer: x}: must be"),
    ],
)
def test_a_bad_value_is_one_line_with_key_value_and_what_is_allowed(override, line):
    assert line in line_of(override)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["training.k_best_of_n=[2, 16]"],
            "training.k_best_of_n = [2, 16]: grpo trains on all n; write [16, 16], "
            "or training.learning_type=sil",
        ),
        (
            ["training.embedding_learning_rate=1e-3"],
            "training.embedding_learning_rate = 0.001: adamw has one learning rate; write null, or "
            "training.optimizer=muon",
        ),
        (
            ["model.load_in_4bit=true"],
            "model.load_in_4bit = true: weights in 4 bits cannot be trained; write false, or set "
            "model.lora='{r: 8}' to train an adapter on them",
        ),
        (
            ["export.merge=true"],
            "export.merge = true: there is no adapter to merge, and best/ is a plain model; write "
            "false, or set model.lora",
        ),
        (
            ["model.lora.r=8", "training.optimizer=muon"],
            "training.optimizer = muon: is for whole matrices, model.lora trains factors of them; "
            "write adamw",
        ),
        (
            ["training.k_best_of_n=[1, 1]"],
            "training.k_best_of_n = [1, 1]: n must be at least 2, since a sample is judged by its "
            "group",
        ),
        (
            ["training.k_best_of_n=[8, 4]", "training.learning_type=sil"],
            "training.k_best_of_n = [8, 4]: the k best of n cannot be more than n; write [4, 4]",
        ),
        (
            ["training.k_best_of_n=[16, 16]", "training.learning_type=sil"],
            "training.k_best_of_n = [16, 16]: sil learns by leaving out all but the k best; write "
            "k < n, such as [2, 32]",
        ),
        (
            [
                "training.learning_type=sil",
                "training.k_best_of_n=[2, 4]",
                "training.advantage=zscore",
            ],
            "training.advantage = zscore: sil gives the k best the advantage 1; write mean",
        ),
        (
            ["validation.best_of_n=4", "validation.pass_k=[1, 8]"],
            "validation.pass_k = [1, 8]: each must be at most validation.best_of_n (4)",
        ),
        (["validation.pass_k=[1, 1]"], "validation.pass_k = [1, 1]: write each k once"),
        (
            ["task.min_number=60"],
            "task.min_number = 60: must be at most task.max_number (50)",
        ),
        (
            ["task.reward_weights={format: 0, answer: 0}"],
            "task.reward_weights = {format: 0.0, answer: 0.0}: one must not be 0",
        ),
    ],
)
def test_an_impossible_combination_is_one_line_with_the_fix(overrides, line):
    assert line_of(*overrides) == line


def test_what_is_for_training_is_not_asked_of_an_evaluation():
    load("mode=evaluate", "model.load_in_4bit=true", "export.merge=true")


def test_every_mistake_has_its_line():
    lines = lines_of("training.seed=x", "sampling.top_p=7", "zzz=1", "task.min_target=1.5")
    assert len(lines) == 4
    lines = lines_of("training.k_best_of_n=[1, 2]", "validation.best_of_n=1")
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("task.reward_weights.format=1", "must be a mapping from answer, length to a number"),
        ("task.tolerance=-1", "task.tolerance = -1: must be a number >= 0"),
        ("task.max_target=9", "task.max_target = 9: unknown key of task guessing; --help lists"),
    ],
)
def test_options_and_parts_of_another_task_are_checked(override, line, tmp_path):
    file = file_with(tmp_path, "task: {name: guessing}")
    assert line in line_of(file, override, tasks=TASKS | {"guessing": GUESSING})


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["training.num_steps"], "training.num_steps: write section.key=value, for example"),
        (["--verbose"], "--verbose: write section.key=value, for example training.num_steps=60"),
        (["training.k_best_of_n=[1,"], "training.k_best_of_n=[1,: cannot be read as YAML: "),
        (["run.name=2024-13-45"], "run.name=2024-13-45: cannot be read as YAML: month must be in"),
        (["--config"], "argument --config: expected one argument"),
        (["--config", "missing.yaml"], "missing.yaml: No such file or directory; give --config a"),
        (["--config", str(ROOT)], "Is a directory; give --config a YAML file"),
    ],
)
def test_an_argument_that_cannot_be_read_is_one_line(arguments, line):
    assert line in line_of(*arguments)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("training: [", "some.yaml: cannot be read as YAML: while parsing"),
        ("training: {seed: 1, seed: 2}", "the key seed is given twice"),
        ("training: {seed: 1}\nlogging: {}\ntraining: {}", "the key training is given twice"),
        ("- training", "some.yaml: must hold sections of keys"),
        ("just text", "some.yaml: must hold sections of keys"),
        ("0", "some.yaml: must hold sections of keys"),
        ("a: !!python/object:os.system {}", "cannot be read as YAML: could not determine"),
        ("training: {1: 2}", "training.1 = 2: unknown key"),
        ("null: 2", "None = 2: unknown key"),
        ("training: {a.b: 2}", "training.a.b = 2: unknown key"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(text, line, tmp_path):
    assert line in line_of(file_with(tmp_path, text))


def test_a_file_that_is_not_text_is_one_line(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"\xff\xfe\x00\x93")
    assert "cannot be read as YAML" in line_of("--config", str(tmp_path / "model.bin"))


def test_a_long_value_is_shortened_in_its_line():
    assert len(line_of(f"training.seed={'9' * 5_000}x")) < 200


def test_a_rank_without_a_validation_question_is_refused():
    config = load("validation.num_examples=3")
    check_world(config, 3)
    with pytest.raises(ConfigError) as caught:
        check_world(config, 4)
    assert caught.value.lines == [
        "validation.num_examples = 3: must be at least 4, one for each rank"
    ]


def test_an_override_to_another_task_leaves_the_files_options_of_its_own_task():
    """`task.name=gsm8k` with config.yaml was refused for Countdown's keys, which nobody typed."""
    file = ["--config", str(ROOT / "config.yaml")]
    config = load_config([*file, "task.name=gsm8k", "task.train=a.jsonl"], tasks=TASKS)
    assert (config.task.name, config.task.train, config.task.eval) == (
        "gsm8k",
        "a.jsonl",
        "generated",
    )
    assert config.task.reward_weights == load("task.name=gsm8k").task.reward_weights
    with pytest.raises(ConfigError, match=r"task\.max_numbers = 5: unknown key of task gsm8k"):
        load_config([*file, "task.name=gsm8k", "task.max_numbers=5"], tasks=TASKS)
    same = load_config([*file, "task.name=countdown", "task.max_numbers=5"], tasks=TASKS)
    assert same.task.max_numbers == 5


def test_questions_that_the_ranks_cannot_share_evenly_are_refused():
    config = load("training.num_samples_per_step_global=6")
    for num_ranks in (1, 2, 3, 6):
        check_world(config, num_ranks)
        assert questions_per_rank(config, num_ranks) * num_ranks == 6
    assert questions_per_rank(load("training.num_samples_per_step=5"), 4) == 5
    with pytest.raises(ConfigError) as caught:
        check_world(config, 4)
    assert caught.value.lines == [
        "training.num_samples_per_step_global = 6: must be a multiple of 4, the number of ranks"
    ]


# What is written


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "countdown-tiny-grpo-s0"),
        (["model.name=Qwen/Qwen2.5-3B", "training.seed=3"], "countdown-Qwen2.5-3B-grpo-s3"),
        (["model.name=some/folder/"], "countdown-folder-grpo-s0"),
        (
            ["training.learning_type=sil", "training.k_best_of_n=[2, 32]"],
            "countdown-tiny-sil-s0",
        ),
        (["run.name=mine"], "mine"),
    ],
)
def test_the_name_of_a_run_tells_runs_apart(overrides, name):
    assert run_name(load(*overrides)) == name


def test_each_key_that_differs_from_its_default_is_listed_with_both_values():
    default = Config().training.learning_rate
    assert differences(load("training.learning_rate=1e-5", "task.max_target=88")) == [
        "task.max_target: 88 (default 99)",
        f"training.learning_rate: 1.0e-05 (default {default})",
    ]


@pytest.mark.parametrize("name", ["1e-5", "no", "null", "007", "2024-01-01", "grün", "a"])
def test_a_written_configuration_loads_to_the_same_one(name, tmp_path):
    overrides = [
        f'run.name="{name}"',
        "training.learning_rate=1e-5",
        "training.clip_eps_high=0.28",
        "validation.pass_k=[1, 2, 4]",
        "task.reward_weights.format=0",
        "task.max_target=99",
        'model.name="a: b # c"',
        r'model.revision="line\nbreak \" and \u00e9"',
    ]
    config = load(*overrides)
    assert config.run.name == name
    for comments in (False, True):
        assert load(file_with(tmp_path, dump(config, comments=comments))) == config
    plain = yaml.safe_load(dump(config))
    assert plain["run"]["name"] == name and plain["training"]["learning_rate"] == 1e-5


def test_config_yaml_is_written_from_the_schema():
    command = [sys.executable, "config.py"]
    written = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (ROOT / "config.yaml").read_text() == written, "run: python config.py > config.yaml"


def test_every_default_is_a_value_that_the_schema_accepts():
    full_schema = schema(countdown)
    assert full_schema.model_validate(full_schema().model_dump()) == full_schema()


def test_every_key_has_a_description():
    undescribed = [key for key, field in known_keys(Config).items() if not field.get("description")]
    assert undescribed == []


def test_a_key_may_stand_outside_all_sections(tmp_path):
    config = load("mode=evaluate")
    assert config.mode == flatten(config)["mode"] == "evaluate"
    assert known_keys(Config)["mode"]["description"].startswith("What to do:")
    assert dump(config, comments=True).startswith("\n# What to do:")
    for comments in (False, True):
        assert load(file_with(tmp_path, dump(config, comments=comments))) == config
    assert differences(config) == ["mode: evaluate (default train)"]
    assert line_of("mode=trian") == "mode = trian: must be one of train, evaluate, sample"
    assert (
        line_of("mod=train")
        == "mod = train: unknown key, the nearest is mode; --help lists the keys"
    )


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_key_with_default_type_and_meaning(flag, capsys):
    with pytest.raises(SystemExit) as caught:
        load_config([flag], tasks=TASKS | {"guessing": GUESSING})
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for key in [*flatten(schema(countdown)()), "task.tolerance"]:
        assert re.search(rf"^{re.escape(key)} = .*  \(.+\)\n    \S", text, re.MULTILINE), key
    assert "  (an integer > 0)\n    Steps of the run." in text
    assert (
        "task.tolerance = 0.5  (a number >= 0; task guessing)\n    How far off an answer may be."
        in text
    )


def test_help_is_printed_on_one_rank(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        load("--help")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.yaml")), ids=lambda path: path.name)
def test_a_recipe_loads_and_holds_only_what_differs(path):
    config = load("--config", str(path))
    values, defaults = flatten(config), flatten(type(config)())
    recipe = yaml.safe_load(path.read_text())
    named = {f"{section}.{key}" for section, keys in recipe.items() for key in keys}
    same = {key for key in named if values[key] == defaults[key]}
    assert same <= {"training.k_best_of_n"}, "spelled out for the reader, all else differs"
    for word in ("command", "hardware", "time", "result"):
        assert re.search(rf"^#   {word} ", path.read_text(), re.MULTILINE), word
    assert f"--config configs/{path.name}" in path.read_text()


def test_every_key_is_read_somewhere():
    sources = [path for path in ROOT.glob("*.py") if path.name != "config.py"]
    text = "\n".join(path.read_text() for path in sources)
    unread = [
        key for key in known_keys(Config) if not re.search(rf"\.{key.split('.')[-1]}\b", text)
    ]
    assert unread == []


def test_reading_the_configuration_imports_none_of_the_heavy_libraries():
    check = "import config, sys; print({'torch', 'transformers', 'datasets'} & set(sys.modules))"
    command = [sys.executable, "-c", check]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
