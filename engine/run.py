"""What a run consists of, and how it is resumed, saved and summed up; main.py is how it learns."""

import contextlib
import errno
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import TextIO

import torch
from torch import nn

from engine import checkpoint
from engine.config import (
    ROOT,
    Config,
    ConfigError,
    check_same_run,
    differences,
    dotted_values,
    dump,
    run_name,
)
from engine.data import QuestionStream
from engine.distributed import World
from engine.estimate import check_disk
from engine.export import PASS_AT_1, ExportError, merge, model_card, push, save_in_4bit
from engine.metrics import (
    majority_sample,
    mean_of_last,
    metric_columns,
    reduce_means,
    signs_of_collapse,
    single_rate,
    versions,
)
from engine.model import Policy
from engine.prompts import render_prompts
from engine.sharding import check_shared_disk, gather_weights, load_parts, move_parts, save_parts
from logger import Logger, json_line, without_nan, write_atomically


@dataclass
class State:
    """Where a run is: what a checkpoint holds beside the weights and the optimizer."""

    step: int = 0
    position: int = 0  # of the stream: training questions walked so far, over all ranks
    untrained: list[float] = field(default_factory=list)  # eval/pass@1 and the ends of its interval
    first: float | None = None  # the metric of validation.best_by before training
    last: float | None = None  # the same at the last evaluation
    best: float | None = None  # the same of the model in best/
    best_step: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    recent: list[list[float]] = field(default_factory=list)  # see metrics.mean_of_last
    best_solved: float = 0.0  # the highest mean of train/solved over the last steps
    signs: dict[str, str] = field(default_factory=dict)  # of a collapse: metric and description
    row: dict[str, float] | None = field(default_factory=dict)  # this step's metrics until recorded
    samples: list[dict] = field(default_factory=list)  # training completions until recorded

    def advance(
        self, metrics: dict[str, float], *, num_questions: int, is_skipped: bool
    ) -> list[str]:
        """Count a step and keep its metrics until recorded; returns new signs of a collapse."""
        self.step += 1
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
        return [text for name, text in self.signs.items() if name not in before]

    def note_evaluation(self, measured: dict[str, float], *, best_metric: str) -> None:
        """Keep what the summary and the model card say of the model now and before training."""
        self.last = measured[best_metric]
        if self.step == 0:
            self.first = self.last
            self.untrained = [measured[name] for name in PASS_AT_1]


@dataclass
class Run:
    """Everything that training needs; an evaluation has no optimizer and no training questions."""

    config: Config
    world: World
    logger: Logger
    folder: Path
    task: ModuleType
    policy: Policy
    validation_questions: list[dict]
    train_questions: QuestionStream | None = None
    optimizer: torch.optim.Optimizer | None = None
    state: State = field(default_factory=State)
    is_resumed: bool = False
    lock: TextIO | None = None  # holds the folder while it is open

    @property
    def trained_weights(self) -> list[nn.Parameter]:
        """The parameters that the optimizer updates."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or the model has collapsed and the config says to stop."""
        training = self.config.training
        has_collapsed = training.stop_on_collapse and bool(self.state.signs)
        return self.state.step >= training.num_steps or has_collapsed


# Beginning


def run_folder(config: Config) -> Path:
    """The folder of this run. An evaluated model's is that of the run that made it.

    So `mode=evaluate` of runs/a/best, of a checkpoint or of an exported model writes to runs/a,
    unless run.name is given or nothing can be written there.
    """
    model = Path(config.model.name).resolve()  # checkpoints/last is a link
    is_checkpoint = model.parent.name == "checkpoints"
    folder = model.parent.parent if is_checkpoint else model.parent
    is_of_run = is_checkpoint or model.name in ("best", "merged", "merged-4bit")
    is_of_run = is_of_run and (folder / "metrics.jsonl").is_file()
    if config.mode == "train" or config.run.name is not None or not is_of_run:
        return Path(config.run.dir) / run_name(config)
    return folder if os.access(folder, os.W_OK) else Path(config.run.dir) / run_name(config)


def check_room(run: Run) -> None:
    """Log on what the run computes and where it writes; ValueError if the disk is too small."""
    num_weights, world = run.policy.model.num_parameters(), run.world
    training, num_questions = run.config.training, run.config.questions_per_rank(world.size)
    place = f"{world.size} x {world.device.type}"
    run.logger.info(f"{num_weights:,} weights, on {place}; results in {run.folder}")
    k, n = training.k_best_of_n
    run.logger.info(
        f"{training.num_steps} steps of {num_questions * world.size * k:,} rows: {num_questions} "
        f"questions on each rank, {n} samples of each" + f", of which the best {k}" * (k < n)
    )
    if world.is_main:
        num_trained = sum(parameter.numel() for parameter in run.trained_weights)
        num_merged = num_weights if run.config.export.merge else 0
        check_disk(run.folder, run.config, num_weights=num_trained, num_merged=num_merged)


def resume(run: Run) -> None:
    """Go on from the newest whole checkpoint, if there is one; rank 0 reads and broadcasts it.

    Raises ValueError where that checkpoint belongs to another configuration, and where the folder
    is another process's or holds results that would be overwritten.
    """
    world, config = run.world, run.config
    folder, saved = world.on_main(functools.partial(find_saved, run))
    if config.model.shard:
        check_shared_disk(run.folder, world)
    if saved is None:
        return
    check_same_run(saved["config"], config)
    if saved["num_ranks"] != world.size:
        run.logger.warning(
            f"the run had {saved['num_ranks']} ranks and goes on with {world.size}: "
            "not bit for bit the same"
        )
    if config.model.shard:  # each rank reads its own part
        num_parts = saved["num_ranks"]
        load_parts(folder, run.policy.model, run.optimizer, num_parts=num_parts, rank=world.rank)
    else:
        if world.is_main:
            checkpoint.load_weights(folder, run.policy.model)
            run.optimizer.load_state_dict(checkpoint.load_optimizer_state(folder))
        for parameter in run.trained_weights:
            world.broadcast_tensor(parameter.data)
        world.broadcast_optimizer(run.optimizer)
    run.policy.refresh_sampler()
    run.state, run.is_resumed = State(**saved["state"]), True
    run.logger.info(f"resumed after step {run.state.step}")


def find_saved(run: Run) -> tuple[Path | None, dict | None]:
    """Lock the run's folder; the checkpoint to go on from and what it saved of the run's state."""
    warn, may_resume = run.logger.warning, run.config.checkpoint.resume == "auto"
    run.lock = checkpoint.lock_folder(run.folder, warn)
    folder = checkpoint.find_start(run.folder, may_resume=may_resume, warn=warn)
    if folder is None:
        return None, None
    saved, best = checkpoint.load_state(folder), run.folder / "best"
    if saved["state"].keys() != asdict(run.state).keys():
        raise ValueError(
            f"{folder} was saved by another version of this program: go on with that one, or set "
            "run.name to start another run"
        )
    if saved["state"]["best"] is not None and not best.is_dir():
        warn(f"{best} is gone: the best model from here on will be saved there")
        saved["state"]["best"] = None
    return folder, saved


def open_files(run: Run) -> None:
    """Make the run's folder, write its resolved config, and start the files of its metrics."""
    config, state = run.config, run.state
    run.logger.open(
        run.folder,
        config_text=dump(config),
        params=dotted_values(config),
        columns=metric_columns(config, run.task.REWARD_PARTS),
        resume_step=state.step if run.is_resumed else None,
        row_waits=state.row is not None,
        experiment=config.logging.experiment,
        run_name=run_name(config),
        description="\n".join(f"- {line}" for line in differences(config)),
    )
    if run.world.is_main:
        write_config(run.folder, config)


def write_config(folder: Path, config: Config) -> None:
    """Write every setting to config.yaml, below the versions in use."""
    text = f"# {versions()}\n{dump(config)}"
    (folder / "config.yaml").write_text(text, encoding="utf-8")


# Saving


def save_best(run: Run, measured: dict[str, float]) -> bool:
    """Save the model in best/ with its card; returns False if that was not possible."""
    tokenizer, config = run.policy.tokenizer, run.config
    (prompt,), add_special_tokens = render_prompts(
        run.validation_questions[:1], task=run.task, options=config.task, tokenizer=tokenizer
    )
    card = model_card(
        config,
        step=run.state.step,
        before=run.state.untrained,
        world=run.world,
        num_questions=len(run.validation_questions),
        prompt=prompt,
        add_special_tokens=add_special_tokens,
        tokenizer=tokenizer,
        measured=measured,
    )
    folder = run.folder / "best"
    model, is_sharded = run.policy.model, config.model.shard
    weights = gather_weights(model, run.world) if is_sharded else None
    save = functools.partial(checkpoint.save_model, model, tokenizer, card, folder, weights)
    return save_on_main(run, save)


def save_checkpoint(run: Run) -> bool:
    """Save all that a resumed run needs; False where nothing could be saved.

    Skipped steps leave the weights as they are, perhaps ruined by the last step that was taken.
    They are saved once at most: so with checkpoint.keep=2 the checkpoint before them stays.
    """
    root, world = run.folder / "checkpoints", run.world
    if run.state.skipped_in_a_row > 0:
        newest = world.on_main(functools.partial(checkpoint.newest_whole, root))
        last_taken = run.state.step - run.state.skipped_in_a_row
        if newest is not None and checkpoint.step_of(newest) >= last_taken:
            run.logger.info(
                "all steps since the newest checkpoint were skipped: nothing new to save"
            )
            return True
    # The norm can overflow for finite weights, but only for ones far too large for usable logits.
    if not nn.utils.get_total_norm(run.trained_weights).isfinite():
        run.logger.warning(
            f"nothing saved at step {run.state.step}, since the weights are not finite: what was "
            "saved before stays"
        )
        return False
    state = {
        "state": asdict(run.state),
        "num_ranks": world.size,
        "config": dotted_values(run.config),
    }
    model, optimizer, name = run.policy.model, run.optimizer, f"step-{run.state.step:06d}"
    if run.config.model.shard:
        folder = root / f"{name}.parts.tmp"
        num_failed = save_parts(model, optimizer, folder, world)
        counts = {"num_parts": world.size, "num_failed": num_failed}
        write = functools.partial(move_parts, written=folder, **counts)
    else:
        parts = {"model": model, "tokenizer": run.policy.tokenizer, "optimizer": optimizer}
        write = functools.partial(checkpoint.write_model, **parts)
    save = functools.partial(
        checkpoint.save_checkpoint,
        root,
        state,
        step=run.state.step,
        write=write,
        keep=run.config.checkpoint.keep,
    )
    if is_saved := save_on_main(run, save):
        run.logger.info(f"saved checkpoint {root / name}")
    return is_saved


def save_on_main(run: Run, save: Callable[[], None]) -> bool:
    """Save on rank 0; if the disk is full, warn, keep what was saved before, and go on.

    Returns False if nothing could be saved. The other ranks return True: they cannot know. With
    model.shard they are told, since what rank 0 does next may take all of them.
    """
    is_saved = True
    if run.world.is_main:
        try:
            save()
        except OSError as error:
            run.logger.warning(
                f"nothing saved at step {run.state.step}, what was saved before is kept: {error}; "
                "free some space, or lower checkpoint.keep"
            )
            is_saved = False
    return run.world.broadcast(is_saved) if run.config.model.shard else is_saved


# Samples


def first_samples(run: Run, groups: list[list], questions: list[dict], *, split: str) -> list[dict]:
    """The first completion of each of some groups of trajectories, as samples.jsonl keeps it.

    With fewer groups than `logging.samples` the second completions follow, and so on. `questions`
    are those of the groups. Where they have no key `answer`, as in Countdown, the gold answer is
    the question itself: the numbers and the target.
    """
    numbered = zip(*groups, strict=True)  # the first completion of each group, then the second
    pairs = [pair for some in numbered for pair in zip(some, questions, strict=True)]
    return [
        {
            "split": split,
            "prompt": run.policy.tokenizer.decode(trajectory.prompt_ids),
            "completion": trajectory.text,
            "gold": question.get("answer", question),
            "answer": run.task.extract_answer(trajectory.text, question, options=run.config.task),
            "reward": trajectory.reward,
            "reward_parts": trajectory.reward_parts,
            "truncated": trajectory.completion.truncated,
            "tokens": len(trajectory.completion.token_ids),
        }
        for trajectory, question in pairs[: run.config.logging.samples]
    ]


def validation_samples(run: Run, groups: list[list]) -> list[dict]:
    """The same of this rank's share of the validation questions."""
    mine = run.validation_questions[run.world.rank :: run.world.size]
    return first_samples(run, groups, mine, split="validation")


# Evaluation: what only mode=evaluate measures and writes


def single_answer_metrics(run: Run, groups: list[list], greedy: list[list]) -> dict[str, float]:
    """Rates of one answer per question, with Wilson's interval: what the group votes for, greedy.

    The mean length of the greedy answers stands beside them; so does, where the task has
    `is_lenient_solved`, a reading that forgives the form. `groups` and `greedy` are trajectories,
    for this rank's questions.
    """
    task, world, questions = run.task, run.world, run.validation_questions
    mine = questions[world.rank :: world.size]
    answers = [trajectory for (trajectory,) in greedy]
    solved = {
        "majority": [is_majority_solved(run, *pair) for pair in zip(groups, mine, strict=True)],
        "greedy": [t.is_solved for t in answers],
    }
    if hasattr(task, "is_lenient_solved"):
        solved["strict"] = solved["greedy"]
        solved["lenient"] = [
            not t.completion.is_broken
            and task.is_lenient_solved(t.text, example, options=run.config.task)
            for t, example in zip(answers, mine, strict=True)
        ]
    rows = list(zip(*solved.values(), strict=True))
    table = world.gather_rows(rows, shape=(len(questions), len(solved)))
    num_tokens = sum(len(t.completion.token_ids) for t in answers)
    metrics = reduce_means({"eval/greedy_tokens": (num_tokens, len(answers))}, world)
    for name, column in zip(solved, table.T, strict=True):
        metrics |= single_rate(name, column)
    return metrics


def answer_totals(run: Run) -> dict[str, int]:
    """The number of answers behind each rate that is a share of them."""
    num_questions, num_samples = len(run.validation_questions), run.config.validation.best_of_n
    of_samples = ("pass@1", "solved_and_ended", "truncated_frac")
    of_questions = (f"best_of_{num_samples}", "majority", "greedy", "strict", "lenient")
    totals = dict.fromkeys(of_questions, num_questions)
    return totals | dict.fromkeys(of_samples, num_questions * num_samples)


def is_majority_solved(run: Run, group: list, example: dict) -> bool:
    """Whether the answer that most of the group's completions give solves the question."""
    options = run.config.task
    answers = [run.task.extract_answer(t.text, example, options=options) for t in group]
    chosen = majority_sample(answers)
    return chosen is not None and group[chosen].is_solved


def save_evaluation(run: Run, metrics: dict[str, float], samples: list[dict]) -> None:
    """Write what mode=evaluate has measured to eval-<time>/ in the run's folder, on rank 0.

    The new folder holds config.yaml, metrics.json and samples.jsonl; the run's own files stay.
    """
    if not run.world.is_main:
        return
    folder = run.folder / f"eval-{datetime.now():%Y%m%d-%H%M%S-%f}"
    folder.mkdir(parents=True)
    write_config(folder, run.config)
    write_atomically(folder / "samples.jsonl", "".join(map(json_line, samples)))
    text = json.dumps(without_nan(metrics), allow_nan=False, indent=1) + "\n"
    write_atomically(folder / "metrics.json", text)
    run.logger.info(f"written to {folder}")


# Ending


def stop(run: Run) -> int:
    """Save after a signal, between two steps; returns the exit status that the signal asks for."""
    is_saved = save_checkpoint(run)
    run.logger.close("KILLED")
    what = "all is saved" if is_saved else "only what was saved before is there"
    run.logger.info(
        f"stopped by a signal after step {run.state.step}; {what}; go on with the same command"
    )
    return 128 + (run.world.stop_signal or 15)  # SIGTERM, where another rank was sent the signal


def finish(run: Run) -> None:
    """Log the summary of the run and, if MLflow is on, show its curves and its report there."""
    run.logger.info(summary(run))
    if run.world.is_main and run.config.logging.mlflow:
        for tool, name in {"plot": "curves.png", "report": "report.html"}.items():
            folder = run.folder.absolute()
            command = [sys.executable, "-m", f"tools.{tool}", folder, "--out", folder / name]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode == 0:
                run.logger.log_artifact(run.folder / name)
            else:
                problem = done.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
                run.logger.warning(f"no {name}: {problem}")
    run.logger.close()


def export(run: Run) -> None:
    """Do on rank 0 what the config's export section asks for; the other ranks need not wait.

    Raises ExportError, whose message is one line, if that is not possible.
    """
    settings, best = run.config.export, run.folder / "best"
    if not run.world.is_main or not (settings.merge or settings.save_4bit or settings.push_to_hub):
        return
    if run.state.best is None:
        raise ExportError(f"export: no model could be saved in {best}")
    exported, trust = best, run.config.model.trust_remote_code
    if settings.merge:
        exported = run.folder / "merged"
        merge(best, exported, run.policy.tokenizer, trust_remote_code=trust)
        run.logger.info(f"the best model, merged: {exported}")
    if settings.save_4bit:
        small = run.folder / "merged-4bit"
        save_in_4bit(exported, small, run.policy.tokenizer, trust_remote_code=trust)
        run.logger.info(f"the best model, in 4 bits: {small}")
    if settings.push_to_hub:
        push(exported, settings.push_to_hub, private=settings.private)
        run.logger.info(f"uploaded to https://huggingface.co/{settings.push_to_hub}")


def summary(run: Run) -> str:
    """How well the first, the last and the best model solve, and what can be done with the best."""
    state, best = run.state, run.folder / "best"
    metric = run.config.validation.best_metric.removeprefix("eval/")
    scores = f"{metric} {state.first:.3f} at the start, {state.last:.3f} after step {state.step}"
    if state.best is None:
        return f"{scores}; no model could be saved in {best}"
    needs = ", with peft" if run.config.model.lora is not None else ""
    lines = [
        f"{scores}; best {state.best:.3f} at step {state.best_step}, chosen on these same "
        "validation questions",
        f"the best model: {best}",
        f'load it:        AutoModelForCausalLM.from_pretrained("{best}"){needs}',
        f"ask it:         python -m tools.chat {best}",
        f"look at it all: python -m tools.report {run.folder}",
        "train on:       the same command with a larger training.num_steps",
    ]
    if state.step < run.config.training.num_steps:
        signs = ", ".join(state.signs.values())
        lines[-1] = f"stopped, since the model has collapsed: {signs}"
    return "\n".join(lines)


# What a user sees when something goes wrong


@contextlib.contextmanager
def mistakes_cost_one_line() -> Iterator[None]:
    """Print a user's mistake on one rank, and not again at a restart; exit with status 2."""
    try:
        yield
    except KeyboardInterrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("stopped by Ctrl-C before the start: nothing was changed", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except (ValueError, OSError) as error:
        is_config = isinstance(error, ConfigError)
        is_first_rank, is_first_start = (
            os.environ.get(name, "0") == "0"
            for name in ("LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
        )
        if is_first_start and not is_first_rank:
            # torchrun ends all ranks with the first: give rank 0 time to print the same mistake.
            time.sleep(3)
        if is_first_start and (is_first_rank or not is_config):
            lines = error.lines if is_config else [str(error)]
            print("\n".join(f"error: {line}" for line in lines), file=sys.stderr)
        sys.exit(2)


@contextlib.contextmanager
def crashes_name_the_fix(folder: Path) -> Iterator[None]:
    """Where memory or the disk is full, say below the traceback what to do about it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RuntimeError(
            "out of GPU memory: lower sampling.max_batch_tokens if it was sampling, else "
            "training.micro_batch_tokens, or set model.gradient_checkpointing=true"
        ) from error
    except ExportError as error:
        with mistakes_cost_one_line():
            raise error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise RuntimeError(
            f"{folder}: the disk is full: free some space and give the same command again, it "
            "goes on from the last checkpoint"
        ) from error
