"""model.shard: the same steps, on less memory each; for the gradients see test_update.py."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import assert_resumes, make_config, make_policy, make_run, run_on_ranks, sample
from reference import EASY, EQUAL, GRPO, HARD, LONG, config_of, distance, flat, make_groups
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import main
from engine.core.distributed import World
from engine.run import checkpoint
from engine.run.state import Run
from engine.update.optimizer import Outcome, make_optimizer
from engine.update.shards import load_parts, local, save_parts

SHARD, WHOLE = "model.shard=true", "model.shard=false"

UPDATED, NO_STEP, BROKEN = Outcome.UPDATED, Outcome.NOTHING_TO_TRAIN_ON, Outcome.BROKEN
STEPS = [  # a group of each rank, what is not finite on the last one, the outcome on all
    ((EQUAL, EQUAL, EQUAL), {}, NO_STEP),
    ((EQUAL, LONG, HARD), {}, UPDATED),
    ((EASY, HARD, LONG), {"advantage": math.inf}, BROKEN),
    ((EASY, EQUAL, LONG), {"log_prob": math.nan}, BROKEN),
    ((LONG, EASY, HARD), {}, UPDATED),
]


def take_steps(world: World, folder: Path) -> list[tuple]:
    """Of whole models and shards: outcomes, weights, whether the sampler has the last, bytes."""
    results = []
    for shard in (WHOLE, SHARD):
        keys = [*GRPO, "training.max_grad_norm=0.1", "training.learning_rate=1e-3", shard]
        policy, config = make_policy(folder, *keys, world=world), config_of(*keys)
        run, parameters = make_run(policy, config, world=world), list(policy.model.parameters())
        outcomes, weights = [], [flat(parameters)]
        for groups, broken, _ in STEPS:
            (group,) = make_groups(config, groups[world.rank])
            if world.rank == world.size - 1:
                group[1].advantage = broken.get("advantage", group[1].advantage)
                group[1].completion.log_probs[2] = broken.get("log_prob", -5.0)
            outcomes.append(main.update_policy(run, [group]).outcome.name)
            weights.append(flat(parameters))
            assert all(p.grad is None or not local(p.grad).any() for p in parameters)
        sampler = flat(list(policy.sampler.model.parameters()))
        ((completion, *_),) = sample(policy, [[5, 9, 30]], num_samples=2, max_new_tokens=4)
        is_fresh = np.array_equal(sampler, weights[-1]) and len(completion.token_ids) > 0
        results.append((outcomes, weights, is_fresh, bytes_for_a_weight(run)))
    return results


def bytes_for_a_weight(run: Run) -> dict[str, float]:
    """Bytes on this rank that hold weights, gradients and averages, for each of all weights."""
    ids = torch.tensor([[5, 9, 30]])
    run.policy.scorer(ids, ids > 0, temperature=1.0).sum().backward()
    weights, averages = list(run.policy.model.parameters()), run.optimizer.state.values()
    tensors = {
        "weights": weights,
        "gradients": [p.grad for p in weights],
        "averages": [value for state in averages for value in state.values() if value.ndim > 0],
    }
    num_weights, sizes = sum(p.numel() for p in weights), {}
    for name, some in tensors.items():  # the storages behind this rank's parts, each counted once
        storages = [local(tensor).untyped_storage() for tensor in some]
        sizes[name] = sum({s.data_ptr(): s.nbytes() for s in storages}.values()) / num_weights
    return sizes


def test_all_ranks_take_the_same_steps_with_whole_models_and_shards(rotary_model_folder, tmp_path):
    """All skip the step that is broken on one; a rank without advantages holds up no other."""
    ranks = run_on_ranks(take_steps, 3, rotary_model_folder, folder=tmp_path)
    expected = [outcome.name for *_, outcome in STEPS]
    for outcomes, weights, is_fresh, _ in (kind for rank in ranks for kind in rank):
        assert outcomes == expected and is_fresh and np.isfinite(weights[-1]).all()
    for kind in (0, 1):
        first = ranks[0][kind][1]
        for rank in ranks:
            assert all(map(np.array_equal, rank[kind][1], first))
        moved = [not np.array_equal(*pair) for pair in itertools.pairwise(first)]
        assert moved == [outcome is UPDATED for *_, outcome in STEPS]
    (_, whole, *_), (_, parts, *_) = ranks[0]
    assert distance(parts[-1], whole[-1]) <= 1e-5 and distance(whole[-1], whole[0]) > 1e-3
    num_bytes = {"weights": 4 / 3, "gradients": 4 / 3, "averages": 8 / 3}
    for _, (*_, measured) in ranks:
        assert measured == pytest.approx(num_bytes, rel=0.04)


def merged(folder: Path) -> dict[str, torch.Tensor]:
    """Whole tensors of all parts below a folder; counts of steps, which all parts have, once."""
    parts = [load_file(file) for file in sorted(folder.rglob("part-*"))]
    return {
        name: torch.cat([part[name] for part in parts]) if tensor.ndim > 0 else tensor
        for name, tensor in parts[0].items()
    }


def load_and_save(world: World, model: Path, folder: Path, again: Path) -> int:
    """Read a checkpoint of 2 ranks, and write it again as so many parts as there are ranks."""
    policy = make_policy(model, SHARD, world=world)
    optimizer = make_optimizer(policy.model, make_config().training)
    load_parts(folder, policy.model, optimizer, num_parts=2, rank=world.rank)
    return save_parts(policy.model, optimizer, again, world)


def test_a_run_goes_on_with_another_number_of_ranks(absolute_model_folder, tmp_path, data):
    """And with the same number bit for bit. Rank 1 finds a folder in its part's place, as on a full
    disk."""
    whole = tmp_path / "whole"
    keys = [*data, SHARD, "training.warmup_steps=0", "training.kl_coef=0.1"]
    keys += ["training.micro_batch_tokens=200"]  # several passes on each rank
    in_the_way = whole / "x/checkpoints/step-000001.parts.tmp/part-00001.safetensors"
    in_the_way.mkdir(parents=True)
    how = {"num_ranks": 2, "num_steps": 3, "rates": [0.1, 0.2, 0.3, 0.4]}  # the last is the best
    output = assert_resumes(tmp_path, absolute_model_folder, *keys, **how)
    assert "nothing saved at step 1" in output
    assert "1 of 2 ranks could not write their part" in output
    last = whole / "x/checkpoints/step-000003"
    assert checkpoint.is_whole(last)
    assert not list(last.glob("*.safetensors"))  # no rank has written the whole model

    weights = merged(last)
    assert any("exp_avg_sq" in name for name in weights)
    best = AutoModelForCausalLM.from_pretrained(whole / "x/best")
    assert best.dtype == torch.float32 and best.lm_head.weight is best.transformer.wte.weight
    assert all(torch.equal(p, weights[name]) for name, p in best.named_parameters())
    arguments = absolute_model_folder, last, tmp_path / "again"
    assert run_on_ranks(load_and_save, 3, *arguments, folder=tmp_path) == [0, 0, 0]
    again = merged(tmp_path / "again")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)
