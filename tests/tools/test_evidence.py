"""What learning.py, ablations.py and pass_at_k.py make of finished runs, and what they run."""

import json
import sys

import numpy as np
import pytest
from harness import benchmark, load_run

import main
from engine.core.config import Config, dotted_values
from engine.report.evaluation import evaluation_metrics
from engine.run.config_file import load_config

learning, ablations, switched, pass_at_k = map(
    benchmark, ("learning", "ablations", "switched", "pass_at_k")
)


# Learning


def write_side(folder, side: str, *seeds: list[float]) -> None:
    """Evaluations after 0, 10 and 20 steps of a minute each."""
    folder.mkdir(exist_ok=True)
    for seed, rates in enumerate(seeds):
        steps = enumerate(rates)
        rows = [{"step": 10 * i, "minutes": 10.0 * i, "eval/pass@1": rate} for i, rate in steps]
        (folder / f"{side}-s{seed}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_the_two_sides_are_compared_at_each_evaluation_and_drawn(tmp_path, monkeypatch, capsys):
    """At step 10: 0.15, and two standard errors of sqrt(0.02 / 2 + 0.005 / 2) = 0.1118."""
    folder = tmp_path / "learning"
    write_side(folder, "TRL", [0.2, 0.3, 0.6], [0.2, 0.5, 0.6])
    write_side(folder, "plain-grpo", [0.2, 0.5, 0.7], [0.2, 0.6, 0.7])
    monkeypatch.setattr(learning, "LEVEL", 0.6)
    monkeypatch.setattr(sys, "argv", ["learning.py", "--draw", "--out", str(tmp_path)])
    learning.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:4] == [
        ["0", "0.200", "0.200", "0.000", "0.000", "True"],
        ["10", "0.400", "0.550", "0.150", "0.224", "True"],
        ["20", "0.600", "0.700", "0.100", "0.000", "False"],
    ]
    assert ["TRL", "20.0", "20.0", "20.0", "20.0"] in lines
    assert ["plain-grpo", "15.0", "10.0", "20.0", "20.0"] in lines
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")


def test_both_sides_take_the_steps_of_the_default_run():
    default, config = load_config([]), load_config(learning.settings(3, is_quick=False))
    num_rows = 2 * default.questions_per_rank(2) * default.training.group_size
    assert config.questions_per_rank(1) * config.training.group_size == num_rows
    steps = default.training.num_steps
    assert config.training.num_steps == steps and config.training.seed == 3
    assert num_rows % learning.TRL_MICRO_BATCH == 0


# Ablations


def config_of_row(recipe: list[str], overrides: list[str]) -> Config:
    questions = ablations.questions_per_step(recipe)
    size = f"training.num_samples_per_step_global={questions}"
    return load_config([*recipe, size, *overrides])


def test_every_row_is_the_default_with_one_thing_changed_and_samples_as_many():
    makers = {"ablations": ablations.make_rows, "hard": ablations.make_hard_rows}
    all_rows = set()
    for lab, recipe in ablations.LABS.items():
        rows = makers[lab](ablations.questions_per_step(recipe))
        default = config_of_row(recipe, [])
        num_rows = default.questions_per_rank(1) * default.training.group_size
        for name, overrides in rows.items():
            config = config_of_row(recipe, overrides)
            assert config.questions_per_rank(1) * config.training.group_size == num_rows, name
            values, others = dotted_values(config), dotted_values(default)
            changed = [key for key in values if values[key] != others[key]]
            has_switch = name in ablations.SWITCHES
            assert len(changed) >= len(overrides) > 0 or has_switch or name == "default", name
        all_rows |= set(rows)
    assert {*ablations.SWITCHES, *ablations.AT_EQUAL_MINUTES} < all_rows


def write_metrics(folder, name: str, rate: float, best: float) -> None:
    header = "step,eval/pass@1,eval/best_of_8,time/eval_s,time/step_s"
    lines = [header, "0,0.1,0.2,30,", "1,,,,90", f"2,{rate},{best},30,90"]
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")


def test_the_table_has_every_row_with_the_range_of_its_seeds(tmp_path, monkeypatch):
    folder = tmp_path / "ablations"
    write_metrics(folder, "default-s0", 0.5, 0.75)
    write_metrics(folder, "default-s1", 0.6, 0.85)
    write_metrics(folder, "lora-r8-lr-x10-s0", 0.4, 0.7)
    (folder / "remarks.yaml").write_text("default: It learns.\n")
    monkeypatch.setattr(sys, "argv", ["ablations.py", "--draw", "--out", str(tmp_path)])
    ablations.main()
    lines = (tmp_path / "ablations.md").read_text().splitlines()
    assert len(lines) == 2 + len(ablations.make_rows(32))
    assert lines[2] == (
        "| default |  | 2 | 0.550 (0.500 to 0.600) | 0.800 (0.750 to 0.850) | 4.0 (4.0 to 4.0) "
        "| It learns. |"
    )
    assert "| zscore | `training.advantage=zscore` | 0 | not run |  |  |  |" in lines
    (adapter,) = (line for line in lines if line.startswith("| lora-r8-lr-x10 |"))
    assert adapter.endswith(" | 1 | 0.400 | 0.700 | 4.0 |  |")
    assert (tmp_path / "ablations.png").read_bytes().startswith(b"\x89PNG")


# pass@k


def test_the_table_of_pass_at_k_says_where_the_curves_cross(tmp_path, monkeypatch):
    """Of 4 samples 1, 1 and 1 are right before, 4, 4 and 0 after: at k = 1, 2, 3, 4 pass@k is
    1/4, 1/2, 3/4, 1 before and always 2/3 after. A second seed has its row, and no curve."""
    folder = tmp_path / "some"
    folder.mkdir()
    for name, solved in {"before": [1, 1, 1], "s0": [4, 4, 0], "s1": [0, 4, 4]}.items():
        name = name if name == "before" else f"after-{name}"
        (folder / f"{name}.json").write_text(json.dumps({"solved": solved}))
    arguments = ["--draw", "--name", "some", "--samples", "4", "--out", str(tmp_path)]
    models = ["--models", "before=a", "after-s0=b", "after-s1=c"]
    monkeypatch.setattr(sys, "argv", ["pass_at_k.py", *arguments, *models])
    pass_at_k.main()
    rows = [line.split(" | ") for line in (tmp_path / "some.md").read_text().splitlines()]
    assert rows[2] == ["| before", "0.250", "0.500", "1.000", "", "", " |"]
    for row, seed in zip(rows[3:5], ("s0", "s1"), strict=True):
        assert row == [f"| after-{seed}", "0.667", "0.667", "0.667", "3", "0", "1 |"]
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_kept_of_a_model_is_how_many_of_its_samples_solve_each_question(tmp_path):
    keys = ["validation.num_examples=6", "validation.best_of_n=4", "validation.pass_k=[1, 2]"]
    pass_at_k.measure(tmp_path / "tiny.json", keys)
    found = json.loads((tmp_path / "tiny.json").read_text())
    run = load_run(load_config([*keys, "mode=evaluate", f"run.dir={tmp_path}"]))
    groups, validation = main.sample_validation(run), run.config.validation
    metrics = evaluation_metrics(groups, run.task, validation, run.world)
    assert found["model"] == "tiny" and found["samples"] == 4
    for k in (1, 2):
        rate = pass_at_k.pass_at_k(np.array(found["solved"]), 4, k)
        assert rate == pytest.approx(metrics[f"eval/pass@{k}"])


def test_both_learning_types_are_trained_and_measured_at_the_same_steps():
    configs = [load_config(command[2:]) for command in pass_at_k.trainings()]
    assert [config.training.learning_type for config in configs] == ["grpo", "sil"]
    for config in configs:
        assert config.checkpoint.keep is None and config.training.num_steps == 60
        assert all(step % config.checkpoint.every == 0 for step in pass_at_k.STEPS)
