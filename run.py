"""The life of a run: prepared, begun or resumed, saved, summed up.

What a run learns is in main.py; here is what it consists of, and how nothing of it gets lost.
"""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

import checkpoint
import plot
from card import model_card
from collapse import mean_of_last, signs_of_collapse
from config import Config, check_same_run, differences, dump, flatten, run_name
from data import QuestionStream, load_questions, render_prompts
from distributed import World, init_world, settle_buckets, tell_optimizer
from estimate import check_disk
from logger import Logger
from metrics import metric_columns, versions
from optimizer import make_optimizer
from policy import Policy, load_policy

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass
class State:
    """Where a run is: what a checkpoint holds beside the weights and the optimizer."""

    step: int = 0
    position: int = 0  # training questions drawn so far, over all ranks
    first: float | None = None  # eval/pass@1 before training
    first_interval: list[float] = field(default_factory=list)  # its 95% interval
    last: float | None = None
    best: float | None = None  # that of best/: the highest, the earliest on ties
    best_step: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    recent: list[list[float]] = field(default_factory=list)  # see collapse.py
    best_solved: float = 0.0  # the highest mean of train/solved over the last steps
    signs: dict[str, str] = field(default_factory=dict)  # of a collapse
    row: dict[str, float] = field(default_factory=dict)  # metrics of this step, not yet recorded
    is_recorded: bool = False

    def advance(
        self, metrics: dict[str, float], *, num_questions: int, is_skipped: bool
    ) -> list[str]:
        """Count a step, and keep its metrics to be recorded; returns new signs of a collapse."""
        self.step += 1
        self.position += num_questions
        self.skipped_steps += is_skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if is_skipped else 0
        self.recent, means = mean_of_last(self.recent, metrics, num_questions=num_questions)
        before, self.signs = self.signs, {}
        if means:
            self.best_solved = max(self.best_solved, means["train/solved"])
            self.signs = signs_of_collapse(means, best_solved=self.best_solved)
        self.row = metrics | {
            "train/skipped_steps": self.skipped_steps,
            "train/collapsed": float(bool(self.signs)),
        }
        self.is_recorded = False
        return [text for name, text in self.signs.items() if name not in before]


@dataclass
class Session:
    """What every mode needs, loaded and checked before anything is written."""

    config: Config
    world: World
    policy: Policy
    folder: Path
    console: Logger


@dataclass
class Run(Session):
    """Everything a training run needs."""

    optimizer: torch.optim.Optimizer
    train_questions: QuestionStream
    validation_questions: list[dict]
    state: State = field(default_factory=State)
    is_resumed: bool = False

    @property
    def trained_weights(self) -> list[nn.Parameter]:
        """All that the optimizer steps."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def is_over(self) -> bool:
        """All steps are done, or the model has collapsed and the config says to stop there."""
        training = self.config.training
        has_collapsed = training.stop_on_collapse and bool(self.state.signs)
        return self.state.step >= training.num_steps or has_collapsed


def open_session(config: Config) -> Session:
    """Join the other ranks and load the model. Raises ValueError or OSError where it cannot be."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    world, notes = init_world()
    console = Logger(rank=world.rank)
    for line in [*notes, *differences(config)]:
        console.info(line)
    policy = load_policy(config, device=world.device, num_ranks=world.size, say=console.info)
    folder = Path(config.run.dir) / run_name(config)
    return Session(config, world, policy, folder, console)


def context_length(policy: Policy) -> int | None:
    """The most tokens that the model can see, None for no limit."""
    return getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)


def questions_for(session: Session) -> dict[str, "Dataset"]:
    """The mode's questions. Raises ValueError where they cannot be used, or are too few."""
    policy, num_ranks = session.policy, session.world.size
    questions = load_questions(
        session.config,
        tokenizer=policy.tokenizer,
        context=context_length(policy),
        say=session.console.info,
    )
    if len(questions["validation"]) < num_ranks:
        num_questions = len(questions["validation"])
        raise ValueError(f"{num_questions} validation questions for {num_ranks} ranks")
    return questions


def prepare_run(config: Config) -> Run:
    """Load what the config names. Raises ValueError or OSError where it cannot be used."""
    session = open_session(config)
    questions, model = questions_for(session), session.policy.model
    run = Run(
        **vars(session),
        optimizer=make_optimizer(model, config),
        train_questions=QuestionStream(questions["training"], config.training.seed),
        validation_questions=questions["validation"].to_list(),
    )
    if run.world.is_main:
        place = f"{run.world.size} x {run.world.device.type}"
        run.console.info(f"{model.num_parameters():,} weights, on {place}; results in {run.folder}")
        num_trained = sum(parameter.numel() for parameter in run.trained_weights)
        num_merged = model.num_parameters() if config.export.merge else 0
        check_disk(run.folder, config, num_weights=num_trained, num_merged=num_merged)
    resume(run)
    settle_buckets(run.policy.scorer, run.world.device)
    return run


def resume(run: Run) -> None:
    """Go on from the newest whole checkpoint, if there is one: rank 0 reads, the others are told.

    Raises ValueError where that checkpoint belongs to another configuration.
    """
    world, config, root = run.world, run.config, run.folder / "checkpoints"
    if config.checkpoint.resume == "never":
        if checkpoint.list_checkpoints(root):
            raise ValueError(f"{root} holds checkpoints: set run.name to start another run")
        return
    folder = checkpoint.newest_whole(root, run.console.warning) if world.is_main else None
    saved = world.tell(checkpoint.load_state(folder) if folder else None)
    if saved is None:
        return
    check_same_run(saved["config"], config)
    if saved["num_ranks"] != world.size:
        run.console.warning(
            f"the run had {saved['num_ranks']} ranks and goes on with {world.size}: "
            "not bit for bit the same"
        )
    if folder:
        checkpoint.load_weights(folder, run.policy.model)
        run.optimizer.load_state_dict(checkpoint.load_optimizer_state(folder))
    for parameter in run.trained_weights:
        world.tell_tensor(parameter.data)
    tell_optimizer(world, run.optimizer)
    run.policy.refresh_sampler()
    run.state, run.is_resumed = State(**saved["state"]), True
    run.console.info(f"resumed after step {run.state.step}")


def open_logger(run: Run) -> Logger:
    """The run's folder with its resolved config, and the files that its metrics go to."""
    config, state = run.config, run.state
    last_recorded = state.step if state.is_recorded else state.step - 1
    logger = Logger(
        rank=run.world.rank,
        do_mlflow=config.logging.mlflow,
        run_dir=run.folder,
        config=config.model_dump(),
        experiment=config.logging.experiment,
        run_name=run_name(config),
        description="\n".join(f"- {line}" for line in differences(config)),
        columns=metric_columns(config),
        resume_step=last_recorded if run.is_resumed else None,
    )
    if run.world.is_main:
        checkpoint.mend(run.folder / "best")
        write_config(run.folder, config)
    return logger


def write_config(folder: Path, config: Config) -> None:
    """Every setting, with the versions used."""
    text = f"# {versions()}\n{dump(config)}"
    (folder / "config.yaml").write_text(text, encoding="utf-8")


def save_best(run: Run, measured: dict[str, float]) -> bool:
    """Save the model in best/ with its card; False where that was not possible."""
    model, tokenizer, config = run.policy.model, run.policy.tokenizer, run.config
    (prompt,), adds_special_tokens = render_prompts(
        run.validation_questions[:1], config=config, tokenizer=tokenizer
    )
    card = model_card(
        config,
        step=run.state.step,
        world=run.world,
        num_questions=len(run.validation_questions),
        prompt=prompt,
        tokenizer=tokenizer,
        adds_special_tokens=adds_special_tokens,
        before=[run.state.first, *run.state.first_interval],
        after=measured,
        library="transformers" if config.model.lora is None else "peft",
    )
    best = functools.partial(checkpoint.save_model, model, tokenizer, card)
    return save_on_main(run, functools.partial(best, run.folder / "best"))


def save_state(run: Run) -> None:
    """Save everything that goes on, unless that could only push out a good checkpoint."""
    if not is_worth_saving(run):
        run.console.warning(
            f"nothing new and finite to save at step {run.state.step}: what was saved before stays"
        )
        return
    state = {
        "state": asdict(run.state),
        "num_ranks": run.world.size,
        "config": flatten(run.config),
    }
    save = functools.partial(
        checkpoint.save_checkpoint,
        run.folder / "checkpoints",
        state,
        step=run.state.step,
        model=run.policy.model,
        tokenizer=run.policy.tokenizer,
        optimizer=run.optimizer,
        keep=run.config.checkpoint.keep,
    )
    save_on_main(run, save)


def is_worth_saving(run: Run) -> bool:
    """Whether there are weights to save: finite ones that are not in the newest checkpoint yet.

    Skipped steps leave the weights as they are, ruined perhaps by the last step that was taken.
    They are saved once at most, so with checkpoint.keep=2 the checkpoint before them stays.
    """
    last_taken = run.state.step - run.state.skipped_in_a_row
    newest = checkpoint.list_checkpoints(run.folder / "checkpoints")[:1]
    if run.state.skipped_in_a_row > 0 and any(int(p.name[5:]) >= last_taken for p in newest):
        return False
    # the norm is infinite for some finite weights too, far beyond those that any logits come of
    return bool(nn.utils.get_total_norm(run.trained_weights).isfinite())


def save_on_main(run: Run, save: Callable[[], None]) -> bool:
    """Save on rank 0; a full disk leaves what was saved before, and the run goes on.

    Returns False where nothing could be saved; the other ranks take it that all is well.
    """
    if not run.world.is_main:
        return True
    try:
        save()
        return True
    except OSError as error:
        run.console.warning(
            f"nothing saved at step {run.state.step}, what was saved before is kept: {error}; free "
            "some space, or lower checkpoint.keep"
        )
        return False


def show_curves(run: Run, logger: Logger) -> None:
    """Draw the run's curves in its folder and show them in MLflow, where that is on."""
    if not (run.world.is_main and run.config.logging.mlflow):
        return
    try:
        picture, _ = plot.draw([run.folder], run.folder / "curves")
        logger.log_artifact(picture)
    except ValueError as error:
        run.console.warning(f"the curves are not drawn: {error}")


def summary(run: Run) -> str:
    """What came of the run, and where it is."""
    state, best = run.state, run.folder / "best"
    scores = f"pass@1 {state.first:.3f} at the start, {state.last:.3f} after step {state.step}"
    if state.best is None:
        return f"{scores}; no model could be saved in {best}"
    needs = ", with peft" if run.config.model.lora is not None else ""
    lines = [
        f"{scores}; best {state.best:.3f} at step {state.best_step}, chosen on these same "
        "validation questions",
        f"the best model: {best}",
        f'load it:        AutoModelForCausalLM.from_pretrained("{best}"){needs}',
        f"ask it:         python main.py --config {run.folder / 'config.yaml'} mode=sample "
        f"model.name={best}",
        "train on:       the same command with a larger training.num_steps",
    ]
    if state.step < run.config.training.num_steps:
        signs = ", ".join(state.signs.values())
        lines[-1] = f"stopped, since the model has collapsed: {signs}"
    return "\n".join(lines)
