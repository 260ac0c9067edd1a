"""The schema of config.yaml, and how a run's configuration is read and checked.

The schema is the single source: `python config.py > config.yaml` writes its defaults, each below
its description; `--help` prints the same; a recipe in configs/ holds only what differs. To add a
key, add a field here, read it somewhere, and write config.yaml again.
"""

import argparse
import difflib
import functools
import inspect
import operator
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    create_model,
)

HEADER = """\
# The default run: the embedded model in tiny/ learns Countdown on generated questions.
#
#   command   OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 main.py
#   hardware  2 CPU cores
#   time      384 to 411 s from start to end
#   result    pass@1 on 512 held-out questions, 8 samples each: 0.237 before, after 80 steps 0.647,
#             0.664 and 0.688 for the seeds 0, 1 and 2 (95% intervals about 0.03 to each side). The
#             metrics are in results/. The settings were chosen on an earlier run of seed 0.
#
# Written by `python config.py > config.yaml` from the schema in config.py: a change here is a
# change of your run, a change there is a change of the defaults.
"""

# The schema

Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """What all sections share: no unknown keys, no silent conversion ("3" is not 3), read-only."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # the text below a key is its description
    )


class Run(Section):
    """Where the results of the run are kept."""

    name: str | None = Field(None, pattern=r"^\w[\w.+=@-]*$")
    """Folder of this run inside `run.dir`; runs of the same name are the same run. null makes it
    <task>-<model>-<learning_type>-s<seed>."""

    dir: Text = "runs"
    """Folder that holds the folders of all runs."""


class Lora(Section):
    """A low-rank adapter (arXiv:2106.09685)."""

    r: PositiveInt = 8
    alpha: PositiveInt = 32
    dropout: float = Field(0.0, ge=0, lt=1)


class Model(Section):
    """The model that is trained."""

    name: Text = "tiny"
    """Causal language model to start from: a folder with Hugging Face files, or an id on the
    hub."""

    revision: str | None = None
    """Branch, tag or commit of the hub model; a commit makes the run repeatable, null takes the
    newest."""

    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the arithmetic; the trained weights are float32 whatever it is. auto is
    bfloat16 autocast on a GPU that has it and float32 elsewhere, bfloat16 is fast, float32 is
    exact and several times slower on a GPU."""

    attn_implementation: Text = "sdpa"
    """Attention kernel, as transformers names it: sdpa works everywhere, eager is slow and plain,
    flash_attention_2 needs that package."""

    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: the memory of the
    update falls a lot, its time rises by about a third."""

    lora: Lora | None = None
    """null trains all weights. {r: 8, alpha: 32, dropout: 0.0} leaves them as they are and trains
    an adapter (package peft): alpha / r times a product of two matrices of rank r, added to every
    linear layer of the blocks. Dropout acts in the update alone, anew at every pass: above 0 the
    scored policy is not the sampled one, and with num_iterations the ratios are never quite 1."""

    load_in_4bit: bool = False
    """Keep the weights below the adapter in 4 bits (NF4 with double quantisation, package
    bitsandbytes): a quarter of the memory of bfloat16, a little less exact."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model; only for authors you trust."""


class Task(Section):
    """The questions, and what a good completion earns."""

    name: str = "countdown"
    """The task: the name of its module."""

    train: Text = "generated"
    """Training questions: `generated` (Countdown only), a dataset id on the hub, or a local
    .jsonl, .json, .csv or .parquet file."""

    eval: Text = "generated"
    """Validation questions, from the same kinds of source; none of them is trained on even where
    both sources are the same."""

    reward_weights: dict[str, float] = {"format": 0.1, "answer": 1.0}
    """Weight of each part of the reward; the reward is the sum of weight times part. More weight
    on format teaches the layout sooner and the answers later."""


class Sampling(Section):
    """How completions are sampled during training and evaluation."""

    backend: Literal["grouped", "generate", "continuous"] = "grouped"
    """How tokens are generated: grouped reads each prompt once for all its samples and drops rows
    as they end; generate is transformers' own loop, slower, for any model; continuous is its
    continuous batching, for GPUs."""

    temperature: PositiveFloat = 1.0
    """Temperature of training samples, and of the log-probabilities trained on. Higher explores
    more and solves less; low values make the samples of a group alike."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most likely tokens that hold this share of the probability. Below 1 the
    sampled distribution is no longer the one that is trained."""

    top_k: NonNegativeInt = 0
    """Sample from this many most likely tokens; 0 is off. Above 0 the sampled distribution is no
    longer the one that is trained."""

    max_batch_tokens: PositiveInt | None = None
    """Tokens decoded at once: rows times (longest prompt + new tokens). null is what fits into the
    GPU's free memory, 131072 on a CPU. Lower it when sampling runs out of memory."""

    calculator: bool = False
    """A calculator tool: where a completion says <<12*3= the exact result and >> are written for
    it, as in GSM8K's solutions. They count in its length and are not trained on."""


class Training(Section):
    """The learning algorithm; a step is one batch of rollouts and the update made from it."""

    learning_type: Literal["grpo", "sil"] = "grpo"
    """grpo trains on all samples, each weighted by how much better than the mean of its group it
    was; sil (self-improvement learning) imitates the best ones."""

    num_steps: PositiveInt = 80
    """Steps of the run."""

    num_samples_per_step: PositiveInt = 16
    """Questions per step on each rank. More make the gradient less noisy and the step longer."""

    num_samples_per_step_global: PositiveInt | None = None
    """Questions per step over all ranks, which the number of ranks must divide. Another number of
    ranks then takes the same steps; null is num_samples_per_step on each."""

    k_best_of_n: list[PositiveInt] = Field([16, 16], min_length=2, max_length=2)
    """[k, n]: n completions are sampled per question and the k best are trained on. grpo trains
    on all of them (k = n); sil needs k < n, such as [2, 32]."""

    max_new_gen_tokens: PositiveInt = 128
    """Longest completion, in tokens; a longer one is cut off and usually earns nothing."""

    micro_batch_tokens: PositiveInt = 8_192
    """Tokens per forward and backward pass: rows times (longest prompt + completion); a longer
    row goes alone. The gradient does not depend on it; lower it when the update runs out of
    memory, raise it on a big GPU."""

    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """adamw keeps two float32 averages per weight; adamw_8bit (package bitsandbytes) keeps them in
    8 bits, 6 bytes less per weight. muon steps the matrices of the blocks by Muon, with one
    average, and embeddings, head and vectors by AdamW."""

    learning_rate: PositiveFloat = 2.0e-4
    """AdamW's learning rate after the warm-up. Higher learns faster until the model collapses;
    big models need far less (about 1e-6 for 3 billion weights)."""

    muon_learning_rate: PositiveFloat = 1.0e-3
    """Learning rate of the matrices that muon steps, on the same schedule. A step changes each
    direction of a matrix by about this much, whatever the gradient's size."""

    embedding_learning_rate: PositiveFloat | None = None
    """For muon, AdamW's learning rate of the embeddings (of the head too where they are the same),
    on the same schedule; null is learning_rate."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling in a line or along a cosine to 0,
    which it would reach one step after the last."""

    warmup_steps: NonNegativeInt = 10
    """Steps over which the learning rate rises in a line to its full value, while AdamW's
    averages settle; 0 is off."""

    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, per step and unit of learning rate; 0 is off."""

    max_grad_norm: PositiveFloat = 1.0
    """Gradients of a larger norm are scaled down to it. Lower is safer and slower."""

    advantage: Literal["mean", "zscore"] = "mean"
    """For grpo, the reward minus its group's mean; zscore also divides by the group's standard
    deviation, which weighs very easy and very hard questions more."""

    loss_normalization: Literal["dr_grpo", "token", "sequence", "sum"] = "dr_grpo"
    """What the loss is divided by: dr_grpo, rows times max_new_gen_tokens (no length bias);
    token, all completion tokens; sequence, each row's own length and then the rows (favours short
    right and long wrong answers); sum, the rows."""

    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL penalty, which holds the policy near the model that the run started from;
    0 is off and costs nothing, 0.001 to 0.04 is usual. Above 0 a frozen copy of that model is kept
    in memory (with model.lora it is the model with the adapter off), it scores every batch too, and
    completions without an advantage are in the update."""

    num_iterations: PositiveInt = 1
    """Updates made from the same rollouts. Above 1 the step learns more from each sample, with
    the clipped ratio of PPO."""

    clip_eps: float = Field(0.2, gt=0, lt=1)
    """How far the probability ratio may fall below 1 (and rise above it, see clip_eps_high)
    before its gradient is cut; matters when num_iterations is above 1."""

    clip_eps_high: PositiveFloat | None = None
    """How far the probability ratio may rise above 1; null is clip_eps. Higher lets unlikely
    tokens grow faster."""

    tis_clip: PositiveFloat | None = None
    """Weigh each token by how much likelier the trained policy makes it than the sampler did, at
    most by this (truncated importance sampling; 2 is usual); null is off. It corrects for
    `train/sampler_mismatch`, which bf16 sampling makes large."""

    skip_truncated: bool = False
    """Do not train on completions that were cut off at max_new_gen_tokens; they still count in
    the mean of their group."""

    max_skipped_steps: PositiveInt = 10
    """Stop after this many steps in a row whose loss or gradient was not finite."""

    stop_on_collapse: bool = False
    """Stop where the model has collapsed: over the last steps it solves half of what it solved at
    its best, its entropy is near 0, or most completions are cut off. A warning is given anyway."""

    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the data, their order and the samples; another seed is another run."""


class Validation(Section):
    """How the model is measured on questions that it is never trained on."""

    every: PositiveInt = 20
    """Steps between two evaluations; the start and the end are always evaluated. Training does
    not depend on it."""

    num_examples: PositiveInt = 512
    """Validation questions over all ranks. Four times as many halve the interval around
    pass@1."""

    best_of_n: PositiveInt = 8
    """Completions sampled per validation question; pass@1 is their mean, best of n the share of
    questions with a right one among them."""

    pass_k: list[PositiveInt] = Field([1, 8], min_length=1)
    """The k for which pass@k is reported: the chance that one of k samples is right; each at most
    best_of_n."""

    temperature: PositiveFloat = 1.0
    """Temperature of validation samples. Lower usually raises pass@1 and lowers best of n."""


class Checkpoint(Section):
    """What is saved so that a run can be killed at any moment and go on."""

    every: PositiveInt = 20
    """Steps between two checkpoints; the end, a signal and an error make one too. At most so many
    steps are lost where a machine dies."""

    keep: PositiveInt = 2
    """Newest checkpoints that are kept; each holds the weights and AdamW's two averages, 12 bytes
    per weight. From 2 on, a good one is among them even after a step that ruined the weights."""

    resume: Literal["auto", "never"] = "auto"
    """auto goes on from the newest whole checkpoint of the run of this name; never refuses to
    touch a run that has one."""


class Logging(Section):
    """What is recorded beside metrics.csv and metrics.jsonl, which are always written."""

    mlflow: bool = False
    """Also log to MLflow; the server's address and credentials come from the environment or a
    .env file."""

    experiment: Text = "plain-grpo"
    """Name of the MLflow experiment."""

    samples: NonNegativeInt = 3
    """Completions printed and kept in samples.jsonl at each evaluation."""


class Export(Section):
    """What is made of best/ after the last step; a finished run started again makes it too."""

    merge: bool = False
    """Add the adapter of best/ to a bfloat16 copy of its base model, and save that as a plain model
    in merged/, which loads without peft."""

    push_to_hub: str | None = Field(None, pattern=r"^[\w.-]+/[\w.-]+$")
    """Hub id (user/name) to upload merged/ to, or best/ where nothing is merged; needs a token
    (`hf auth login`, or HF_TOKEN). A repository that is not there yet is made a private one."""


class Config(Section):
    """A whole configuration; `schema` adds the options of a task to its task section."""

    mode: Literal["train", "evaluate", "sample"] = "train"
    """What to do: train the model; evaluate it as it is, on the validation questions, by all that
    `validation` asks for, majority votes and greedy completions, into a folder eval-<time> of its
    own in the run's folder; or sample an answer to each question typed or piped in, on one
    process."""

    run: Run = Run()
    model: Model = Model()
    task: Task = Task()
    sampling: Sampling = Sampling()
    training: Training = Training()
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    export: Export = Export()


SECTIONS = {name for name, value in Config() if isinstance(value, Section)}

# The task's own options

Tasks = dict[str, ModuleType]
TASK_FUNCTIONS = ("load_examples", "generate_prompt", "reward_function", "extract_answer")
PASSED_BY_MAIN = {"num_examples", "seed", "held_out", "exclude", "num_tokens"}


@functools.cache
def schema(task: ModuleType) -> type[Config]:
    """Config with the options and the reward parts of `task` in its task section."""
    options: dict[str, Any] = {}
    for function in TASK_FUNCTIONS:
        for option, parameter in keyword_only(getattr(task, function)).items():
            assert parameter.default is not parameter.empty, f"{function}: {option} has no default"
            options.setdefault(option, (parameter.annotation, parameter.default))
    if parts := getattr(task, "REWARD_PARTS", None):
        weights = Task.model_fields["reward_weights"]
        defaults = {part: weights.default.get(part, 0.0) for part in parts}
        field = Field(defaults, description=weights.description)
        options["reward_weights"] = (dict[Literal[tuple(parts)], float], field)
    with_options = create_model(
        "Task", __base__=Task, __module__=task.__name__, __doc__=Task.__doc__, **options
    )
    return create_model("Config", __base__=Config, task=(with_options, with_options()))


def keyword_only(function: Callable) -> dict[str, inspect.Parameter]:
    """The parameters of a task's function that the config sets."""
    return {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in PASSED_BY_MAIN
    }


def options_for(function: Callable, config: Config) -> dict[str, Any]:
    """The options in the task section that `function` takes, to be passed on as keywords."""
    return {name: getattr(config.task, name) for name in keyword_only(function)}


# Reading: the schema's defaults, then the file, then the overrides


class ConfigError(ValueError):
    """A user's mistake; each of `lines` names the key or file and the fix."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


def load_config(arguments: list[str], *, tasks: Tasks) -> Config:
    """The configuration that `[--config FILE] [section.key=value ...]` asks for.

    FILE is config.yaml next to this script if not given. Raises ConfigError; with --help prints
    every key, on one rank, and exits with 0.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default=Path(__file__).with_name("config.yaml"))
    parser.add_argument("-h", "--help", action="store_true")
    options, overrides = parser.parse_known_args(arguments)
    if options.help:
        if os.environ.get("RANK", "0") == "0":
            print(help_text(tasks), end="")
        raise SystemExit(0)
    pairs = parse_overrides(overrides)
    content = without_other_task(read_file(options.config), pairs)
    given: dict[str, Any] = {}
    for key, value in [*content.items(), *pairs]:
        if value is not None or key not in SECTIONS:  # an empty section sets nothing
            given = merge(given, nest(key, value))
    return validate(given, tasks=tasks)


class ArgumentParser(argparse.ArgumentParser):
    """argparse, but a mistake is a ConfigError, not an exit on every rank."""

    def error(self, message: str) -> None:
        raise ConfigError([message])


class Loader(yaml.SafeLoader):
    """YAML as people expect it: 1e-5 is a number, a key is text, and none is given twice."""

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


NOT_YAML = (yaml.YAMLError, ValueError)  # ValueError: bytes that are no text, or month 13


def read_file(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping."""
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=Loader)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}; give --config a YAML file"]) from error
    except NOT_YAML as error:
        raise ConfigError([f"{path}: cannot be read as YAML: {one_line(error)}"]) from error
    if content is not None and not isinstance(content, dict):
        raise ConfigError([f"{path}: must hold sections of keys, as config.yaml does"])
    return content or {}


def parse_overrides(overrides: list[str]) -> list[tuple[str, Any]]:
    """Dotted keys and their YAML values."""
    pairs, lines = [], []
    for override in overrides:
        key, equals, text = override.partition("=")
        try:
            pairs.append((key, yaml.load(text, Loader=Loader)))
        except NOT_YAML as error:
            lines.append(f"{override}: cannot be read as YAML: {one_line(error)}")
        if not equals:
            example = "section.key=value, for example training.num_steps=60"
            lines.append(f"{override}: write {example}; --help lists the keys")
    if lines:
        raise ConfigError(lines)
    return pairs


def without_other_task(content: dict[str, Any], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A file's content without the options of its task, where an override names another task."""
    section, names = content.get("task"), [value for key, value in pairs if key == "task.name"]
    if not names or not isinstance(section, dict) or section.get("name") == names[-1]:
        return content
    shared = Task.model_fields.keys() - {"reward_weights"}
    return content | {"task": {key: section[key] for key in section if key in shared}}


def nest(key: str, value: Any) -> dict[str, Any]:
    """{"training": {"seed": 1}} for "training.seed" and 1."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def merge(base: Any, new: Any) -> Any:
    """`base` with what `new` sets, mapping by mapping."""
    if isinstance(base, dict) and isinstance(new, dict):
        return base | {key: merge(base.get(key), value) for key, value in new.items()}
    return new


# Checking


def validate(given: dict[str, Any], *, tasks: Tasks) -> Config:
    """The Config that `given` makes with the schema's defaults; ConfigError if there is none."""
    task = merge(Config().model_dump(), given)["task"]
    name = task["name"] if isinstance(task, dict) else Config().task.name
    if name not in list(tasks):
        raise ConfigError([f"task.name = {show(name)}: must be one of {', '.join(tasks)}"])
    full_schema = schema(tasks[name])
    values = merge(full_schema().model_dump(), given)
    try:
        config = full_schema.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, known=known_keys(full_schema), values=values)) from error
    if lines := list(impossible(config)):
        raise ConfigError(lines)
    return config


def explain(error: ValidationError, *, known: dict[str, dict], values: dict) -> list[str]:
    """One line for each key that pydantic rejects: its value and what is allowed."""
    sections = {key.split(".")[0]: key for key in known}
    lines = []
    for detail in error.errors():
        path = detail["loc"][:2]
        key, value = ".".join(path), functools.reduce(operator.getitem, path, values)
        if key in known:
            problem = f"must be {allowed(known[key])}"
            if "text" in problem and not isinstance(value, str):
                problem += f"; in quotes it is text, as in {key}='\"12\"'"
        elif key in sections:
            problem = f"is a section, set its keys, such as {sections[key]}"
        else:
            place = f" of task {values['task']['name']}" if path[0] == "task" else ""
            is_section = len(path) == 1 and isinstance(value, dict)
            hint = nearest(key, sections if is_section else known)
            problem = f"unknown key{place}{hint}; --help lists the keys"
        lines.append(f"{key} = {shorten(show(value))}: {problem}")
    return list(dict.fromkeys(lines))


def nearest(key: str, known: Iterable[str]) -> str:
    """A hint that names the known key most like `key`, empty where none is like it."""
    best = max(known, key=functools.partial(likeness, key))
    return f", the nearest is {best}" if likeness(key, best) > 1.2 else ""


def likeness(key: str, other: str) -> float:
    """From 0 to 2: how alike two dotted keys are as a whole and in their last name."""
    pairs = ((key, other), (key.split(".")[-1], other.split(".")[-1]))
    return sum(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)


def impossible(config: Config) -> Iterator[str]:
    """A line for each combination of values that cannot work."""
    training, validation, task = config.training, config.validation, config.task.model_dump()
    yield from impossible_k_best_of_n(training)
    if config.mode == "train":
        yield from impossible_adapter(config)
    if training.learning_type == "sil" and training.advantage == "zscore":
        yield "training.advantage = zscore: sil gives the k best the advantage 1; write mean"
    if training.embedding_learning_rate is not None and training.optimizer != "muon":
        yield (
            f"training.embedding_learning_rate = {show(training.embedding_learning_rate)}: "
            f"{training.optimizer} has one learning rate; write null, or training.optimizer=muon"
        )
    if config.sampling.backend == "continuous" and truncates(config.sampling):
        yield (
            "sampling.backend = continuous: gives no log-probabilities of the whole distribution "
            "where sampling.top_p or top_k is on; write grouped"
        )
    if config.sampling.backend == "continuous" and config.sampling.calculator:
        yield (
            "sampling.backend = continuous: no calculator can write into what it samples; write "
            "grouped, or sampling.calculator=false"
        )
    if max(validation.pass_k) > validation.best_of_n:
        yield (
            f"validation.pass_k = {validation.pass_k}: each must be at most "
            f"validation.best_of_n ({validation.best_of_n})"
        )
    if len(set(validation.pass_k)) < len(validation.pass_k):
        yield f"validation.pass_k = {validation.pass_k}: write each k once"
    if not any(task["reward_weights"].values()):
        yield f"task.reward_weights = {show(task['reward_weights'])}: one must not be 0"
    for low in task:
        high = low.replace("min_", "max_", 1)
        if low.startswith("min_") and high in task and task[low] > task[high]:
            yield f"task.{low} = {task[low]}: must be at most task.{high} ({task[high]})"


def truncates(sampling: Sampling) -> bool:
    """Whether completions are drawn from less than the whole distribution."""
    return sampling.top_p < 1 or sampling.top_k > 0


def impossible_k_best_of_n(training: Training) -> Iterator[str]:
    (k, n), learning_type = training.k_best_of_n, training.learning_type
    key = f"training.k_best_of_n = [{k}, {n}]"
    if n < 2:
        yield f"{key}: n must be at least 2, since a sample is judged by its group"
    elif k > n:
        yield f"{key}: the k best of n cannot be more than n; write [{n}, {n}]"
    elif learning_type == "grpo" and k < n:
        yield f"{key}: grpo trains on all n; write [{n}, {n}], or training.learning_type=sil"
    elif learning_type == "sil" and k == n:
        yield f"{key}: sil learns by leaving out all but the k best; write k < n, such as [2, 32]"


def impossible_adapter(config: Config) -> Iterator[str]:
    if config.model.lora is None and config.model.load_in_4bit:
        yield (
            "model.load_in_4bit = true: weights in 4 bits cannot be trained; write false, or set "
            "model.lora='{r: 8}' to train an adapter on them"
        )
    if config.model.lora is None and config.export.merge:
        yield (
            "export.merge = true: there is no adapter to merge, and best/ is a plain model; write "
            "false, or set model.lora"
        )
    if config.model.lora is not None and config.training.optimizer == "muon":
        yield (
            "training.optimizer = muon: is for whole matrices, model.lora trains factors of them; "
            "write adamw"
        )


def check_world(config: Config, world_size: int) -> None:
    """Raises ConfigError where a rank would have nothing to do, or another share than others."""
    if config.mode == "sample" and world_size > 1:
        fix = "one process talks with you: python main.py mode=sample"
        raise ConfigError([f"mode = sample: {world_size} ranks, but {fix}"])
    num_examples = config.validation.num_examples
    num_questions = config.training.num_samples_per_step_global
    lines = []
    if num_examples < world_size:
        key = f"validation.num_examples = {num_examples}"
        lines.append(f"{key}: must be at least {world_size}, one for each rank")
    if num_questions is not None and num_questions % world_size != 0:
        key = f"training.num_samples_per_step_global = {num_questions}"
        lines.append(f"{key}: must be a multiple of {world_size}, the number of ranks")
    if lines:
        raise ConfigError(lines)


def check_same_run(saved: dict[str, Any], config: Config) -> None:
    """Raises ConfigError where keys of a run to be resumed (`flatten`ed) differ that must not."""
    free = ("mode", "training.num_steps", "training.stop_on_collapse", "validation.every")
    free_sections = ("checkpoint.", "export.", "logging.", "run.")
    saved = flatten(type(config)()) | saved  # keys that came later had their defaults
    changed = [
        f"{key} = {show(value)}, but the run was started with {show(saved[key])}"
        for key, value in flatten(config).items()
        if key not in free and not key.startswith(free_sections) and saved[key] != value
    ]
    if changed:
        fix = f"restore it to continue {run_name(config)}, or set run.name for another run"
        raise ConfigError([f"{line}: {fix}" for line in changed])


# Writing


def run_name(config: Config) -> str:
    """The name of the run's folder; by default switching grpo to sil makes another run."""
    model = os.path.basename(os.path.abspath(config.model.name))
    training = config.training
    default = f"{config.task.name}-{model}-{training.learning_type}-s{training.seed}"
    return config.run.name or default


def differences(config: Config) -> list[str]:
    """A line such as "training.num_steps: 5 (default 60)" for each key not at its default."""
    defaults = flatten(type(config)())
    return [
        f"{key}: {show(value)} (default {show(defaults[key])})"
        for key, value in flatten(config).items()
        if value != defaults[key]
    ]


def dump(config: Config, *, comments: bool = False) -> str:
    """The whole configuration as YAML, which loads to the same one."""
    known = known_keys(type(config))
    lines: list[str] = []
    for key, value in flatten(config).items():
        section, _, name = key.rpartition(".")
        if section and f"{section}:" not in lines:
            title = type(getattr(config, section)).__doc__
            lines += ["", f"# {title}", f"{section}:"] if comments else [f"{section}:"]
        indent = "  " if section else ""
        if comments:
            lines += [] if section else [""]
            lines += wrap(meaning(known[key]), indent=indent + "# ")
        lines.append(f"{indent}{name}: {show(value)}")
    return "\n".join(lines) + "\n"


def help_text(tasks: Tasks) -> str:
    """Usage, then every key with its default, what is allowed and its meaning."""
    lines = [
        "usage: torchrun --nproc-per-node=2 main.py [--config FILE] [section.key=value ...]",
        "",
        "FILE sets keys (config.yaml if not given); overrides come last and are read as YAML.",
    ]
    described = {name: describe_keys(schema(task)) for name, task in tasks.items()}
    for name, keys in described.items():
        for key, (default, kind, text) in keys.items():
            is_shared = all(other.get(key) == keys[key] for other in described.values())
            head = f"{key} = {default}  ({kind if is_shared else f'{kind}; task {name}'})"
            if head not in lines:
                lines += ["", head, *wrap(text, indent="    ")]
    return "\n".join(lines) + "\n"


def describe_keys(full_schema: type[Config]) -> dict[str, tuple[str, str, str]]:
    """Of every key its default, what is allowed, and its meaning."""
    defaults = flatten(full_schema())
    return {
        key: (show(defaults[key]), allowed(field), meaning(field))
        for key, field in known_keys(full_schema).items()
    }


def known_keys(full_schema: type[Config]) -> dict[str, dict]:
    """The JSON schema of every key, by its dotted name."""
    document = full_schema.model_json_schema()
    known = {}
    for name, field in document["properties"].items():
        field = resolve(field, document)
        if name in SECTIONS:
            keys = field["properties"].items()
            known |= {f"{name}.{key}": resolve(field, document) for key, field in keys}
        else:
            known[name] = field
    return known


def resolve(field: dict, document: dict) -> dict:
    """A JSON schema with the models that it refers to in their place."""
    if "$ref" in field:
        return document["$defs"][field["$ref"].removeprefix("#/$defs/")]
    choices = [resolve(choice, document) for choice in field.get("anyOf", [])]
    return field | {"anyOf": choices} if choices else field


def flatten(config: Config) -> dict[str, Any]:
    """The value of every key, by its dotted name."""
    flat: dict[str, Any] = {}
    for name, value in config.model_dump().items():
        is_section = isinstance(getattr(config, name), Section)
        flat |= {f"{name}.{key}": value[key] for key in value} if is_section else {name: value}
    return flat


LIMITS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
TYPES = {
    "integer": "an integer",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}


def allowed(field: dict) -> str:
    """What a JSON schema allows, in words such as "an integer > 0"."""
    if "anyOf" in field:
        return " or ".join(allowed(choice) for choice in field["anyOf"])
    if "enum" in field:
        return "one of " + ", ".join(field["enum"])
    if field["type"] == "array":
        length = f" of {field['minItems']}" if "maxItems" in field else ""
        return f"a list{length}, each {allowed(field['items'])}"
    if "properties" in field:
        keys = (f"{key} ({allowed(value)})" for key, value in field["properties"].items())
        return "a mapping of " + ", ".join(keys)
    if field["type"] == "object":
        names = ", ".join(field.get("propertyNames", {}).get("enum", ["names"]))
        return f"a mapping from {names} to {allowed(field['additionalProperties'])}"
    limits = " and ".join(f"{sign} {field[name]}" for name, sign in LIMITS.items() if name in field)
    pattern = f"matching {field['pattern']}" if "pattern" in field else ""
    not_empty = "that is not empty" if "minLength" in field else ""
    return " ".join(filter(None, [TYPES[field["type"]], limits, pattern, not_empty]))


def meaning(field: dict) -> str:
    return field.get("description", "An option of the task, described in its module.")


def wrap(text: str, *, indent: str) -> list[str]:
    return textwrap.wrap(text, 96, initial_indent=indent, subsequent_indent=indent)


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


def shorten(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    import countdown

    print(HEADER + dump(schema(countdown)(), comments=True), end="")
