"""What a run leaves behind: lines on the terminal, files in its folder and, if wanted, MLflow.

Every rank makes a `Logger` and calls it in the same way; only rank 0 prints and writes.

    metrics.jsonl    one object per step, and after it one per evaluation, which has the step too; a
                     value that is not finite is null (JSON has no NaN)
    metrics.csv      the same in fixed columns; a metric that a row lacks is an empty cell
    samples.jsonl    one sample per line: step, prompt, completion, reward, gold answer and others
    rollouts.jsonl   a few groups of a step with their tokens: engine/rollouts_log.py
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
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

from tqdm import tqdm

from engine.files import append_durably, json_line, read_text, write_atomically

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
ROW_STEP = re.compile(r'(?:\{"step": ?)?(\d+)')  # finds the step of a row in any of the files


class Logger:
    """Prints what a run reports; from `open` on, also writes it to files and to MLflow."""

    def __init__(self, *, rank: int, do_mlflow: bool = False) -> None:
        self.is_main = rank == 0
        self.folder: Path | None = None  # None until `open`, and always on the other ranks
        self.columns: list[str] = []
        self.mlflow = MlflowRun(import_mlflow()) if do_mlflow and self.is_main else None
        self.once = functools.cache(self.info)  # `info` for what is worth a line the first time

    def open(
        self,
        folder: Path,
        *,
        columns: Sequence[str],
        resume_step: int | None,
        is_evaluated: bool = False,
        **shown: Any,
    ) -> None:
        """Start the files of a new run, or cut those of a resumed run back to `resume_step`.

        If that step `is_evaluated`, its evaluation is kept too. `columns` are the metrics that may
        be logged; `shown` are the arguments of `MlflowRun.start`. Raises ValueError if the
        metrics.csv of a resumed run has other columns.
        """
        if not self.is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        names = ("metrics.csv", "metrics.jsonl", "samples.jsonl", "rollouts.jsonl")
        if resume_step is None:
            (folder / "mlflow_run_id").unlink(missing_ok=True)
            kept = dict.fromkeys(names, "")
        else:
            last = resume_step, is_evaluated
            kept = {name: rows_until(last, folder / name) for name in names}
        header = ",".join(["step", *columns]) + "\n"
        kept["metrics.csv"] = kept["metrics.csv"] or header
        if not kept["metrics.csv"].startswith(header):
            fix = "give the run another run.name, or undo the change of the config"
            raise ValueError(f"{folder / 'metrics.csv'} has other columns than this config: {fix}")
        for name, text in kept.items():
            write_atomically(folder / name, text)
        self.folder, self.columns = folder, list(columns)
        self._send(MlflowRun.start, folder, **shown)

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
        """Append one row to metrics.jsonl and metrics.csv; the names must be among the columns."""
        if self.folder is None:
            return
        unknown = sorted(metrics.keys() - set(self.columns))
        assert not unknown, f"metrics without a column in metrics.csv: {', '.join(unknown)}"
        row = {name: float(value) for name, value in metrics.items()}
        append_durably(self.folder / "metrics.jsonl", json_line({"step": step, **row}))
        cells = [str(step), *(repr(row[name]) if name in row else "" for name in self.columns)]
        append_durably(self.folder / "metrics.csv", ",".join(cells) + "\n")
        self._send(MlflowRun.log_metrics, step, row)

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Append samples: dictionaries with prompt, completion, reward, reward_parts and others."""
        if self.folder is None or not samples:
            return
        lines = [json_line({"step": step, **sample}) for sample in samples]
        append_durably(self.folder / "samples.jsonl", "".join(lines))
        self._send(MlflowRun.log_samples, step, samples)

    def log_rollouts(self, lines: str) -> None:
        """Append lines of engine/rollouts_log.py to rollouts.jsonl."""
        if self.folder is not None and lines:
            append_durably(self.folder / "rollouts.jsonl", lines)

    def print_step(self, step: int, num_steps: int, metrics: dict[str, float]) -> None:
        """Print one line, aligned with the lines of other steps; a missing metric is a dash."""
        parts = [f"step {step:{len(str(num_steps))}d}/{num_steps}"]
        for label, name, width, spec in STEP_FIELDS:
            value = format(metrics[name], spec) if name in metrics else "-"
            parts.append(f"{label} {value:>{width}}")
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
        """Print the first three samples: reward, prompt, completion, answer read, gold answer."""
        lines = [title]
        for number, sample in enumerate(samples[:3], start=1):
            reward = format_reward(sample["reward"], sample["reward_parts"])
            lines.append(f"  completion {number}  {reward}  {sample['tokens']} tokens")
            lines += [f"    > {line}" for line in shorten(sample["prompt"].strip()).split("\n")]
            completion = sample["completion"].strip("\n")
            lines += [f"    {line}" for line in shorten(completion).split("\n")]
            gold = str(sample["gold"]).rpartition("\n")[2]  # a solution ends with its answer
            lines.append(f"    read: {sample['answer']}  gold: {gold}")
        self.info("\n".join(lines))

    def close(self, status: str = "FINISHED") -> None:
        """End the MLflow run as FINISHED, FAILED or KILLED; every row is on disk already."""
        self._send(MlflowRun.end, status)
        self.mlflow = None

    def _send(self, call: Callable[..., None], *args: Any, **options: Any) -> None:
        """Make one call to MLflow; if it fails or is slow, warn, and make no further call."""
        if self.mlflow is None or self.folder is None:
            return
        started_s = time.monotonic()
        try:
            call(self.mlflow, *args, **options)
            elapsed_s = time.monotonic() - started_s
            if elapsed_s > MLFLOW_SLOW_S:
                raise TimeoutError(f"a call took {elapsed_s:.0f} s")
        except Exception as error:  # nothing that MLflow or its server does may end a training run
            self.mlflow = None
            reason = str(error).rpartition("(Caused by ")[2].split("\n")[0]
            reason = without_password(reason) or type(error).__name__
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
        if not samples or (step, is_evaluation(samples[0])) <= self.last_sent:
            return
        rows = [unnest({"step": step, **sample}, separator="/") for sample in samples]
        names = dict.fromkeys(name for row in rows for name in row)
        table = {name: [row.get(name) for row in rows] for name in names}
        self.client.log_table(self.run_id, table, "samples.json")  # adds to the earlier steps' rows

    def end(self, status: str) -> None:
        self.client.set_terminated(self.run_id, status)


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


def without_password(text: str) -> str:
    """Return `text` without the login in MLflow's address; "" if a library left a piece of it."""
    text, address = re.sub(r"//\S*@", "//", text), os.environ.get("MLFLOW_TRACKING_URI", "")
    secret = address.partition("//")[2].rpartition("@")[0]
    pieces = re.split(r"\W+", f"{secret} {unquote(secret)}")
    return "" if any(piece and piece in text for piece in pieces) else text


def mlflow_name(name: str) -> str:
    """Return `name` in the characters that MLflow allows: `pass@1` becomes `pass_at_1`."""
    return re.sub(r"[^\w./ -]", "_", name.replace("@", "_at_"))


def unnest(nested: dict[str, Any], *, separator: str) -> dict[str, Any]:
    """Return {"a/b": 1} for {"a": {"b": 1}} and the separator "/", with all texts printable."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            inner = unnest(value, separator=separator)
            flat |= {f"{key}{separator}{name}": inner[name] for name in inner}
        else:
            flat[key] = printable(value) if isinstance(value, str) else value
    return flat


def format_reward(reward: float, parts: dict[str, float]) -> str:
    """Return "reward 1.10  (format 1.00  answer 1.00)", for example."""
    shown = "  ".join(f"{name} {value:.2f}" for name, value in parts.items())
    return f"reward {reward:.2f}  ({shown})"


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


def is_evaluation(record: dict[str, Any]) -> bool:
    """Whether metrics or a sample are an evaluation's, not a training step's."""
    return record.get("split") == "validation" or any(name.startswith("eval/") for name in record)


def rows_until(last: tuple[int, bool], path: Path) -> str:
    """Return the rows up to the step `last`, without a line that is half written.

    The second word of `last` says whether that step's evaluation is kept too. A CSV file's header
    stays; its evaluations are the rows with a cell in a column of `eval/`.
    """
    whole_lines = read_text(path).split("\n")[:-1] if path.exists() else []
    kept, names = [], whole_lines[0].split(",") if whole_lines else []
    for line in whole_lines:
        step = ROW_STEP.match(line)
        if step is not None and int(step[1]) == last[0]:
            cells = zip(names, line.split(","), strict=False)
            row = json.loads(line) if line[0] == "{" else {name: c for name, c in cells if c}
            is_kept = last[1] or not is_evaluation(row)
        else:
            is_kept = step is None or int(step[1]) < last[0]  # no step: the header
        kept += [line] if is_kept else []
    return "".join(f"{line}\n" for line in kept)
