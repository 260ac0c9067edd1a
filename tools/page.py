"""The data in the page of a run, which tools/report.py writes and tools/serve.py serves."""

import itertools
import json
import math
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.core.config import Config, beside_defaults
from engine.core.files import read_lines, read_text, without_nan
from engine.core.text import plain, shorten
from engine.questions.tasks import built_in_tasks, load_task, schema
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


def read_run(folder: Path) -> dict[str, Any]:
    """All that the page shows of a run; raises OSError or ValueError with the file's name."""
    table, config = read_table(folder), folder / "config.yaml"
    rollouts = by_step(read_lines(folder / "rollouts.jsonl", ROLLOUT))
    rows = read_lines(folder / "samples.jsonl", SAMPLE)
    samples = by_step([row for row in rows if row.get("split", "validation") == "validation"])
    panels = panels_of(folder)
    metric = panels[0][0]  # what has chosen best/, if that is not best_of_n
    evaluated = evaluations(table, samples, metric)
    return {
        "name": table.name,
        "step": int(table.rows["step"].iloc[-1]),
        "versions": read_text(config).partition("\n")[0].removeprefix("# "),
        "curves": without_nan(curves(table, panels)),
        "settings": list(settings(config)),
        "remarks": [row["line"] for row in read_lines(folder / "remarks.jsonl", ("step", "line"))],
        "metric": metric.removeprefix("eval/"),
        "evaluations": thin(without_nan(evaluated), PART_BYTES["evaluations"]),
        "rollouts": thin(rollouts, PART_BYTES["rollouts"]),
        "recorded": {"evaluations": len(samples), "rollouts": len(rollouts)},
    }


def by_step(rows: list[dict]) -> list[dict]:
    """Rows of one step together: [{"step": 20, "rows": [...]}, ...]."""
    steps = itertools.groupby(rows, key=operator.itemgetter("step"))
    return [{"step": step, "rows": list(rows)} for step, rows in steps]


def curves(table: Table, panels_of_run: Sequence) -> list[dict]:
    """The run's panels of tools/plot.py: steps, means and, if it was measured, the interval."""
    counts = [name.removeprefix(BEST_OF) for name in table.rows if name.startswith(BEST_OF)]
    panels = []
    for metric, title, label in panels_of_run:
        curve = points(table, metric, window=WINDOW)  # (5, points)
        if curve.size > 0:
            places = np.linspace(0, len(curve[0]) - 1, MAX_POINTS).round().astype(int)
            steps, _, mean, low, high = curve[:, np.unique(places)].round(4).tolist()
            panel = {"title": title.format(n="/".join(counts) or "n"), "label": label}
            panels.append(panel | {"steps": steps, "mean": mean, "low": low, "high": high})
    return panels


def evaluations(table: Table, samples: list[dict], metric: str) -> list[dict]:
    """The evaluations' samples, each with its step's `metric` and interval."""
    names = [metric, f"{metric}_low", f"{metric}_high"]
    rates = table.rows.set_index("step").reindex([e["step"] for e in samples], columns=names)
    texts = ("prompt", "question", "completion", "gold", "answer")
    for evaluation, measured in zip(samples, rates.to_numpy(), strict=True):
        # as the run has printed them
        evaluation["score"] = [f"{rate:.3f}" for rate in measured if math.isfinite(rate)]
        del evaluation["rows"][MAX_QUESTIONS:]
        for sample in evaluation["rows"]:
            given = [name for name in texts if sample.get(name) is not None]
            sample |= {name: shorten(plain(sample[name]), MAX_CHARACTERS) for name in given}
    return samples


def settings(file: Path) -> Iterator[dict]:
    """Each key of a run's config.yaml, its value and its default, as text."""
    values = read_file(file)
    name = task_name(values)
    # A task of the user's own is not imported, so the defaults of its own keys are None.
    full_schema = schema(load_task(name)) if name in built_in_tasks() else Config
    for key, value, default in beside_defaults(values, full_schema):
        default = value if key == "task.template_date" else default  # the run's first day
        yield {"key": key, "value": shorten(value, MAX_CHARACTERS), "default": default}


def thin(items: list[dict], max_bytes: int) -> list[dict]:
    """Drop every second item but the ends until the JSON fits; at last the last one stays alone."""
    while sum(len(to_json(item)) for item in items) > max_bytes:
        items = items[:-1:2] + items[-1:] if len(items) > 2 else items[1:]
    return items


def to_json(value: Any) -> str:
    """JSON in ASCII without "<", so that no text in it can end the page's script element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
