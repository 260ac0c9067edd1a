"""The KL penalty in the update: its gradient, the rows it is for, and that it is free when off."""

import copy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import assert_resumes, make_policy, read_rows, run_on_ranks, seed
from reference import (
    ALL_TOGETHER,
    EASY,
    EQUAL,
    GRPO,
    HARD,
    IN_TWO,
    MAX_NEW_TOKENS,
    NORMALIZATIONS,
    ONE_BY_ONE,
    ROUNDING,
    SIL,
    TRUNCATED,
    Recorder,
    config_of,
    distance,
    make_groups,
    recorded,
    reference,
    reference_loss,
    row_log_probs,
    update,
)
from torch import nn
from transformers import AutoModelForCausalLM

from engine.core.distributed import World
from engine.model.policy import Policy
from engine.update.head import ChunkedScorer
from main import CompletionScorer, make_micro_batches

KL = "training.kl_coef=0.5"


def make_moved_policy(folder: Path, *, world: World | None = None) -> Policy:
    """A policy that has gone some way from its reference, the same one each time."""
    policy = make_policy(folder, KL, world=world, is_exact=True)
    generator = torch.Generator().manual_seed(seed())
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return policy


def ref_log_probs(folder: Path, groups) -> list[torch.Tensor]:
    """What the model in the folder gives each row of the batch, one at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    batch = [t for group in groups for t in group if t.in_batch]
    return [row_log_probs(model, t).detach() for t in batch]


def mean_kl(model: torch.nn.Module, groups, ref: list[torch.Tensor]) -> float:
    """Mean over the batch's tokens."""
    batch = [t for group in groups for t in group if t.in_batch]
    log_ratios = [r - row_log_probs(model, t).detach() for t, r in zip(batch, ref, strict=True)]
    return torch.cat([x.exp() - x - 1 for x in log_ratios]).mean().item()


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("learning", [GRPO, SIL], ids=["grpo", "sil"])
def test_the_gradient_is_that_of_all_rows_in_any_micro_batches(
    model_folder, learning, normalization
):
    """Rows whose advantage is 0 have a penalty too; rows that sil dropped have none."""
    policy = make_moved_policy(model_folder)
    overrides = [*learning, KL, f"training.loss_normalization={normalization}"]
    groups = make_groups(config_of(*overrides), EASY, EQUAL, HARD)
    ref = ref_log_probs(model_folder, groups)
    expected, loss = reference(policy.model, groups, config_of(*overrides), ref)
    without, _ = reference(policy.model, groups, config_of(*overrides))
    assert distance(without, expected) > 0.1
    for limit in (ALL_TOGETHER, IN_TWO, ONE_BY_ONE):
        config = config_of(*overrides, f"training.micro_batch_tokens={limit}")
        recorder = Recorder(policy.model)
        metrics, sums, _ = update(policy, recorder, groups, config)
        assert distance(recorder.gradients[0], expected) <= ROUNDING
        assert metrics["train/loss"] == pytest.approx(loss, rel=1e-6, abs=1e-6)
        total, count = sums["train/kl"]
        assert count == sum(len(row) for row in ref)
        assert total / count == pytest.approx(mean_kl(policy.model, groups, ref), rel=1e-5)


IDLE = [*GRPO, KL, "training.skip_truncated=true"]


def update_of_an_idle_rank(world: World, folder: Path) -> tuple:
    """Gradient, loss, sum and count of the KL; rank 1 has nothing to train on."""
    policy, config = make_moved_policy(folder, world=world), config_of(*IDLE)
    recorder, groups = Recorder(policy.model), make_groups(config, (EASY, TRUNCATED)[world.rank])
    metrics, sums, _ = update(policy, recorder, groups, config, world)
    return recorder.gradients[0], metrics["train/loss"], sums["train/kl"].tolist()


def test_the_gradient_does_not_depend_on_the_number_of_ranks(rotary_model_folder, tmp_path):
    """The row that a rank without a lesson sends must weigh nothing."""
    first, second = run_on_ranks(update_of_an_idle_rank, 2, rotary_model_folder, folder=tmp_path)
    model, config = make_moved_policy(rotary_model_folder).model, config_of(*IDLE)
    groups = make_groups(config, EASY, TRUNCATED)
    expected, loss = reference(model, groups, config, ref_log_probs(rotary_model_folder, groups))
    assert distance(first[0], expected) <= ROUNDING and np.array_equal(first[0], second[0])
    assert first[1] == second[1] == pytest.approx(loss, rel=1e-6, abs=1e-6)
    assert second[2] == [0, 0]


def test_the_row_of_a_rank_without_a_lesson_weighs_nothing():
    """Its advantage is 0, but it has a penalty. The other rank has four rows of 20 tokens."""
    config = config_of(*IDLE)
    others = lambda counts: torch.tensor(counts) + torch.tensor([4, 20, 4])  # noqa: E731
    world = SimpleNamespace(size=2, device=torch.device("cpu"), sum=others)
    (batch,) = make_micro_batches(make_groups(config, TRUNCATED), config.training, world)
    assert len(batch.trajectories) == 1 and batch.completion_mask.any()
    assert not batch.token_weights.any()


def test_the_reference_scores_a_batch_once_for_all_iterations(rotary_model_folder):
    overrides = [*GRPO, KL, f"training.micro_batch_tokens={IN_TWO}"]
    config, rate = config_of(*overrides, "training.num_iterations=3"), 1.0
    policy = make_moved_policy(rotary_model_folder)
    groups = make_groups(config, EASY, HARD)
    model, recorder, passes = copy.deepcopy(policy.model), Recorder(policy.model, rate), []
    policy.reference.register_forward_hook(lambda *args: passes.append(torch.is_grad_enabled()))
    before = [p.clone() for p in policy.reference.parameters()]
    _, sums, _ = update(policy, recorder, groups, config)
    assert passes == [False, False]
    assert all(map(torch.equal, before, policy.reference.parameters()))
    assert not any(p.requires_grad for p in policy.reference.parameters())

    ref, plain = ref_log_probs(rotary_model_folder, groups), Recorder(model, rate)
    old = [row_log_probs(model, t).detach() for group in groups for t in group]
    first_kl = mean_kl(model, groups, ref)
    for iteration in range(3):
        plain.zero_grad()
        reference_loss(model, groups, config, old=old if iteration else None, ref=ref).backward()
        plain.step()
    assert distance(recorder.gradients[0], plain.gradients[0]) <= ROUNDING
    assert distance(recorder.gradients[2], plain.gradients[2]) <= 1e-3  # weights differ a little
    assert distance(plain.gradients[2], plain.gradients[0]) > 0.01
    total, count = sums["train/kl"]
    assert total / count == pytest.approx(first_kl, rel=1e-5)


def test_a_batch_without_advantages_is_drawn_back_to_the_reference(rotary_model_folder):
    """The KL changes as the slope says between equal steps along the gradient and against it.

    Bugs of this test: one step alone was too long for the curvature, by 1.8% for one seed of many,
    and then too short for the rounding of the model's norms, which are in fp32, by 2.9%.
    """
    policy, config = make_moved_policy(rotary_model_folder), config_of(*GRPO, KL)
    groups, rate = make_groups(config, EQUAL), 1e-4
    ref = ref_log_probs(rotary_model_folder, groups)
    before = mean_kl(policy.model, groups, ref)
    recorder = Recorder(policy.model, rate=rate)
    update(policy, recorder, groups, config)
    below, (gradient,) = mean_kl(policy.model, groups, ref), recorder.gradients
    with torch.no_grad():
        weights = nn.utils.parameters_to_vector(policy.model.parameters())
        weights += 2 * rate * torch.from_numpy(gradient)
        nn.utils.vector_to_parameters(weights, policy.model.parameters())
    above, num_tokens = mean_kl(policy.model, groups, ref), sum(map(len, ref))
    slope = np.sum(gradient**2) * 4 * MAX_NEW_TOKENS / (0.5 * num_tokens)
    assert below < before < above
    assert above - below == pytest.approx(2 * rate * slope, rel=0.01)


def test_a_reference_scores_in_blocks_where_the_policy_does(rotary_model_folder, monkeypatch):
    """The gradient is that of scorers which make all logits at once."""
    config, gradients = config_of(*GRPO, KL), []
    for limit in (0, 2**40):
        monkeypatch.setattr("engine.model.policy.MAX_LOGITS_BYTES", limit)
        policy = make_moved_policy(rotary_model_folder)
        kind = CompletionScorer if limit else ChunkedScorer
        assert type(policy.scorer) is type(policy.reference) is kind
        gradients.append(recorded(policy, make_groups(config, EASY, EQUAL, HARD), config)[0])
    assert distance(*gradients) <= ROUNDING


def test_a_resumed_run_is_held_near_the_model_that_it_started_from(
    tmp_path, rotary_model_folder, data
):
    """The reference is made before the checkpoint is loaded, not of the checkpoint."""
    run = assert_resumes(tmp_path, rotary_model_folder, KL, "training.learning_rate=0.01", *data)
    assert all(row["train/kl"] > 0 for row in read_rows(run)[2:])


def test_without_a_penalty_there_is_no_reference_and_no_metric(rotary_model_folder):
    policy, config = make_policy(rotary_model_folder), config_of(*GRPO)
    assert policy.reference is None
    _, sums, _ = update(policy, Recorder(policy.model), make_groups(config, EASY), config)
    assert "train/kl" not in sums
