"""What a run leaves behind: lines on the terminal, files in its folder and, if wanted, MLflow.

Every rank makes a `Logger` and calls it in the same way; only rank 0 prints and writes.

    metrics.jsonl    one object per step, and after it one per evaluation, which has the step too; a
                     value that is not finite is null (JSON has no NaN)
    metrics.csv      the same in columns: a metric that a row lacks is an empty cell, null is nan.
                     It is made anew from metrics.jsonl at a metric's first row, and at a resume
    samples.jsonl    one sample per line: step, prompt, completion, reward, gold answer and others
    rollouts.jsonl   a few groups of a step with their tokens: engine/report/completions.py
    mlflow_run_id    the id of this run in MLflow, where a resumed run continues it

`log_metrics` returns when its row is on disk. A checkpoint is saved after that, so the files have
every step and evaluation that it has. When a run is killed, they may also have later ones, and half
a row at the end. They are cut off when the run is resumed.
"""

import functools
import io
import json
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from tqdm import tqdm

from engine.core.files import append_durably, json_line, read_lines, read_text, write_atomically

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
MLFLOW_SLOW_S = 20.0  # all ranks wait for rank 0; after a slower call MLflow is switched off

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
    """Prints what a run reports; from `open` on, also writes it to files and to MLflow."""

    def __init__(self, *, rank: int, do_mlflow: bool = False) -> None:
        self.is_main = rank == 0
        self.folder: Path | None = None  # None until `open`, and always on the other ranks
        self.columns: list[str] = []  # of metrics.csv
        self.mlflow = MlflowRun(import_mlflow()) if do_mlflow and self.is_main else None
        self.printed_s: deque[float] = deque(maxlen=20)  # when the last steps were printed
        self.has_shown_prompt = False
        self.once = functools.cache(self.info)  # `info` for what is worth a line the first time

    def open(
        self,
        folder: Path,
        *,
        resume_step: int | None,
        is_evaluated: bool,
        start_mlflow: Callable[["MlflowRun"], None],
    ) -> None:
        """Start the files of a new run, or cut those of a resumed run back to `resume_step`.

        If that step `is_evaluated`, its evaluation stays. `start_mlflow` calls MlflowRun.start.
        """
        if not self.is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        if resume_step is None:
            (folder / "mlflow_run_id").unlink(missing_ok=True)
        for name in ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl"):
            rows = [] if resume_step is None else read_lines(folder / name)
            rows = [r for r in rows if (r["step"], is_evaluation(r)) <= (resume_step, is_evaluated)]
            write_atomically(folder / name, "".join(map(json_line, rows)))
        self._write_table()
        self._send(start_mlflow)

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
        """Append one row to metrics.jsonl and metrics.csv."""
        if self.folder is None:
            return
        values = {name: float(value) for name, value in metrics.items()}
        line = json_line({"step": step} | values)
        append_durably(self.folder / "metrics.jsonl", line)
        if metrics.keys() <= set(self.columns):
            append_durably(self.folder / "metrics.csv", self._csv_line(json.loads(line)))
        else:
            self._write_table()
        self._send(lambda run: run.log_metrics(step, values))

    def _write_table(self) -> None:
        """Write metrics.csv with a column for each metric that is in metrics.jsonl by now."""
        rows = read_lines(self.folder / "metrics.jsonl")
        self.columns = list(dict.fromkeys(["step", *(name for row in rows for name in row)]))
        table = [",".join(self.columns) + "\n", *map(self._csv_line, rows)]
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
        self._send(lambda run: run.log_samples(step, samples))

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
        """End the MLflow run as FINISHED, FAILED or KILLED; every row is on disk already."""
        self._send(lambda run: run.client.set_terminated(run.run_id, status))
        self.mlflow = None

    def _send(self, call: Callable[["MlflowRun"], None]) -> None:
        """Make one call to MLflow; if it fails or is slow, warn, and make no further call."""
        if self.mlflow is None or self.folder is None:
            return
        started_s = time.monotonic()
        try:
            call(self.mlflow)
            elapsed_s = time.monotonic() - started_s
            if elapsed_s > MLFLOW_SLOW_S:
                raise TimeoutError(f"a call took {elapsed_s:.0f} s")
        except Exception as error:  # nothing that MLflow or its server does may end a training run
            self.mlflow = None
            reason = str(error).rpartition("(Caused by ")[2].split("\n")[0]
            if "@" in os.getenv("MLFLOW_TRACKING_URI", ""):  # the reason may quote the password
                reason = type(error).__name__
            state = "MLflow is off until the run ends, the run's own files go on"
            self.warning(f"{state}: {reason[:300]}")


class MlflowRun:
    """The run in MLflow. Any of its methods may raise or take long; see `Logger._send`.

    MLflow rejects some characters in names: `eval/pass@1` is `eval/pass_at_1` there. It cannot
    delete points, and a resumed run repeats steps that it has sent before. So we keep what was sent
    last in the tag `last_sent`, a step and whether its evaluation, and send only what comes later.
    """

    def __init__(self, mlflow: ModuleType) -> None:
        self.mlflow = mlflow
        self.last_sent = (-1, False)

    def start(
        self,
        folder: Path,
        *,
        experiment: str,
        run_name: str,
        description: str,
        params: dict[str, Any],
        config_text: str,
    ) -> None:
        """Continue the MLflow run that the file mlflow_run_id names, else create one."""
        self.client = self.mlflow.MlflowClient()
        id_file = folder / "mlflow_run_id"
        if id_file.exists():
            self.run_id = id_file.read_text().strip()
            tags = self.client.get_run(self.run_id).data.tags
            step, _, evaluated = tags.get("last_sent", "-1").partition(" ")
            self.last_sent = (int(step), bool(evaluated))
            self.client.update_run(self.run_id, status="RUNNING")
            return
        experiment_id = self.mlflow.set_experiment(experiment).experiment_id
        tags = {"mlflow.note.content": description}  # Markdown; MLflow's name for it
        run = self.client.create_run(experiment_id, run_name=run_name, tags=tags)
        self.run_id = run.info.run_id
        named = {mlflow_name(k): value for k, value in unnest(params, separator=".").items()}
        self.mlflow.log_params(named, synchronous=True, run_id=self.run_id)
        self.client.log_text(self.run_id, config_text, "config.yaml")
        write_atomically(id_file, self.run_id + "\n")

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        sent = (step, is_evaluation(metrics))
        if sent <= self.last_sent:
            return
        entities, now_ms = self.mlflow.entities, int(time.time() * 1000)
        points = [
            entities.Metric(mlflow_name(name), value, now_ms, step)
            for name, value in metrics.items()
            if math.isfinite(value)  # MLflow would draw infinity as 1.8e308
        ]
        tags = [entities.RunTag("last_sent", f"{step} evaluated" if sent[1] else str(step))]
        self.client.log_batch(self.run_id, metrics=points, tags=tags, synchronous=True)

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        if (step, is_evaluation(samples[0])) <= self.last_sent:
            return
        rows = [unnest({"step": step, **sample}, separator="/") for sample in samples]
        names = dict.fromkeys(name for row in rows for name in row)
        table = {name: [row.get(name) for row in rows] for name in names}
        self.client.log_table(self.run_id, table, "samples.json")  # adds to the earlier steps' rows


def import_mlflow() -> ModuleType:
    """Import MLflow, or raise ValueError; ./.env sets what the environment leaves unset."""
    try:
        import dotenv

        if Path(".env").exists():
            dotenv.load_dotenv(stream=io.StringIO(read_text(Path(".env"))))
        for name, value in MLFLOW_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import mlflow
    except ModuleNotFoundError as error:
        fix = "pip install mlflow python-dotenv, or set logging.mlflow=false"
        raise ValueError(f"logging.mlflow: true needs the package {error.name}: {fix}") from error
    return mlflow


def mlflow_name(name: str) -> str:
    """Return `name` in the characters that MLflow allows: `pass@1` becomes `pass_at_1`."""
    return re.sub(r"[^\w./ -]", "_", name.replace("@", "_at_"))


def unnest(nested: dict[str, Any], *, separator: str) -> dict[str, Any]:
    """Return {"a/b": 1} for {"a": {"b": 1}} and the separator "/", with all texts printable."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            inner = unnest(value, separator=separator).items()
            flat |= {f"{key}{separator}{name}": text for name, text in inner}
        else:
            flat[key] = printable(value) if isinstance(value, str) else value
    return flat


def format_reward(reward: float, parts: dict[str, float]) -> str:
    """Return "reward 1.10  (format 1.00  answer 1.00)", for example."""
    shown = "  ".join(f"{name} {value:.2f}" for name, value in parts.items())
    return f"reward {reward:.2f}  ({shown})"


def plain(value: Any) -> str:
    """A question or a gold answer as a person writes it: "nums: 3 7 25, target: 46", say."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {plain(item)}" for name, item in value.items())
    return " ".join(map(plain, value)) if isinstance(value, list) else str(value)


def shorten(text: str, max_characters: int = 600) -> str:
    """Return a long text without its middle; its end is kept, since the answer stands there."""
    if len(text) <= max_characters:
        return text
    head, tail = text[: max_characters * 2 // 3], text[-(max_characters // 3) :]
    return f"{head}\n[... {len(text) - len(head) - len(tail)} characters ...]\n{tail}"


def printable(text: str, encoding: str = "utf-8") -> str:
    """Return `text` with escapes for control codes and for characters that `encoding` lacks."""
    visible = (c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
    return "".join(visible).encode(encoding, "backslashreplace").decode(encoding)


def error_line(problem: object) -> str:
    """One line that says what is wrong, whatever text of a file or a package it quotes."""
    text = re.sub(r"\s*\n\s*", " ", shorten(str(problem), 2_000))
    return f"error: {printable(text)}"


def is_evaluation(record: dict[str, Any]) -> bool:
    """Whether metrics or a sample are an evaluation's, not a training step's."""
    return record.get("split") == "validation" or any(name.startswith("eval/") for name in record)
