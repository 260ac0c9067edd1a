"""The configuration of a run: what every key may be, and how a user's values are read and checked.

Each key begins with its default in the schema below; a YAML file may set it, and the command line
after that. The schema also holds the types and limits; config.yaml explains every key.

To add a key, write one line here, and the same key with its explanation in config.yaml. A task adds
keys of its own to the task section by a class `Options` in its module.
"""

import argparse
import difflib
import functools
import importlib
import importlib.util
import math
import operator
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    create_model,
)

ROOT = Path(__file__).resolve().parent.parent  # the checkout

# The schema

Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[Text, AfterValidator(os.path.expanduser)]  # a file, a folder or a hub id
# Limits that no sensible run comes near: a slip of the keyboard must not start endless work.
Count = Annotated[int, Field(gt=0, le=1_000_000)]
Rate = Annotated[float, Field(gt=0, le=10)]
Weight = Annotated[float, Field(ge=-1_000_000, le=1_000_000)]
LOWEST_TEMPERATURE = 0.01  # logits / 0.01 are still finite
Temperature = Annotated[float, Field(ge=LOWEST_TEMPERATURE, le=100)]


class Section(BaseModel):
    """What all sections share: no unknown keys, no silent conversion ("3" is not 3), read-only."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class RunSettings(Section):
    name: str | None = Field(None, pattern=r"^\w[\w.+=@-]*$")
    dir: PathText = "runs"


class LoraSettings(Section):
    r: int = Field(8, gt=0, le=4096)
    alpha: Count = 32
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)] = (
        "all-linear"
    )


class ModelSettings(Section):
    name: PathText = "tiny"
    revision: str | None = None
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    attn_implementation: Text = "sdpa"
    gradient_checkpointing: bool = False
    shard: bool = False
    lora: LoraSettings | None = None
    load_in_4bit: bool = False
    trust_remote_code: bool = False


class TaskSettings(Section):
    name: Text = "countdown"
    train: PathText = "generated"
    eval: PathText = "generated"
    reward_weights: dict[str, Weight] = {"format": 0.1, "answer": 1.0}
    max_train_examples: Count | None = None
    shuffle: bool = True
    system_prompt: Text | None = None
    prompt: Text | None = None


class SamplingSettings(Section):
    backend: Literal["grouped", "generate"] = "grouped"
    temperature: Temperature = 1.0
    top_p: float = Field(1.0, ge=1e-6, le=1)
    top_k: NonNegativeInt = 0
    stop: list[Text] = []
    max_batch_tokens: PositiveInt | None = None
    calculator: Literal["gsm8k", "nanochat"] | None = None


class TrainingSettings(Section):
    learning_type: Literal["grpo", "sil"] = "grpo"
    num_steps: PositiveInt = 60
    num_epochs: float | None = Field(None, gt=0, le=10_000)
    num_samples_per_step: Count = 16
    num_samples_per_step_global: Count | None = None
    k_best_of_n: list[Count] = Field([16, 16], min_length=2, max_length=2)
    max_new_gen_tokens: Count = 208
    micro_batch_tokens: PositiveInt = 8_192
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    learning_rate: Rate = 2.0e-4
    muon_learning_rate: Rate = 1.0e-3
    embedding_learning_rate: Rate | None = None
    adam_betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [0.9, 0.999], min_length=2, max_length=2
    )
    adam_eps: float = Field(1.0e-8, gt=0, le=1)
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    warmup_steps: NonNegativeInt = 10
    weight_decay: float = Field(0.0, ge=0, le=10)
    max_grad_norm: PositiveFloat = 1.0
    advantage: Literal["mean", "zscore"] = "mean"
    loss_normalization: Literal["dr_grpo", "token", "sequence", "sum"] = "dr_grpo"
    policy_loss: Literal["ppo", "cispo", "gspo"] = "ppo"
    kl_coef: float = Field(0.0, ge=0, le=1000)
    num_iterations: Count = 1
    clip_eps: float = Field(0.2, gt=0, lt=1)
    clip_eps_high: PositiveFloat | None = None
    tis_clip: PositiveFloat | None = None
    skip_truncated: bool = False
    max_skipped_steps: PositiveInt = 10
    stop_on_collapse: bool = False
    seed: int = Field(0, ge=0, lt=2**32)

    @property
    def group_size(self) -> int:
        """Completions that are sampled for a question."""
        return self.k_best_of_n[1]


class ValidationSettings(Section):
    every: PositiveInt = 20
    num_examples: Count = 512
    best_of_n: Count = 8
    pass_k: list[Count] = Field([1, 8], min_length=1)
    best_by: Literal["pass@1", "best_of_n"] = "pass@1"
    temperature: float = Field(1.0, ge=0, le=100)
    max_new_gen_tokens: Count | None = None

    @property
    def best_metric(self) -> str:
        """The metric by which best/ is chosen."""
        return "eval/pass@1" if self.best_by == "pass@1" else f"eval/best_of_{self.best_of_n}"


class CheckpointSettings(Section):
    every: PositiveInt = 20
    keep: PositiveInt | None = 2
    resume: Literal["auto", "never"] = "auto"


class LoggingSettings(Section):
    mlflow: bool = False
    experiment: Text = "plain-grpo"
    samples: NonNegativeInt = 3
    train_samples_every: NonNegativeInt = 0
    rollouts_every: NonNegativeInt = 20


class ExportSettings(Section):
    merge: bool = False
    save_4bit: bool = False
    push_to_hub: str | None = Field(None, pattern=r"^[\w.-]+/[\w.-]+$")
    private: bool = True


class Config(Section):
    """A whole configuration; `schema` makes the one whose task section has a task's own keys."""

    mode: Literal["train", "evaluate"] = "train"
    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    task: TaskSettings = TaskSettings()
    sampling: SamplingSettings = SamplingSettings()
    training: TrainingSettings = TrainingSettings()
    validation: ValidationSettings = ValidationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    logging: LoggingSettings = LoggingSettings()
    export: ExportSettings = ExportSettings()

    def questions_per_rank(self, num_ranks: int) -> int:
        """Training questions of a step on each rank; `check_world` makes sure that they divide."""
        if self.training.num_samples_per_step_global is None:
            return self.training.num_samples_per_step
        return self.training.num_samples_per_step_global // num_ranks

    @property
    def max_validation_tokens(self) -> int:
        """The greatest length of a validation completion."""
        return self.validation.max_new_gen_tokens or self.training.max_new_gen_tokens

    def with_num_steps(self, num_questions: int, num_ranks: int) -> "Config":
        """The same configuration with training.num_steps in place of num_epochs.

        An epoch takes all of the training questions. Raises ConfigError if the epochs are less than
        a step.
        """
        num_epochs = self.training.num_epochs
        if num_epochs is None:
            return self
        questions_per_step = self.questions_per_rank(num_ranks) * num_ranks
        num_steps = math.floor(num_epochs * num_questions / questions_per_step)
        if num_steps == 0:
            line = f"training.num_epochs = {show(num_epochs)}: of {num_questions} questions"
            raise ConfigError([f"{line} is less than a step of {questions_per_step}; raise it"])
        changes = {"num_steps": num_steps, "num_epochs": None}
        return self.model_copy(update={"training": self.training.model_copy(update=changes)})


SECTIONS = [name for name, value in Config() if isinstance(value, Section)]


class ConfigError(ValueError):
    """A user's mistake; each of `lines` names the key or the file, and the fix."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


# Modules that the configuration names


def load_task(name: str) -> ModuleType:
    """The module of a task: one of the checkout, or <name>.py in the current folder.

    Raises ConfigError if there is no such file, or if the module is not a whole task.
    """
    own_file = Path.cwd() / f"{name}.py"
    if name in built_in_tasks():
        module = importlib.import_module(name if name == "countdown" else f"tasks.{name}")
    elif own_file.stem == name and own_file.is_file():
        module = import_file(own_file)
    else:
        choices = f"{', '.join(built_in_tasks())}, or the name of a .py file in {Path.cwd()}"
        raise ConfigError([f"task.name = {show(name):.80}: must be one of {choices}"])
    if problems := list(problems_of_task(module)):
        raise ConfigError([f"{module.__file__}: {problem}" for problem in problems])
    return module


@functools.cache
def built_in_tasks() -> list[str]:
    """The names of the tasks in the checkout; other files in tasks/ have no reward_function."""
    paths = [ROOT / "countdown.py", *sorted(ROOT.glob("tasks/*.py"))]
    return [path.stem for path in paths if "\ndef reward_function(" in path.read_text("utf-8")]


@functools.cache
def import_file(path: Path) -> ModuleType:
    """The module in a file, under a name that cannot be taken for another module's."""
    spec = importlib.util.spec_from_file_location(f"user_task_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pickle and dataclasses look modules up by their names
    spec.loader.exec_module(module)
    return module


def problems_of_task(module: ModuleType) -> Iterator[str]:
    """A line for each thing that is missing or wrong in a task's module."""
    functions = ("load_examples", "generate_prompt", "reward_function", "extract_answer")
    for name in ("REWARD_PARTS", *functions):
        if not hasattr(module, name):
            yield f"a task must define {name}; countdown.py shows how"
    parts = getattr(module, "REWARD_PARTS", ("answer",))
    if not isinstance(parts, tuple) or "answer" not in parts:
        yield 'REWARD_PARTS must be a tuple of names with "answer" among them, such as ("answer",)'
    options = getattr(module, "Options", Section)
    if not issubclass(options, Section):
        yield "Options must inherit from Section in engine/config.py"
        return
    for key, field in options.model_fields.items():
        if field.is_required() or key in TaskSettings.model_fields:
            shared = ", ".join(TaskSettings.model_fields)
            yield f"Options.{key} needs a default, and a name other than {shared}"


@functools.cache
def schema(task: ModuleType) -> type[Config]:
    """Config with the task's own keys and the parts of its reward in the task section."""
    weights = TaskSettings().reward_weights
    defaults = {part: weights.get(part, 0.0) for part in task.REWARD_PARTS}
    settings = create_model(
        "TaskSettings",
        __base__=(task.Options, TaskSettings) if hasattr(task, "Options") else TaskSettings,
        reward_weights=(dict[Literal[task.REWARD_PARTS], Weight], defaults),
    )
    return create_model("Config", __base__=Config, task=(settings, settings()))


def import_package(name: str, *, key: str) -> ModuleType:
    """The package that pip calls `name`, which only runs with this `key` of the config need.

    Raises ValueError with the command that installs the version which pyproject.toml pins.
    """
    try:
        return importlib.import_module(name.replace("-", "_"))
    except ModuleNotFoundError as error:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        pins = [pin for extra in project["optional-dependencies"].values() for pin in extra]
        pin = next(pin for pin in pins if pin.startswith(f"{name}=="))
        raise ValueError(f"{key}: needs a package: pip install {pin}") from error


# Reading: the schema's defaults, then the file, then the overrides


def load_config(arguments: list[str], *, default_file: Path = ROOT / "config.yaml") -> Config:
    """The configuration that `[--config FILE] [section.key=value ...]` asks for.

    Raises ConfigError for a user's mistake. With --help it prints every key, on one rank, and ends.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="append")
    parser.add_argument("-h", "--help", action="store_true")
    try:
        options, overrides = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError([str(error)]) from error
    if options.help:
        if os.environ.get("RANK", "0") == "0":
            print(help_text(overrides))
        raise SystemExit(0)
    files = options.config or [default_file]
    if len(files) > 1:
        raise ConfigError([f"--config {' '.join(files)}: give one file; keys can follow it"])
    from_file = nest(read_file(Path(files[0]).expanduser()).items())
    from_command_line = nest(map(parse_override, overrides))
    values = merge(without_other_task(from_file, from_command_line), from_command_line)
    return validate(merge(values, replaced_length(from_file, from_command_line)))


class Loader(yaml.SafeLoader):
    """YAML as people expect it: 1e-5 is a number, a key is text, a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                problem = f"the key {name} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return {str(key): value for key, value in super().construct_mapping(node, deep).items()}


class Dumper(yaml.SafeDumper):
    """Writes what Loader reads, so the text "1e-5" goes in quotes."""


for yaml_class in (Loader, Dumper):
    yaml_class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )


def parse_yaml(text: str | bytes, *, origin: str | Path) -> Any:
    """The value that YAML text stands for; errors name its `origin`."""
    try:
        return yaml.load(text, Loader=Loader)
    except RecursionError as error:
        raise ConfigError([f"{origin}: cannot be read as YAML: nested too deeply"]) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date in month 13
        problem = " ".join(str(error).split())
        raise ConfigError([f"{origin}: cannot be read as YAML: {problem}"]) from error


def read_file(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping."""
    try:
        content = parse_yaml(Path(path).read_bytes(), origin=path)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}; give --config a YAML file"]) from error
    if content is not None and not isinstance(content, dict):
        raise ConfigError([f"{path}: must hold sections of keys, as config.yaml does"])
    return content or {}


def parse_override(override: str) -> tuple[str, Any]:
    """The dotted key and the value of "training.num_steps=60"."""
    key, equals, text = override.partition("=")
    if not equals:
        example = "section.key=value, for example training.num_steps=60"
        raise ConfigError([f"{override}: write {example}; --help lists the keys"])
    return key, parse_yaml(text, origin=override)


def nest(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Values by section: {"training": {"seed": 1}} for "training.seed" and 1; the later pair wins.

    Raises ConfigError for a key that is given beside a section that sets it too.
    """
    nested: dict[str, Any] = {}
    pairs = [pair for pair in pairs if pair[1] is not None or pair[0] not in SECTIONS]  # empty ones
    for key, value in pairs:
        for other, _ in pairs:
            if other.startswith(f"{key}.") and sets(value, other.removeprefix(f"{key}.")):
                raise ConfigError([f"{key}: {other} is given beside it; leave one of the two out"])
        for name in reversed(key.split(".")):
            value = {name: value}
        nested = merge(nested, value)
    return nested


def sets(value: Any, path: str) -> bool:
    """Whether a section's value decides on the key at this dotted path inside it."""
    name, _, rest = path.partition(".")
    if not isinstance(value, dict):
        return True
    return name in value and (not rest or sets(value[name], rest))


def merge(base: Any, new: Any) -> Any:
    """`new` in place of `base`; of two mappings, a mapping with the keys of both."""
    if isinstance(base, dict) and isinstance(new, dict):
        return base | {key: merge(base.get(key), value) for key, value in new.items()}
    return new


def without_other_task(values: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """The file's values, without those for its task if the command line names another task."""
    task = values.get("task")
    if not isinstance(task, dict) or task_name(values) == task_name(merge(values, overrides)):
        return values
    of_the_task = {"reward_weights", "system_prompt", "prompt"}
    shared = TaskSettings.model_fields.keys() - of_the_task
    return values | {"task": {key: task[key] for key in task if key in shared}}


def replaced_length(from_file: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """What becomes of training.num_steps or num_epochs where the command line gives the other.

    Raises ConfigError for a file with both: they exclude each other.
    """
    in_file, given = (section_of(values, "training") for values in (from_file, overrides))
    if in_file.get("num_steps") is not None and in_file.get("num_epochs") is not None:
        key = f"training.num_epochs = {show(in_file['num_epochs'])}"
        raise ConfigError([f"{key}: it sets num_steps, which the file gives too; leave one out"])
    if given.get("num_steps") is not None:
        return {"training": {"num_epochs": None}}
    if given.get("num_epochs") is not None:
        return {"training": {"num_steps": TrainingSettings().num_steps}}
    return {}


def section_of(values: dict[str, Any], name: str) -> dict[str, Any]:
    """A section of unchecked values; empty for one that is no section."""
    section = values.get(name)
    return section if isinstance(section, dict) else {}


def task_name(values: dict[str, Any]) -> Any:
    """The name of the task that the values ask for, before they are checked."""
    task, default = values.get("task"), TaskSettings().name
    return task.get("name", default) if isinstance(task, dict) else default


# Checking


def validate(values: dict[str, Any]) -> Config:
    """The configuration of these values and, for all other keys, the defaults.

    Raises ConfigError with a line for each mistake.
    """
    full_schema = schema(load_task(task_name(values)))
    values = merge(full_schema().model_dump(), values)
    try:
        config = full_schema.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, known=known_keys(full_schema), values=values)) from error
    if lines := list(impossible(config)):
        raise ConfigError(lines)
    return config


def explain(error: ValidationError, *, known: dict[str, str], values: dict) -> list[str]:
    """One line for each key that pydantic rejects: its value and what is allowed."""
    lines = []
    for detail in error.errors():
        path = detail["loc"][:2]
        key, value = ".".join(path), functools.reduce(operator.getitem, path, values)
        if detail["type"] == "value_error":  # a validator in a task's Options raised it
            problem = str(detail["ctx"]["error"])
        elif key in known:
            problem = f"must be {known[key]}"
            if known[key].startswith("text") and not isinstance(value, str):
                problem += f"; in quotes it is text, as in {key}='\"12\"'"
        elif key in SECTIONS:
            example = next(name for name in known if name.startswith(f"{key}."))
            problem = f"is a section, set its keys, such as {example}"
        else:
            place = f" of task {values['task']['name']}" if path[0] == "task" else ""
            hint = nearest(key, [*SECTIONS, *known])
            problem = f"unknown key{place}{hint}; --help lists the keys"
        is_about_several_keys = key == "task" and detail["type"] == "value_error"
        subject = key if is_about_several_keys else f"{key} = {show(value):.80}"
        lines.append(f"{subject}: {problem}")
    return list(dict.fromkeys(lines))


def nearest(key: str, known: list[str]) -> str:
    """A hint at the known key that is spelt most like `key`, or whose last name is."""
    by_name = {other.split(".")[-1]: other for other in known}
    close = functools.partial(difflib.get_close_matches, n=1, cutoff=0.8)
    for match in close(key, known) or close(key.split(".")[-1], by_name):
        return f", the nearest is {by_name.get(match, match)}"
    return ""


def known_keys(full_schema: type[Config]) -> dict[str, str]:
    """What is allowed for every key, in words, by the key's dotted name."""
    document = full_schema.model_json_schema()
    definitions, known = document["$defs"], {}
    for name, value in full_schema():
        if isinstance(value, Section):
            keys = definitions[type(value).__name__]["properties"].items()
            known |= {f"{name}.{key}": allowed(field, definitions) for key, field in keys}
        else:
            known[name] = allowed(document["properties"][name], definitions)
    return known


LIMITS = {
    "exclusiveMinimum": "> {}",
    "minimum": ">= {}",
    "exclusiveMaximum": "< {}",
    "maximum": "<= {}",
    "pattern": "matching {}",
    "minLength": "that is not empty",
}
TYPES = {
    "integer": "an integer",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "object": "a mapping",
}


def allowed(field: dict, definitions: dict) -> str:
    """What a field's JSON schema allows, in words such as "an integer > 0"."""
    if "$ref" in field:
        field = definitions[field["$ref"].removeprefix("#/$defs/")]
    if "anyOf" in field:
        return " or ".join(allowed(choice, definitions) for choice in field["anyOf"])
    if "const" in field:  # a choice of one
        return str(field["const"])
    if "enum" in field:
        return "one of " + ", ".join(map(str, field["enum"]))
    if "properties" in field:
        keys = field["properties"].items()
        return "a mapping of " + ", ".join(f"{k} ({allowed(v, definitions)})" for k, v in keys)
    if "propertyNames" in field:
        names = allowed(field["propertyNames"], definitions).removeprefix("one of ")
        return f"a mapping from {names} to {allowed(field['additionalProperties'], definitions)}"
    if "items" in field:
        length = f" of {field['minItems']}" if "maxItems" in field else ""
        return f"a list{length}, each {allowed(field['items'], definitions)}"
    kind = TYPES.get(field.get("type"), field.get("type", "any value"))
    limits = [text.format(field[name]) for name, text in LIMITS.items() if name in field]
    return f"{kind} {' and '.join(limits)}".strip()


LARGEST_NUM_COMPLETIONS = 10_000_000  # of a step or an evaluation


def impossible(config: Config) -> Iterator[str]:
    """A line with the fix for each combination of values that cannot work."""
    if config.mode == "train":
        yield from impossible_training(config)
    if config.model.shard:
        yield from impossible_shards(config)
    validation = config.validation
    if 0 < validation.temperature < LOWEST_TEMPERATURE:
        key = f"validation.temperature = {show(validation.temperature)}"
        yield f"{key}: must be 0, which is greedy, or at least {LOWEST_TEMPERATURE}"
    if validation.temperature == 0 and validation.best_of_n > 1:
        key = f"validation.best_of_n = {validation.best_of_n}"
        yield f"{key}: at validation.temperature 0 all completions of a question are alike; write 1"
    key = f"validation.pass_k = {validation.pass_k}"
    if max(validation.pass_k) > validation.best_of_n:
        yield f"{key}: each must be at most validation.best_of_n ({validation.best_of_n})"
    if len(set(validation.pass_k)) < len(validation.pass_k):
        yield f"{key}: write each k once"
    if validation.num_examples * validation.best_of_n > LARGEST_NUM_COMPLETIONS:
        key = f"validation.num_examples = {validation.num_examples}"
        yield f"{key}: times best_of_n more than {LARGEST_NUM_COMPLETIONS:,} completions; lower one"
    if not any(config.task.reward_weights.values()):
        yield f"task.reward_weights = {show(config.task.reward_weights)}: one must not be 0"


def impossible_training(config: Config) -> Iterator[str]:
    """The same for what only training needs."""
    model, training = config.model, config.training
    (k, n), is_sil = training.k_best_of_n, training.learning_type == "sil"
    key = f"training.k_best_of_n = [{k}, {n}]"
    if n < 2:
        yield f"{key}: n must be at least 2, since a sample is judged by its group"
    elif k > n:
        yield f"{key}: the k best of n cannot be more than n; write [{n}, {n}]"
    elif k < n and not is_sil:
        yield f"{key}: grpo trains on all n; write [{n}, {n}], or training.learning_type=sil"
    elif k == n and is_sil:
        yield f"{key}: sil learns by leaving out all but the k best; write k < n, such as [2, 32]"
    if config.questions_per_rank(1) * n > LARGEST_NUM_COMPLETIONS:
        yield f"{key}: a step of more than {LARGEST_NUM_COMPLETIONS:,} completions; lower n"
    if training.num_epochs is not None and config.task.train == "generated":
        key = f"training.num_epochs = {show(training.num_epochs)}"
        yield f"{key}: generated questions have no epochs; write null, and training.num_steps"
    if is_sil and training.advantage == "zscore":
        yield "training.advantage = zscore: sil gives the k best the advantage 1; write mean"
    if training.policy_loss == "gspo" and training.clip_eps >= 0.1:
        key = f"training.clip_eps = {show(training.clip_eps)}"
        yield f"{key}: gspo's ratio hardly leaves 1, so this never clips; write 3e-4 or so"
    if training.embedding_learning_rate is not None and training.optimizer != "muon":
        key = f"training.embedding_learning_rate = {show(training.embedding_learning_rate)}"
        yield f"{key}: only muon has one; write null, or training.optimizer=muon"
    if model.lora is not None and training.optimizer == "muon":
        yield "training.optimizer = muon: cannot train the factors of model.lora; write adamw"
    if model.lora is None and model.load_in_4bit:
        key, fix = "model.load_in_4bit = true", "write false, or set model.lora='{r: 8}'"
        yield f"{key}: weights in 4 bits cannot be trained; {fix}"
    if model.lora is None and config.export.merge:
        yield "export.merge = true: there is no adapter to merge; write false, or set model.lora"
    if model.lora is not None and config.export.save_4bit and not config.export.merge:
        yield "export.save_4bit = true: an adapter has to be merged first; set export.merge=true"


def impossible_shards(config: Config) -> Iterator[str]:
    """The same for what model.shard cannot cut into parts."""
    model, optimizer = config.model, config.training.optimizer
    if optimizer == "muon":
        yield "training.optimizer = muon: it needs matrices, which model.shard cuts; write adamw"
    if optimizer == "adamw_8bit":
        yield "training.optimizer = adamw_8bit: it cannot step what model.shard cuts; write adamw"
    if model.load_in_4bit:
        yield "model.shard = true: weights in 4 bits cannot be cut; write false for one of the two"
    elif model.lora is not None:
        yield "model.shard = true: an adapter's base is not trained; write false, or lora: null"


def check_world(config: Config, num_ranks: int) -> None:
    """Raises ConfigError if a rank would get no validation question, or more than its share."""
    num_examples = config.validation.num_examples
    num_questions = config.training.num_samples_per_step_global
    is_training, lines = config.mode == "train", []
    if num_examples < num_ranks:
        key = f"validation.num_examples = {num_examples}"
        lines.append(f"{key}: must be at least {num_ranks}, one for each rank")
    if is_training and num_questions is not None and num_questions % num_ranks != 0:
        key = f"training.num_samples_per_step_global = {num_questions}"
        lines.append(f"{key}: must be a multiple of {num_ranks}, the number of ranks")
    if lines:
        raise ConfigError(lines)


# A run may go on with other values of these keys. Another value of any other key is another run.
FREE_KEYS = (
    "mode",
    "training.num_steps",
    "training.num_epochs",
    "training.stop_on_collapse",
    "validation.every",
)
FREE_SECTIONS = ("checkpoint.", "export.", "logging.", "run.")


def check_same_run(saved: dict[str, Any], config: Config) -> None:
    """Raises ConfigError if keys that must not change differ from the saved run's dotted values."""
    saved = dotted_values(type(config)()) | saved  # a run older than a key had the key's default
    changed = [
        f"{key} = {show(value)}, but the run was started with {show(saved[key])}"
        for key, value in dotted_values(config).items()
        if key not in FREE_KEYS and not key.startswith(FREE_SECTIONS) and saved[key] != value
    ]
    if changed:
        fix = f"restore it to continue {run_name(config)}, or set run.name for another run"
        raise ConfigError([f"{line}: {fix}" for line in changed])


def truncates(sampling: SamplingSettings) -> bool:
    """Whether completions are drawn from less than the whole distribution."""
    return sampling.top_p < 1 or sampling.top_k > 0


# Writing


def run_name(config: Config) -> str:
    """The name of the run's folder; by default switching grpo to sil makes another run."""
    model = os.path.basename(os.path.abspath(config.model.name))
    training = config.training
    default = f"{config.task.name}-{model}-{training.learning_type}-s{training.seed}"
    return config.run.name or default


def dotted_values(config: Config) -> dict[str, Any]:
    """The value of every key, by its dotted name."""
    values: dict[str, Any] = {}
    for name, value in config.model_dump().items():
        if name in SECTIONS:
            values |= {f"{name}.{key}": value[key] for key in value}
        else:
            values[name] = value
    return values


def differences(config: Config) -> list[str]:
    """A line such as "training.num_steps: 5 (default 80)" for each key not at its default."""
    defaults = dotted_values(type(config)())
    return [
        f"{key}: {show(value)} (default {show(defaults[key])})"
        for key, value in dotted_values(config).items()
        if value != defaults[key]
    ]


def dump(config: Config) -> str:
    """The whole configuration as YAML, which loads to the same one."""
    values = config.model_dump()
    if config.training.num_epochs is not None:
        del values["training"]["num_steps"]  # a file has only one of the two
    return yaml.dump(values, Dumper=Dumper, allow_unicode=True, sort_keys=False)


USAGE = """\
usage: torchrun --nproc-per-node=2 main.py [--config FILE] [section.key=value ...]

FILE sets keys (config.yaml if not given); overrides come last and are read as YAML. These are the
keys, their defaults and what they may be; config.yaml explains them, a task's module its own.
"""


def help_text(overrides: list[str]) -> str:
    """Usage, and a line for each key of the built-in tasks and of the one that is asked for."""
    asked = [text.removeprefix("task.name=") for text in overrides if text.startswith("task.name=")]
    lines = [USAGE, *describe(Config)]
    for name in dict.fromkeys(built_in_tasks() + asked):
        own_lines = [line for line in describe(schema(load_task(name))) if line not in lines]
        lines += [f"{line} (task {name})" for line in own_lines]
    return "\n".join(lines)


def describe(full_schema: type[Config]) -> list[str]:
    """A line for each key: its default and what is allowed."""
    defaults, known = dotted_values(full_schema()), known_keys(full_schema)
    return [f"{key} = {show(defaults[key])}: {known[key]}" for key in known]


def show(value: Any) -> str:
    """The value as YAML on one line."""
    text = yaml.dump(
        value,
        Dumper=Dumper,
        default_flow_style=True,
        width=float("inf"),
        allow_unicode=True,
        sort_keys=False,
    )
    return text.removesuffix("...\n").strip()
