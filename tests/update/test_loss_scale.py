"""float16: any loss scale that fits makes the same update; and which dtype a run computes in.

On a CPU float16 products take several times as long as in float32, so all models here are tiny.
"""

import math
from pathlib import Path

import harness
import numpy as np
import pytest
import torch
from harness import CPU, arguments, grade_by_text, load_run, make_config, read_rows
from reference import EASY, GRPO, HARD, IN_TWO, Recorder, config_of, make_groups, weights_of
from test_update import AT_ONCE, IN_BLOCKS, RATE
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import engine.model.precision
import main
from engine.core.distributed import World
from engine.model.load import load_model_and_tokenizer
from engine.model.precision import INIT_SCALE, choose_compute_dtype
from engine.run.config_file import load_config, read_file
from engine.run.state import Run
from engine.update.optimizer import Outcome, Update

FLOAT16 = "model.compute_dtype=float16"


def prepared(folder: Path, *options: str, world: World | None = None, scale: float) -> Run:
    """A run in float16 whose loss scale is `scale`."""
    options = [*GRPO, FLOAT16, "training.learning_rate=1e-3", *options]
    config = config_of(*options, f"training.micro_batch_tokens={IN_TWO}")
    run = harness.make_run(harness.make_policy(folder, *options, world=world), config, world=world)
    scaler = run.policy.grad_scaler
    scaler.load_state_dict(scaler.state_dict() | {"scale": scale})
    return run


def update(run: Run, *, factor: float) -> tuple[Update, np.ndarray]:
    """What became of, and the weights after an update with `factor` times all gradients."""
    groups = [EASY, HARD] if run.world.size == 1 else [(EASY, HARD)[run.world.rank]]
    made = make_groups(run.config, *groups)
    for trajectory in (t for group in made for t in group):
        trajectory.advantage *= factor
    result = main.update_policy(run, made)
    return result, weights_of(run.policy)


@pytest.mark.parametrize(("limit", "max_bytes"), [("1e9", AT_ONCE), ("1e-3", IN_BLOCKS)])
def test_an_update_is_the_same_at_every_loss_scale_that_fits(
    rotary_model_folder, monkeypatch, limit, max_bytes
):
    """Bit for bit, where the norm is limited too. A smaller scale loses small gradients; a larger
    one overflows: it is halved, and costs a step. That it is right is in test_update.py."""
    monkeypatch.setattr("engine.model.policy.MAX_LOGITS_BYTES", max_bytes)
    hot = "sampling.temperature=4"  # logits that are close to each other have gradients that are
    run = prepared(rotary_model_folder, hot, f"training.max_grad_norm={limit}", scale=1.0)
    scaler, before = run.policy.grad_scaler, weights_of(run.policy)
    made, exponents = {}, range(8, 27)
    for exponent in exponents:
        nn.utils.vector_to_parameters(torch.tensor(before), run.policy.model.parameters())
        scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**exponent})
        run.optimizer = Recorder(run.policy.model, RATE)
        result, weights = update(run, factor=1.0)
        if result.outcome is Outcome.UPDATED:
            assert scaler.get_scale() == 2.0**exponent
            numbers = np.concatenate([*run.optimizer.gradients, weights])
            made[exponent] = numbers.tobytes(), result.metrics
        else:
            assert result.outcome is Outcome.OVERFLOWED and scaler.get_scale() == 2.0**exponent / 2
            assert not result.moved_weights and np.array_equal(before, weights)
            assert result.metrics["train/loss"] == made[8][1]["train/loss"]
            run.end_step(result, 0)
    assert run.state.skipped_steps == len(exponents) - len(made) > 1
    assert run.state.skipped_in_a_row == 0  # the search for a scale does not end the run
    last = max(made)
    fitting = [exponent for exponent in made if made[exponent] == made[last]]
    assert [*made] == [*range(8, last + 1)] and fitting == [*range(fitting[0], last + 1)]
    assert fitting[0] > 8 and len(fitting) >= 5


@pytest.mark.parametrize(("factor", "scale"), [(1e30, 1.0), (math.inf, 8.0)], ids=["grad", "loss"])
def test_what_is_not_finite_at_any_scale_counts_as_broken(rotary_model_folder, factor, scale):
    """The scale is not to blame where it is 1, or where the loss is not finite."""
    run = prepared(rotary_model_folder, scale=scale)
    before = weights_of(run.policy)
    result, weights = update(run, factor=factor)
    assert result.outcome is Outcome.BROKEN and np.array_equal(before, weights)
    assert math.isfinite(result.metrics["train/loss"]) == math.isfinite(factor)
    assert not math.isfinite(result.metrics["train/grad_norm"])
    result, later = update(run, factor=1.0)
    assert result.outcome is Outcome.UPDATED
    assert not np.array_equal(later, weights) and np.isfinite(later).all()


def updates_of_unlike_ranks(world: World, folder: Path) -> list[tuple]:
    """Outcome, loss scale and weights, of a whole model and of shards; rank 1 alone overflows."""
    results = []
    for shard in ("model.shard=false", "model.shard=true"):
        run = prepared(folder, shard, world=world, scale=INIT_SCALE)
        result, weights = update(run, factor=(1.0, 1e4)[world.rank])
        results.append((result.outcome.name, run.policy.grad_scaler.get_scale(), weights))
    return results


def test_all_ranks_halve_the_scale_that_is_too_high_on_one(rotary_model_folder, tmp_path):
    ranks = harness.run_on_ranks(updates_of_unlike_ranks, 2, rotary_model_folder, folder=tmp_path)
    for (outcome, scale, weights), other in zip(*ranks, strict=True):
        assert (outcome, scale) == other[:2] == ("OVERFLOWED", INIT_SCALE / 2)
        assert np.isfinite(weights).all() and np.array_equal(weights, other[2])


def test_a_resumed_run_has_the_loss_scale_and_the_sampler_of_its_checkpoint(
    rotary_model_folder, tmp_path, monkeypatch
):
    """The scale doubles after two updates, of which one was before the break."""
    grade_by_text(monkeypatch)
    for num_steps in (1, 3):
        settings = [FLOAT16, f"training.num_steps={num_steps}"]
        run = load_run(load_config(arguments(tmp_path, rotary_model_folder, *settings)))
        run.policy.grad_scaler.set_growth_interval(2)
        if num_steps == 3:
            saved = AutoModelForCausalLM.from_pretrained(run.folder / "checkpoints/last")
            pairs = zip(saved.parameters(), run.policy.sampler.model.parameters(), strict=True)
            assert all(torch.equal(weights.half(), copied) for weights, copied in pairs)
        assert main.run_training(run) == 0
        run.lock.close()
    _, *rows = harness.read_rows(run.folder)
    scales = [row["train/loss_scale"] for row in rows]
    assert scales == [INIT_SCALE, 2 * INIT_SCALE, 2 * INIT_SCALE]
    assert all(0 < row["train/sampler_mismatch"] < 0.01 for row in rows)


@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_a_gpu_without_bfloat16_computes_in_float16(monkeypatch, has_bf16, dtype):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert choose_compute_dtype(make_config().model, torch.device("cuda")) == dtype
    assert choose_compute_dtype(make_config().model, CPU) == torch.float32
    assert choose_compute_dtype(make_config(FLOAT16).model, CPU) == torch.float16


@pytest.mark.parametrize(
    ("given", "dtype", "num_starts"),
    [
        (["training.kl_coef=0.1"], "bfloat16", 2),  # the reference too
        (["model.compute_dtype=float32"], "float32", 1),
        (["model.lora={r: 2}"], "float32", 1),  # its base would be rounded
        (["no hardware"], "float32", 2),
        (["avx512_bf16"], "bfloat16", 1),
        (["another model"], "float32", 1),  # whose logits in bf16 are far off
    ],
)
def test_a_run_keeps_the_dtype_that_was_chosen_for_its_first_processor(
    rotary_model_folder, tmp_path, monkeypatch, given, dtype, num_starts
):
    """A run of before there was a choice is in fp32, as if there were no hardware."""
    grade_by_text(monkeypatch)
    if given == ["another model"]:
        monkeypatch.setattr(engine.model.precision, "supports_dtype", lambda *_: False)
    hardware = {"avx512_bf16" if "avx512_bf16" in given else "amx_bf16": given != ["no hardware"]}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: hardware)
    monkeypatch.setattr(engine.model.precision, "MIN_SIZE", 32)  # products of any size count
    sizes = ["training.num_samples_per_step=1", "training.k_best_of_n=[2,2]"]
    sizes += ["training.max_new_gen_tokens=2", "validation.num_examples=1"]
    for num_steps in range(1, num_starts + 1):
        options = [*(word for word in given if "=" in word), f"training.num_steps={num_steps}"]
        run = load_run(load_config(arguments(tmp_path, rotary_model_folder, *sizes, *options)))
        policy, expected = run.policy, getattr(torch, dtype)
        assert policy.compute_dtype == policy.scorer.compute_dtype == expected
        assert policy.sampler.model.dtype == expected and run.is_resumed == (num_steps == 2)
        assert policy.reference is None or policy.reference.compute_dtype == expected
        assert read_file(run.folder / "config.yaml")["model"]["compute_dtype"] == dtype
        if num_steps < num_starts:
            assert main.run_training(run) == 0
        run.lock.close()
        if num_steps < num_starts:  # Bug: both took auto anew, and evaluated in another dtype
            settings = [f"--config={run.folder / 'config.yaml'}"]
            again = load_run(load_config(settings))
            assert again.is_resumed and again.policy.sampler.model.dtype == expected
            again.lock.close()
            best = f"model.name={run.folder / 'best'}"
            found, _ = harness.measure(load_run(load_config([*settings, best, "mode=evaluate"])))
            step = run.state.best_step
            logged = {k: v for k, v in read_rows(run.folder)[step].items() if k in found}
            assert logged == {name: found[name] for name in logged} and "eval/reward" in logged
        hardware = {name: not there for name, there in hardware.items()}


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
        how = {"log": lines.append, "compute_dtype": torch.float16}
        model, _, dtype = load_model_and_tokenizer(config, CPU, **how)
        assert dtype == expected
        assert model.dtype == (torch.float32 if lora == "null" else expected)
        assert any("float32 is used" in line for line in lines) == (expected == torch.float32)
