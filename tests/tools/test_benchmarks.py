"""The benchmarks run."""

import json
import sys
from types import ModuleType

import pytest
import torch
from harness import ROOT, benchmark

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quick(python, monkeypatch) -> None:
    """What a benchmark starts is a fork, and no GPU is seen."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# Bug: searches.py called main.py in a way that was no longer there, and no test noticed.
PRINTED = {
    "searches validation.num_examples=4 validation.best_of_n=2 validation.pass_k=[1]": "\nequat",
    "learning --quick --sides plain-grpo --seeds 1 --out HERE": "plain-grpo, seed 1",
}


@pytest.mark.parametrize("command", PRINTED)
def test_a_benchmark_prints_what_it_measures(tmp_path, monkeypatch, capsys, command):
    """TRL's side of learning.py needs the package trl, which is no dependency of ours."""
    monkeypatch.setattr(sys, "argv", command.replace("HERE", str(tmp_path)).split())
    benchmark(sys.argv[0]).main()
    assert PRINTED[command] in capsys.readouterr().out


def test_what_only_a_gpu_can_time_runs_as_a_toy(tmp_path, capsys):
    """Every aim but speed's is reached on a CPU too. The other parts are the evening's."""
    gpu = benchmark("gpu")
    with pytest.raises(SystemExit, match="0"):
        gpu.main(["speed", "--quick", "--out", str(tmp_path)])
    found, output = json.loads((tmp_path / "gpu-speed.json").read_text()), capsys.readouterr().out
    assert found["part"] == "speed" and len(found["rows"]) >= 5
    assert all(row["is_reached"] and row["name"] in output for row in found["rows"])


def test_an_evening_has_a_row_for_each_part_and_goes_on_with_what_is_not_done(
    tmp_path, monkeypatch, capsys
):
    """A part that runs out of time stops no other; only a vLLM that is not there may be skipped."""
    gpu = benchmark("gpu")
    monkeypatch.setattr(gpu, "EVENING", dict.fromkeys(gpu.EVENING, 300) | {"float16": 0.1})
    evening = ["evening", "--quick", "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="1"):
        gpu.main(evening)
    expected = dict.fromkeys(gpu.EVENING, "done") | {"float16": "cut off", "vllm": "skipped"}
    assert states_of(gpu, capsys.readouterr().out) == expected
    (tmp_path / "gpu-lora.json").touch()
    before = (tmp_path / "gpu-lora.json").stat()
    monkeypatch.setitem(gpu.EVENING, "float16", 300)
    with pytest.raises(SystemExit, match="0"):
        gpu.main([*evening, "--only", "lora", "float16"])
    assert states_of(gpu, capsys.readouterr().out) == {"lora": "done", "float16": "done"}
    assert (tmp_path / "gpu-lora.json").stat() == before


def states_of(gpu: ModuleType, printed: str) -> dict[str, str]:
    """Each part's state in the table at the end of an evening."""
    rows = [line.split("  ") for line in printed.partition("aims missed")[2].splitlines()]
    return {row[0].strip(): next(filter(None, row[1:])).strip() for row in rows if len(row) > 1}


def test_a_check_that_raises_is_named_and_costs_no_other(tmp_path, monkeypatch, capsys):
    gpu = benchmark("gpu")
    checks = {"broken": lambda _: 1 / 0, "sound": lambda _: [gpu.Row("one", 1.0, "")]}
    monkeypatch.setitem(gpu.PARTS, "toy", checks)
    with pytest.raises(SystemExit, match="1"):
        gpu.main(["toy", "--quick", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "gpu-toy.json").read_text())
    assert found["state"] == "failed" and "broken: ZeroDivisionError" in capsys.readouterr().out
    rows = {row["check"]: row["is_reached"] for row in found["rows"]}
    assert rows == {"broken": False, "sound": True}


def test_a_tree_does_not_equal_one_with_another_constant(monkeypatch, capsys):
    """In one step with a KL penalty, whose limit is another."""
    equality, name = benchmark("equality"), "gspo-kl"
    monkeypatch.setattr(equality, "write_data", lambda folder: None)  # for the recipes
    one_step = ["training.num_steps=1", "training.num_iterations=2", "checkpoint.every=1"]
    one_step += ["training.num_samples_per_step_global=2", "training.max_new_gen_tokens=64"]
    one_step += ["validation.num_examples=2", "task.max_train_examples=64"]
    overrides = [*equality.CONFIGURATIONS[name].overrides, *one_step]
    monkeypatch.setitem(equality.CONFIGURATIONS, name, equality.Configuration(overrides))
    changed = ["--set-b", "KL_LOG_RATIO_LIMIT=0.001", "--only", name]
    monkeypatch.setattr(sys, "argv", ["equality.py", str(ROOT), str(ROOT), *changed])
    with pytest.raises(SystemExit, match="True"):
        equality.main()
    assert "| gspo-kl | weights: at most " in capsys.readouterr().out
