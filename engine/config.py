"""The configuration of a run: every key with its default, type and limits, and rules for values.

To add a key, write one line here, and the same key with its explanation in config.yaml. A task adds
keys of its own to the task section by a class `Options` in its module.
"""

import os
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt

from engine import ROOT
from engine.yaml_text import show

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1)]
PathText = Annotated[Text, AfterValidator(os.path.expanduser)]  # a file, a folder or a hub id


def in_checkout(name: str) -> str:
    """The path of the checkout's model of this name, such as tiny, if there is none here."""
    is_there = os.path.isfile(ROOT / name / "config.json")
    return str(ROOT / name) if is_there and not os.path.exists(name) else name


Fraction = Annotated[float, Field(ge=0, lt=1)]
# Limits that no sensible run comes near: a slip of the keyboard must not start endless work.
Count = Annotated[int, Field(gt=0, le=1_000_000)]
Rate = Annotated[float, Field(gt=0, le=10)]
Weight = Annotated[float, Field(ge=-1_000_000, le=1_000_000)]
MIN_TEMPERATURE = 0.01  # logits / 0.01 are still finite
Temperature = Annotated[float, Field(ge=MIN_TEMPERATURE, le=100)]


class Section(BaseModel, extra="forbid", strict=True, frozen=True, allow_inf_nan=False):
    """What all sections share: no unknown keys, no silent conversion ("3" is not 3), read-only."""


class RunSettings(Section):
    name: str | None = Field(None, pattern=r"^\w[\w.+=@-]*$")
    dir: PathText = "runs"


class LoraSettings(Section):
    r: int = Field(8, gt=0, le=4096)
    alpha: Count = 32
    dropout: Fraction = 0.0
    target_modules: Literal["all-linear"] | Texts = "all-linear"


class ModelSettings(Section):
    name: Annotated[PathText, AfterValidator(in_checkout)] = "tiny"
    revision: str | None = None
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
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
    template_options: dict[str, bool | int | float | str] = {}
    template_date: str | None = Field(None, pattern=r"^\d{4}-\d\d-\d\d$")


class SamplingSettings(Section):
    backend: Literal["grouped", "generate"] = "grouped"
    temperature: Temperature = 1.0
    top_p: float = Field(1.0, ge=1e-6, le=1)
    top_k: NonNegativeInt = 0
    stop: list[Text] = []
    max_batch_tokens: PositiveInt | None = None
    calculator: Literal["gsm8k", "nanochat"] | None = None
    max_turns: Count = 8


class TrainingSettings(Section):
    learning_type: Literal["grpo", "sil"] = "grpo"
    num_steps: PositiveInt = 20
    num_epochs: float | None = Field(None, gt=0, le=10_000)
    num_samples_per_step: Count = 16
    num_samples_per_step_global: Count | None = None
    k_best_of_n: list[Count] = Field([16, 16], min_length=2, max_length=2)
    max_new_gen_tokens: Count = 320
    micro_batch_tokens: PositiveInt = 2_048
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    learning_rate: Rate = 6.0e-4
    muon_learning_rate: Rate = 1.0e-3
    embedding_learning_rate: Rate | None = None
    adam_betas: list[Fraction] = Field([0.9, 0.999], min_length=2, max_length=2)
    adam_eps: float = Field(1.0e-8, gt=0, le=1)
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    warmup_steps: NonNegativeInt = 5
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
        return self.k_best_of_n[1]

    @property
    def is_plain(self) -> bool:
        """Whether the loss is -A log pi in every pass: see `apply_options` in losses.py."""
        return self.num_iterations == 1 and self.kl_coef == 0 and self.tis_clip is None


class ValidationSettings(Section):
    every: PositiveInt = 10
    num_examples: Count = 512
    best_of_n: Count = 8
    pass_k: list[Count] = Field([1, 8], min_length=1)
    best_by: Literal["pass@1", "best_of_n"] = "pass@1"
    temperature: float = Field(1.0, ge=0, le=100)
    max_new_gen_tokens: Count | None = None

    @property
    def best_metric(self) -> str:
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
    rollouts_every: NonNegativeInt = 10


class ExportSettings(Section):
    merge: bool = False
    save_4bit: bool = False
    push_to_hub: str | None = Field(None, pattern=r"^[\w.-]+/[\w.-]+$")
    private: bool = True


class Config(Section):
    """A whole configuration; `schema` in engine/task_module.py adds a task's own keys to it."""

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
        in_all = self.training.num_samples_per_step_global
        return self.training.num_samples_per_step if in_all is None else in_all // num_ranks

    @property
    def max_validation_tokens(self) -> int:
        return self.validation.max_new_gen_tokens or self.training.max_new_gen_tokens

    def with_num_steps(self, num_questions: int, num_ranks: int) -> "Config":
        """The same, with num_steps for num_epochs. Raises ConfigError if that is less than one."""
        num_epochs = self.training.num_epochs
        if num_epochs is None:
            return self
        questions_per_step = self.questions_per_rank(num_ranks) * num_ranks
        num_steps = int(num_epochs * num_questions / questions_per_step)
        if num_steps == 0:
            problem = f"of {num_questions} questions is less than a step of {questions_per_step}"
            raise ConfigError([f"training.num_epochs = {num_epochs}: {problem}; raise it"])
        training = self.training.model_copy(update={"num_steps": num_steps, "num_epochs": None})
        return self.model_copy(update={"training": training})


SECTIONS = [name for name, value in Config() if isinstance(value, Section)]


def dotted_values(config: Config) -> dict[str, Any]:
    """The value of every key, by its dotted name."""
    values = config.model_dump()
    sections = [(name, values.pop(name)) for name in SECTIONS]
    return values | {f"{name}.{key}": keys[key] for name, keys in sections for key in keys}


def differences(config: Config) -> list[str]:
    """A line such as "training.num_steps: 5 (default 80)" for each key not at its default."""
    defaults = dotted_values(type(config)())
    return [
        f"{key}: {show(value)} (default {show(defaults[key])})"
        for key, value in dotted_values(config).items()
        if value != defaults[key]
    ]


def run_name(config: Config) -> str:
    """The name of the run's folder; by default switching grpo to sil makes another run."""
    model = os.path.basename(os.path.abspath(config.model.name))
    kind = f"{config.training.learning_type}-s{config.training.seed}"
    return config.run.name or f"{config.task.name}-{model}-{kind}"


class ConfigError(ValueError):
    """A user's mistake; each of `lines` names the key or the file, and the fix."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


LARGEST_NUM_COMPLETIONS = 10_000_000  # of a step or an evaluation


def check_world(config: Config, num_ranks: int) -> None:
    """Raises ConfigError for values that cannot work together, or not on this number of ranks."""
    values, problems = dotted_values(config), impossible(config, num_ranks)
    if lines := [f"{key} = {show(values[key])}: {problem}" for key, problem in problems]:
        raise ConfigError(lines)


def impossible(config: Config, num_ranks: int) -> Iterator[tuple[str, str]]:
    """Each key whose value cannot work beside the other values, with the fix."""
    model, training, validation = config.model, config.training, config.validation
    if validation.num_examples < num_ranks:
        yield "validation.num_examples", f"must be at least {num_ranks}, one for each rank"
    if 0 < validation.temperature < MIN_TEMPERATURE:
        yield "validation.temperature", f"must be 0, which is greedy, or at least {MIN_TEMPERATURE}"
    if validation.temperature == 0 and validation.best_of_n > 1:
        yield "validation.best_of_n", "at temperature 0 a question's samples are all alike; write 1"
    if max(validation.pass_k) > validation.best_of_n:
        yield "validation.pass_k", f"each must be at most best_of_n ({validation.best_of_n})"
    if len(set(validation.pass_k)) < len(validation.pass_k):
        yield "validation.pass_k", "write each k once"
    if validation.num_examples * validation.best_of_n > LARGEST_NUM_COMPLETIONS:
        fix = f"times best_of_n more than {LARGEST_NUM_COMPLETIONS:,} completions; lower one"
        yield "validation.num_examples", fix
    if not any(config.task.reward_weights.values()):
        yield "task.reward_weights", "one must not be 0"
    if model.shard and training.optimizer != "adamw":
        yield "training.optimizer", "it cannot step what model.shard cuts; write adamw"
    if model.shard and model.load_in_4bit:
        yield "model.shard", "weights in 4 bits cannot be cut; write false for one of the two"
    elif model.shard and model.lora is not None:
        yield "model.shard", "an adapter's base is not trained; write false, or lora: null"
    if config.mode == "evaluate":
        return  # the rest is for training
    (k, n), is_sil = training.k_best_of_n, training.learning_type == "sil"
    key = "training.k_best_of_n"
    if n < 2:
        yield key, "n must be at least 2, since a sample is judged by its group"
    elif k > n:
        yield key, f"the k best of n cannot be more than n; write [{n}, {n}]"
    elif k < n and not is_sil:
        yield key, f"grpo trains on all n; write [{n}, {n}], or training.learning_type=sil"
    elif k == n and is_sil:
        yield key, "sil learns by leaving out all but the k best; write k < n, such as [2, 32]"
    if config.questions_per_rank(1) * n > LARGEST_NUM_COMPLETIONS:
        yield key, f"a step of more than {LARGEST_NUM_COMPLETIONS:,} completions; lower n"
    if training.num_epochs is not None and config.task.train == "generated":
        yield "training.num_epochs", "generated questions have no epochs; write null and num_steps"
    if (training.num_samples_per_step_global or 0) % num_ranks != 0:
        yield "training.num_samples_per_step_global", f"must be a multiple of the {num_ranks} ranks"
    if is_sil and training.advantage == "zscore":
        yield "training.advantage", "sil gives the k best the advantage 1; write mean"
    if training.policy_loss == "gspo" and training.clip_eps >= 0.1:
        yield "training.clip_eps", "gspo's ratio is near 1, so this never clips; write 3e-4 or so"
    if training.embedding_learning_rate is not None and training.optimizer != "muon":
        fix = "only muon has one; write null, or training.optimizer=muon"
        yield "training.embedding_learning_rate", fix
    if model.lora is not None and training.optimizer == "muon":
        yield "training.optimizer", "cannot train the factors of model.lora; write adamw"
    if model.lora is None and model.load_in_4bit:
        yield "model.load_in_4bit", "cannot be trained; write false, or set model.lora='{r: 8}'"
    if model.lora is None and config.export.merge:
        yield "export.merge", "there is no adapter to merge; write false, or set model.lora"
    if model.lora is not None and config.export.save_4bit and not config.export.merge:
        yield "export.save_4bit", "an adapter has to be merged first; set export.merge=true"


# These keys may change when a run is resumed. Changing any other key is refused.
FREE_KEYS = ("mode", "training.num_steps", "training.num_epochs", "validation.every")
FREE_KEYS += ("training.stop_on_collapse",)
FREE_SECTIONS = ("checkpoint.", "export.", "logging.", "run.")
# So may these, which save memory. They change how sums are rounded, and LoRA's dropout masks.
ROUNDING_KEYS = ("training.micro_batch_tokens", "sampling.max_batch_tokens")
ROUNDING_KEYS += ("model.gradient_checkpointing",)


def check_same_run(saved: dict, config: Config, rests_on: dict | None = None) -> list[str]:
    """Raises ConfigError if keys that must not change differ from the saved run's dotted values.

    `rests_on` (engine/fingerprint.py) are more of these. Returns the ROUNDING_KEYS that differ.
    """
    now = dotted_values(config) | (rests_on or {})
    saved = now | dotted_values(type(config)()) | saved  # a run older than a key had its default
    fix = f"restore it to continue {run_name(config)}, or set run.name for another run"
    changed = [key for key in now if not key.startswith(FREE_SECTIONS) and saved[key] != now[key]]
    lines = [
        f"{key} = {show(now[key])}, but the run was started with {show(saved[key])}: {fix}"
        for key in changed
        if key not in (*FREE_KEYS, *ROUNDING_KEYS)
    ]
    if lines:
        raise ConfigError(lines)
    return [key for key in changed if key in ROUNDING_KEYS]
