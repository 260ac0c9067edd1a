"""The optimizers: what they keep, and that a run with either goes on where it was."""

import pytest
import torch
from harness import assert_resumes, make_config, make_policy, read_rows, seed
from transformers import get_scheduler

from engine.model.policy import Policy
from engine.update.optimizer import learning_rate_at, make_optimizer, set_learning_rate


@pytest.mark.parametrize("num_warmup", [0, 7])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_after_the_warm_up_each_rate_is_that_of_transformers_one_step_earlier(schedule, num_warmup):
    """Bug: the decay ran from step 1 on, so that the default never had its whole learning rate."""
    num_steps = 10
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    theirs = get_scheduler(schedule, optimizer, num_warmup, num_steps)
    rates = []
    for _ in range(num_steps):
        rates += theirs.get_last_lr()
        optimizer.step()
        theirs.step()
    settings = [f"training.num_steps={num_steps}", "training.learning_rate=0.01"]
    settings += [f"training.lr_schedule={schedule}", f"training.warmup_steps={num_warmup}"]
    training = make_config(*settings).training
    ours = [learning_rate_at(step, training) for step in range(1, num_steps + 1)]
    rising = [0.01 * step / num_warmup for step in range(1, num_warmup + 1)]
    assert ours[:num_warmup] == pytest.approx(rising)
    assert ours[num_warmup:] == pytest.approx(rates[num_warmup:])
    assert all(rate > 0 for rate in ours)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon"])
def test_adamws_betas_and_eps_are_the_configs(rotary_model_folder, name):
    """Muon's own groups, which have neither a pair of betas nor this eps, are left out."""
    model, chosen = make_policy(rotary_model_folder).model, f"training.optimizer={name}"
    for overrides, betas, eps in (
        ([], (0.9, 0.999), 1e-8),
        (["training.adam_betas=[0.8, 0.95]", "training.adam_eps=1e-10"], (0.8, 0.95), 1e-10),
    ):
        optimizer = make_optimizer(model, make_config(chosen, *overrides).training)
        found = {(tuple(g["betas"]), g["eps"]) for g in optimizer.param_groups if "betas" in g}
        assert found == {(betas, eps)}
    weight = model.get_input_embeddings().weight
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    kinds = {getattr(value, "dtype", int) for value in optimizer.state[weight].values()}
    assert (torch.uint8 in kinds) == (name == "adamw_8bit")


# Muon for the matrices of the blocks, AdamW for all else

MUON = ["training.optimizer=muon", "training.learning_rate=1e-3"]
MUON += ["training.muon_learning_rate=2e-2", "training.embedding_learning_rate=5e-3"]


def step_with_muon(policy: Policy, *, learning_rate: float) -> dict[str, torch.Tensor]:
    """How one step moves each parameter, on random gradients."""
    generator = torch.Generator().manual_seed(seed())
    optimizer = make_optimizer(policy.model, make_config(*MUON).training)
    rate = [f"training.learning_rate={learning_rate}", "training.warmup_steps=0"]
    set_learning_rate(optimizer, 1, make_config(*MUON, *rate).training)
    parameters = dict(policy.model.named_parameters())
    before = {name: p.detach().clone() for name, p in parameters.items()}
    for p in parameters.values():
        noise = torch.randn(p.shape, generator=generator)
        p.grad = noise + 0.01 * noise.sign()  # far larger than AdamW's eps, everywhere
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in parameters.values())
    return {name: p.detach() - before[name] for name, p in parameters.items()}


def test_muon_steps_the_blocks_matrices_and_adamw_the_rest_each_at_its_rate(model_folder):
    """Singular values of Muon's first step are near its rate times sqrt(max(1, rows / columns))."""
    factor, moved = 0.25, step_with_muon(make_policy(model_folder), learning_rate=0.25e-3)
    in_blocks = [name for name in moved if ".layers." in name or ".h." in name]
    matrices = [name for name in in_blocks if moved[name].ndim == 2]
    assert len(matrices) in (2 * 7, 2 * 4) and len(matrices) < len(in_blocks) < len(moved)
    for name, move in moved.items():
        if name in matrices:
            rows, columns = move.shape
            sizes = torch.linalg.svdvals(move) / (factor * 2e-2 * max(1, rows / columns) ** 0.5)
            assert 0.5 < sizes.median() < 1.3 and sizes.max() < 1.4, name
        else:
            rate = 5e-3 if any(part in name for part in ("embed_tokens", "wte", "wpe")) else 1e-3
            assert torch.allclose(move.abs(), torch.tensor(factor * rate), rtol=1e-3), name


@pytest.mark.parametrize("optimizer", [[], MUON], ids=["adamw", "muon"])
def test_weight_decay_is_on_all_but_the_vectors(model_folder, optimizer):
    """And every weight is in the optimizer, once."""
    policy = make_policy(model_folder)
    config = make_config(*optimizer, "training.weight_decay=0.1")
    groups = make_optimizer(policy.model, config.training).param_groups
    decays = [(id(p), group["weight_decay"]) for group in groups for p in group["params"]]
    expected = [(id(p), 0.1 if p.ndim >= 2 else 0.0) for p in policy.model.parameters()]
    assert sorted(decays) == sorted(expected)


def test_a_run_in_two_parts_is_the_unbroken_one(tmp_path, rotary_model_folder, data):
    """On two ranks, of which rank 0 reads the checkpoint; the KL is to the model of the start."""
    settings = [*MUON, "training.kl_coef=0.5", *data]
    run = assert_resumes(tmp_path, rotary_model_folder, *settings, num_ranks=2)
    _, *rows = read_rows(run)
    assert [row["train/lr"] for row in rows] == pytest.approx([2e-4, 4e-4])  # they rise
    assert all(row["train/grad_norm"] > 0 for row in rows)  # else there would be no state to keep
    assert rows[1]["train/kl"] > 0
