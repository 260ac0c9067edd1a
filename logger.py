"""What a run leaves behind: lines on the terminal, files in its folder and, if wanted, boards.

Every rank makes a `Logger` and calls it in the same way; only rank 0 prints and writes.

    metrics.jsonl    one object per step, and after it one per evaluation, which has the step too; a
                     value that is not finite is null (JSON has no NaN)
    metrics.csv      the same in columns, one row a step: a metric that it lacks is an empty cell,
                     null is nan. Made anew from metrics.jsonl at an evaluation, a new metric and a
                     resume
    samples.jsonl    one sample per line: step, prompt, completion, reward, gold answer and others
    rollouts.jsonl   a few groups of a step with their tokens: engine/report/completions.py
    mlflow_run_id    the id of this run in MLflow, where a resumed run continues it; wandb_run_id

`log_metrics` returns when its row is on disk. A checkpoint is saved after that, so the files have
every step and evaluation that it has. When a run is killed, they may also have later ones, and half
a row at the end. They are cut off when the run is resumed.
"""

import functools
import json
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from tqdm import tqdm

from engine.core.files import append_durably, json_line, load_env, read_lines, write_atomically
from engine.core.packages import import_package
from engine.core.text import format_reward, plain, printable, shorten, unnest

# When a server does not answer, MLflow's own defaults would stop the training for many minutes: it
# tries 8 times for 120 s, and sleeps as long as a Retry-After header asks for. We set these values
# instead, except for those that the environment or .env sets.
MLFLOW_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",  # else it prints two lines about a new database
}
SLOW_S = 20.0  # all ranks wait for rank 0; after a slower call a board is switched off

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
    """Prints what a run reports; from `open` on, also writes it to files and sends it to boards.

    Boards are rank 0's MlflowRun and its like (engine/report/boards.py).
    """

    def __init__(self, *, rank: int, boards: Iterable["MlflowRun"] = ()) -> None:
        self.is_main = rank == 0
        self.folder: Path | None = None  # None until `open`, and always on the other ranks
        self.columns: list[str] = []  # of metrics.csv
        self.boards = [*boards]
        self.printed_s: deque[float] = deque(maxlen=20)  # when the last steps were printed
        self.has_shown_prompt = False
        self.once = functools.cache(self.info)  # `info` for what is worth a line the first time

    def open(
        self,
        folder: Path,
        *,
        resume_step: int | None,
        is_evaluated: bool,
        about: dict[str, Any],
    ) -> None:
        """Start the files of a new run, or cut those of a resumed run back to `resume_step`.

        If that step `is_evaluated`, its evaluation stays. `about` is what boards show of the run:
        its experiment, run_name, description, params and config_text.
        """
        if not self.is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        if resume_step is None:
            for file in folder.glob("*_run_id"):
                file.unlink()
        for name in ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl"):
            rows = [] if resume_step is None else read_lines(folder / name)
            rows = [r for r in rows if (r["step"], is_evaluation(r)) <= (resume_step, is_evaluated)]
            write_atomically(folder / name, "".join(map(json_line, rows)))
        self._write_table()
        about = about | {"params": unnest(about["params"], separator=".")}
        self._send(lambda board: self._begin(board, about))

    def _begin(self, board: "MlflowRun", about: dict[str, Any]) -> None:
        """Start a board's run, or continue the one that it had, and print its address."""
        file = self.folder / f"{board.title.lower()}_run_id"
        known = file.read_text().strip() if file.exists() else None
        run_id, address = board.start(known, self.folder, about)
        write_atomically(file, run_id + "\n")
        self.info(f"{board.title}: {address}")

    def info(self, text: str) -> None:
        """Print on rank 0, above a progress bar if one is drawn, in the encoding of stdout."""
        if self.is_main and sys.stdout is not None:  # a daemon may have closed it
            tqdm.write(printable(text, encoding=sys.stdout.encoding or "utf-8"), file=sys.stdout)
            sys.stdout.flush()  # else a log file shows the line minutes later

    def warning(self, text: str) -> None:
        self.info(f"warning: {text}")

    def progress(self, total: int, description: str, unit: str) -> tqdm:
        """Return a bar with an ETA. It is drawn on rank 0 only, if stderr is a terminal."""
        is_off = None if self.is_main and sys.stderr is not None else True  # None lets tqdm see
        return tqdm(None, description, total, False, unit=unit, dynamic_ncols=True, disable=is_off)

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Append one row to metrics.jsonl, and its metrics to metrics.csv."""
        if self.folder is None:
            return
        values = {name: float(value) for name, value in metrics.items()}
        line = json_line({"step": step} | values)
        append_durably(self.folder / "metrics.jsonl", line)
        if metrics.keys() <= set(self.columns) and not is_evaluation(metrics):
            append_durably(self.folder / "metrics.csv", self._csv_line(json.loads(line)))
        else:
            self._write_table()
        # Boards would draw infinity as 1.8e308.
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._send(lambda board: board.log_metrics(step, finite), (step, is_evaluation(metrics)))

    def _write_table(self) -> None:
        """Write metrics.csv with a column for each metric that is in metrics.jsonl by now."""
        rows: dict[int, dict[str, Any]] = {}  # a step's and its evaluation's are one
        for row in read_lines(self.folder / "metrics.jsonl"):
            rows[row["step"]] = rows.get(row["step"], {}) | row
        names = (name for row in rows.values() for name in row)
        self.columns = list(dict.fromkeys(["step", *names]))
        table = [",".join(self.columns) + "\n", *map(self._csv_line, rows.values())]
        write_atomically(self.folder / "metrics.csv", "".join(table))

    def _csv_line(self, row: dict[str, Any]) -> str:
        cells = (str(row.get(name, "")) for name in self.columns)
        return ",".join(cells).replace("None", "nan") + "\n"

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Append samples: dictionaries with prompt, completion, reward, reward_parts and others."""
        if self.folder is None or not samples:
            return
        lines = [json_line({"step": step, **sample}) for sample in samples]
        append_durably(self.folder / "samples.jsonl", "".join(lines))
        rows = [unnest({"step": step, **sample}, separator="/") for sample in samples]
        names = dict.fromkeys(name for row in rows for name in row)
        table = {name: [row.get(name) for row in rows] for name in names}
        self._send(lambda board: board.log_samples(table), (step, is_evaluation(samples[0])))

    def log_rollouts(self, lines: str) -> None:
        """Append lines of engine/report/completions.py to rollouts.jsonl."""
        if self.folder is not None and lines:
            append_durably(self.folder / "rollouts.jsonl", lines)

    def print_step(self, step: int, num_steps: int, metrics: dict[str, float]) -> None:
        """Print a step's line, aligned, a dash for a missing metric, and the time left."""
        parts = [f"step {step:{len(str(num_steps))}d}/{num_steps}"]
        for label, name, width, spec in STEP_FIELDS:
            value = format(metrics[name], spec) if name in metrics else "-"
            parts.append(f"{label} {value:>{width}}")
        self.printed_s.append(time.monotonic())
        num_past, mean_s = len(self.printed_s) - 1, metrics.get("time/step_s", 0.0)
        if num_past > 0:  # the last steps with what came between them, such as evaluations
            mean_s = (self.printed_s[-1] - self.printed_s[0]) / num_past
        parts.append(f"left {timedelta(seconds=round(mean_s * (num_steps - step)))}")
        self.info("  ".join(parts))

    def print_evaluation(
        self,
        title: str,
        metrics: dict[str, float],
        samples: list[dict[str, Any]],
        *,
        totals: dict[str, int] | None = None,
    ) -> None:
        """Print metrics of an evaluation, some as "2 of 8" by `totals`, and its first samples."""
        names = [name.removeprefix("eval/") for name in metrics if name.startswith("eval/")]
        names = [name for name in names if not name.endswith(("_low", "_high"))]
        lines, width = [title], max(map(len, names), default=0)
        for name in names:
            value, low, high = (metrics.get(f"eval/{name}{end}") for end in ("", "_low", "_high"))
            decimals = 1 if value > 1 else 3  # numbers of tokens with one, rates with three
            total = (totals or {}).get(name)
            count = "" if total is None else f"  ({round(value * total):,} of {total:,})"
            interval = "" if low is None else f"  (95% interval {low:.3f} to {high:.3f})"
            lines.append(f"  {name:<{width}} {value:7.{decimals}f}{count}{interval}")
        self.print_samples("\n".join(lines), samples)

    def print_samples(self, title: str, samples: list[dict[str, Any]]) -> None:
        """Print the first three samples: the first one's prompt in full, then questions alone."""
        lines = [title]
        for number, sample in enumerate(samples[:3], start=1):
            reward = format_reward(sample["reward"], sample["reward_parts"])
            lines.append(f"  completion {number}  {reward}  {sample['tokens']} tokens")
            asked = sample["question"] if self.has_shown_prompt else sample["prompt"].strip()
            self.has_shown_prompt = True
            lines += [f"    > {line}" for line in shorten(asked).split("\n")]
            completion = sample["completion"].strip("\n")
            lines += [f"    {line}" for line in shorten(completion).split("\n")]
            lines.append(f"    read: {sample['answer']}")
            if (gold := plain(sample["gold"])) != sample["question"]:
                lines[-1] += "  gold: " + gold.rpartition("\n")[2]  # a solution's end
        self.info("\n".join(lines))

    def close(self, status: str = "FINISHED") -> None:
        """End the boards' runs as FINISHED, FAILED or KILLED; every row is on disk already."""
        self._send(lambda board: board.finish(status))
        self.boards = []

    def _send(
        self, call: Callable[["MlflowRun"], None], sent: tuple[float, bool] = (math.inf, True)
    ) -> None:
        """Make one call to each board; one that fails or is slow gets a warning and no other call.

        A resumed run repeats steps that it has sent before, and boards cannot delete points. So a
        board keeps what was `sent` to it last, a step and whether its evaluation, and gets only
        what comes later.
        """
        for board in self.boards if self.folder is not None else []:
            started_s = time.monotonic()
            try:
                if sent > board.last_sent:
                    call(board)
                elapsed_s = time.monotonic() - started_s
                if elapsed_s > SLOW_S:
                    raise TimeoutError(f"a call took {elapsed_s:.0f} s")
            except Exception as error:  # nothing that a board does may end a training run
                self.boards = [other for other in self.boards if other is not board]
                reason = str(error).rpartition("(Caused by ")[2].split("\n")[0]
                if "@" in os.getenv(board.server, ""):  # the reason may quote the password
                    reason = type(error).__name__
                state = f"{board.title} is off until the run ends, the run's own files go on"
                self.warning(f"{state}: {reason[:300]}")


class MlflowRun:
    """The run in MLflow. Any of its methods may raise or take long; see `Logger._send`.

    MLflow rejects some characters in names: `eval/pass@1` is `eval/pass_at_1` there.
    """

    title, server = "MLflow", "MLFLOW_TRACKING_URI"

    def __init__(self) -> None:
        self.mlflow = import_mlflow()
        self.last_sent = (-1, False)

    def start(self, run_id: str | None, folder: Path, about: dict[str, Any]) -> tuple[str, str]:
        """Continue the run of that id, or create one; returns its id and address."""
        self.client = self.mlflow.MlflowClient()
        if run_id is not None:
            run = self.client.get_run(run_id)
            step, _, evaluated = run.data.tags.get("last_sent", "-1").partition(" ")
            self.last_sent = (int(step), evaluated != "")
            self.client.update_run(run_id, status="RUNNING")
        else:
            experiment_id = self.mlflow.set_experiment(about["experiment"]).experiment_id
            tags = {"mlflow.note.content": about["description"]}  # Markdown
            run = self.client.create_run(experiment_id, run_name=about["run_name"], tags=tags)
            run_id = run.info.run_id
            named = {mlflow_name(name): value for name, value in about["params"].items()}
            self.mlflow.log_params(named, synchronous=True, run_id=run_id)
            self.client.log_text(run_id, about["config_text"], "config.yaml")
        server = re.sub("//.*@", "//", self.mlflow.get_tracking_uri()).rstrip("/")  # no password
        page = f"#/experiments/{run.info.experiment_id}/runs/{run_id}"
        self.run_id = run_id
        return run_id, f"{server}/{page}" if "http" in server else f"{run_id} in {server}"

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        entities, now_ms = self.mlflow.entities, int(time.time() * 1000)
        points = [
            entities.Metric(mlflow_name(name), value, now_ms, step)
            for name, value in metrics.items()
        ]
        sent = f"{step} evaluated" if is_evaluation(metrics) else str(step)
        tags = [entities.RunTag("last_sent", sent)]
        self.client.log_batch(self.run_id, metrics=points, tags=tags, synchronous=True)

    def log_samples(self, table: dict[str, list]) -> None:
        self.client.log_table(self.run_id, table, "samples.json")  # adds to the earlier steps' rows

    def finish(self, status: str) -> None:
        self.client.set_terminated(self.run_id, status)


def import_mlflow() -> ModuleType:
    """Import MLflow, or raise ValueError; ./.env sets what the environment leaves unset."""
    load_env()
    for name, value in MLFLOW_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return import_package("mlflow", key="logging.report_to")


def mlflow_name(name: str) -> str:
    """Return `name` in the characters that MLflow allows: `pass@1` becomes `pass_at_1`."""
    return re.sub(r"[^\w./ -]", "_", name.replace("@", "_at_"))


def is_evaluation(record: dict[str, Any]) -> bool:
    """Whether metrics or a sample are an evaluation's, not a training step's."""
    return record.get("split") == "validation" or any(name.startswith("eval/") for name in record)
