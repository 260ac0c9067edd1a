"""The configuration: what is read, what is refused and in which words, what is written."""

import re
import shutil
import subprocess
import sys
from itertools import pairwise

import pytest
import yaml

from engine import ROOT
from engine.core.config import (
    Config,
    ConfigError,
    TaskSettings,
    check_world,
    differences,
    dotted_values,
    explained,
)
from engine.core.packages import import_package
from engine.core.text import Loader, show, to_yaml
from engine.questions.tasks import built_in_tasks, load_task, schema
from engine.run.config_file import (
    NAMES_ELSEWHERE,
    RATE_RECIPES,
    dump,
    load_config,
    parse_yaml,
)
from engine.run.fingerprint import check_same_run
from engine.run.folder import run_name
from tools import chat
from tools.write_config import write_config

GUESSING = """
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from engine.core.config import Section


class Options(Section):
    tolerance: Annotated[float, Field(ge=0)] = 0.5
    '''How far off a guess may be.'''
    low: int | None = None

    @field_validator("low")
    @classmethod
    def check_low(cls, low):
        if low == 13:
            raise ValueError("must not be 13")
        return low

    @model_validator(mode="after")
    def check_both(self):
        if self.tolerance > (self.low or 10):
            raise ValueError("tolerance must be at most low")
        return self


REWARD_PARTS = ("answer", "length")


def load_examples(source, split, *, options, num_examples, seed, held_out, exclude): ...
def generate_prompt(example, *, options): ...
def reward_function(completion, example, *, options, num_tokens): ...
def extract_answer(completion, example, *, options): ...
"""

COMPARISON = ROOT / "docs/comparison.md"


def load(*arguments):
    return load_config(list(arguments))


def lines_raised(function, *arguments):
    """The lines of the ConfigError that the function raises."""
    with pytest.raises(ConfigError) as caught:
        function(*arguments)
    assert all("\n" not in line for line in caught.value.lines)
    return caught.value.lines


def line_of(*arguments):
    """The only line of the error that the command line raises."""
    (line,) = lines_raised(load, *arguments)
    return line


def file_with(folder, text):
    path = folder / "some.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return f"--config={path}"


@pytest.fixture
def guessing(tmp_path, monkeypatch):
    """A folder in which the user's own task `guessing` is, and from which main.py is run."""
    (tmp_path / "guessing.py").write_text(GUESSING)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# What is read


def test_the_checkouts_model_is_found_from_every_folder(tmp_path, monkeypatch):
    """Bug: elsewhere `tiny` was asked of the hub, which took 71 s to fail without a network."""
    monkeypatch.chdir(tmp_path)
    assert load().model.name == str(ROOT / "tiny")
    assert load("model.name=engine", "mode=evaluate").model.name == "engine"  # no model
    (tmp_path / "tiny").mkdir()
    assert load().model.name == "tiny"


def test_later_overrides_win_over_earlier_ones_and_these_over_the_file(tmp_path):
    file = file_with(tmp_path, "training: {num_steps: 30, warmup_steps: 2}\ntraining.seed: 7")
    config = load(file, "training.num_steps=40", "training.num_steps=50")
    assert config.training.num_steps == 50
    assert config.training.seed == 7
    assert config.training.num_samples_per_step == Config().training.num_samples_per_step


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "0.00001", "+1e-05", ".1e-4"])
def test_a_number_in_scientific_notation_is_a_number(text):
    """PyYAML reads 1e-5 as text, so that a learning rate became a string."""
    assert load(f"training.learning_rate={text}").training.learning_rate == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("text", "value"),
    [("0123", 123), ("010", 10), ("-07", -7), ("1_000", 1000), ("00", 0)],
)
def test_numbers_are_decimal(text, value):
    """Bug: of YAML 1.1, training.seed=0123 was 83 and training.num_steps=010 was 8."""
    assert parse_yaml(text, origin="here") == value
    assert parse_yaml(to_yaml({"text": text}), origin="here") == {"text": text}


@pytest.mark.parametrize("text", ["1:30", "1:30.5", "-1:30.5", "0x10", "0b11", "9" * 5_000])
def test_numbers_that_are_not_decimal_are_refused(text):
    """Bug: 1:30 was 90."""
    with pytest.raises(ConfigError, match="here: cannot be read as YAML"):
        parse_yaml(text, origin="here")


@pytest.mark.timeout(20)
def test_a_mapping_of_many_keys_takes_no_quadratic_time():
    keys = [yaml.ScalarNode("tag:yaml.org,2002:str", f"k{n}") for n in range(100_000)]
    node = yaml.MappingNode("tag:yaml.org,2002:map", [(key, key) for key in keys])
    assert len(Loader("").construct_mapping(node)) == 100_000


@pytest.mark.parametrize(
    ("text", "boards"),
    [("wandb", ["wandb"]), ("[mlflow, wandb]", ["mlflow", "wandb"]), ("none", []), ("null", [])],
)
def test_boards_are_a_list_one_word_or_none(text, boards):
    assert load_config([f"logging.report_to={text}"]).logging.report_to == boards


@pytest.mark.parametrize("text", ["", "# nothing yet", "training:\nlogging:\n"])
def test_an_empty_file_or_section_sets_nothing(text, tmp_path):
    assert load(file_with(tmp_path, text)) == load()


def test_a_mapping_that_is_off_can_be_set_in_part_and_switched_off_again(tmp_path):
    assert load().model.lora is None
    defaults = {"alpha": 32, "dropout": 0.0, "target_modules": "all-linear"}
    assert load("model.lora.r=4").model.lora.model_dump() == {"r": 4} | defaults
    assert load("model.lora={r: 4}", "model.lora.alpha=8").model.lora.alpha == 8
    file = file_with(tmp_path, "model: {lora: {r: 16, alpha: 8}}")
    assert load(file, "model.lora.r=2").model.lora.alpha == 8
    assert load(file, "model.lora=null").model.lora is None
    given = "{r: 16, alpha: 8, dropout: 0.0, target_modules: all-linear}"
    assert differences(load(file)) == [f"model.lora: {given} (default null)"]
    text = dump(load("model.lora.dropout=0.1"))
    assert load(file_with(tmp_path, text)).model.lora.dropout == 0.1


# Tasks


def test_a_task_of_ones_own_is_a_file_in_the_current_folder(guessing):
    config = load("task.name=guessing", "task.tolerance=1", "task.reward_weights.length=-0.5")
    assert (config.task.tolerance, config.task.low) == (1.0, None)
    assert config.task.reward_weights == {"answer": 1.0, "length": -0.5}
    assert not hasattr(config.task, "max_target")
    module = load_task("guessing")
    assert module is load_task("guessing") and module.__file__ == str(guessing / "guessing.py")


def test_a_task_without_options_has_the_keys_that_all_tasks_have(guessing):
    text = GUESSING[GUESSING.index("REWARD_PARTS") :].replace('("answer", "length")', '("answer",)')
    (guessing / "bare.py").write_text(text)
    config = load("task.name=bare")
    assert set(config.task.model_dump()) == set(TaskSettings.model_fields)
    line = "task.reward_weights.length: Input should be 'answer'"
    assert line_of("task.name=bare", "task.reward_weights.length=1") == line


def test_a_task_of_ones_own_may_have_the_name_of_another_module(guessing):
    """`math` is in the standard library, `statistics` too and imported already, `main` is ours."""
    import math
    import statistics

    for name in ("math", "statistics", "main"):
        (guessing / f"{name}.py").write_text(GUESSING)
        assert load(f"task.name={name}", "task.tolerance=2").task.tolerance == 2.0
        assert load_task(name).REWARD_PARTS == ("answer", "length")
    assert sys.modules["math"] is math and sys.modules["statistics"] is statistics


def test_a_tasks_environment_must_not_be_async(guessing):
    """Nothing awaits it: the model would read `<coroutine object ...>`."""
    environment = "class Environment:\n    async def respond(self, message): return None\n"
    (guessing / "wrong.py").write_text(f"{GUESSING}\n{environment}")
    assert line_of("task.name=wrong").endswith("wrong.py: Environment.respond must not be async")


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("def reward_function", "def rewards", "a task must define reward_function; tasks/templa"),
        ('("answer", "length")', '("answer")', "REWARD_PARTS must be a tuple of names with"),
        ('("answer", "length")', '("length",)', "REWARD_PARTS must be a tuple of names with"),
        ("Options(Section)", "Options", "Options must inherit from Section in engine/core/con"),
        ("low: int | None = None", "low: int", "Options.low needs a default, and a name other"),
        ("low: int", "train: int", "Options.train needs a default, and a name other than name, re"),
    ],
)
def test_a_module_that_is_not_a_task_is_one_line(old, new, line, guessing):
    text = GUESSING.replace(old, new).replace('field_validator("low")', 'field_validator("*")')
    (guessing / "wrong.py").write_text(text)
    assert line_of("task.name=wrong").startswith(f"{guessing / 'wrong.py'}: {line}")


@pytest.mark.parametrize("status", ["", "0", "'bye'"])
def test_a_task_that_exits_when_it_is_imported_is_one_line(status, guessing):
    """Bug: `sys.exit(0)` there ended the run with status 0 and no word."""
    (guessing / "leaving.py").write_text(f"import sys\nsys.exit({status})\n")
    assert "leaving.py: it calls sys.exit(" in line_of("task.name=leaving")


@pytest.mark.parametrize("name", ["chess", "[1]", "../guessing", "guessing.py", "''", "24", "null"])
def test_a_task_that_is_not_there_is_one_line_with_the_ones_that_are(name, guessing):
    line = line_of(f"task.name={name}")
    tasks = "countdown, arithmetic, gsm8k, guess, math500, reasoning_gym, template"
    assert line.startswith(f"task.name = {name}: must be one of {tasks}, or the ")
    assert line.endswith(f"the name of a .py file in {guessing}")


def test_a_tasks_own_validators_speak_in_one_line(guessing):
    own = "task.name=guessing"
    assert line_of(own, "task.low=13") == "task.low = 13: must not be 13"
    line = line_of(own, "task.low=1", "task.tolerance=2")
    assert line == "task: tolerance must be at most low"


def test_a_configuration_cannot_be_changed_after_it_was_checked():
    with pytest.raises(ValueError, match="frozen"):
        load().training.num_steps = 3


# What is refused

GREEDY = "validation.temperature=0"
RATE = "training.learning_rate=6e-4"
SHARD = "model.shard=true"
FOUR_BITS = "model.lora.r=8 model.load_in_4bit=true"
SIL = "training.learning_type=sil training.k_best_of_n=[2,4]"
DISTILL = "training.learning_type=distill model.teacher=tiny"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("training.num_step=5", "training.num_step = 5: unknown key, the nearest"),
        ("num_steps=5", "num_steps = 5: unknown key, the nearest is training.num_steps"),
        ("trainig.seed=5", "trainig = {seed: 5}: unknown key, the nearest is training;"),
        ("task.max_numbr=5", "unknown key of task countdown, the nearest is task.max_number"),
        ("mod=train", "mod = train: unknown key, the nearest is mode; --help lists the keys"),
        ("zzz=5", "zzz = 5: unknown key; --help lists the keys"),
        # Bug: it was told adam_betas.
        ("training.beta=1", "= 1: unknown key, beta is training.kl_coef here; --help lists"),
        ("training.bet=1", "training.bet = 1: unknown key; --help lists the keys"),
        (
            "actor_rollout_ref={rollout: {n: 8}, actor: {optim: {lr: 1}}}",
            "key, rollout.n is training.k_best_of_n here, lr is training.learning_rate here; --",
        ),
        ("configs/x.yaml", "configs/x.yaml: write --config configs/x.yaml"),
        ("training.seed='3'", "training.seed = '3': Input should be a valid integer"),
        ("training.seed=1.0", "training.seed = 1.0: Input should be a valid integer"),
        ("training.num_steps=", "training.num_steps = null: Input should be a valid integer"),
        ("training.learning_rate='1e-5'", "learning_rate = '1e-5': Input should be a valid number"),
        ("training.learning_rate=.nan", "learning_rate = .nan: Input should be a finite number"),
        ("training.learning_rate=0", "learning_rate = 0: Input should be greater than 0"),
        ("training.kl_coef=-0.1", "kl_coef = -0.1: Input should be greater than or equal to 0"),
        ("training.learning_type=ppo", "= ppo: Input should be 'grpo', 'sil' or 'distill'"),
        ("training.k_best_of_n=16", "k_best_of_n = 16: Input should be a valid list"),
        ("training.k_best_of_n=[0, 16]", "k_best_of_n.0 = 0: Input should be greater than 0"),
        ("training.dppo_delta=1", "dppo_delta = 1: Input should be less than 1"),
        ("sampling.top_p=1.1", "sampling.top_p = 1.1: Input should be less than or equal to 1"),
        ("validation.pass_k=[]", "validation.pass_k = []: List should have at least 1 item"),
        # slips of the keyboard that would start endless work, or leave nothing to compute with
        ("validation.num_examples=1000000000000", "Input should be less than or equal to 1000000"),
        ("training.max_new_gen_tokens=1000000000", "Input should be less than or equal to 1000000"),
        ("task.max_numbers=100", "max_numbers = 100: Input should be less than or equal to 10"),
        ("sampling.temperature=1e-300", "1.0e-300: Input should be greater than or equal to 0.01"),
        ("training.learning_rate=1e38", "Input should be less than or equal to 10"),
        ("logging.report_to=[mlflow, 3]", "report_to.1 = 3: Input should be 'mlflow' or 'wandb'"),
        ("logging.mlflow=1", "logging.mlflow = 1: Input should be a valid boolean"),
        ("model.name=12", "model.name = 12: Input should be a valid string; in quotes it is text"),
        ("model.name=''", "model.name = '': String should have at least 1 character"),
        ("run.name=a/b", "run.name = a/b: String should match pattern"),
        ("task=3", "task = 3: Input should be a mapping of keys, which --help lists"),
        ("model.lora.r=0", "model.lora.r = 0: Input should be greater than 0"),
        ("model.lora.target_modules=[8]", "= [8]: Input should be 'all-linear' or a valid string"),
        ("task.template_options.x=[1]", "x = [1]: Input should be a valid boolean or a valid int"),
        ("model.lora_r=8", "unknown key, the nearest is model.lora;"),
        ("task.reward_weights.answer=x", "task.reward_weights.answer = x: Input should be a valid"),
    ],
)
def test_a_bad_value_is_one_line_with_key_value_and_what_is_allowed(override, line):
    assert line in line_of(override)


@pytest.mark.parametrize(
    ("others", "value", "end"),
    [
        ("", "training.k_best_of_n = [1, 1]", "at least 2, since a sample is judged by its group"),
        ("", "training.k_best_of_n = [8, 4]", "k best of n cannot be more than n; write [4, 4]"),
        (SIL, "training.k_best_of_n = [8, 8]", "all but the k best; write k < n, such as [2, 32]"),
        (DISTILL, "training.k_best_of_n = [2, 4]", "write [4, 4], or training.learning_type=sil"),
        (DISTILL, "training.kl_coef = 0.1", "is in the place of the reference; write 0"),
        ("", "model.teacher = tiny", "only distill reads it; write null"),
        ("training.learning_type=distill", "model.teacher = null", "give a folder or a hub id"),
        (SIL, "training.advantage = over_mean", "sil gives the k best the advantage 1; write mean"),
        ("task.reward_weights.format=-0.1", "training.advantage = over_mean", "weight; write mean"),
        ("training.policy_loss=dppo", "training.tis_clip = 2.0", "sampler already; write null"),
        ("training.policy_loss=gspo", "training.clip_eps = 0.2", "clips; write 3e-4 or so"),
        ("", "training.embedding_learning_rate = 0.001", "write null, or training.optimizer=muon"),
        ("", "model.load_in_4bit = true", "write false, or set model.lora='{r: 8}'"),
        (SHARD, "training.optimizer = muon", "cannot step what model.shard cuts; write adamw"),
        ("model.lora.r=8", "model.shard = true", "not trained; write false, or lora: null"),
        (FOUR_BITS, "model.shard = true", "4 bits cannot be cut; write false for one of the two"),
        (FOUR_BITS, "sampling.backend = vllm", "weights of 16 bits, not 4; write grouped"),
        ("model.lora.r=8", "training.optimizer = muon", "the factors of model.lora; write adamw"),
        ("validation.best_of_n=4", "validation.pass_k = [1, 8]", "at most best_of_n (4)"),
        ("", "validation.temperature = 0.009", "must be 0, which is greedy, or at least 0.01"),
        (GREEDY, "validation.best_of_n = 2", "a question's samples are all alike; write 1"),
        ("", "training.num_epochs = 2.0", "questions have no epochs; write null and num_steps"),
        ("", "task.reward_weights = {format: 0.0, answer: 0.0}", ": one must not be 0"),
    ],
)
def test_an_impossible_combination_is_one_line_with_the_fix(others, value, end):
    line = line_of(*others.split(), value.replace(" = ", "="))
    assert line.startswith(f"{value}: ") and line.endswith(end)


def test_what_is_for_training_is_not_asked_of_an_evaluation():
    wrong = ["model.load_in_4bit=true", "training.k_best_of_n=[1, 1]"]
    wrong.append("training.num_samples_per_step_global=3")
    check_world(load("mode=evaluate", *wrong), 2)
    assert len(lines_raised(load, *wrong)) == 2


def test_every_mistake_has_its_line():
    wrong = ["training.seed=x", "sampling.top_p=7", "zzz=1", "task.min_target=1.5"]
    assert len(lines_raised(load, *wrong)) == 4
    impossible = ["training.k_best_of_n=[1, 2]", "validation.pass_k=[9]"]
    assert len(lines_raised(load, *impossible)) == 2


def test_reward_parts_of_another_task_are_checked(guessing):
    line = line_of(file_with(guessing, "task: {name: guessing}"), "task.reward_weights.format=1")
    assert "reward_weights.format: Input should be 'answer' or" in line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["training.num_steps"], "training.num_steps: write section.key=value, for example"),
        (["training.k_best_of_n=[1,"], "training.k_best_of_n=[1,: cannot be read as YAML: "),
        (["training.seed=" + "[" * 5_000], "cannot be read as YAML: maximum recursion depth"),
        (["--config", "a.yaml", "--config", "b.yaml"], "--config a.yaml b.yaml: give one file"),
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
        ("training:\n\tseed: 1", ": use spaces, no tabs"),
        ("- training", "some.yaml: must hold sections of keys"),
        ("0", "some.yaml: must hold sections of keys"),
        ("a: !!python/object:os.system {}", "cannot be read as YAML: could not determine"),
        ("training: {1: 2}", "training.1 = 2: unknown key"),
        (b"\x80\x04\x95", "some.yaml: cannot be read as YAML: "),  # not text
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(text, line, tmp_path):
    assert line in line_of(file_with(tmp_path, text))


def test_a_tilde_is_the_home_folder_in_every_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my.yaml").write_text("run: {dir: ~/runs}\ntask: {train: ~/a.jsonl}")
    config = load("--config", "~/my.yaml", "model.name=~/model", "task.eval=~/b.jsonl", RATE)
    paths = (config.run.dir, config.task.train, config.model.name, config.task.eval)
    assert paths == tuple(f"{tmp_path}/{name}" for name in ("runs", "a.jsonl", "model", "b.jsonl"))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("validation.num_examples = 3", "must be at least 4, one for each rank"),
        ("training.num_samples_per_step_global = 6", "must be a multiple of the 4 ranks"),
    ],
)
def test_ranks_without_their_share_of_the_questions_are_refused(value, problem):
    config = load(value.replace(" = ", "="))
    check_world(config, 3)
    (line,) = lines_raised(check_world, config, 4)
    assert line.startswith(f"{value}: {problem}")


def test_the_questions_of_a_step_are_given_for_each_rank_or_for_all_together():
    assert load("training.num_samples_per_step=5").questions_per_rank(4) == 5
    assert load("training.num_samples_per_step_global=6").questions_per_rank(3) == 2


@pytest.mark.parametrize(
    ("in_file", "overrides", "num_steps", "num_epochs"),
    [
        ("num_steps: 40", "", 40, None),
        ("num_epochs: 2", "", 20, 2.0),  # 20 stands until the questions are counted
        ("num_epochs: 2, num_steps: null", "", None, None),
        ("num_epochs: 2", "training.num_steps=5", 5, None),
        ("num_steps: 40", "training.num_epochs=0.5", 20, 0.5),
        ("num_steps: 40, num_epochs: null", "training.num_epochs=null", 40, None),
        ("seed: 1", "training.num_epochs=2 training.num_steps=5", None, None),
        ("num_steps: 30, num_epochs: 2", "training.num_steps=5", None, None),
    ],
)
def test_steps_or_epochs_are_given_and_the_command_line_wins(
    tmp_path, in_file, overrides, num_steps, num_epochs
):
    arguments = [file_with(tmp_path, f"training: {{{in_file}}}"), "task.train=a.jsonl"]
    arguments += overrides.split()
    if num_steps is None:
        (line,) = lines_raised(load, *arguments)
        assert line.startswith(("training.num_epochs = 2: it sets", "training.num_steps = null"))
        return
    config = load(*arguments)
    assert (config.training.num_steps, config.training.num_epochs) == (num_steps, num_epochs)
    assert load(file_with(tmp_path, dump(config))) == config


SIXTEEN = "training.num_samples_per_step_global=16"


@pytest.mark.parametrize(
    ("num_epochs", "num_questions", "num_ranks", "num_steps"),
    [(1, 7_473, 1, 467), (1, 7_473, 2, 467), (3, 7_473, 1, 1_401), (0.5, 64, 2, 2), (1, 31, 1, 1)],
)
def test_epochs_become_steps_rounded_down(num_epochs, num_questions, num_ranks, num_steps):
    """16 questions a step; 7,473 of them make nanochat's 467 steps."""
    given = ["task.train=a.jsonl", f"training.num_epochs={num_epochs}"]
    config = load(*given, SIXTEEN)
    resolved = config.with_num_steps(num_questions, num_ranks)
    assert (resolved.training.num_steps, resolved.training.num_epochs) == (num_steps, None)
    assert resolved == load(given[0], f"training.num_steps={num_steps}", SIXTEEN)
    check_same_run(dotted_values(config), resolved)


def test_less_than_a_step_is_refused_and_steps_stay_steps():
    config = load("task.train=a.jsonl", "training.num_epochs=1", SIXTEEN)
    (line,) = lines_raised(config.with_num_steps, 15, 1)
    assert line.startswith("training.num_epochs = 1.0: of 15 questions is less than a step of 16")
    steps = load("training.num_steps=9")
    assert steps.with_num_steps(5, 1) == steps


def test_an_override_to_another_task_leaves_the_files_options_of_its_own_task(tmp_path):
    """`task.name=gsm8k` with config.yaml was refused for Countdown's keys, which nobody typed."""
    file = file_with(
        tmp_path,
        "task: {eval: b.jsonl, max_numbers: 4, reward_weights: {format: 0.5}, prompt: '{nums}'}",
    )
    task = load(file, "task.name=gsm8k", "task.train=a.jsonl").task
    assert (task.name, task.train, task.eval) == ("gsm8k", "a.jsonl", "b.jsonl")
    assert task.prompt is None
    assert task.reward_weights == load("task.name=gsm8k").task.reward_weights
    assert line_of(file, "task.name=gsm8k", "task.max_numbers=5").startswith(
        "task.max_numbers = 5: unknown key of task gsm8k"
    )
    same = load(file, "task.name=countdown", "task.max_number=60").task
    assert (same.max_numbers, same.max_number, same.reward_weights["format"]) == (4, 60, 0.5)


def test_the_words_of_others_are_those_of_the_page_and_each_names_a_key():
    rows = re.findall(r"^\| `([\w.]+)` \| (`.*`) \|", COMPARISON.read_text(), re.MULTILINE)
    assert {key: words.strip("`").split("`, `") for key, words in rows} == {
        key: words.split() for key, words in NAMES_ELSEWHERE.items()
    }
    for name in load_task("countdown"), load_task("gsm8k"):
        known = {*dotted_values(schema(name)())}
        assert known.issuperset(NAMES_ELSEWHERE), name
    words = [word for theirs in NAMES_ELSEWHERE.values() for word in theirs.split()]
    assert len({*words}) == len(words)
    for word in words:
        assert f", {word} is " in line_of(f"{word}=1")


def test_pass_k_follows_best_of_n():
    for n, expected in ((1, [1]), (2, [1, 2]), (8, [1, 8])):
        assert load(f"validation.best_of_n={n}").validation.reported_k == expected
    given = load("validation.best_of_n=4", "validation.pass_k=[1, 2]").validation
    assert given.reported_k == [1, 2]


def test_tinys_learning_rate_is_refused_for_other_models(tmp_path, monkeypatch):
    """Bug: SmolLM2 at tiny's rate, which nobody had given, had no gradient after four steps."""
    assert "--config" not in (line := line_of("model.name=a/b"))
    for recipe in RATE_RECIPES:
        rate = yaml.safe_load((ROOT / recipe).read_text())["training"]["learning_rate"]
        assert f"{rate:g} ({recipe})" in line
    monkeypatch.chdir(ROOT)
    assert line_of("--config", "config.yaml", "model.name=a/b") == line
    own = file_with(tmp_path, "model: {name: a/b}")
    assert line_of(own) == line
    for given in (
        [RATE, "model.name=a/b"],
        [file_with(tmp_path, "model: {name: a/b}\ntraining: {learning_rate: 6.0e-4}")],
        ["model.name=a/b", "mode=evaluate"],
        [f"model.name={ROOT / 'tiny'}"],
        ["training.seed=1"],
    ):
        load(*given)


@pytest.mark.parametrize("model", ["best", "checkpoints/step-000010", "merged"])
def test_what_a_run_has_made_at_tinys_rate_may_be_trained_at_it(tmp_path, model):
    (tmp_path / "x" / model).mkdir(parents=True)
    (tmp_path / "x/metrics.jsonl").touch()
    name = f"model.name={tmp_path / 'x' / model}"
    for rate in (RATE, "training.learning_rate=1e-3"):
        (tmp_path / "x/config.yaml").write_text(dump(load(rate)))
        if rate == RATE:
            load(name)
        else:
            assert "tiny's and ruins" in line_of(name)


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
    with pytest.raises(ConfigError, match=r"^training\.tis_clip = 2\.0, but .* with null"):
        check_same_run(saved, load("training.tis_clip=2"))


EXPORT = "\nexport: {merge: true, save_4bit: false, push_to_hub: null, private: true}\n"


def test_a_config_with_the_export_section_names_the_command_and_can_still_be_evaluated(tmp_path):
    """Runs wrote that section into their config.yaml while it had keys."""
    file = file_with(tmp_path, dump(load("training.seed=3")) + EXPORT)
    for arguments in ([file], ["export.merge=true"], ["export.private=false", "mode=train"]):
        assert line_of(*arguments).startswith("export: it is a command now: remove the section")
    assert load(file, "mode=evaluate") == load("training.seed=3", "mode=evaluate")
    asked = chat.read_arguments([str(tmp_path), file])
    assert chat.chat_config(asked).training.seed == 3


NO_WARM_START = "\nwarm_start: {data: null, num_steps: 50, only_solved: false}\n"


def test_a_config_with_a_warm_start_names_the_command_and_can_still_be_evaluated(tmp_path):
    """Every run wrote that section into its config.yaml while it had keys; few asked for it."""
    written = dump(load("training.seed=3")) + NO_WARM_START
    assert load(file_with(tmp_path, written)) == load("training.seed=3")
    file = file_with(tmp_path, written.replace("data: null", "data: a/b.jsonl"))
    line = "warm_start: it is a command now: python -m tools.imitate MODEL a/b.jsonl, then "
    for arguments in ([file], [file, "mode=train"], ["warm_start.data=a/b.jsonl"]):
        assert line_of(*arguments).startswith(line)
    assert load(file, "mode=evaluate") == load("training.seed=3", "mode=evaluate")


PACKAGES = ["peft", "bitsandbytes", "math-verify", "matplotlib", "reasoning-gym", "vllm"]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_package_is_named_with_what_installs_it(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package.replace("-", "_"), None)
    with pytest.raises(
        ValueError, match=rf"^a\.b: needs a package: pip install '?{package}[=>]=\d"
    ):
        import_package(package, key="a.b")
    with pytest.raises(ValueError, match=r"pip install a-package-of-the-users$"):
        import_package("a-package-of-the-users", key="task.name = own")


# What is written


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "countdown-tiny-grpo-s0"),
        (["model.name=Qwen/Qwen2.5-3B", "training.seed=3"], "countdown-Qwen2.5-3B-grpo-s3"),
        (["model.name=some/folder/"], "countdown-folder-grpo-s0"),
        (SIL.split(), "countdown-tiny-sil-s0"),
        (["run.name=mine"], "mine"),
    ],
)
def test_the_name_of_a_run_tells_runs_apart(overrides, name):
    assert run_name(load(*overrides, RATE)) == name


@pytest.mark.parametrize("model", ["best", "merged", "checkpoints/step-000010", "checkpoints/last"])
def test_a_run_that_goes_on_from_a_runs_model_is_named_after_that_run(tmp_path, model):
    """Bug: all were named after `best`, so the second of two was refused as another run."""
    for name in ("x", "y"):
        (tmp_path / f"disk/{name}/best").mkdir(parents=True)  # best/ is a link to another disk
        (tmp_path / f"{name}/checkpoints/step-000010").mkdir(parents=True)
        (tmp_path / f"{name}/checkpoints/last").symlink_to("step-000010")
        (tmp_path / f"{name}/merged").mkdir()
        (tmp_path / f"{name}/best").symlink_to(tmp_path / f"disk/{name}/best")
        (tmp_path / f"{name}/metrics.jsonl").touch()
        config = load(f"model.name={tmp_path / name / model}", RATE)
        assert run_name(config) == f"countdown-{name}-grpo-s0"


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
    assert load(file_with(tmp_path, dump(config))) == config
    plain = yaml.safe_load(dump(config))
    assert plain["run"]["name"] == name and plain["training"]["learning_rate"] == 1e-5


@pytest.fixture
def config_yaml(tmp_path):
    """A copy of config.yaml in a git repository of its own, whose index holds it."""
    shutil.copy(ROOT / "config.yaml", tmp_path)
    for command in ("init", "add config.yaml"):
        subprocess.run(["git", "-C", tmp_path, *command.split()], check=True, capture_output=True)
    return tmp_path / "config.yaml"


def test_config_yaml_is_as_the_schema_writes_it(config_yaml):
    """`python -m tools.write_config` makes it so."""
    write_config(config_yaml)
    assert config_yaml.read_text() == (ROOT / "config.yaml").read_text()


def test_a_config_yaml_is_not_overwritten_before_git_holds_it(config_yaml):
    written = config_yaml.read_text()
    config_yaml.write_text(edited := written.replace("num_steps: 20", "num_steps: 21"))
    with pytest.raises(SystemExit, match="is changed: git add it, or restore it, first"):
        write_config(config_yaml)
    assert config_yaml.read_text() == edited != written
    subprocess.run(["git", "-C", config_yaml.parent, "add", "config.yaml"], check=True)
    write_config(config_yaml)
    assert config_yaml.read_text() == written


@pytest.mark.parametrize("task", built_in_tasks())
def test_every_key_is_written_with_its_default_below_its_explanation(task):
    """A task's own keys too, behind a # that can be removed."""
    config = load(f"task.name={task}")
    text = re.sub(r"^  #(\w+:)", r"  \1", explained(config), flags=re.MULTILINE)
    assert show(yaml.safe_load(text)) == show(config.model_dump())  # 1 is not 1.0
    lines = ["", *text.splitlines()]
    for before, line in pairwise(lines):
        if match := re.match("( *)\\w+:", line):
            assert re.match(f"{match[1]}# \\S", before), f"{line}: has no explanation"


def test_every_default_is_a_value_that_the_schema_accepts():
    for name in built_in_tasks():
        default = type(load(f"task.name={name}"))()
        assert type(default).model_validate(default.model_dump()) == default


def test_a_key_may_stand_outside_all_sections(tmp_path):
    config = load("mode=evaluate")
    assert config.mode == dotted_values(config)["mode"] == "evaluate"
    assert dump(config).startswith("mode: evaluate\nrun:\n")
    assert load(file_with(tmp_path, dump(config))) == config
    assert differences(config) == ["mode: evaluate (default train)"]
    assert line_of("mode=trian") == "mode = trian: Input should be 'train' or 'evaluate'"


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_help_prints_the_keys_of_the_task_that_is_named(future, capsys, guessing):
    (guessing / "late.py").write_text(future + GUESSING)
    with pytest.raises(SystemExit) as caught:
        load("training.num_step", "--help", "task.name=late")
    assert caught.value.code == 0
    usage, _, keys = capsys.readouterr().out.partition("\n\n# ")
    assert usage.startswith("usage: ")
    assert keys == explained(load("task.name=late")).removeprefix("# ") + "\n"
    own = "  # How far off a guess may be.\n  #tolerance: 0.5\n  #low: null\n\n# How completions"
    assert "  name: late\n" in keys and own in keys


def test_help_prints_what_stands_in_config_yaml(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        load("--help")
    _, _, keys = (ROOT / "config.yaml").read_text().partition("\n\n")
    assert capsys.readouterr().out.endswith(f"\n\n{keys}")


def test_help_is_printed_on_one_rank(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        load("--help")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.yaml")), ids=lambda path: path.name)
def test_a_recipe_loads_and_holds_only_what_differs(path):
    config = load("--config", str(path))
    values, defaults = dotted_values(config), dotted_values(type(config)())
    recipe = yaml.safe_load(path.read_text())
    named = {f"{section}.{key}" for section, keys in recipe.items() for key in keys}
    same = {key for key in named if values[key] == defaults[key]}
    spelled_out = {"training.k_best_of_n", "training.micro_batch_tokens"}  # for the reader
    assert same <= spelled_out, "all else differs"
    for word in ("command", "hardware", "time", "result"):
        assert re.search(rf"^#   {word} ", path.read_text(), re.MULTILINE), word
    assert f"--config configs/{path.name}" in path.read_text()


def test_every_key_is_read_somewhere():
    sources = [*ROOT.glob("*.py"), *ROOT.glob("engine/**/*.py")]
    text = "\n".join(path.read_text() for path in sources if not path.name.startswith("config"))
    text += " ".join(re.findall(r"self\.[\w.]+", (ROOT / "engine/core/config.py").read_text()))
    keys = dotted_values(Config())
    unread = [key for key in keys if not re.search(rf"\.{key.split('.')[-1]}\b", text)]
    assert unread == []
