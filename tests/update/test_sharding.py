"""Weights cut into a part for each rank (model.shard): the same training, on less memory each."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import (
    alone,
    assert_same,
    make_config,
    make_policy,
    peak_bytes,
    run_on_ranks,
    sample,
    train,
    train_forked,
)
from reference import (
    EASY,
    EQUAL,
    GRPO,
    HARD,
    LONG,
    NORMALIZATIONS,
    ROUNDING,
    Recorder,
    config_of,
    distance,
    make_groups,
    update,
)
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

import main
from engine.core.distributed import World
from engine.model.policy import Policy
from engine.run import resuming
from engine.update.optimizer import make_optimizer
from engine.update.shards import check_shared_disk, load_parts, local, save_parts, whole

SHARD, BF16 = "model.shard=true", "model.compute_dtype=bfloat16"
ITERATIONS, KL = "training.num_iterations=2", "training.kl_coef=0.5"


class WholeRecorder(Recorder):
    """Notes whole gradients, gathered from all ranks, of weights that are cut into parts."""

    @torch.no_grad()
    def step(self) -> None:
        whole_ones = [whole(p.grad, p.dtype).flatten() for p in self.parameters]
        self.gradients.append(torch.cat(whole_ones).numpy().copy())
        for parameter in self.parameters:
            parameter -= self.rate * parameter.grad


def share_of(groups: tuple, world: World) -> list[tuple]:
    """Groups rank, rank + size and so on; a rank that gets none has one that teaches nothing."""
    return list(groups[world.rank :: world.size]) or [EQUAL]


# (options of the run, micro-batch limit, groups): uneven rows, an idle rank, a penalty, ...
CASES = [
    *(([f"training.loss_normalization={name}"], 45, (EASY, HARD, LONG)) for name in NORMALIZATIONS),
    ([], 1, (HARD, EQUAL, EQUAL)),
    ([ITERATIONS, KL], 45, (EASY, LONG, HARD, EQUAL)),
    ([ITERATIONS, "model.gradient_checkpointing=true"], 45, (LONG, EASY, HARD)),
]


def gradients(world: World, folder: Path, is_exact: bool, *options: str) -> list[tuple]:
    """The gradients of each case, one for each iteration, its loss, and the norm of the first."""
    results = []
    for overrides, limit, groups in CASES:
        policy = make_policy(folder, *overrides, *options, world=world, is_exact=is_exact)
        settings = [*GRPO, *overrides, *options, f"training.micro_batch_tokens={limit}"]
        config, recorder = config_of(*settings), WholeRecorder(policy.model, rate=0.1)
        mine = make_groups(config, *share_of(groups, world))
        metrics, _, _ = update(policy, recorder, mine, config, world)
        results.append((recorder.gradients, metrics["train/loss"], metrics["train/grad_norm"]))
    return results


def test_the_gradient_of_a_sharded_model_is_that_of_a_whole_one(absolute_model_folder, tmp_path):
    """In fp64, where only the tokens' weights and the advantages are rounded to fp32."""
    expected = gradients(alone(), absolute_model_folder, True)
    ranks = run_on_ranks(gradients, 3, absolute_model_folder, True, SHARD, folder=tmp_path)
    for result in ranks:
        for case, (found, loss, norm), (wanted, wanted_loss, wanted_norm) in zip(
            CASES, result, expected, strict=True
        ):
            assert len(found) == len(wanted) > 0
            for one, other in zip(found, wanted, strict=True):
                assert distance(one, other) <= ROUNDING, case
            assert loss == pytest.approx(wanted_loss, rel=1e-6, abs=1e-6)
            assert norm == pytest.approx(wanted_norm, rel=1e-5)


def test_the_gradient_is_that_of_ddp_in_bf16_too(rotary_model_folder, tmp_path):
    """Two ranks sum the same numbers, but for the order of micro-batches."""
    ddp, sharded = (
        run_on_ranks(gradients, 2, rotary_model_folder, False, *options, folder=tmp_path)[0]
        for options in ((BF16,), (BF16, SHARD))
    )
    for case, (found, *_), (wanted, *_) in zip(CASES, sharded, ddp, strict=True):
        assert distance(found[0], wanted[0]) <= ROUNDING, case


def whole_weights(policy: Policy) -> np.ndarray:
    tensors = [whole(p.detach(), p.dtype).flatten() for p in policy.model.parameters()]
    return torch.cat(tensors).numpy().copy()


def bytes_for_a_weight(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Bytes on this rank that hold weights, gradients and averages, for each of all weights."""
    ids = torch.tensor([[5, 9, 30]])
    policy.scorer(ids, ids > 0, temperature=1.0).sum().backward()
    weights, averages = list(policy.model.parameters()), optimizer.state.values()
    tensors = {
        "weights": weights,
        "gradients": [p.grad for p in weights],
        "averages": [value for state in averages for value in state.values() if value.ndim > 0],
    }
    num_weights = sum(p.numel() for p in weights)
    return {name: bytes_in_memory(some) / num_weights for name, some in tensors.items()}


def bytes_in_memory(tensors: list[torch.Tensor]) -> int:
    """The size of the storages behind this rank's parts of the tensors, each counted once."""
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def ten_updates(world: World, folder: Path, *options: str) -> tuple[np.ndarray, bool, dict]:
    """Weights after ten AdamW updates; whether the sampler has them, and samples with them; bytes.

    One update has no lesson on any rank, and in one logits were not finite: both are left out.
    """
    options = [*GRPO, "training.max_grad_norm=0.1", "training.learning_rate=1e-3", *options]
    policy, config = make_policy(folder, *options, world=world), config_of(*options)
    optimizer = make_optimizer(policy.model, config.training)
    before = whole_weights(policy)
    for i in range(12):
        groups = (EQUAL,) * 3 if i == 4 else ((EASY, HARD, LONG) * 2)[i % 3 :][: 2 + i % 2]
        mine = make_groups(config, *share_of(groups, world))
        if i == 7 and world.rank == world.size - 1:
            mine[0][0].completion.log_probs[0] = np.nan
        _, _, is_skipped = update(policy, optimizer, mine, config, world)
        assert is_skipped == (i == 7)
    after = whole_weights(policy)
    assert distance(after, before) > 1e-3
    sampled = torch.cat([p.detach().flatten() for p in policy.sampler.model.parameters()]).numpy()
    ((completion, *_),) = sample(policy, [[5, 9, 30]], num_samples=2, max_new_tokens=4)
    is_sampler_fresh = np.array_equal(sampled, after) and len(completion.token_ids) > 0
    return after, is_sampler_fresh, bytes_for_a_weight(policy, optimizer)


def test_ten_updates_of_a_sharded_model_give_the_weights_of_ddp(rotary_model_folder, tmp_path):
    """In fp32; AdamW divides by roots of tiny averages, where rounding shows, hence 1e-5."""
    run = functools.partial(run_on_ranks, ten_updates, 3, rotary_model_folder)
    ddp, sharded = run(folder=tmp_path), run(SHARD, folder=tmp_path)
    num_bytes = {"weights": 4 / 3, "gradients": 4 / 3, "averages": 8 / 3}
    for weights, is_sampler_fresh, measured in sharded:
        assert is_sampler_fresh
        assert np.array_equal(weights, sharded[0][0])
        assert distance(weights, ddp[0][0]) <= 1e-5
        assert measured == pytest.approx(num_bytes, rel=0.04)


def test_a_part_is_not_written_through_a_link(rotary_model_folder, tmp_path):
    """Bug: the file at its end was overwritten, and moved away."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "part-00000.safetensors").write_text("precious")
    (tmp_path / "step").symlink_to(mine)
    policy = make_policy(rotary_model_folder)
    optimizer = make_optimizer(policy.model, make_config().training)
    assert save_parts(policy.model, optimizer, tmp_path / "step", alone()) == 1
    assert (mine / "part-00000.safetensors").read_text() == "precious"


# Whole runs


def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(rotary_model_folder, tmp_path, data):
    """One rank gets a signal right after the first checkpoint; all ranks save once more."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = [*data, SHARD, "training.num_steps=3", "training.warmup_steps=0"]
    options += ["validation.num_examples=6", "training.kl_coef=0.1"]
    options += ["training.micro_batch_tokens=99"]  # several passes on each rank
    train(whole, rotary_model_folder, *options, num_ranks=2)
    fault = {"do": "terminate other", "saves": 1, "events": 1}
    status, output = train_forked(parts, rotary_model_folder, *options, num_ranks=2, fault=fault)
    assert status == 1 and "all is saved" in output, output
    assert "resumed after step" in train(parts, rotary_model_folder, *options, num_ranks=2)
    assert_same(whole, parts)


def test_a_run_goes_on_with_another_number_of_ranks(absolute_model_folder, tmp_path, data):
    """From 3 ranks to 2, whose parts are cut elsewhere; the embeddings are tied."""
    options = [*data, SHARD, "training.num_samples_per_step_global=6", "training.warmup_steps=0"]
    rising = {"rates": [0.1, 0.2, 0.3]}  # so that best/ is the model after the last step
    one_step = [*options, "training.num_steps=1"]
    train(tmp_path, absolute_model_folder, *one_step, num_ranks=3, grading=rising)
    folder = tmp_path / "x/checkpoints/step-000001"
    assert not list(folder.glob("*.safetensors"))  # no rank has written the whole model
    three = merged(folder)
    results = run_on_ranks(load_and_save, 2, absolute_model_folder, folder, folder=tmp_path)
    assert results == [0, 0]
    two = merged(tmp_path / "again")
    assert three.keys() == two.keys() and any("exp_avg_sq" in name for name in three)
    assert all(torch.equal(three[name], two[name]) for name in three)
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "x/best")
    assert best.dtype == torch.float32 and best.lm_head.weight is best.transformer.wte.weight
    assert all(torch.equal(p, three[name]) for name, p in best.named_parameters())
    two_steps = [*options, "training.num_steps=2"]
    output = train(tmp_path, absolute_model_folder, *two_steps, num_ranks=2, grading=rising)
    assert "the run had 3 ranks and goes on with 2: not bit for bit the same" in output


def merged(folder: Path) -> dict[str, torch.Tensor]:
    """Whole tensors of all parts below a folder; counts of steps, which all parts have, once."""
    parts = [load_file(file) for file in sorted(folder.rglob("part-*"))]
    return {
        name: torch.cat([part[name] for part in parts]) if tensor.ndim > 0 else tensor
        for name, tensor in parts[0].items()
    }


def load_and_save(world: World, model: Path, folder: Path) -> int:
    """Read a checkpoint of 3 ranks, and write it again as so many parts as there are ranks."""
    policy = make_policy(model, SHARD, world=world)
    optimizer = make_optimizer(policy.model, make_config().training)
    load_parts(folder, policy.model, optimizer, num_parts=3, rank=world.rank)
    again = folder.parents[2] / "again"
    return save_parts(policy.model, optimizer, again, world)


def test_an_unwritable_part_costs_that_checkpoint_alone(rotary_model_folder, tmp_path, data):
    """Rank 1 alone finds a folder in the place of its part, as if its disk were full."""
    root = tmp_path / "x/checkpoints"
    (root / "step-000001.parts.tmp/part-00001.safetensors").mkdir(parents=True)
    options = [*data, SHARD, "training.num_steps=2", "training.warmup_steps=0"]
    output = train(tmp_path, rotary_model_folder, *options, num_ranks=2)
    assert "nothing saved at step 1" in output
    assert "1 of 2 ranks could not write their part" in output
    names = sorted(path.name for path in root.iterdir())
    assert names == ["last", "step-000002"] and resuming.is_whole(root / "step-000002")


def look_for_a_disk(world: World, folder: Path) -> list[str]:
    """What the check says where each rank has a disk of its own, with an older lock or none."""
    if world.is_main:
        (folder / "lock").write_text("process 7 on a")
    world.sum([0.0])
    check_shared_disk(folder, world)
    said = []
    for name, text in (("empty", None), ("copied", "process 6 on b")):
        own = folder / f"{name}-{world.rank}"
        own.mkdir()
        if world.is_main or text is not None:
            (own / "lock").write_text("process 7 on a" if world.is_main else text)
        with pytest.raises(ValueError, match="1 of 2 ranks do not see") as caught:
            check_shared_disk(own, world)
        said.append(str(caught.value))
    return said


def test_ranks_that_do_not_share_a_disk_are_told_in_one_line(tmp_path):
    first, second = run_on_ranks(look_for_a_disk, 2, tmp_path, folder=tmp_path)
    for said in first + second:
        assert "\n" not in said and "set run.dir to a disk that all nodes share" in said


def peaks_of_a_pass(world: World, folder: Path, shard: str) -> list[int]:
    """The most bytes that a pass in bf16 allocates at once, as it is and with casts kept."""
    policy, peaks = make_policy(folder, shard, BF16, world=world), []
    ids, settings = torch.tensor([[5, 9, 30]]), {"temperature": 1.0}
    policy.scorer(ids, ids > 0, **settings)  # the first pass makes buffers that stay
    as_it_is = main.autocast
    keeping = lambda device, dtype, cache_casts: as_it_is(device, dtype)  # noqa: E731
    for main.autocast in (as_it_is, keeping):
        with (
            torch.no_grad(),
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        ):
            policy.scorer(ids, ids > 0, **settings)
        peaks.append(peak_bytes(profiler))
    return peaks


@pytest.mark.parametrize("shard", [SHARD, "model.shard=false"])
def test_a_pass_does_not_keep_a_whole_model_in_bf16(rotary_model_folder, tmp_path, shard):
    """Bug: autocast kept the bf16 copy of each weight until the pass ended."""
    arguments = (rotary_model_folder, shard)
    ((as_it_is, kept),) = run_on_ranks(peaks_of_a_pass, 1, *arguments, folder=tmp_path)
    assert as_it_is + 9_216 <= kept
