"""The benchmarks run."""

import json
import sys

import pytest
import torch
from harness import ROOT, benchmark
from transformers import AutoModelForCausalLM, GemmaConfig, GemmaForCausalLM

from engine.sampling.sampler import copy_in

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


@pytest.mark.parametrize("part", ["correctness", "adapters", "speed", "step", "evening"])
def test_what_only_a_gpu_can_show_runs_as_a_toy(part, tmp_path, monkeypatch, capsys):
    """Every aim is reached on a CPU too, but speed's; of an evening what it does beside others."""
    gpu = benchmark("gpu")
    others = {check for name, checks in gpu.PARTS.items() if name != "evening" for check in checks}
    checks = [check for check in gpu.PARTS[part] if part != "evening" or check not in others]
    with pytest.raises(SystemExit, match="0"):
        gpu.main([part, "--quick", "--out", str(tmp_path), "--only", *checks])
    found, output = json.loads((tmp_path / f"gpu-{part}.json").read_text()), capsys.readouterr().out
    assert found["part"] == part and len(found["rows"]) >= 5 and len(checks) >= 3
    assert all(row["is_reached"] and row["name"] in output for row in found["rows"])


def test_fused_norms_are_those_that_compute_the_same(rotary_model_folder):
    """And a copy's norm reads the copy's weight; a norm of 1 + weight (Gemma's) stays as it is."""
    gpu, ids = benchmark("gpu"), torch.arange(2, 9)[None]
    model = AutoModelForCausalLM.from_pretrained(rotary_model_folder, dtype=torch.float32)
    names, expected = list(model.state_dict()), model(input_ids=ids).logits
    assert gpu.fuse_norms(model) == 2 * model.config.num_hidden_layers + 1
    torch.testing.assert_close(model(input_ids=ids).logits, expected)
    copied = copy_in(torch.float32, model, model.device)
    copied.model.norm.weight *= 2
    torch.testing.assert_close(copied(input_ids=ids).logits, 2 * expected)
    assert list(model.state_dict()) == list(copied.state_dict()) == names
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), 16)
    heads = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    assert gpu.fuse_norms(GemmaForCausalLM(GemmaConfig(vocab_size=99, **sizes, **heads))) == 0


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
