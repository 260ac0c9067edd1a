"""What a run leaves behind: lines on the terminal, files in its folder and, if wanted, MLflow.

Every rank makes a `Logger` and calls it alike; ranks other than 0 print nothing, write nothing.

    metrics.jsonl    one object per step; a value that is not finite is null (JSON has no NaN)
    metrics.csv      the same in fixed columns; a metric missing at a step is an empty cell
    samples.jsonl    one sample per line: step, prompt, completion, reward, reward_parts
    mlflow_run_id    the MLflow run that a resumed run continues

A row is on disk when `log_metrics` returns, so a checkpoint saved after it never knows a step
that the files lack. A killed run leaves rows after its last checkpoint, perhaps half a row at the
end: `resume_step` cuts them off.
"""

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

# Set unless the environment or .env sets them: MLflow's own defaults (7 retries of 120 s each, and
# sleeps as long as a Retry-After header asks for) would stop the training for many minutes.
MLFLOW_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",  # else two lines tell that a new database gets its tables
}
MLFLOW_SLOW_S = 20.0  # all ranks wait while rank 0 logs, so a call that takes longer is the last

STEP_FIELDS = (  # label, metric, width, format
    ("reward", "train/reward", 6, ".3f"),
    ("solved", "train/solved", 5, ".3f"),
    ("length", "train/completion_tokens", 5, ".0f"),
    ("entropy", "train/entropy", 5, ".3f"),
    ("grad norm", "train/grad_norm", 6, ".3f"),
    ("lr", "train/lr", 7, ".1e"),
    ("seconds", "time/step_s", 6, ".1f"),
)
ROW_STEP = re.compile(rb'(?:\{"step": ?)?(\d+)')  # how a row of each of the three files starts


class Logger:
    """Where a run's numbers and texts go; rank 0 alone prints and writes."""

    def __init__(
        self,
        *,
        rank: int,
        do_mlflow: bool = False,
        run_dir: Path | None = None,
        config: dict[str, Any] | None = None,
        experiment: str = "plain-grpo",
        run_name: str = "",
        description: str = "",
        columns: Sequence[str] = (),
        resume_step: int | None = None,
    ) -> None:
        """Start the files of `run_dir` (None: no files) anew, or cut them back to `resume_step`.

        `columns` are the metrics that may be logged; `description` is Markdown, for MLflow. Raises
        ValueError if MLflow is wanted but not installed, or if the metrics.csv of a resumed run has
        other columns.
        """
        self.is_main = rank == 0
        self.sinks: list[RunFiles | MlflowRun] = []  # stays empty on the other ranks
        if not self.is_main:
            return
        mlflow = import_mlflow() if do_mlflow else None  # if missing, no file has been touched yet
        if run_dir is not None:
            self.sinks.append(RunFiles(run_dir, columns, resume_step))
        if mlflow is not None:
            run = MlflowRun(mlflow, run_dir, warn=self.warning)
            tags = {"mlflow.note.content": description}  # MLflow's name for it
            run.start(config=config or {}, experiment=experiment, run_name=run_name, tags=tags)
            self.sinks.append(run)

    def info(self, text: str) -> None:
        """Print without tearing a progress bar, on rank 0, in whatever encoding stdout has."""
        if self.is_main:
            tqdm.write(printable(text, encoding=sys.stdout.encoding or "utf-8"), file=sys.stdout)
            sys.stdout.flush()  # else a log file shows the line minutes later

    def warning(self, text: str) -> None:
        """Print as a warning."""
        self.info(f"warning: {text}")

    def progress(self, total: int, description: str, unit: str) -> tqdm:
        """Return a bar with an ETA (`update(n)`, `close()`, `with`), drawn on terminals only."""
        return tqdm(
            total=total,
            desc=description,
            unit=unit,
            leave=False,
            dynamic_ncols=True,
            disable=None if self.is_main else True,  # None: not where stderr is a file
        )

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Append one row; the names are among `columns`."""
        for sink in self.sinks:
            sink.log_metrics(step, metrics)

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Append samples, each with prompt, completion, reward, reward_parts and any other key."""
        for sink in self.sinks:
            sink.log_samples(step, samples)

    def log_artifact(self, path: Path) -> None:
        """Show a file of the run's folder, such as a picture, wherever else the run is shown."""
        for sink in self.sinks:
            sink.log_artifact(path)

    def print_step(self, step: int, num_steps: int, metrics: dict[str, float]) -> None:
        """Print a training step's line."""
        self.info(format_step(step, num_steps, metrics))

    def print_evaluation(
        self, title: str, metrics: dict[str, float], samples: list[dict[str, Any]]
    ) -> None:
        """Print an evaluation's metrics and its first three completions with their rewards."""
        self.info(format_evaluation(title, metrics, samples))

    def close(self, status: str = "FINISHED") -> None:
        """End the MLflow run as FINISHED, FAILED or KILLED."""
        for sink in self.sinks:
            sink.close(status)


class RunFiles:
    """metrics.jsonl, metrics.csv and samples.jsonl in a run's folder; rows are only appended."""

    def __init__(self, run_dir: Path, columns: Sequence[str], resume_step: int | None) -> None:
        self.columns = list(columns)
        self.metrics_jsonl = run_dir / "metrics.jsonl"
        self.metrics_csv = run_dir / "metrics.csv"
        self.samples_jsonl = run_dir / "samples.jsonl"
        run_dir.mkdir(parents=True, exist_ok=True)
        header = ",".join(["step", *self.columns]) + "\n"
        paths = (self.metrics_csv, self.metrics_jsonl, self.samples_jsonl)
        if resume_step is None:
            (run_dir / "mlflow_run_id").unlink(missing_ok=True)
            kept = dict.fromkeys(paths, "")
        else:
            kept = {path: rows_until(resume_step, path) for path in paths}
        kept[self.metrics_csv] = kept[self.metrics_csv] or header
        if not kept[self.metrics_csv].startswith(header):
            fix = "give the run another run.name, or undo the change of the config"
            raise ValueError(f"{self.metrics_csv} has not the columns of this config: {fix}")
        for path in paths:
            write_atomically(path, kept[path])

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        unknown = sorted(metrics.keys() - set(self.columns))
        assert not unknown, f"metrics without a column in metrics.csv: {', '.join(unknown)}"
        row = {name: float(value) for name, value in metrics.items()}
        append_durably(self.metrics_jsonl, json_line({"step": step, **row}))
        cells = [str(step), *(repr(row[name]) if name in row else "" for name in self.columns)]
        append_durably(self.metrics_csv, ",".join(cells) + "\n")

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        lines = [json_line({"step": step, **sample}) for sample in samples]
        append_durably(self.samples_jsonl, "".join(lines))

    def log_artifact(self, path: Path) -> None:
        """It is in the folder already."""

    def close(self, status: str) -> None:
        """Every row is on disk already."""


class MlflowRun:
    """The same in MLflow; the first call that fails or is slow is the last, and training goes on.

    Names lose the characters that MLflow rejects: `eval/pass@1` is `eval/pass_at_1` there. MLflow
    cannot take points back, so a resumed run sends only the steps that its MLflow run lacks; the
    run's tag `last_step` says which.
    """

    def __init__(self, mlflow: Any, run_dir: Path | None, warn: Callable[[str], None]) -> None:
        self.mlflow = mlflow
        self.id_file = run_dir / "mlflow_run_id" if run_dir is not None else None
        self.warn = warn
        self.is_on = True
        self.last_step = -1

    def start(
        self, *, config: dict[str, Any], experiment: str, run_name: str, tags: dict[str, str]
    ) -> None:
        """Continue the MLflow run that the run's folder names, else create one."""
        self._attempt(self._start, config, experiment, run_name, tags)

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if step > self.last_step:
            self._attempt(self._send_metrics, step, metrics)

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        if step > self.last_step and samples:
            self._attempt(self._send_samples, step, samples)

    def log_artifact(self, path: Path) -> None:
        self._attempt(self._send_artifact, path)

    def close(self, status: str) -> None:
        self._attempt(self._end, status)
        self.is_on = False

    def _attempt(self, call: Callable[..., None], *args: Any) -> None:
        """Make one call to MLflow; if it raises or is slow, warn and never call again."""
        if not self.is_on:
            return
        started_s = time.monotonic()
        try:
            call(*args)
            elapsed_s = time.monotonic() - started_s
            if elapsed_s > MLFLOW_SLOW_S:
                raise TimeoutError(f"a call took {elapsed_s:.0f} s")
        except Exception as error:  # nothing that MLflow or its server does may end a training run
            self.is_on = False
            reason = str(error).rpartition("(Caused by ")[2].split("\n")[0]
            reason = re.sub(r"//[^/@\s]*@", "//", reason)  # a password in the server's address
            self.warn(
                f"MLflow is off until the run ends, the run's own files go on: {reason[:300]}"
            )

    def _start(
        self, config: dict[str, Any], experiment: str, run_name: str, tags: dict[str, str]
    ) -> None:
        self.client = self.mlflow.MlflowClient()
        if self.id_file is not None and self.id_file.exists():
            self._continue(self.id_file.read_text().strip())
        else:
            self._create(config, experiment, run_name, tags)

    def _continue(self, run_id: str) -> None:
        self.run_id = run_id
        self.last_step = int(self.client.get_run(run_id).data.tags.get("last_step", -1))
        self.client.update_run(run_id, status="RUNNING")

    def _create(
        self, config: dict[str, Any], experiment: str, run_name: str, tags: dict[str, str]
    ) -> None:
        known = self.client.get_experiment_by_name(experiment)
        experiment_id = known.experiment_id if known else self.client.create_experiment(experiment)
        run = self.client.create_run(experiment_id, run_name=run_name or None, tags=tags)
        self.run_id = run.info.run_id
        params = [
            self.mlflow.entities.Param(mlflow_name(key), printable(str(value)))
            for key, value in flatten(config).items()
        ]
        for i in range(0, len(params), 100):  # MLflow takes at most 100 at once
            self.client.log_batch(self.run_id, params=params[i : i + 100], synchronous=True)
        self.client.log_text(self.run_id, yaml.safe_dump(config, sort_keys=False), "config.yaml")
        if self.id_file is not None:
            write_atomically(self.id_file, self.run_id + "\n")

    def _send_metrics(self, step: int, metrics: dict[str, float]) -> None:
        entities = self.mlflow.entities
        now_ms = int(time.time() * 1000)
        points = [
            entities.Metric(mlflow_name(name), float(value), now_ms, step)
            for name, value in metrics.items()
            if math.isfinite(value)  # MLflow would draw infinity as 1.8e308
        ]
        tags = [entities.RunTag("last_step", str(step))]
        self.client.log_batch(self.run_id, metrics=points, tags=tags, synchronous=True)

    def _send_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        rows = [flatten({"step": step, **sample}, separator="/") for sample in samples]
        names = dict.fromkeys(name for row in rows for name in row)
        table = {name: [table_cell(row.get(name)) for row in rows] for name in names}
        self.client.log_table(self.run_id, table, "samples.json")  # adds to the earlier steps' rows

    def _send_artifact(self, path: Path) -> None:
        self.client.log_artifact(self.run_id, str(path))

    def _end(self, status: str) -> None:
        self.client.set_terminated(self.run_id, status)


def import_mlflow() -> Any:
    """Import MLflow, set up by environment variables, which win over `.env` in this folder."""
    try:
        import dotenv

        dotenv.load_dotenv(".env")
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


def flatten(nested: dict[str, Any], prefix: str = "", *, separator: str = ".") -> dict[str, Any]:
    """Return the leaves of nested dicts under dotted keys: {"a": {"b": 1}} becomes {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= flatten(value, f"{name}{separator}", separator=separator)
        else:
            flat[name] = value
    return flat


def table_cell(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value


def format_step(step: int, num_steps: int, metrics: dict[str, float]) -> str:
    """Return a line that is aligned with the other steps'; a missing metric shows as a dash."""
    parts = [f"step {step:{len(str(num_steps))}d}/{num_steps}"]
    for label, name, width, spec in STEP_FIELDS:
        value = format(metrics[name], spec) if name in metrics else "-"
        parts.append(f"{label} {value:>{width}}")
    return "  ".join(parts)


def format_evaluation(title: str, metrics: dict[str, float], samples: list[dict[str, Any]]) -> str:
    """Return a table of the metrics, shares with their intervals, and the first completions."""
    values = {name[5:]: value for name, value in metrics.items() if name.startswith("eval/")}
    shown = [name for name in values if not name.endswith(("_low", "_high"))]
    width = max(map(len, shown), default=0)
    lines = [title]
    for name in shown:  # shares with three decimals, numbers of tokens with one
        decimals = 1 if values[name] > 1 else 3
        line = f"  {name:<{width}} {values[name]:7.{decimals}f}"
        if f"{name}_low" in values:
            low, high = values[f"{name}_low"], values[f"{name}_high"]
            line += f"  (95% interval {low:.3f} to {high:.3f})"
        lines.append(line)
    for number, sample in enumerate(samples[:3], start=1):
        score = format_reward(sample["reward"], sample["reward_parts"])
        lines.append(f"  completion {number}  {score}")
        lines += [f"    > {line}" for line in shorten(sample["prompt"].strip()).split("\n")]
        lines += [f"    {line}" for line in shorten(sample["completion"].strip("\n")).split("\n")]
    return "\n".join(lines)


def format_reward(reward: float, parts: dict[str, float]) -> str:
    """Return a completion's reward and what it is made of."""
    shown = "  ".join(f"{name} {value:.2f}" for name, value in parts.items())
    return f"reward {reward:.2f}  ({shown})"


def shorten(text: str, max_characters: int = 600) -> str:
    """Return `text`, if it is long without its middle: the answer stands at the end."""
    if len(text) <= max_characters:
        return text
    head, tail = text[: max_characters * 2 // 3], text[-(max_characters // 3) :]
    return f"{head}\n[... {len(text) - len(head) - len(tail)} characters ...]\n{tail}"


def printable(text: str, encoding: str = "utf-8") -> str:
    """Return `text` with escapes for control codes and for what `encoding` lacks (surrogates)."""
    visible = "".join(
        character
        if character.isprintable() or character in "\n\t"
        else character.encode("unicode_escape").decode()
        for character in text
    )
    return visible.encode(encoding, "backslashreplace").decode(encoding)


def json_line(record: dict[str, Any]) -> str:
    """Return one line of strict JSON in ASCII, where any text fits, half a character too."""
    return json.dumps(without_nan(record), allow_nan=False, default=str) + "\n"


def without_nan(value: Any) -> Any:
    """Return `value` with None for every float in it that is not finite."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def rows_until(resume_step: int, path: Path) -> str:
    """Return the file's whole lines (the header too) without the rows after `resume_step`."""
    whole_lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    steps = [ROW_STEP.match(line) for line in whole_lines]  # None: a header
    kept = [
        line.decode() + "\n"
        for line, step in zip(whole_lines, steps, strict=True)
        if step is None or int(step[1]) <= resume_step
    ]
    return "".join(kept)


def append_durably(path: Path, text: str) -> None:
    """Append `text`; when this returns, it is on disk."""
    with path.open("a", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, text: str) -> None:
    """Replace the file's text: after a crash it is the old one or the new one, whole."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    append_durably(temporary, text)
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
