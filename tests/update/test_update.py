"""The update: one gradient whatever the micro-batches and ranks, and no step where none is due.

What it should be is computed in reference.py, row by row, from the same made-up rollouts.
"""

import copy
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import alone, make_policy, make_run, run_on_ranks, seed
from hypothesis import given
from hypothesis import strategies as st
from reference import (
    ALL_TOGETHER,
    EASY,
    EQUAL,
    GRPO,
    HARD,
    IN_TWO,
    LONG,
    MAX_NEW_TOKENS,
    NORMALIZATIONS,
    ONE_BY_ONE,
    ROUNDING,
    SIL,
    TRUNCATED,
    Recorder,
    config_of,
    distance,
    make_group,
    make_groups,
    recorded,
    reference,
    reference_loss,
    row_log_probs,
    update,
)
from torch.nn.parallel import DistributedDataParallel

from engine.core.config import Config
from engine.core.distributed import World, order_ddp_buckets
from engine.core.statistics import Clock
from engine.core.types import Trajectory
from engine.model.policy import Policy
from engine.update.optimizer import make_optimizer
from main import pack, sample_trajectories

# Micro-batches

LENGTHS = st.tuples(st.integers(1, 50), st.integers(1, 50))  # of a prompt and its completion


def make_rows(*lengths: tuple[int, int]) -> list[Trajectory]:
    return [make_group(prompt, (completion,), (0.0,))[0] for prompt, completion in lengths]


@given(lengths=st.lists(LENGTHS, min_size=1, max_size=40), max_tokens=st.integers(1, 400))
def test_every_row_is_in_one_micro_batch_within_the_limit(lengths, max_tokens):
    """Rows x the longest (prompt + completion), as the batch is padded; a long row is alone."""
    rows = make_rows(*lengths)
    batches = list(pack(rows, max_tokens))
    assert sorted(id(row) for batch in batches for row in batch) == sorted(map(id, rows))
    for batch in batches:
        longest = max(len(row.prompt_ids + row.completion.token_ids) for row in batch)
        assert len(batch) * longest <= max_tokens or len(batch) == 1


def test_rows_share_a_micro_batch_as_long_as_they_fit():
    """In order of length: 3 x (3 + 4) would be above 16, 2 x (3 + 5) is not."""
    rows = make_rows((3, 4), (3, 1), (3, 5), (3, 2))
    lengths = [[len(row.completion.token_ids) for row in batch] for batch in pack(rows, 16)]
    assert lengths == [[1, 2], [4, 5]]


def test_the_limits_make_one_two_and_eight_micro_batches():
    """The tests below use these limits."""
    rows = [t for group in (EASY, HARD) for t in make_group(*group)]
    limits = {ALL_TOGETHER: [8], IN_TWO: [5, 3], ONE_BY_ONE: [1] * 8}
    for limit, sizes in limits.items():
        assert [len(batch) for batch in pack(rows, limit)] == sizes


# The gradient is that of the whole batch


def made_of(overrides: list[str], *groups: tuple) -> tuple[list[list[Trajectory]], Config]:
    config = config_of(*overrides)
    return make_groups(config, *groups), config


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("learning", [GRPO, SIL], ids=["grpo", "sil"])
def test_the_gradient_does_not_depend_on_the_micro_batch_size(
    model_folder, learning, normalization
):
    """The rows of an equal group teach nothing, but the sum is divided by all rows."""
    policy = make_policy(model_folder, is_exact=True)
    overrides = [*learning, f"training.loss_normalization={normalization}"]
    without, _ = reference(policy.model, *made_of(overrides, EASY, HARD))
    for limit in (ALL_TOGETHER, IN_TWO, ONE_BY_ONE):
        limited = [*overrides, f"training.micro_batch_tokens={limit}"]
        groups, config = made_of(limited, EASY, EQUAL, HARD)
        expected, loss = reference(policy.model, groups, config)
        assert distance(without, expected) > 0.1
        gradient, metrics = recorded(policy, groups, config)
        assert distance(gradient, expected) <= ROUNDING
        assert metrics["train/loss"] == pytest.approx(loss, rel=1e-6, abs=1e-6)
        assert metrics["train/grad_norm"] == pytest.approx(np.linalg.norm(expected), rel=1e-5)


def test_the_gradient_is_that_of_the_distribution_that_was_sampled(rotary_model_folder):
    """At temperature 0.7 it is that of softmax(logits / 0.7)."""
    policy = make_policy(rotary_model_folder, "sampling.temperature=0.7", is_exact=True)
    config, at_1 = config_of(*GRPO, "sampling.temperature=0.7"), config_of(*GRPO)
    groups = make_groups(config, EASY, HARD)
    expected, loss = reference(policy.model, groups, config)
    gradient, metrics = recorded(policy, groups, config)
    assert distance(gradient, expected) <= ROUNDING
    assert metrics["train/loss"] == pytest.approx(loss, rel=1e-6, abs=1e-6)
    assert distance(reference(policy.model, groups, at_1)[0], expected) > 0.1


def gradients_on_this_rank(world: World, folder: Path) -> dict:
    """(gradient, loss) of EASY on rank 0 and HARD on rank 1, for every kind of loss."""
    policy = make_policy(folder, world=world, is_exact=True)
    results = {}
    for learning in (GRPO, SIL):
        for normalization in NORMALIZATIONS:
            for limit in (ALL_TOGETHER, 45, ONE_BY_ONE):  # 45: 1 batch on rank 0, 2 on rank 1
                overrides = [*learning, f"training.loss_normalization={normalization}"]
                config = config_of(*overrides, f"training.micro_batch_tokens={limit}")
                groups = make_groups(config, (EASY, HARD)[world.rank])
                gradient, metrics = recorded(policy, groups, config, world)
                results[(*overrides, limit)] = gradient, metrics["train/loss"]
    return results


def test_the_gradient_does_not_depend_on_the_number_of_ranks(rotary_model_folder, tmp_path):
    ranks = run_on_ranks(gradients_on_this_rank, 2, rotary_model_folder, folder=tmp_path)
    model = make_policy(rotary_model_folder, is_exact=True).model
    assert len(ranks[0]) == 24
    for key, (gradient, loss) in ranks[0].items():
        config = config_of(*key[:-1])
        expected, expected_loss = reference(model, make_groups(config, EASY, HARD), config)
        assert distance(gradient, expected) <= ROUNDING, key
        assert loss == pytest.approx(expected_loss, rel=1e-6, abs=1e-6)
        assert np.array_equal(ranks[1][key][0], gradient) and ranks[1][key][1] == loss


def updates_of_unlike_ranks(world: World, folder: Path) -> tuple[list[np.ndarray], float]:
    """Gradients of three iterations, and the last loss; rank 1 has six micro-batches, rank 0 one.

    Rank 0 has one short group, rank 1 has three, some of them longer, in smaller micro-batches.
    """
    policy = make_policy(folder, world=world, is_exact=True)
    limit = (ALL_TOGETHER, 45)[world.rank]
    overrides = ["training.num_iterations=3", f"training.micro_batch_tokens={limit}"]
    config = config_of(*GRPO, *overrides)
    groups = make_groups(config, *([EASY], [HARD, EQUAL, LONG])[world.rank])
    rows = [t for group in groups for t in group if t.advantage]
    assert len(list(pack(rows, limit))) == (1, 6)[world.rank]
    recorder = Recorder(policy.model, rate=1.0)
    metrics, _, _ = update(policy, recorder, groups, config, world)
    return recorder.gradients, metrics["train/loss"]


def test_a_rank_with_more_and_longer_rows_holds_up_no_other(rotary_model_folder, tmp_path):
    """Each rank has its own number of micro-batches, and all meet once an iteration."""
    first, second = run_on_ranks(
        updates_of_unlike_ranks, 2, rotary_model_folder, folder=tmp_path, timeout_s=60
    )
    assert len(first[0]) == len(second[0]) == 3 and first[1] == second[1]
    assert all(np.array_equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    config, model = config_of(*GRPO), make_policy(rotary_model_folder, is_exact=True).model
    expected, _ = reference(model, make_groups(config, EASY, HARD, EQUAL, LONG), config)
    assert distance(first[0][0], expected) <= ROUNDING
    assert distance(first[0][1], expected) > 1e-3


# Which rows and tokens are in it


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_truncated_rows_can_be_skipped_but_stay_in_the_counts(rotary_model_folder, normalization):
    policy = make_policy(rotary_model_folder, is_exact=True)
    overrides = [*GRPO, f"training.loss_normalization={normalization}"]
    config = config_of(*overrides, "training.skip_truncated=true")
    groups = make_groups(config, EASY, HARD)
    assert sum(t.completion.truncated for group in groups for t in group) == 2
    gradient, _ = recorded(policy, groups, config)
    assert distance(gradient, reference(policy.model, groups, config)[0]) <= ROUNDING
    with_them, _ = recorded(policy, groups, config_of(*overrides))
    assert distance(gradient, with_them) > 0.01


def test_the_end_token_is_trained(rotary_model_folder):
    """A row of two tokens among longer ones: its gradient is that of one token and the end."""
    policy, config = make_policy(rotary_model_folder, is_exact=True), config_of(*GRPO)
    groups = make_groups(config, EASY)
    for t in groups[0]:
        t.advantage = float(len(t.completion.token_ids) == 2)
    gradient, _ = recorded(policy, groups, config)
    (row,) = [t for t in groups[0] if t.advantage]
    expected = []
    for part in (slice(None), slice(1, None)):
        policy.model.zero_grad()
        (-row_log_probs(policy.model, row)[part].sum() / (4 * MAX_NEW_TOKENS)).backward()
        expected.append(torch.cat([p.grad.flatten() for p in policy.model.parameters()]).numpy())
    whole, end = expected
    assert distance(gradient, whole) <= ROUNDING
    assert np.linalg.norm(end) > 0.1 * np.linalg.norm(whole)


def test_the_gradient_is_clipped_after_its_norm_is_noted(rotary_model_folder):
    policy, config = make_policy(rotary_model_folder, is_exact=True), config_of(*GRPO)
    groups = make_groups(config, EASY, HARD)
    expected, _ = reference(policy.model, groups, config)
    clipped = config_of(*GRPO, "training.max_grad_norm=1e-3")
    gradient, metrics = recorded(policy, groups, clipped)
    assert metrics["train/grad_norm"] == pytest.approx(np.linalg.norm(expected), rel=1e-5)
    assert np.linalg.norm(gradient) == pytest.approx(1e-3, rel=1e-3)
    assert distance(gradient * np.linalg.norm(expected) / 1e-3, expected) < 1e-3


# Several iterations on the same rollouts


@pytest.mark.parametrize("policy_loss", ["ppo", "cispo", "gspo"])
def test_later_iterations_follow_the_clipped_ratio_on_one_rollout(rotary_model_folder, policy_loss):
    """The first iteration is REINFORCE; the others compare with the log-probabilities of its pass.

    Bug of this test: where every completion was clipped in the third pass, both gradients were 0.
    So one completion is there twice, with an advantage above 0 and with one below: however its
    ratio moves, the clip leaves one of the two its gradient.
    """
    overrides = [*GRPO, f"training.micro_batch_tokens={IN_TWO}", "training.num_iterations=3"]
    overrides += [f"training.policy_loss={policy_loss}"]
    overrides += ["training.clip_eps=0.02"] if policy_loss == "gspo" else []
    config, rate = config_of(*overrides), 5.0
    policy = make_policy(rotary_model_folder, is_exact=True)
    groups = make_groups(config, EASY, HARD)
    falls, rises, *_ = groups[1]
    assert falls.advantage < -0.5 and rises.advantage > 0.5
    rises.completion = copy.deepcopy(falls.completion)
    before = copy.deepcopy(groups)
    model, recorder = copy.deepcopy(policy.model), Recorder(policy.model, rate)
    metrics, sums, _ = update(policy, recorder, groups, config)

    batch = [t for group in groups for t in group]
    old = [row_log_probs(model, t).detach() for t in batch]
    plain = Recorder(model, rate)
    for iteration in range(3):
        plain.zero_grad()
        loss = reference_loss(model, groups, config, old=old if iteration else None)
        loss.backward()
        plain.step()
    assert len(recorder.gradients) == 3
    assert distance(recorder.gradients[0], plain.gradients[0]) <= ROUNDING
    assert distance(recorder.gradients[1], plain.gradients[1]) <= 1e-3  # weights differ a little
    assert distance(recorder.gradients[2], plain.gradients[2]) <= 1e-3
    assert distance(plain.gradients[1], plain.gradients[0]) > 0.1  # so that it is a test
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-4)
    num_clipped, num_tokens = sums["train/clip_frac"]
    assert num_clipped > 0 and num_tokens > 0
    for t, was in zip(batch, [t for group in before for t in group], strict=True):
        assert t.completion.token_ids == was.completion.token_ids  # nothing was sampled again


def test_dppo_compares_with_the_sampler_in_every_pass_the_first_too(rotary_model_folder):
    """Row by row: the sampler's log-probabilities differ from those of the first pass."""
    overrides = [*GRPO, f"training.micro_batch_tokens={IN_TWO}", "training.num_iterations=2"]
    config = config_of(*overrides, "training.policy_loss=dppo", "training.dppo_delta=0.001")
    policy, rate = make_policy(rotary_model_folder, is_exact=True), 5.0
    groups = make_groups(config, EASY, HARD)
    model, recorder = copy.deepcopy(policy.model), Recorder(policy.model, rate)
    _, sums, _ = update(policy, recorder, groups, config)
    batch, plain, num_masked = [t for group in groups for t in group], Recorder(model, rate), []
    for _ in range(2):
        plain.zero_grad()
        loss, num_masked = torch.zeros((), dtype=torch.float64), [*num_masked, 0]
        for t in batch:
            for log_prob, sampler in zip(
                row_log_probs(model, t), t.completion.log_probs.tolist(), strict=True
            ):
                moved = math.exp(log_prob.item()) - math.exp(sampler)
                if abs(moved) > 0.001 and t.advantage * moved > 0:
                    num_masked[-1] += 1
                else:
                    ratio = (log_prob - sampler).exp()
                    loss = loss - t.advantage * ratio / (len(batch) * MAX_NEW_TOKENS)
        loss.backward()
        plain.step()
    assert distance(recorder.gradients[0], plain.gradients[0]) <= ROUNDING
    assert distance(recorder.gradients[1], plain.gradients[1]) <= 1e-3  # weights differ a little
    assert 0 < num_masked[0] < 45 and sums["train/clip_frac"].tolist() == [sum(num_masked), 90]


def test_one_iteration_clips_nothing_and_compares_sampler_and_trainer(rotary_model_folder):
    policy, config = make_policy(rotary_model_folder, is_exact=True), config_of(*GRPO)
    groups = make_groups(config, EASY, HARD)
    _, sums, _ = update(policy, Recorder(policy.model), groups, config)
    rows = [t for group in groups for t in group]
    differences = [
        row_log_probs(policy.model, t).detach().numpy() - t.completion.log_probs for t in rows
    ]
    total, count = sums["train/sampler_mismatch"]
    assert count == 45
    assert total == pytest.approx(np.abs(np.concatenate(differences)).sum(), rel=1e-5)
    assert "train/clip_frac" not in sums


def test_tokens_are_weighed_by_the_truncated_importance_ratio(rotary_model_folder):
    """The ratio is that of the first pass: what sampled the batch does not change later."""
    clip, rate = 1.5, 5.0
    config = config_of(*GRPO, f"training.tis_clip={clip}", "training.num_iterations=2")
    policy = make_policy(rotary_model_folder, is_exact=True)
    groups = make_groups(config, EASY, HARD)
    batch = [t for group in groups for t in group]
    with torch.no_grad():  # sampled by a policy that differs a little
        for t in batch:
            rng = np.random.default_rng([seed(), len(t.prompt_ids)])
            noise = rng.normal(0, 1, len(t.completion.token_ids))
            t.completion.log_probs[:] = row_log_probs(policy.model, t).numpy() + noise
    model, recorder = copy.deepcopy(policy.model), Recorder(policy.model, rate)
    update(policy, recorder, groups, config)

    plain, old, ratios = Recorder(model, rate), [], []
    for t in batch:
        old.append(row_log_probs(model, t).detach())
        ratios.append((old[-1] - torch.from_numpy(t.completion.log_probs)).exp().clamp(max=clip))
    assert any((ratio == clip).any() for ratio in ratios)
    assert any((ratio < 0.8).any() for ratio in ratios)
    for iteration in range(2):
        plain.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for t, was, ratio in zip(batch, old, ratios, strict=True):
            log_probs = row_log_probs(model, t)
            objective = t.advantage * log_probs
            if iteration:
                moved = (log_probs - was).exp()
                objective = torch.minimum(moved * t.advantage, moved.clamp(0.8, 1.2) * t.advantage)
            loss = loss - (ratio * objective).double().sum() / (len(batch) * MAX_NEW_TOKENS)
        loss.backward()
        plain.step()
    assert distance(recorder.gradients[0], plain.gradients[0]) <= ROUNDING
    assert distance(recorder.gradients[1], plain.gradients[1]) <= 1e-3


def accumulate_in_ddp(world: World, folder: Path) -> tuple[list[bool], np.ndarray]:
    """Whether gradients are in buckets, after settling, in an update and after it; and its own."""
    policy, in_update = make_policy(folder, is_exact=True), []
    config = config_of(*GRPO, f"training.micro_batch_tokens={ONE_BY_ONE}")
    policy.scorer = DistributedDataParallel(policy.scorer, gradient_as_bucket_view=True)
    order_ddp_buckets(policy.scorer, world.device)
    in_buckets, parameters = has_gradients_in_buckets(policy), [*policy.model.parameters()]
    note = lambda *_: in_update.append(all(is_in_bucket(p.grad) for p in parameters))  # noqa: E731
    with policy.model.register_forward_pre_hook(note):
        gradient, _ = recorded(policy, make_groups(config, EASY, HARD), config)
    assert len(in_update) == 8  # micro-batches
    return [in_buckets, all(in_update), has_gradients_in_buckets(policy)], gradient


def is_in_bucket(gradient: torch.Tensor | None) -> bool:
    """Whether it shares its storage with others."""
    return gradient is not None and gradient.untyped_storage().nbytes() > gradient.nbytes


def has_gradients_in_buckets(policy: Policy) -> bool:
    """Whether a backward pass without a sum over the ranks writes into shared storages."""
    ids = torch.tensor([[5, 9, 30]])
    with policy.scorer.no_sync():
        log_probs = policy.scorer(ids, ids > 0, temperature=1.0)
        log_probs.sum().backward()
    gradients = [p.grad for p in policy.model.parameters()]
    assert all(gradient.any() for gradient in gradients)
    return all(map(is_in_bucket, gradients))


def test_ddp_holds_gradients_once_in_its_buckets(rotary_model_folder, tmp_path):
    """Bug: gradients set to None were accumulated beside the buckets, which stayed allocated."""
    ((in_buckets, gradient),) = run_on_ranks(
        accumulate_in_ddp, 1, rotary_model_folder, folder=tmp_path
    )
    assert in_buckets == [True, True, True]
    policy, config = make_policy(rotary_model_folder, is_exact=True), config_of(*GRPO)
    expected, _ = reference(policy.model, make_groups(config, EASY, HARD), config)
    assert distance(gradient, expected) <= ROUNDING


# Nothing to learn


def weights_of(policy: Policy) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()]).numpy().copy()


def weights_after_updates(world: World, folder: Path, *batches: list[tuple], options=()) -> list:
    """(weights, metrics, skipped, sums) after an AdamW update on each of this rank's batches."""
    policy = make_policy(folder, world=world, is_exact=True)
    config = config_of(*GRPO, *options)
    optimizer = make_optimizer(policy.model, config.training)
    results = []
    for batch in batches:
        groups = make_groups(config, batch[world.rank])
        metrics, sums, skipped = update(policy, optimizer, groups, config, world)
        results.append((weights_of(policy), metrics, skipped, sums))
    return results


def check_that_only_the_first_update_moves_weights(results: list, folder: Path) -> None:
    first, second = results
    assert not np.array_equal(first[0], weights_of(make_policy(folder, is_exact=True)))
    assert np.array_equal(first[0], second[0])
    assert second[1:3] == ({}, False)


@pytest.mark.parametrize(
    ("group", "options"),
    [(EQUAL, []), (TRUNCATED, ["training.skip_truncated=true"])],
    ids=["equal rewards", "truncated rows that are skipped"],
)
def test_no_advantage_means_no_optimizer_step(rotary_model_folder, group, options):
    """AdamW would go on along its averages, even with a gradient of zero.

    Bug: rows that skip_truncated takes out had weight 0, and AdamW still moved the weights.
    """
    batches = [EASY], [group]
    results = weights_after_updates(alone(), rotary_model_folder, *batches, options=options)
    check_that_only_the_first_update_moves_weights(results, rotary_model_folder)


def test_ranks_without_advantages_neither_hang_nor_diverge(rotary_model_folder, tmp_path):
    """First rank 1 has none, then both, then rank 0: the gradient is always that of all rows.

    Bug: the row that rank 1 sends without a lesson was counted in the metrics.
    """
    batches = [[EASY, EQUAL], [EQUAL, EQUAL], [EQUAL, HARD]]
    arguments = (rotary_model_folder, *batches)
    first, second = run_on_ranks(weights_after_updates, 2, *arguments, folder=tmp_path)
    for mine, others in zip(first, second, strict=True):
        assert np.array_equal(mine[0], others[0])
        assert mine[1:3] == others[1:3]
    counts = [rank[0][3]["train/sampler_mismatch"][1] for rank in (first, second)]
    assert counts == [5 + 7 + 2 + 6, 0]
    check_that_only_the_first_update_moves_weights(first[:2], rotary_model_folder)
    assert not np.array_equal(first[1][0], first[2][0])
    policy, config = make_policy(rotary_model_folder, is_exact=True), config_of(*GRPO)
    expected, loss = reference(policy.model, make_groups(config, EASY, EQUAL), config)
    assert first[0][1]["train/loss"] == pytest.approx(loss, rel=1e-6, abs=1e-6)
    assert first[0][1]["train/grad_norm"] == pytest.approx(np.linalg.norm(expected), rel=1e-5)


# What a rollout leaves behind, and an update


def test_the_copy_that_samples_has_the_weights_of_each_update(rotary_model_folder):
    """Else a model in 16 bits would sample from its first weights to the end of the run."""
    policy = make_policy(rotary_model_folder, "model.compute_dtype=bfloat16")
    config = config_of(*GRPO)
    update(policy, Recorder(policy.model, rate=1.0), make_groups(config, EASY), config)
    pairs = list(zip(policy.model.parameters(), policy.sampler.model.parameters(), strict=True))
    assert all(torch.equal(weight.bfloat16(), copied) for weight, copied in pairs)
    before = make_policy(rotary_model_folder).model.parameters()
    assert not all(torch.equal(old, new) for old, (new, _) in zip(before, pairs, strict=True))


@pytest.mark.parametrize("backend", ["grouped", "generate"])
def test_an_update_after_a_rollout_is_the_one_without(rotary_model_folder, backend):
    """Sampling needs eval mode, in which gradient checkpointing is silently off."""
    overrides = ["model.gradient_checkpointing=true", f"sampling.backend={backend}"]
    overrides += [f"training.max_new_gen_tokens={MAX_NEW_TOKENS}"]
    config, results = config_of(*GRPO), []
    for do_rollout in (False, True):
        policy = make_policy(rotary_model_folder, *overrides)
        passes, layer = [], policy.model.model.layers[0].mlp
        if do_rollout:
            sample_some(policy, config)
        layer.register_forward_pre_hook(lambda module, args, passes=passes: passes.append(1))
        gradient, metrics = recorded(policy, make_groups(config, EASY, HARD), config)
        left = {
            "passes": len(passes),
            "training": {module.training for module in policy.model.modules()},
            "dtypes": {p.dtype for p in policy.model.parameters()},
            "trainable": {p.requires_grad for p in policy.model.parameters()},
            "attention": policy.model.config._attn_implementation,
            "config": policy.model.config.to_dict(),
            "generation": policy.model.generation_config.to_dict(),
        }
        results.append((gradient.tolist(), metrics, left))
    assert results[0] == results[1]
    assert left["passes"] == 2  # forward, and once more in the backward pass
    assert left["training"] == left["trainable"] == {True}
    assert left["dtypes"] == {torch.float32} and left["attention"] == "sdpa"


def sample_some(policy: Policy, config: Config) -> None:
    """Trajectories of two questions, as a step or an evaluation samples them."""
    groups = sample_trajectories(
        make_run(policy, config),
        [{"nums": [3], "target": 3}, {"nums": [3] * 20, "target": 4}],
        [(seed(), 1), (seed(), 2)],
        replace(policy.params, temperature=1.3, group_size=4),
        Clock(),
    )
    assert [len(group) for group in groups] == [4, 4]


# A gradient that is not finite


def broken_update(world: World, folder: Path, value: float, where: str) -> tuple:
    """Weights before and after an update in which a value of rank 1 is not finite."""
    policy, config = make_policy(folder, world=world), config_of(*GRPO)
    optimizer = make_optimizer(policy.model, config.training)
    groups = make_groups(config, (EASY, HARD)[world.rank])
    if world.rank == 1:
        if where == "advantage":
            groups[0][1].advantage = value
        else:
            groups[0][1].completion.log_probs[2] = value
    before = weights_of(policy)
    _, _, skipped = update(policy, optimizer, groups, config, world)
    after = weights_of(policy)
    assert all(p.grad is None or not p.grad.any() for p in policy.model.parameters())
    good = make_groups(config, (EASY, HARD)[world.rank])
    _, _, skipped_again = update(policy, optimizer, good, config, world)
    return before, after, skipped, skipped_again, weights_of(policy)


@pytest.mark.parametrize(
    ("value", "where"),
    [(math.nan, "advantage"), (math.inf, "advantage"), (math.nan, "sampled log-probability")],
)
def test_all_ranks_skip_the_step_that_is_broken_on_one(rotary_model_folder, tmp_path, value, where):
    arguments = (rotary_model_folder, value, where)
    for before, after, skipped, skipped_again, later in run_on_ranks(
        broken_update, 2, *arguments, folder=tmp_path
    ):
        assert skipped and np.array_equal(before, after)
        assert not skipped_again and not np.array_equal(after, later) and np.isfinite(later).all()
