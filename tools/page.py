"""The data in the page of a run, which tools/report.py writes and tools/serve.py serves."""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine.core.config import Config, dotted, dotted_values
from engine.core.files import whole_lines, without_nan
from engine.core.text import plain, shorten, show
from engine.questions.tasks import built_in_tasks, schema
from engine.run.config_file import read_file, task_name
from tools.plot import BEST_OF, Table, panels_of, points, read_table

TEMPLATE = Path(__file__).with_name("report.html")  # the run's data replaces its {{data}}
PART_BYTES = {"evaluations": 1_000_000, "rollouts": 3_500_000}  # the whole page is below 5 MB
WINDOW = 5  # steps in the mean of a training curve, as in tools/plot.py
MAX_POINTS = 2_000  # of a curve, the first and the last among them
MAX_QUESTIONS = 12  # of an evaluation
SAMPLE = ("step", "prompt", "completion", "reward", "reward_parts")  # what the page reads
ROLLOUT = ("step", "prompt", "gold", "size", "completions")
MAX_CHARACTERS = 4_000  # of a sample's prompt, completion or gold answer


@dataclass
class GrowingFile:
    """A .jsonl file of a run, of which each call of `read` parses only what has been added."""

    path: Path
    names: Sequence[str]  # what each row has
    prepare: Callable[[dict], dict] = dict  # makes of a row what the page shows of it
    rows: list[dict] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # of the rows, as JSON
    num_bytes: int = 0  # that have been parsed
    last: bytes = b""  # the end of them, by which a file that was cut or replaced is known

    def read(self) -> None:
        if self.end_of_parsed() != self.last:
            self.rows, self.sizes, self.num_bytes = [], [], 0
        if not self.path.exists():
            return
        for row, num_bytes in whole_lines(
            self.path, self.names, start=self.num_bytes, first=len(self.rows) + 1
        ):
            self.rows.append(self.prepare(row))
            self.sizes.append(len(to_json(without_nan(self.rows[-1]))))
            self.num_bytes += num_bytes
        self.last = self.end_of_parsed()

    def end_of_parsed(self) -> bytes:
        """The last 200 bytes of what has been parsed, as they are in the file now."""
        if self.num_bytes == 0 or not self.path.exists():
            return b""
        with self.path.open("rb") as file:
            file.seek(max(0, self.num_bytes - 200))
            return file.read(min(200, self.num_bytes))


def files_of(folder: Path) -> dict[str, GrowingFile]:
    """What a run appends to; the live page keeps these from one refresh to the next."""
    kinds = {
        "metrics": (("step",), dict),
        "rollouts": (ROLLOUT, dict),
        "samples": (SAMPLE, shortened),
        "remarks": (("step", "line"), dict),
    }
    return {kind: GrowingFile(folder / f"{kind}.jsonl", *kinds[kind]) for kind in kinds}


def read_run(folder: Path, files: dict[str, GrowingFile] | None = None) -> dict[str, Any]:
    """All that the page shows of a run; raises OSError or ValueError with the file's name."""
    files = files or files_of(folder)
    config = folder / "config.yaml"
    for file in files.values():
        file.read()
    table = read_table(folder, files["metrics"].rows or None)
    rollouts = by_step(files["rollouts"])
    samples = by_step(files["samples"], lambda row: row.get("split") != "train", MAX_QUESTIONS)
    panels = panels_of(folder)
    metric = panels[0][0]  # what has chosen best/, if that is not best_of_n
    return {
        "name": table.name,
        "step": int(table.rows["step"].iloc[-1]),
        "versions": config.read_text("utf-8").partition("\n")[0].removeprefix("# "),
        "curves": without_nan(curves(table, panels)),
        "settings": list(settings(config)),
        "remarks": [row["line"] for row in files["remarks"].rows],
        "metric": metric.removeprefix("eval/"),
        "evaluations": evaluations(table, thin(samples, PART_BYTES["evaluations"]), metric),
        "rollouts": thin(rollouts, PART_BYTES["rollouts"]),
        "recorded": {"evaluations": len(samples), "rollouts": len(rollouts)},
    }


def by_step(
    file: GrowingFile, is_shown: Callable[[dict], bool] = bool, most: int | None = None
) -> list[tuple[dict, int]]:
    """Rows of one step together, `most` at most, with their size: {"step": 20, "rows": [...]}."""
    shown = ((row, size) for row, size in zip(file.rows, file.sizes, strict=True) if is_shown(row))
    steps = []
    for step, pairs in itertools.groupby(shown, key=lambda pair: pair[0]["step"]):
        rows, sizes = zip(*itertools.islice(pairs, most), strict=True)
        steps.append(({"step": step, "rows": [*rows]}, sum(sizes) + 100))  # and its braces
    return steps


def shortened(sample: dict) -> dict:
    """A sample with texts that fit on the page."""
    texts = ("prompt", "question", "completion", "gold", "answer")
    given = [name for name in texts if sample.get(name) is not None]
    return sample | {name: shorten(plain(sample[name]), MAX_CHARACTERS) for name in given}


def curves(table: Table, panels_of_run: Sequence) -> list[dict]:
    """The run's panels of tools/plot.py: steps, means and, if it was measured, the interval."""
    counts = [name.removeprefix(BEST_OF) for name in table.rows if name.startswith(BEST_OF)]
    panels = []
    for metric, title, label in panels_of_run:
        curve = points(table, metric, window=WINDOW)  # (5, points)
        if curve.size > 0:
            places = np.linspace(0, len(curve[0]) - 1, MAX_POINTS).round().astype(int)
            steps, _, mean, low, high = curve[:, np.unique(places)].round(4).tolist()
            panels.append(
                {
                    "title": title.format(n="/".join(counts) or "n"),
                    "label": label,
                    "steps": steps,
                    "mean": mean,
                    "low": low,
                    "high": high,
                }
            )
    return panels


def evaluations(table: Table, samples: list[dict], metric: str) -> list[dict]:
    """The evaluations' samples, each with its step's `metric` and interval as the run prints it."""
    rates = table.rows.set_index("step").reindex(
        [evaluation["step"] for evaluation in samples],
        columns=[metric, f"{metric}_low", f"{metric}_high"],
    )
    for evaluation, measured in zip(samples, rates.to_numpy(), strict=True):
        evaluation["score"] = [f"{rate:.3f}" for rate in measured if math.isfinite(rate)]
    return without_nan(samples)


def settings(file: Path) -> Iterator[dict]:
    """Each key of a run's config.yaml, its value and its default, as text."""
    values = read_file(file)
    name = task_name(values)
    # A task of the user's own is not imported, so the defaults of its own keys are None.
    full_schema = schema(name) if name in built_in_tasks() else Config
    defaults = dotted_values(full_schema())
    for key, value in dotted(values).items():
        text, default = show(value), show(defaults[key]) if key in defaults else None
        default = text if key == "task.template_date" else default  # the run's first day
        yield {"key": key, "value": shorten(text, MAX_CHARACTERS), "default": default}


def thin(items: list[tuple[dict, int]], max_bytes: int) -> list[dict]:
    """Drop every second item but the ends until their sizes fit; at last the last stays alone."""
    while sum(size for _, size in items) > max_bytes:
        items = items[:-1:2] + items[-1:] if len(items) > 2 else items[1:]
    return [item for item, _ in items]


def to_json(value: Any) -> str:
    """JSON in ASCII without "<", so that no text in it can end the page's script element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
