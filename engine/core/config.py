"""The configuration of a run: every key with its default, type and limits, and rules for values.

To add a key, write it here with its explanation below it; `python -m tools.write_config` puts it
into config.yaml. A task adds keys of its own to the task section by a class `Options`.
"""

import os
import re
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.types import NonNegativeInt, PositiveFloat, PositiveInt

from engine import ROOT
from engine.core.text import show

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1)]
PathText = Annotated[Text, AfterValidator(os.path.expanduser)]  # a file, a folder or a hub id


def in_checkout(name: str) -> str:
    """The path of the checkout's model of this name, such as tiny, if there is none here."""
    if os.path.isfile(ROOT / name / "config.json") and not os.path.exists(name):
        return str(ROOT / name)
    return name


def names_function(text: str) -> str:
    if not re.fullmatch(r"[\w.]+:\w+", text):
        raise ValueError("my_algo:f for the function f in your file my_algo.py")
    return text


def as_reward(value: Any) -> Any:
    """The text of a list of functions: YAML reads one of [a:f, b:[g, h]], and a mapping in it."""
    if isinstance(value, dict):
        return ", ".join(f"{file}:{as_reward(names)}" for file, names in value.items())
    return f"[{', '.join(map(str, map(as_reward, value)))}]" if isinstance(value, list) else value


FunctionName = Annotated[str, AfterValidator(names_function)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
# Limits that no sensible run comes near: a slip of the keyboard must not start endless work.
Count = Annotated[int, Field(gt=0, le=1_000_000)]
Rate = Annotated[float, Field(gt=0, le=10)]
Weight = Annotated[float, Field(ge=-1_000_000, le=1_000_000)]
MIN_TEMPERATURE = 0.01  # logits / 0.01 are still finite
Temperature = Annotated[float, Field(ge=MIN_TEMPERATURE, le=100)]


class Section(BaseModel):
    """What all sections share: no unknown keys, no silent conversion ("3" is not 3), read-only."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def replace(self, **changes: Any) -> Self:
        return self.model_copy(update=changes)


class RunSettings(Section):
    """Where the results of the run are kept."""

    name: str | None = Field(None, pattern=r"^\w[\w.+=@-]*$")
    """The folder of this run inside `dir`. Give each experiment a new name: an existing one resumes
    that run. null is <task>-<model>-<learning_type>-s<seed>; of runs/x/best, <model> is x."""
    dir: PathText = "runs"
    """The folder that holds the folders of all runs."""


class LoraSettings(Section):
    r: int = Field(8, gt=0, le=4096)
    """The rank of the two matrices."""
    alpha: Count = 32
    """Their product is scaled by alpha / r."""
    dropout: Fraction = 0.0
    """The share of their inputs that the update leaves out."""
    target_modules: Literal["all-linear"] | Texts = "all-linear"
    """The layers that get them."""


class ModelSettings(Section):
    """The model that is trained."""

    name: Annotated[PathText, AfterValidator(in_checkout)] = "tiny"
    """The causal language model to start from: a folder with Hugging Face files, or a hub id."""
    teacher: PathText | None = None
    """For training.learning_type=distill: the model that the trained one learns from, a folder or a
    hub id. It must have the same tokens; its weights stay in memory, in the compute dtype."""
    revision: str | None = None
    """The branch, tag or commit of a model on the hub; null is main. A run looks up its commit when
    it begins, writes that here, and keeps it."""
    teacher_revision: str | None = None
    """The same for model.teacher."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The precision of the arithmetic; the trained weights are float32 in any case. bfloat16 is
    fast. float16 is as fast on a GPU and rounds 8 times less, but its largest number is 65504: the
    loss is scaled, and some models exceed it. float32 is exact, but several times slower on
    a GPU. auto is bfloat16 autocast on a GPU that supports it, float16 on other GPUs if this
    model's logits are then close to those of float32, and float32 elsewhere; but on a CPU that
    multiplies bfloat16 in hardware (lscpu lists amx_bf16 or avx512_bf16), a run of all weights,
    with a hidden size of 512 or more, takes it if the logits are close. Others are far slower."""
    attn_implementation: Text = "sdpa"
    """The attention kernel, by its name in transformers. Rollouts are fast with sdpa, and with
    eager, which is slow in updates (Gemma 2 needs it); flash_attention_2 needs its package."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass instead of keeping them. The update then needs
    much less memory and about a third more time. null does so on a GPU that otherwise would not
    hold 8192 tokens (or micro_batch_tokens) and two of the longest rows, and with shard; it never
    does on a CPU."""
    shard: bool = False
    """false keeps the whole model, its gradients and the optimizer's averages on each GPU (DDP), 16
    bytes per weight. true splits them among the ranks (FSDP2), for a model that does not fit
    otherwise; only the copy that samples, 2 bytes per weight, stays whole. Each pass then waits for
    weights of the other ranks. It needs adamw, no lora, and a run.dir on a disk that all nodes
    share, since each rank saves a part there. At the start each rank needs 4 bytes of host memory
    per weight. The checkpoints can only be resumed; best/ is an ordinary model."""
    lora: LoraSettings | None = None
    """null trains all weights. {r: 8, alpha: 32, dropout: 0.0} freezes them and trains a low-rank
    adapter instead (LoRA, arXiv:2106.09685; package peft): to every linear layer of the blocks, or
    to some (target_modules: [q_proj, v_proj]), it adds alpha / r times the product of two matrices
    of rank r. Dropout acts only in the update, differently in every pass: the scored policy is then
    not the one that sampled, and with num_iterations above 1 no ratio is quite 1."""
    load_in_4bit: bool = False
    """Keep the weights below the adapter in 4 bits (NF4 with double quantisation; package
    bitsandbytes). They take a quarter of the memory of bfloat16 and are a little less exact."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the model. Do this only if you trust its authors."""
    _merged: Self | None = None  # in a run from an adapter: the settings of its sum with its base

    @property
    def source(self) -> Self:
        """The settings of what is loaded."""
        return self._merged or self


class TaskSettings(Section):
    """The questions, and how completions are rewarded. The keys that only this task has stand at
    the end of the section; remove the # in front of one to set it. Those of another task are
    printed by `python main.py --help task.name=gsm8k`."""

    name: Text = "countdown"
    """countdown, the name of a file in tasks/ (arithmetic, gsm8k, guess, math500 or reasoning_gym),
    or that of your own file in the folder where you run main.py (tv for tv.py)."""
    reward: Annotated[Text, BeforeValidator(as_reward)] | None = None
    """Your own reward instead of a task: my_rewards:f is the function f in my_rewards.py, in the
    folder where you run main.py; 'my_rewards:[accuracy, format]' are two functions of it, and
    '[my_rewards:f, lengths:soft_overlong]' are of two files, looked for there, in tasks/ and among
    the installed modules. They are called as TRL calls them, f(completions, **columns), async or
    not (docs/tasks.md). The rows of `train` are the questions; the model is asked their column
    `prompt`, or task.prompt. `name` then only names the run. Each function has weight 1. A question
    is solved if the function `answer`, or else the first, returns 1.0 or more. They run in the
    run's process, which waits for them: limit their time and memory yourself."""
    concurrency: Count = 64
    """The most calls of an async task.reward that wait at once; each question is one call."""
    reward_timeout: PositiveFloat | None = None
    """The seconds after which a call of an async task.reward counts as None; null is no limit."""
    train: PathText = "generated"
    """The training questions: `generated` (by the task, if it can: countdown, arithmetic, guess,
    reasoning_gym), the id of a dataset on the hub, with its configuration and split if you name
    them (openai/gsm8k:main:test; either may be empty), or a local .jsonl, .json, .csv or .parquet
    file. With a chat template, questions that contain one of its special tokens are left out."""
    eval: PathText = "generated"
    """The validation questions, of such a source; never trained on, even if both are the same."""
    reward_weights: dict[str, Weight] = {"format": 0.1, "answer": 1.0}
    """The weight of each part of the reward. The reward is the sum of weight times part. With more
    weight on format the model learns the layout sooner and the answers later."""
    max_train_examples: Count | None = None
    """How many training questions, drawn by the seed, or the first without shuffle; null is all."""
    shuffle: bool = True
    """Draw a new order of the training questions for each epoch. false keeps the file's order."""
    system_prompt: Text | None = None
    """Your own system message; null keeps the task's. On the command line it stands as typed."""
    prompt: Text | None = None
    """Your own wording of the question, instead of the task's. {question} stands for the value of
    that key of the question, and so on for its other keys; all other braces stay, as LaTeX needs
    them. If the task begins the answer, for example with "<think>", it still does. null keeps the
    task's wording. On the command line the words stand as typed (other values are read as YAML);
    null alone, and a text in quotes of its own, are read."""
    template_options: dict[str, bool | int | float | str] = {}
    """Options of the model's chat template, such as {enable_thinking: false} for Qwen3 or 3.5."""
    template_date: str | None = Field(None, pattern=r"^\d{4}-\d\d-\d\d$")
    """The date in a chat template, such as "2026-11-23". null is the day of the first start."""

    @property
    def code(self) -> str:
        """What `load_task` loads."""
        return self.reward or self.name


class SamplingSettings(Section):
    """How completions are sampled during training and evaluation."""

    backend: Literal["grouped", "generate", "vllm"] = "grouped"
    """How tokens are generated. grouped reads each prompt once for all its samples, and drops rows
    that have ended once they are 15% of the batch. generate is transformers' loop: slower, but it
    works for any model. vllm (package vllm, docs/running.md) runs a vLLM engine on each rank, and
    the same random numbers draw from its logits; untried on a GPU."""
    temperature: Temperature = 1.0
    """The temperature of training samples, and of the log-probabilities that are trained on. At a
    higher one the model explores more and solves less; at a low one samples are too much alike."""
    top_p: float = Field(1.0, ge=1e-6, le=1)
    """Sample only from the most likely tokens that together hold this share of the probability.
    Below 1 the sampled distribution is no longer the trained one."""
    top_k: NonNegativeInt = 0
    """The same with this many most likely tokens; 0 is off."""
    stop: list[Text] = []
    """Texts that end a completion, such as ["</answer>"], with the token that completes them, and
    special tokens, such as ["<|bos|>"]. The end tokens of the model's files always end it, and so
    does what its chat template writes after a turn; all of them are printed at the start."""
    max_batch_tokens: PositiveInt | None = None
    """The most tokens decoded at once: rows times (longest prompt + new tokens). null is what fits
    into the GPU's free memory, or on a CPU into 1 GB, at most 524288. Lower it if that runs out."""
    vllm_memory_gb: PositiveFloat | None = None
    """For backend vllm, the size of its cache of keys and values on each rank, in GB. If that is
    too small for all completions, some wait. null is a fifth of a GPU's free memory, else 1."""
    calculator: Literal["gsm8k", "nanochat"] | None = None
    """A calculator that writes exact results into completions; null is none. gsm8k continues
    <<12*3= with 36>>, as in the solutions of GSM8K. nanochat continues
    <|python_start|>12*3<|python_end|> with <|output_start|>36<|output_end|>, in the special tokens
    of nanochat's models. What it writes counts in the completion's length and is not trained on."""
    max_turns: Count = 8
    """The most turns with a task's Environment; a completion that ends there is not cut off."""


class TrainingSettings(Section):
    """The learning algorithm. A step is one batch of completions and the update made from it. The
    first ten keys are those that you change most; the others are for other methods."""

    learning_type: Literal["grpo", "sil", "distill"] = "grpo"
    """grpo trains on all samples, each weighted by how much better it was than the mean of its
    group. sil (self-improvement learning) imitates the best samples of every question. distill
    trains on all samples too, and weighs each token by how much likelier model.teacher finds it:
    its advantage is log pi_teacher - log pi (on-policy distillation). The reward is only measured,
    and one sample per question is enough: k_best_of_n: [1, 1]. train/kl is the KL divergence of the
    policy from the teacher. For sil change this and the next two: tiny's are sil, [2, 32], 4e-4."""
    k_best_of_n: list[Count] = Field([16, 16], min_length=2, max_length=2)
    """[k, n]: n completions are sampled for each question, and the k best are trained on. grpo
    trains on all of them (k = n); sil needs k < n, such as [2, 32]."""
    learning_rate: Rate = 6.0e-4
    """AdamW's learning rate after the warm-up. A higher rate learns faster, until the model
    collapses. Large models need a far lower one: about 1e-6 for 3 billion weights. The default is
    for the model tiny: set another rate for any other model."""
    num_steps: PositiveInt = 20
    """The number of steps."""
    num_epochs: float | None = Field(None, gt=0, le=10_000)
    """Passes over the training questions, such as 1 or 0.5, in place of num_steps: set only one.
    Steps are rounded down; questions left out as too long count; generated ones have no epochs."""
    num_samples_per_step: Count = 16
    """The questions in a step on each rank. More make the gradient less noisy, the step longer."""
    num_samples_per_step_global: Count | None = None
    """The questions in a step over all ranks, whose number must divide them: the run then makes the
    same steps on any number of ranks. null means num_samples_per_step on each rank."""
    max_new_gen_tokens: Count = 320
    """A completion's greatest length, in tokens. A longer one is cut off, and seldom earns."""
    micro_batch_tokens: PositiveInt | None = None
    """The most tokens in a forward and backward pass: rows times the longest (prompt + completion).
    A longer row gets a separate pass. The gradient does not depend on this limit. null is 2048 on a
    CPU; on a GPU as many as fit, found at the start and kept when the run resumes on such GPUs."""
    seed: int = Field(0, ge=0, lt=2**32)
    """The seed of the questions, their order and the samples. Another seed makes another run."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """The learning rate after the warm-up: constant, or falling to 0 in a straight line (linear) or
    along a cosine, as in transformers. It would reach 0 one step after the last."""
    warmup_steps: NonNegativeInt = 5
    """The steps in which the rate rises in a line, while AdamW's averages settle; 0 is off."""
    advantage: Literal["mean", "over_mean", "zscore"] | FunctionName = "mean"
    """For grpo, mean is the reward minus the mean of its group. zscore also divides by the group's
    standard deviation, which gives very easy and very hard questions more weight. over_mean divides
    by the mean itself (MaxRL, arXiv:2602.02710): the rarer a right answer is in its group, the more
    it counts. It is made for rewards of 0 and 1: a small mean, of groups that earn the format part
    alone, blows up advantages, so set task.reward_weights: {format: 0.0, answer: 1.0}. my_algo:f is
    your own, the function f in my_algo.py: f(rewards, **kwargs) -> advantages (docs/tasks.md)."""
    loss_normalization: Literal["dr_grpo", "token", "sequence", "sum"] = "dr_grpo"
    """What the loss is divided by. dr_grpo: rows times max_new_gen_tokens, so that length has no
    influence. token: all completion tokens. sequence: the length of each row, and then the rows,
    which favours short right answers and long wrong ones. sum: the rows."""
    kl_coef: float = Field(0.0, ge=0, le=1000)
    """The weight of the KL penalty, which holds the policy near the model that the run started
    from: exp(d) - d - 1 per token, d = log p(reference) - log p(policy). 0 is off and costs
    nothing; 0.001 to 0.04 is usual. Above 0 a frozen copy of that model (with model.lora the model
    without its adapter) scores every batch too, and completions of advantage 0 are trained on."""
    num_iterations: Count = 1
    """Updates from the same completions; above 1 each sample teaches more (see policy_loss)."""
    policy_loss: Literal["ppo", "cispo", "gspo", "dppo"] | FunctionName = "ppo"
    """The loss when completions are used again, so it matters if num_iterations is above 1; the
    first update is plain REINFORCE, except with dppo. ppo cuts off the gradient of tokens whose
    probability ratio has moved too far. cispo (arXiv:2506.13585) still trains those, but limits the
    ratio that weighs them to 1 + clip_eps_high. gspo (arXiv:2507.18071) is ppo with one ratio for a
    whole completion, the geometric mean of its tokens' ratios; it stays close to 1, so set
    clip_eps: 3.0e-04 and clip_eps_high: 4.0e-04 too, and loss_normalization: sequence as its paper.
    dppo (arXiv:2602.04879) weighs each token by its ratio to the sampler, in the first update too,
    and leaves out those whose probability has moved further than dppo_delta. my_algo:g is your own:
    g(log_probs, old_log_probs, advantages, mask, **kwargs) -> token losses (docs/tasks.md)."""
    clip_eps: float = Field(0.2, gt=0, lt=1)
    """How far the probability ratio may fall below 1 before its gradient is cut, and how far it may
    rise above 1 unless clip_eps_high says otherwise. It matters if num_iterations is above 1."""
    clip_eps_high: PositiveFloat | None = None
    """How far it may rise above 1; null is clip_eps. More lets unlikely tokens grow faster."""
    dppo_delta: float = Field(0.15, gt=0, lt=1)
    """For dppo: how far a token's probability may move from the sampler's, in the direction that
    its advantage asks for, before its gradient is cut. Its authors use 0.15, prime-rl 0.2."""
    tis_clip: PositiveFloat | None = None
    """Weigh each token by how much more likely it is for the trained policy than for the sampler,
    at most by this factor (truncated importance sampling; 2 is usual); null is off. It corrects for
    `train/sampler_mismatch`, which is large if sampling is in bf16."""
    skip_truncated: bool = False
    """Do not train on completions that were cut off; they do count in the mean of their group."""
    distill_mix: float | None = Field(None, gt=0, le=1000)
    """For distill: grpo's advantage plus this times the teacher's. null is the teacher's alone."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """adamw keeps two float32 averages for each weight. adamw_8bit (package bitsandbytes) keeps
    them in 8 bits, which saves 6 bytes for each weight. muon updates the matrices of the blocks by
    Muon, which keeps one average, and the embeddings, the head and the vectors by AdamW."""
    weight_decay: float = Field(0.0, ge=0, le=10)
    """Decoupled weight decay, for each step and unit of the learning rate; 0 is off."""
    max_grad_norm: PositiveFloat = 1.0
    """A gradient of a larger norm is scaled down to it. A lower limit is safer and slower."""
    adam_betas: list[Fraction] = Field([0.9, 0.999], min_length=2, max_length=2)
    """How much of AdamW's two averages is kept at each step: of the gradient and of its square."""
    adam_eps: float = Field(1.0e-8, gt=0, le=1)
    """What AdamW adds to the root of the second average before it divides by it."""
    muon_learning_rate: Rate = 1.0e-3
    """For muon, the learning rate of the matrices, on the same schedule. A step changes each
    direction of a matrix by about this much, however large the gradient is."""
    embedding_learning_rate: Rate | None = None
    """For muon, AdamW's learning rate of the embeddings, and of the head if it shares their
    weights, on the same schedule. null means learning_rate."""
    max_skipped_steps: PositiveInt = 10
    """Stop after this many steps in a row whose loss or gradient was not finite."""
    stop_on_collapse: bool = False
    """Stop if the model has collapsed: over the last steps it solves half of what it solved at its
    best, or its entropy is near 0, or most of its completions are cut off. false only warns."""

    @property
    def num_best(self) -> int:
        return self.k_best_of_n[0]

    @property
    def group_size(self) -> int:
        return self.k_best_of_n[1]

    @property
    def has_reference(self) -> bool:
        """Whether another model scores completions too: the first one, or a teacher."""
        return self.kl_coef > 0 or self.learning_type == "distill"

    @property
    def trains_all_rows(self) -> bool:
        """Whether a row of advantage 0 can have a gradient: by a KL penalty, or one's own loss."""
        return self.has_reference or ":" in self.policy_loss

    @property
    def is_reinforce(self) -> bool:
        """Whether the loss is -A log pi in every pass: see `apply_options` in losses.py."""
        is_once = self.num_iterations == 1 and self.policy_loss in ("ppo", "cispo", "gspo")
        return is_once and not self.has_reference and self.tis_clip is None


class ValidationSettings(Section):
    """How the model is measured, on questions that it is never trained on."""

    every: PositiveInt = 10
    """Steps between two evaluations, beside both ends. Training does not depend on it."""
    num_examples: Count = 512
    """Validation questions over all ranks. Four times as many halve the interval around pass@1."""
    best_of_n: Count = 8
    """The number of completions sampled for each validation question. pass@1 is the share of them
    that are right; best of n is the share of questions with a right one among them."""
    pass_k: Annotated[list[Count], Field(min_length=1)] | None = None
    """The k of pass@k, the chance that one of k samples is right; null means [1, best_of_n]."""
    best_by: Literal["pass@1", "best_of_n", "reward"] | None = None
    """What chooses the model in best/: the highest pass@1, best_of_n, or mean reward. null is
    pass@1, or reward if task.reward is set and none of its functions is called `answer`."""
    temperature: float = Field(1.0, ge=0, le=100)
    """The temperature of validation samples. A lower one usually raises pass@1 and lowers best of
    n. 0 is greedy: always the likeliest token, so best_of_n must be 1."""
    max_new_gen_tokens: Count | None = None
    """The greatest length of a validation completion, in tokens; null uses that of training."""

    @property
    def reported_k(self) -> list[int]:
        return self.pass_k or sorted({1, self.best_of_n})


class CheckpointSettings(Section):
    """What is saved. You can kill a run at any moment; it resumes from its last checkpoint."""

    every: PositiveInt = 20
    """The number of steps between two checkpoints. The run also saves at its end and, after a
    signal (SIGTERM or SIGINT), at the end of its step. This many are lost at most, if a machine
    dies or a step outlasts the 30 s that torchrun then gives (--shutdown-timeout): choose 10."""
    keep: PositiveInt | None = 2
    """How many of the newest to keep; null keeps all. Each holds the weights and AdamW's averages,
    12 bytes per weight. With 2 or more a good one remains after a step that ruined the weights."""
    resume: Literal["auto", "never"] = "auto"
    """auto resumes the run of this name from its newest whole checkpoint. With never, a run that
    already has a checkpoint stops with an error and stays unchanged."""


def as_list(value: Any) -> Any:
    """A list for one word; none and null are an empty one."""
    return [] if value in ("none", None) else [value] if isinstance(value, str) else value


class LoggingSettings(Section):
    """What is recorded besides metrics.jsonl, which is always written."""

    report_to: Annotated[list[Literal["mlflow", "wandb"]], BeforeValidator(as_list)] = []
    """Send metrics, settings and samples to other boards too: mlflow, wandb, or [mlflow, wandb].
    Addresses and credentials come from the environment or a .env file (MLFLOW_TRACKING_URI,
    WANDB_API_KEY, WANDB_MODE=offline). If a board fails, the run warns once, and the board gets its
    metrics later."""
    mlflow: bool = False
    """true is the same as mlflow in report_to."""
    experiment: Text = "plain-grpo"
    """The name of the MLflow experiment, and of the wandb project."""
    samples: NonNegativeInt = 12
    """How many completions samples.jsonl keeps of each evaluation. Step 0's first three are
    printed, and later up to three of those that were right or wrong then and now are not."""
    train_samples_every: NonNegativeInt = 0
    """Print and keep completions of training questions too, as many as `samples` says, whenever
    this number of steps has passed; 0 is off. samples.jsonl has them with "split": "train"."""
    rollouts_every: NonNegativeInt = 10
    """Keep a few groups of a step in rollouts.jsonl, with the numbers of their tokens, at step 1
    and whenever this number of steps has passed; 0 is off. `python -m tools.report` shows them. The
    file stays below 16 MB: as it fills, fewer steps are kept. time/rollouts_log_s is its cost."""
    completions_every: NonNegativeInt = 0
    """Keep all completions of a step, with their texts, rewards and advantages, whenever this
    number of steps has passed, in completions.jsonl; 0 is off."""


class Config(Section):
    """A whole configuration; `schema` in engine/questions/tasks.py adds a task's own keys to it."""

    mode: Literal["train", "evaluate"] = "train"
    """What to do. train trains the model. evaluate measures the model as it is on the validation
    questions, with majority votes and greedy completions too, and writes into a folder eval-<time>:
    inside the folder of the run that made the model (its best/, a checkpoint, merged/), or of the
    run that the model would make. To talk with a model, see `python -m tools.chat`."""
    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    task: TaskSettings = TaskSettings()
    sampling: SamplingSettings = SamplingSettings()
    training: TrainingSettings = TrainingSettings()
    validation: ValidationSettings = ValidationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    logging: LoggingSettings = LoggingSettings()

    def questions_per_step(self, num_ranks: int) -> int:
        """Training questions of a step over all ranks, which divide them (see `check_world`)."""
        training = self.training
        return training.num_samples_per_step_global or training.num_samples_per_step * num_ranks

    @property
    def is_training(self) -> bool:
        return self.mode == "train"

    @property
    def max_validation_tokens(self) -> int:
        return self.validation.max_new_gen_tokens or self.training.max_new_gen_tokens

    @property
    def best_by(self) -> str:
        """What validation.best_by chooses by."""
        knows_right = self.task.reward is None or "answer" in self.task.reward_weights
        return self.validation.best_by or ("pass@1" if knows_right else "reward")

    @property
    def best_metric(self) -> str:
        if self.best_by == "best_of_n":
            return f"eval/best_of_{self.validation.best_of_n}"
        return f"eval/{self.best_by}"

    def with_num_steps(self, num_questions: int, num_ranks: int) -> "Config":
        """The same, with num_steps for num_epochs. Raises ConfigError if that is less than one."""
        num_epochs = self.training.num_epochs
        if num_epochs is None:
            return self
        questions_per_step = self.questions_per_step(num_ranks)
        num_steps = int(num_epochs * num_questions / questions_per_step)
        if num_steps == 0:
            raise ConfigError(
                f"training.num_epochs = {num_epochs}: of {num_questions} questions is less than a "
                f"step of {questions_per_step}; raise it"
            )
        return self.replace(training=self.training.replace(num_steps=num_steps, num_epochs=None))


SECTIONS = [name for name, value in Config() if isinstance(value, Section)]


def dotted_values(config: Config) -> dict:
    return dotted(config.model_dump())


def dotted(values: dict) -> dict:
    """Values by dotted key: {"training.seed": 1} for {"training": {"seed": 1}}."""
    flat = {}
    for section, content in values.items():
        keys = content if isinstance(content, dict) else {"": content}
        flat |= {f"{section}.{key}".strip("."): value for key, value in keys.items()}
    return flat


def differences(config: Config) -> list[str]:
    """A line such as "training.num_steps: 5 (default 20)" for each key not at its default."""
    defaults = dotted_values(type(config)())
    return [
        f"{key}: {show(value)} (default {show(defaults[key])})"
        for key, value in dotted_values(config).items()
        if value != defaults[key]
    ]


def explained(settings: Section, shared: type[Section] = Config, indent: str = "") -> str:
    """YAML with each key below its explanation; a key that `shared` lacks stands as a comment."""
    lines = []
    for key, own in type(settings).model_fields.items():
        field = shared.model_fields.get(key, own)
        value = getattr(settings, key)
        explanation = field.description or ""
        text = f"{key}: {show(settings.model_dump()[key])}"
        if isinstance(value, Section):
            lines.append("")
            explanation = field.annotation.__doc__
            text = f"{key}:\n{explained(value, field.annotation, '  ')}"
        lines += textwrap.wrap(
            " ".join(explanation.split()),
            width=100,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}# ",
            break_on_hyphens=False,
        )
        lines.append(f"{indent}{'' if key in shared.model_fields else '#'}{text}")
    return "\n".join(lines)


class ConfigError(ValueError):
    """A user's mistake; each of `lines` names the key or the file, and the fix.

    `better` is what a file of other trainers' words is in ours, as YAML.
    """

    def __init__(self, *lines: str, better: str = "") -> None:
        super().__init__("\n".join(lines))
        self.lines = [*lines]
        self.better = better


def check_world(config: Config, num_ranks: int) -> None:
    """Raises ConfigError for values that cannot work together, or not on this number of ranks."""
    values = dotted_values(config)
    problems = impossible(config, num_ranks)
    if lines := [f"{key} = {show(values[key])}: {problem}" for key, problem in problems]:
        raise ConfigError(*lines)


def impossible(config: Config, num_ranks: int) -> Iterator[tuple[str, str]]:
    """Each key whose value cannot work beside the other values, with the fix."""
    model = config.model
    training = config.training
    validation = config.validation
    if 0 < validation.temperature < MIN_TEMPERATURE:
        yield "validation.temperature", f"must be 0, which is greedy, or at least {MIN_TEMPERATURE}"
    if validation.temperature == 0 and validation.best_of_n > 1:
        yield "validation.best_of_n", "at temperature 0 a question's samples are all alike; write 1"
    if max(validation.reported_k) > validation.best_of_n:
        yield "validation.pass_k", f"each must be at most best_of_n ({validation.best_of_n})"
    if model.shard and training.optimizer != "adamw":
        yield "training.optimizer", "it cannot step what model.shard cuts; write adamw"
    if model.shard and model.load_in_4bit:
        yield "model.shard", "weights in 4 bits cannot be cut; write false for one of the two"
    elif model.shard and model.lora:
        yield "model.shard", "an adapter's base is not trained; write false, or lora: null"
    if config.sampling.backend == "vllm" and model.load_in_4bit:
        yield "sampling.backend", "vLLM would sample from weights of 16 bits, not 4; write grouped"
    if not config.is_training:
        return  # the others are only read in training
    k = training.num_best
    n = training.group_size
    is_sil = training.learning_type == "sil"
    key = "training.k_best_of_n"
    is_taught = training.learning_type == "distill"
    if is_taught != (model.teacher is not None):
        needs_one = "training.learning_type=distill needs one; give a folder or a hub id"
        yield "model.teacher", needs_one if is_taught else "only distill reads it; write null"
    if is_taught and training.kl_coef > 0:
        yield "training.kl_coef", "the teacher is in the place of the reference; write 0"
    if n < 2 and (not is_taught or training.distill_mix):
        yield key, "n must be at least 2, since a sample is judged by its group"
    elif k > n:
        yield key, f"the k best of n cannot be more than n; write [{n}, {n}]"
    elif k < n and not is_sil:
        yield (
            key,
            f"{training.learning_type} trains on all n; write [{n}, {n}], or "
            "training.learning_type=sil",
        )
    elif k == n and is_sil:
        yield key, "sil learns by leaving out all but the k best; write k < n, such as [2, 32]"
    if training.num_epochs and config.task.train == "generated":
        yield "training.num_epochs", "generated questions have no epochs; write null and num_steps"
    if (training.num_samples_per_step_global or 0) % num_ranks != 0:
        yield "training.num_samples_per_step_global", f"must be a multiple of the {num_ranks} ranks"
    if is_sil and training.advantage != "mean":
        yield "training.advantage", "sil gives the k best the advantage 1; write mean"
    if training.policy_loss == "dppo" and training.tis_clip:
        yield "training.tis_clip", "dppo weighs by the ratio to the sampler already; write null"
    if training.policy_loss == "gspo" and training.clip_eps >= 0.1:
        yield "training.clip_eps", "gspo's ratio is near 1, so this never clips; write 3e-4 or so"
    if training.embedding_learning_rate and training.optimizer != "muon":
        fix = "only muon has one; write null, or training.optimizer=muon"
        yield "training.embedding_learning_rate", fix
    if model.lora and training.optimizer == "muon":
        yield "training.optimizer", "cannot train the factors of model.lora; write adamw"
