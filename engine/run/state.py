"""What a run consists of: its parts, and where it is."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from pydantic import NonNegativeInt
from torch import nn

from engine.core.config import Config, ConfigError
from engine.core.distributed import World
from engine.core.signals import Left
from engine.core.types import Groups, Metrics, Questions
from engine.model.policy import CPU_TOKENS, Policy
from engine.questions.contract import Task
from engine.questions.data import QuestionStream
from engine.questions.tasks import built_in_tasks
from engine.report.metrics import mean_of_last, signs_of_collapse
from engine.run.fingerprint import of_questions
from engine.run.folder import command, run_folder
from engine.update.optimizer import Outcome, Update


@dataclass
class State:
    """Where a run is: what a checkpoint holds beside the weights and the optimizer."""

    step: NonNegativeInt = 0
    position: NonNegativeInt = 0  # of the stream: training questions walked so far, over all ranks
    first_score: float | None = None  # the metric of validation.best_by before training
    last_score: float | None = None  # the same at the last evaluation
    best: float | None = None  # the same of the model in best/
    best_step: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    recent: list[list[float]] = field(default_factory=list)  # see metrics.mean_of_last
    best_solved: float = 0.0  # the highest mean of train/solved over the last steps
    signs: dict[str, str] = field(default_factory=dict)  # of a collapse: metric and description
    changed_at: int = 0  # the last step that moved the weights, or that was not skipped
    evaluated_at: int = -1  # the last step that was evaluated; 0 is the model as it was loaded
    has_trained: bool = False  # whether a step has moved the weights
    is_saved: bool = False  # whether the newest checkpoint knows all this

    def remember_score(self, score: float) -> None:
        """Keep what the summary says of the model now and before training."""
        self.last_score = score
        self.evaluated_at = self.step
        self.is_saved = False
        if self.step == 0:
            self.first_score = score


@dataclass
class Fit:
    """What was chosen for this machine where the config leaves it open: see engine/run/fit.py."""

    tokens: int = CPU_TOKENS  # of a micro-batch
    recomputes: bool = False  # instead of keeping activations
    in_bf16: bool = False  # on a CPU
    where: str = ""  # the number of ranks and their GPUs


@dataclass
class Saved:
    """What a checkpoint's state.json holds."""

    state: State
    num_ranks: int
    config: dict  # dotted values, and what else the run rests on
    loss_scale: dict = field(default_factory=dict)
    lost_best: float | None = None  # the metric of a best model that could not be saved
    fit: Fit = field(default_factory=Fit)
    num_alike: int = 0


@dataclass
class Run:
    """Everything that training needs; an evaluation has no optimizer and no training questions."""

    config: Config
    world: World
    logger: Any  # logger.py's Logger, which main.py makes
    task: Task
    policy: Policy
    validation_questions: Questions
    stream: QuestionStream | None = None  # of training questions
    optimizer: torch.optim.Optimizer | None = None
    folder: Path | None = None  # by default the one that the config names
    state: State = field(default_factory=State)
    fit: Fit = field(default_factory=Fit)
    is_resumed: bool = False
    # Of "best" and "checkpoint", what could not be saved: its metric, or its step
    unsaved: dict[str, float] = field(default_factory=dict)
    rests_on: dict[str, str] = field(default_factory=dict)  # see engine/run/fingerprint.py
    num_alike: int = 0  # groups of equal rewards, as long as there was no other
    lock: TextIO | None = None  # holds the folder while it is open

    def __post_init__(self) -> None:
        self.folder = self.folder or run_folder(self.config)

    @property
    def trained_weights(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def check_questions(self) -> None:
        """Raises ValueError if the ranks hold other questions or too few, or none can be played."""
        world = self.world
        validation = self.validation_questions
        mine = of_questions(validation, self.stream.questions if self.stream else [])
        if world.sum([mine != world.broadcast(mine)]).item() > 0:
            raise ConfigError(
                f"task.name = {self.config.task.name}: each rank has other questions; make it load "
                "the same list in each process: sorted(set(...)), not list(set(...))"
            )
        if len(validation) < world.size:
            raise ConfigError(f"{len(validation)} validation questions for {world.size} ranks")
        self.rests_on["the questions of task.train and task.eval"] = mine
        if self.task.Environment:
            from engine.questions.environment import problems_of_environment

            for problem in problems_of_environment(
                self.task, self.config, self.policy.tokenizer, validation[0]
            ):
                raise ValueError(f"{self.task.file}: Environment {problem}")

    def count_broken(self, groups: Groups) -> int:
        """How many completions of all ranks met logits that were not finite; warns of them."""
        num_broken = int(self.world.sum([sum(t.completion.is_broken for g in groups for t in g)]))
        if num_broken > 0:
            self.logger.warning(f"{num_broken} completions ended at logits that were not finite")
        return num_broken

    @contextlib.contextmanager
    def left_at_signal(self) -> Iterator[None]:
        """An evaluation, of which nothing stays where a signal ends it: it is due again later."""
        try:
            yield
        except Left:
            if self.task.functions:
                self.task.take_logged()

    @property
    def micro_batch_tokens(self) -> int:
        """The config's, or those that were found for null."""
        return self.config.training.micro_batch_tokens or self.fit.tokens

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or the model has collapsed and the config says to stop."""
        training = self.config.training
        if training.stop_on_collapse and self.state.signs:
            return True
        return self.state.step >= training.num_steps

    @property
    def is_evaluation_due(self) -> bool:
        """Not after a signal, when there may be no time: the resumed run sees what is due."""
        is_due = self.state.step % self.config.validation.every == 0 or self.is_over
        return is_due and self.state.evaluated_at < self.state.step and not self.world.stop_signal

    @property
    def is_checkpoint_due(self) -> bool:
        step = self.state.step
        is_due = self.is_over or (step > 0 and step % self.config.checkpoint.every == 0)
        return (is_due or self.world.stop_signal > 0) and not self.state.is_saved

    def check_skipped_steps(self) -> None:
        """Raises FloatingPointError if too many steps in a row were skipped."""
        num = self.state.skipped_in_a_row
        if num >= self.config.training.max_skipped_steps:
            raise FloatingPointError(
                f"loss or gradient not finite in {num} steps in a row: lower "
                f"training.learning_rate; the best model is in {self.folder / 'best'}"
            )

    def end_step(self, update: Update, position: int) -> None:
        """Count a step.

        `position` is where it ended in the stream of questions. A step that float16's loss scale
        has cost is skipped too, but is no sign that the run is broken: the scale is halved.
        """
        state = self.state
        is_skipped = update.outcome in (Outcome.BROKEN, Outcome.OVERFLOWED)
        state.step += 1
        state.position = position
        state.is_saved = False
        state.skipped_steps += is_skipped
        if update.outcome is not Outcome.OVERFLOWED:
            state.skipped_in_a_row = state.skipped_in_a_row + 1 if is_skipped else 0
        state.has_trained |= update.moved_weights
        if update.moved_weights or not is_skipped:
            state.changed_at = state.step

    def watch_for_collapse(self, metrics: Metrics) -> None:
        """Keep the signs of a collapse in a step's metrics and those before; warn of new ones."""
        state = self.state
        means = mean_of_last(state.recent, metrics, self.config.questions_per_step(self.world.size))
        before = state.signs
        state.signs = {}
        if means:
            state.best_solved = max(state.best_solved, means["train/solved"])
            state.signs = signs_of_collapse(means, state.best_solved)
        for name, sign in state.signs.items():
            if name not in before:
                self.logger.warning(f"the model may be collapsing: {sign} (mean of the last steps)")


def summary(run: Run) -> str:
    """How well the first, the last and the best model solve, and what can be done with the best."""
    state = run.state
    best = run.folder / "best"
    metric = run.config.best_metric.removeprefix("eval/")
    scores = (
        f"{metric} {state.first_score:.3f} at the start, "
        f"{state.last_score:.3f} after step {state.step}"
    )
    if state.best is None:
        return f"{scores}; there is no model in {best}"
    needs = ", with peft" if run.config.model.lora else ""
    is_own_task = run.config.task.code not in built_in_tasks()  # its code must be asked for
    settings = f" --config {run.folder / 'config.yaml'}" if is_own_task else ""
    lines = [
        f"{scores}; best {state.best:.3f} at step {state.best_step}, chosen on these same "
        "validation questions",
        f"the best model: {best}",
        f'load it:        AutoModelForCausalLM.from_pretrained("{best}"){needs}',
        f"ask it:         {command('tools.chat')} {best}{settings}",
        f"look at it all: {command('tools.report')} {run.folder}",
        "train on:       the same command with a larger training.num_steps; its learning rate "
        "is then that of the longer run",
    ]
    if state.step < run.config.training.num_steps:
        lines[-1] = f"stopped, since the model has collapsed: {', '.join(state.signs.values())}"
    return "\n".join(lines)
