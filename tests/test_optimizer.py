"""The optimizers: what they keep, and that a run with either goes on where it was."""

import sys

import pytest
import torch
from conftest import make_config, make_policy, run_on_ranks
from runs import assert_same, train

from distributed import World, tell_optimizer
from optimizer import make_optimizer


def test_adamw_8bit_moves_the_weights_as_adamw_does(rotary_model_folder):
    """Each step is near lr in size; averages of 8 bits may be off by a few percent."""
    moved = {}
    for name in ("adamw", "adamw_8bit"):
        policy = make_policy(rotary_model_folder)
        weight = policy.model.get_input_embeddings().weight
        before = weight.detach().clone()
        optimizer = make_optimizer(policy.model, make_config(f"training.optimizer={name}"))
        for seed in range(3):
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
            weight.grad = 0.5 + noise
            optimizer.step()
        moved[name] = (weight.detach() - before).flatten()
    assert moved["adamw"].abs().max() > 1e-4
    assert torch.corrcoef(torch.stack(list(moved.values())))[0, 1] > 0.99


def test_adamw_8bit_keeps_big_matrices_in_8_bits(rotary_model_folder):
    policy = make_policy(rotary_model_folder)
    optimizer = make_optimizer(policy.model, make_config("training.optimizer=adamw_8bit"))
    weight = policy.model.get_input_embeddings().weight
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert optimizer.state[weight]["state1"].dtype == torch.uint8
    assert weight.dtype == torch.float32


def test_a_run_with_adamw_8bit_in_two_parts_is_the_unbroken_one(tmp_path, rotary_model_folder):
    option, model = "training.optimizer=adamw_8bit", rotary_model_folder
    train(tmp_path / "whole", model, option, "training.num_steps=4")
    train(tmp_path / "parts", model, option, "training.num_steps=2")
    train(tmp_path / "parts", model, option, "training.num_steps=4")
    assert_same(tmp_path / "whole", tmp_path / "parts")


def told_state(world: World, folder, option: str) -> list[dict]:
    """The optimizer's state on this rank after rank 0, which alone has one, has told it."""
    policy = make_policy(folder)
    optimizer = make_optimizer(policy.model, make_config(option))
    if world.is_main:
        for parameter in policy.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
    tell_optimizer(world, optimizer)
    return [
        {name: torch.as_tensor(value).tolist() for name, value in optimizer.state[p].items()}
        for p in policy.model.parameters()
    ]


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_rank_0_tells_the_others_its_averages(rotary_model_folder, tmp_path, name):
    option = f"training.optimizer={name}"
    first, second = run_on_ranks(told_state, 2, rotary_model_folder, option, folder=tmp_path)
    assert first == second and all(first)


def test_a_missing_package_is_named(rotary_model_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    config = make_config("training.optimizer=adamw_8bit")
    with pytest.raises(ValueError, match="pip install bitsandbytes"):
        make_optimizer(make_policy(rotary_model_folder).model, config)
