"""What a run leaves behind: lines on the terminal, and files in its folder.

It prints and writes what it is given, of whatever run. What a run logs, engine/run/log.py decides;
what it warns of, engine/run/remarks.py; how both are measured and written down, engine/report/.
Every rank makes a `Logger` and calls it in the same way; only rank 0 prints and writes.

    metrics.jsonl    one object per step, and after it one per evaluation, which has the step too; a
                     value that is not finite is null (JSON has no NaN)
    samples.jsonl    one sample per line: step, prompt, completion, reward, gold answer and others
    rollouts.jsonl   a few groups of a step with their tokens: engine/report/completions.py
    completions.jsonl  all completions of some steps, if logging.completions_every is set

A row is on disk when `log_metrics` returns, and a checkpoint is saved after that: the files never
lack a step that it has. After a kill they may have later ones, which are cut off on resume.
"""

import functools
import itertools
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from tqdm import tqdm

from engine.core.files import append_durably, json_line, open_to_append, read_lines, whole_lines
from engine.core.text import plain, printable, shorten

Sample = dict[str, Any]  # of samples.jsonl: prompt, completion, reward, reward_parts and others
LOGS = ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl", "remarks.jsonl")
STEP_FIELDS = (  # label, metric, width, format
    ("reward", "train/reward", 6, ".3f"),
    ("solved", "train/solved", 5, ".3f"),
    ("length", "train/completion_tokens", 5, ".0f"),
    ("entropy", "train/entropy", 5, ".3f"),
    ("grad norm", "train/grad_norm", 6, ".3f"),
    ("lr", "train/lr", 7, ".1e"),
    ("seconds", "time/step_s", 6, ".1f"),
)


class Logger:
    """Prints what a run reports; from `open` on, also writes it to files and sends it to boards."""

    def __init__(self, *, rank: int, do_mlflow: bool = False, boards: Sequence[Any] = ()) -> None:
        self.is_main = rank == 0
        self.folder: Path | None = None  # None until `open`, and always on the other ranks
        self.boards = [*boards]  # what else gets it
        if do_mlflow and self.is_main:
            from engine.report.boards import MlflowRun  # a run without a board does not load it

            self.boards.append(MlflowRun())
        self.printed_s: deque[float] = deque(maxlen=20)  # when the last steps were printed
        self.is_first_sample = True  # its prompt is printed in full
        self.once = functools.cache(self.info)  # `info` for what is worth a line the first time

    def open(
        self, folder: Path, *, resume_step: int | None, is_evaluated: bool, about: dict[str, Any]
    ) -> None:
        """Start the files of a new run, or cut those of a resumed run back to `resume_step`.

        If it `is_evaluated`, its evaluation stays. `about` is what boards show: experiment,
        run_name, description, params and config_text.
        """
        if not self.is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        if resume_step is None:
            for file in folder.glob("*_run_id"):
                file.unlink()
        last = (-1, False) if resume_step is None else (resume_step, is_evaluated)
        for file in (folder / name for name in (*LOGS, "completions.jsonl")):
            if file.name in LOGS or os.path.lexists(file):
                cut_lines(file, lambda row: moment_of(row) <= last)
        for board in self.boards:
            board.open(folder, about, self)
            for row in read_lines(folder / "metrics.jsonl"):  # it takes those that it has missed
                values = {name: row[name] for name in row if isinstance(row[name], float)}
                board.log_metrics(moment_of(row), values)

    def info(self, text: str) -> None:
        """Print on rank 0, above a progress bar if one is drawn, in the encoding of stdout."""
        if self.is_main and sys.stdout is not None:  # a daemon may have closed it
            tqdm.write(printable(text, encoding=sys.stdout.encoding or "utf-8"), file=sys.stdout)
            sys.stdout.flush()  # else a log file shows the line minutes later

    def warning(self, text: str) -> None:
        self.info(f"warning: {text}")

    def progress(self, items: Sequence[Any], description: str, unit: str) -> tqdm:
        """The items, with a bar and an ETA: drawn on rank 0 only, if stderr is a terminal."""
        can_draw = self.is_main and sys.stderr is not None and os.environ.get("TERM") != "dumb"
        is_off = None if can_draw else True  # None lets tqdm see whether it is a terminal
        return tqdm(items, description, unit=unit, leave=False, dynamic_ncols=True, disable=is_off)

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if self.folder is None:
            return
        values = {name: float(value) for name, value in metrics.items()}
        row = {"step": step} | values
        append_durably(self.folder / "metrics.jsonl", json_line(row))
        for board in self.boards:
            board.log_metrics(moment_of(row), values)

    def log_samples(self, step: int, samples: list[Sample]) -> None:
        """Append samples of a step, or of the evaluation after it."""
        if self.folder is None or not samples:
            return
        rows = [{"step": step, **sample} for sample in samples]
        append_durably(self.folder / "samples.jsonl", "".join(map(json_line, rows)))
        for board in self.boards:
            board.log_samples(moment_of(rows[0]), rows)

    def log_lines(self, name: str, lines: str) -> None:
        """Append to one of the other files."""
        if self.folder is not None and lines:
            append_durably(self.folder / name, lines)

    def print_step(self, step: int, num_steps: int, metrics: dict[str, float]) -> None:
        """Print a step's line, aligned, a dash for a missing metric, and the time left."""
        parts = [f"step {step:{len(str(num_steps))}d}/{num_steps}"]
        for label, name, width, spec in STEP_FIELDS:
            value = format(metrics[name], spec) if name in metrics else "-"
            parts.append(f"{label} {value:>{width}}")
        self.printed_s.append(time.monotonic())
        num_past = len(self.printed_s) - 1
        mean_s = metrics.get("time/step_s", 0.0)
        if num_past > 0:  # the last steps with what came between them, such as evaluations
            mean_s = (self.printed_s[-1] - self.printed_s[0]) / num_past
        parts.append(f"left {timedelta(seconds=round(mean_s * (num_steps - step)))}")
        if sys.stdout is not None and sys.stdout.isatty():
            while len("  ".join(parts)) > shutil.get_terminal_size().columns and len(parts) > 4:
                del parts[-3]  # before the seconds and what is left: the rate first
        self.info("  ".join(parts))

    def print_evaluation(
        self, title: str, metrics: dict[str, float], samples: list[Sample], totals: dict[str, int]
    ) -> None:
        """Print the metrics of an evaluation, and samples: what became of step 0's.

        `totals` has the number of answers behind a share: "0.333  (439 of 1,319)".
        """
        names = [name.removeprefix("eval/") for name in metrics if name.startswith("eval/")]
        names = [name for name in names if not name.endswith(("_low", "_high"))]
        width = max(map(len, names), default=0)
        lines = [title]
        for name in names:
            value, low, high = (metrics.get(f"eval/{name}{end}") for end in ("", "_low", "_high"))
            decimals = 1 if name.endswith("tokens") else 3
            total = totals.get(name)
            count = "" if total is None else f"  ({round(value * total):,} of {total:,})"
            interval = "" if low is None else f"  (95% interval {low:.3f} to {high:.3f})"
            lines.append(f"  {name:<{width}} {value:7.{decimals}f}{count}{interval}")
        start = self.samples_at_start(samples)
        right, before = (sum(sample["solved"] for sample in some) for some in (samples, start))
        told = f"  {right} of {len(samples)} are right" + f", {before} at the start" * bool(start)
        self.print_samples("\n".join([*lines, *[told] * bool(samples)]), samples, start)

    def samples_at_start(self, samples: list[Sample]) -> list[Sample]:
        """Step 0's samples, if their prompts are the same ones; else none."""
        rows = [] if self.folder is None else read_lines(self.folder / "samples.jsonl")
        rows = [row for row in rows if row["step"] == 0 and "solved" in row]
        same = [row["prompt"] for row in rows] == [sample["prompt"] for sample in samples]
        return rows if same else []

    def print_samples(self, title: str, samples: list[Sample], start: list[Sample]) -> None:
        """Print three samples: if any, those whose verdict at `start` was another."""
        numbered = [*enumerate(samples, start=1)]
        pairs = zip(numbered, start, strict=False)
        changed = [one for one, before in pairs if one[1]["solved"] != before["solved"]]
        lines = [title]
        for number, sample in (changed or numbered)[:3]:
            reward = format_reward(sample["reward"], sample["reward_parts"])
            lines.append(f"  completion {number}  {reward}  {sample['tokens']} tokens")
            asked = sample["prompt"].strip() if self.is_first_sample else sample["question"]
            self.is_first_sample = False
            lines += [f"    > {line}" for line in shorten(asked).split("\n")]
            lines += [
                f"    {line}" for line in shorten(sample["completion"].strip("\n")).split("\n")
            ]
            read = sample["answer"] != sample["completion"].strip()  # else nothing was read in it
            notes = [f"read: {sample['answer']}"] * read
            if (gold := plain(sample["gold"])) != sample["question"]:
                notes.append("gold: " + gold.rpartition("\n")[2])  # a solution's end
            if notes:
                lines.append("    " + "  ".join(notes))
        self.info("\n".join(lines))

    def close(self, status: str = "FINISHED") -> None:
        """End the boards' runs as FINISHED, FAILED or KILLED; every row is on disk already."""
        for board in self.boards:
            board.close(status)


def moment_of(row: dict[str, Any]) -> tuple[int, bool]:
    """A row's step, and whether it is of the evaluation after it: the order in which rows come."""
    is_evaluation = row.get("split") == "validation" or any(n.startswith("eval/") for n in row)
    return row["step"], is_evaluation


def format_reward(reward: float, parts: dict[str, float | None]) -> str:
    """Return "reward 1.10  (format 1.00  answer 1.00)", for example."""
    shown = "  ".join(f"{name} {x:.2f}" for name, x in parts.items() if x is not None)
    return f"reward {reward:.2f}  ({shown})"


def cut_lines(path: Path, is_kept: Callable[[dict], bool]) -> None:
    """Cut a .jsonl file off behind its last line that is kept, or make an empty one.

    The lines stand in the order in which they were written, and only one at a time is in memory.
    """
    with open_to_append(path) as file:
        kept = itertools.takewhile(lambda line: is_kept(line[0]), whole_lines(path))
        file.truncate(sum(num_bytes for _, num_bytes in kept))
