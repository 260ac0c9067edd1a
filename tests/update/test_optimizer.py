"""The optimizers: what they keep, and that a run with either goes on where it was."""

import re

import pytest
import torch
from harness import assert_resumes, make_config, make_policy, read_rows
from transformers import get_scheduler

from engine.update.optimizer import learning_rate_at, make_optimizer


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


MUON = ["training.optimizer=muon", "training.learning_rate=1e-3"]
MUON += ["training.muon_learning_rate=2e-2", "training.embedding_learning_rate=5e-3"]


def test_muon_has_the_blocks_matrices_and_adamw_the_rest(model_folder):
    """Embeddings stand apart, with the head where it shares their weights."""
    model, kinds = make_policy(model_folder).model, {}
    for name, p in model.named_parameters():
        kind = "embedding" if re.search("embed_tokens|wte|wpe", name) else "other"
        kinds[id(p)] = "matrix" if p.ndim == 2 and re.search(r"\.(layers|h)\.", name) else kind
    groups = make_optimizer(model, make_config(*MUON).training).param_groups
    found = [sorted(kinds.pop(id(p)) for p in group["params"]) for group in groups]
    *others, embeddings, matrices = ({*some} for some in found)
    assert (embeddings, matrices) == ({"embedding"}, {"matrix"}) and kinds == {}
    assert {"embedding", "matrix"}.isdisjoint({*others[0], *others[-1]})


@pytest.mark.timeout(240)
def test_a_run_in_two_parts_is_the_unbroken_one(tmp_path, rotary_model_folder, data):
    """On three ranks, of which rank 0 reads the checkpoint; the KL is to the model of the start.
    DDP reorders gradients after the first backward pass; sums of three then round otherwise."""
    settings = [*MUON, "training.kl_coef=0.5", *data]
    assert_resumes(tmp_path, rotary_model_folder, *settings, num_ranks=3)
    _, *rows = read_rows(tmp_path / "parts/x")
    assert [row["train/lr"] for row in rows] == pytest.approx([2e-4, 4e-4])  # they rise
    assert all(row["train/grad_norm"] > 0 for row in rows)  # else there would be no state to keep
    assert rows[1]["train/kl"] > 0
