"""float16: small gradients survive, one that overflows is made again, a resumed run goes on.

On a CPU float16 products take several times as long as in float32, so all models here are tiny.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import (
    CPU,
    arguments,
    assert_same,
    grade_by_text,
    load_run,
    make_config,
    make_policy,
    make_run,
    read_rows,
    run_on_ranks,
)
from reference import EASY, GRPO, HARD, IN_TWO, Recorder, config_of, distance, make_groups
from transformers import AutoModelForCausalLM, AutoTokenizer

import main
from engine.core.distributed import World
from engine.model.load import load_model_and_tokenizer
from engine.model.policy import choose_compute_dtype
from engine.run.config_file import load_config
from engine.run.state import Run
from engine.update.shards import whole

FLOAT16 = "model.compute_dtype=float16"
FIRST_SCALE = 65_536.0


def prepared(folder: Path, *options: str, world: World | None = None, scale: float) -> Run:
    """A run in float16, unless the options name another dtype, whose loss scale is `scale`."""
    options = [*GRPO, FLOAT16, "training.learning_rate=1e-3", *options]
    config = config_of(*options, f"training.micro_batch_tokens={IN_TWO}")
    run = make_run(make_policy(folder, *options, world=world), config, world=world)
    loss_scale = run.policy.loss_scale
    loss_scale.load_state_dict(loss_scale.state_dict() | {"scale": scale})
    return run


def update(run: Run, *, factor: float) -> tuple[dict, int, np.ndarray]:
    """Metrics, optimizer steps and weights after an update by two groups, on two ranks by one each.

    The advantages, and so all gradients, are `factor` times what they are elsewhere.
    """
    groups = [EASY, HARD] if run.world.size == 1 else [(EASY, HARD)[run.world.rank]]
    made = make_groups(run.config, *groups)
    for trajectory in (t for group in made for t in group):
        trajectory.advantage *= factor
    batches = main.make_micro_batches(made, run.config, run.world)
    metrics, _, num_updates = main.update_policy(
        run.policy, run.optimizer, batches, run.config.training, run.world, run.logger
    )
    weights = [whole(p.detach(), p.dtype).flatten() for p in run.policy.model.parameters()]
    return metrics, num_updates, torch.cat(weights).numpy().copy()


# An update


def test_gradients_too_small_for_float16_are_those_of_float32(rotary_model_folder):
    """Without a scale they are 0 in float16, for the most part."""
    gradients = []
    for dtype, scale in (("float32", 1.0), ("float16", FIRST_SCALE), ("float16", 1.0)):
        run = prepared(rotary_model_folder, f"model.compute_dtype={dtype}", scale=scale)
        run.optimizer = recorder = Recorder(run.policy.model)
        recorder.param_groups = [{"params": recorder.parameters}]
        _, num_updates, _ = update(run, factor=1e-6)
        assert num_updates == 1
        gradients += recorder.gradients
    exact, scaled, unscaled = gradients
    assert distance(scaled, exact) < 0.02
    assert distance(unscaled, exact) > 0.5


def test_an_update_that_overflows_begins_again_with_half_the_scale(rotary_model_folder):
    """It ends where one ends that begins with that scale: nothing is left of the attempts."""
    options = [rotary_model_folder, "training.num_iterations=2"]
    run = prepared(*options, scale=FIRST_SCALE)
    metrics, num_updates, weights = update(run, factor=1e4)
    scale = run.policy.loss_scale.get_scale()
    assert num_updates == 2 and 1 < scale < FIRST_SCALE / 2
    other = prepared(*options, scale=scale)
    expected, _, expected_weights = update(other, factor=1e4)
    assert other.policy.loss_scale.get_scale() == scale
    assert metrics["train/grad_norm"] == expected["train/grad_norm"]
    assert np.array_equal(weights, expected_weights)


@pytest.mark.parametrize("factor", [1e30, math.inf], ids=["gradient", "loss"])
def test_what_is_not_finite_at_any_scale_skips_the_step(rotary_model_folder, factor):
    """The scale is not to blame, so that the next step begins with the first one."""
    run = prepared(rotary_model_folder, scale=8.0)
    before = torch.cat([p.detach().flatten() for p in run.policy.model.parameters()]).numpy().copy()
    metrics, num_updates, weights = update(run, factor=factor)
    assert num_updates == 0 and np.array_equal(before, weights)
    assert math.isfinite(metrics["train/loss"]) == math.isfinite(factor)
    assert not math.isfinite(metrics["train/grad_norm"])
    assert run.policy.loss_scale.read() == {"train/loss_scale": FIRST_SCALE}
    _, num_updates, later = update(run, factor=1.0)
    assert num_updates == 1 and not np.array_equal(later, weights) and np.isfinite(later).all()


def update_of_unlike_ranks(world: World, folder: Path, *options: str) -> tuple:
    """Loss scale, optimizer steps and weights; the gradient overflows on rank 1 alone."""
    run = prepared(folder, *options, world=world, scale=FIRST_SCALE)
    _, num_updates, weights = update(run, factor=(1.0, 1e4)[world.rank])
    return run.policy.loss_scale.get_scale(), num_updates, weights


@pytest.mark.parametrize("shard", ["false", "true"])
def test_all_ranks_halve_the_scale_that_is_too_high_on_one(rotary_model_folder, tmp_path, shard):
    ranks = run_on_ranks(
        update_of_unlike_ranks, 2, rotary_model_folder, f"model.shard={shard}", folder=tmp_path
    )
    (scale, num_updates, weights), (other_scale, _, other_weights) = ranks
    assert num_updates == 1 and 1 < scale == other_scale < FIRST_SCALE
    assert np.isfinite(weights).all() and np.array_equal(weights, other_weights)


# Whole runs


def train(folder: Path, model: Path, num_steps: int) -> list[float]:
    """The loss scale after each step of a run in float16, or of the one that goes on there."""
    settings = [FLOAT16, f"training.num_steps={num_steps}", "validation.every=1"]
    run = load_run(load_config(arguments(folder, model, *settings)))
    run.policy.loss_scale.set_growth_interval(2)
    assert main.run_training(run) == 0
    run.lock.close()
    _, *rows = read_rows(folder / "x")
    assert all(0 < row["train/sampler_mismatch"] < 0.01 for row in rows)
    return [row["train/loss_scale"] for row in rows]


def test_a_resumed_run_is_bit_for_bit_the_unbroken_one(rotary_model_folder, tmp_path, monkeypatch):
    """The scale doubles after two updates, of which one was before the break."""
    grade_by_text(monkeypatch)
    scales = train(tmp_path / "whole", rotary_model_folder, 3)
    assert scales == [FIRST_SCALE, 2 * FIRST_SCALE, 2 * FIRST_SCALE]
    train(tmp_path / "parts", rotary_model_folder, 1)
    assert train(tmp_path / "parts", rotary_model_folder, 3) == scales
    assert_same(tmp_path / "whole", tmp_path / "parts")


# The choice


@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_a_gpu_without_bfloat16_computes_in_float16(monkeypatch, has_bf16, dtype):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert choose_compute_dtype(make_config().model, torch.device("cuda")) == dtype
    assert choose_compute_dtype(make_config().model, CPU) == torch.float32
    assert choose_compute_dtype(make_config(FLOAT16).model, CPU) == torch.float16


@pytest.mark.parametrize("lora", ["null", "{r: 2}"])
def test_auto_takes_float16_only_where_numbers_stay_within(rotary_model_folder, tmp_path, lora):
    """float32's largest number is 3e38, float16's is 65,504."""
    model = AutoModelForCausalLM.from_pretrained(rotary_model_folder)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight *= 1e5
    AutoTokenizer.from_pretrained(rotary_model_folder).save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    for folder, expected in ((rotary_model_folder, torch.float16), (tmp_path, torch.float32)):
        config, lines = make_config(f"model.name={folder}", f"model.lora={lora}"), []
        how = {"device": CPU, "compute_dtype": torch.float16, "log": lines.append}
        model, *_, dtype = load_model_and_tokenizer(config, **how)
        assert dtype == expected
        assert model.dtype == (torch.float32 if lora == "null" else expected)
        assert any("float32 is used" in line for line in lines) == (expected == torch.float32)
