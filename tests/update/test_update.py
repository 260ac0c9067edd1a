"""The law of the update: whatever is set, however it is computed, it equals the reference's.

The reference is in reference.py: plain formulas, row by row, from the same made-up rollouts.
"""

import functools
import sys
from itertools import compress, permutations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import reference
import torch
from harness import alone, make_policy, run_on_ranks, sample, seed, table
from one_pass import plain_logits
from reference import EASY, GRPO, HARD, LONG, config_of, make_groups, trained, update, weights_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import main
from engine.core.config import Config
from engine.core.distributed import World, order_ddp_buckets
from engine.model.policy import Policy
from engine.update import head
from engine.update.head import ChunkedScorer
from engine.update.optimizer import Outcome, make_optimizer
from main import pack

OPTIONS = table("update/options.yaml")
# How it is computed: ranks, model (absolute has a tied head), micro-batches, the head, keys
AT_ONCE, IN_BLOCKS = 2**40, 0  # engine.model.policy.MAX_LOGITS_BYTES
CHECKPOINTING, SHARD = "model.gradient_checkpointing=true", "model.shard=true"
WAYS = {
    "in several": (1, "rotary", 150, AT_ONCE, CHECKPOINTING),
    "one by one": (1, "absolute", reference.ONE_BY_ONE, IN_BLOCKS),
    "two ranks": (2, "rotary", 150, IN_BLOCKS),
    "two shards": (2, "absolute", reference.ALL_TOGETHER, AT_ONCE, SHARD),
    "three ranks": (3, "absolute", 45, AT_ONCE),
    "three shards": (3, "rotary", 150, IN_BLOCKS, SHARD, CHECKPOINTING),
}
RATE = 1.0  # of the steps between two passes
C = 4  # roundings of the largest logit that 16 bits may cost an update
# The groups of each rank. They make another number of micro-batches on each, and the third rank has
# nothing to train on, unless there is a reference; where truncated rows are skipped, they differ.
SHARES = {
    1: [[EASY, reference.NO_LESSON, HARD, LONG]],
    2: [[EASY], [reference.NO_LESSON, HARD, LONG]],
    3: [[EASY], [HARD, LONG], [reference.NO_LESSON]],
}


def groups_of(config: Config, num_ranks: int, rank: int) -> list[tuple]:
    cut = reference.TRUNCATED if config.training.skip_truncated else reference.NO_LESSON
    return [cut if group is reference.NO_LESSON else group for group in SHARES[num_ranks][rank]]


@pytest.fixture
def folders(rotary_model_folder, absolute_model_folder, teacher_folder) -> dict[str, Path]:
    models = {"rotary": rotary_model_folder, "absolute": absolute_model_folder}
    return models | {"teacher": teacher_folder}


def overrides_of(options: str, folders: dict[str, Path]) -> list[str]:
    """What a row of the table stands for."""
    keys = [key if "." in key.split("=")[0] else f"training.{key}" for key in options.split()]
    teacher = [f"model.teacher={folders['teacher']}"] if "distill" in options else []
    return [*GRPO, *keys, *teacher]


def moved_policy(folder: Path, *overrides: str, **how) -> Policy:
    """It has gone some way from its reference, and its adapter does something."""
    policy = make_policy(folder, *overrides, **how)
    with torch.no_grad():
        for parameter in trained(policy.model):
            parameter.mul_(0.9).add_(0.01)
    return policy


def compute(world: World, folders: dict, options: str, way: str, *more: str) -> tuple:
    """The policy that an update has moved by these options, what it recorded, and its metrics."""
    _, name, limit, max_bytes, *others = WAYS[way]
    overrides = [*overrides_of(OPTIONS[options], folders), f"training.micro_batch_tokens={limit}"]
    config = config_of(*overrides, *others)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.model.policy.MAX_LOGITS_BYTES", max_bytes)
        patch.setattr(head, "CPU_BLOCK_BYTES", 2**13)
        given = (*overrides, *others, *more)
        policy = moved_policy(folders[name], *given, world=world, is_exact=not more)
        for scorer in (policy.scorer, policy.reference):
            in_blocks = scorer and any(isinstance(m, ChunkedScorer) for m in scorer.modules())
            assert in_blocks in (None, max_bytes == IN_BLOCKS)
        recorder = reference.Recorder(policy.model, RATE)
        mine = make_groups(config, *groups_of(config, world.size, world.rank))
        metrics = update(policy, recorder, mine, config, world).metrics
    return policy, config, recorder, metrics


def compare(world: World, folders: dict, options: str, way: str) -> list[tuple] | None:
    """(gradients of all passes, metrics) of an update, and by the reference; for rank 0."""
    policy, config, recorder, metrics = compute(world, folders, options, way)
    assert np.array_equal(recorder.gradients[-1], world.broadcast(recorder.gradients[-1]))
    if not world.is_main:
        return None
    folder = folders[WAYS[way][1]]
    model = fp64_model(folder) if SHARD in WAYS[way] else policy.model.eval()
    expected = by_reference(model, recorder.weights, config, folder)
    return [(recorder.gradients, metrics), expected]


def fp64_model(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def by_reference(model: nn.Module, all_weights: list, config: Config, folder: Path) -> tuple:
    """(gradients, metrics) at the weights of each pass."""
    training = config.training
    groups = reference.reference_groups(config, *groups_of(config, 1, 0))
    gradients, old, ref = [], None, None
    batch = [t for group in groups for t in group if t.in_batch]
    if training.has_reference:
        scorer = fp64_model(config.model.teacher or folder)
        temperature = config.sampling.temperature
        with torch.no_grad():
            ref = [reference.row_log_probs(scorer, t, temperature=temperature) for t in batch]
    for weights in all_weights:
        nn.utils.vector_to_parameters(torch.from_numpy(weights), trained(model))
        gradient, loss, rows = reference.reference(model, groups, config, old=old, ref=ref)
        norm = np.linalg.norm(gradient)
        gradients.append(gradient * min(1.0, training.max_grad_norm / (norm + 1e-6)))
        old = old or rows
    # The metrics of the first pass are means over the tokens that are trained.
    is_trained = [
        (t.advantage != 0 or training.has_reference)
        and not (t.completion.truncated and training.skip_truncated)
        for t in batch
    ]
    sampler = [reference.sampler_log_probs(t) for t in batch]
    old, sampler = (torch.cat(list(compress(rows, is_trained))) for rows in (old, sampler))
    metrics = {"train/loss": loss, "train/grad_norm": norm}
    metrics["train/sampler_mismatch"] = (old - sampler).abs().mean().item()
    if training.has_reference:
        kl = old - torch.cat(list(compress(ref, is_trained)))
        kl = (-kl).exp() + kl - 1 if training.kl_coef else kl  # distillation logs log-ratios
        metrics["train/kl"] = kl.mean().item()
    return gradients, metrics


def check(options: str, way: str, found: tuple, expected: tuple) -> None:
    """That an update's gradients and metrics are the reference's, up to rounding."""
    (gradients, metrics), (expected_gradients, expected_metrics) = found, expected
    bound = reference.ROUNDING if WAYS[way][3] == IN_BLOCKS else reference.FP32_ROUNDING
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert reference.distance(one, other) <= bound, options
    is_clipped, is_penalized = (key in OPTIONS[options] for key in ("num_iterations", "kl_coef"))
    assert ("train/clip_frac" in metrics) == (is_clipped or is_penalized), options
    assert (metrics.pop("train/clip_frac", 0.0) > 0) == is_clipped, options
    assert metrics == pytest.approx(expected_metrics, rel=1e-6, abs=1e-6), options


# What meets other code in the other way: the head in blocks, rows without padding, a GPT-2
ONE_BY_ONE_TOO = ("grpo", "temperature", "skip, token", "kl, lora", "ppo, kl", "cispo", "dppo")
ONE_BY_ONE_TOO += ("distill", "distill, lora")
CASES = [(options, "in several") for options in OPTIONS]
CASES += [(options, "one by one") for options in ONE_BY_ONE_TOO]


@pytest.mark.parametrize(("options", "way"), CASES)
def test_an_update_equals_the_reference(folders, options, way):
    """In fp64; in 16 bits the first pass does, to C roundings of the largest logit; in a later one
    the rounding also decides which tokens are clipped."""
    found, expected = compare(alone(), folders, options, way)
    check(options, way, found, expected)
    if options == "dppo":  # masks tokens in its first pass, too
        return
    turn = ([*OPTIONS].index(options) + (way == "one by one")) % 2  # both heads in either dtype
    dtype = (torch.bfloat16, torch.float16)[turn]
    compute_dtype = f"model.compute_dtype={str(dtype).removeprefix('torch.')}"
    policy, config, recorder, metrics = compute(alone(), folders, options, way, compute_dtype)
    bound = C * torch.finfo(dtype).eps * largest_logit(folders[WAYS[way][1]])
    bound /= config.sampling.temperature
    assert reference.distance(recorder.gradients[0], expected[0][0]) <= bound
    names = {"train/sampler_mismatch", "train/kl"}  # of the first pass; the others of the last one
    names |= {"train/loss", "train/grad_norm"} if config.training.num_iterations == 1 else set()
    measured = {name: value for name, value in expected[1].items() if name in names}
    found = {name: metrics[name] for name in measured}
    assert found == pytest.approx(measured, rel=bound, abs=bound)
    assert {p.dtype for p in trained(policy.model)} == {torch.float32}


@functools.cache
def largest_logit(folder: Path) -> float:
    """Of all rows, in fp64."""
    model = moved_policy(folder, is_exact=True).model.eval()
    rows = [t for group in SHARES[1][0] for t in reference.make_group(*group)]
    logits = (plain_logits(model, t.prompt_ids, t.completion.token_ids) for t in rows)
    return max(some.abs().max().item() for some in logits)


class Bigram(nn.Embedding):
    """A model of the last token alone, which costs nothing."""

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=super().forward(input_ids))


def test_each_row_of_the_table_has_a_gradient_of_its_own(folders, monkeypatch):
    """Else an update that ignores it would pass. Here weights move by a tenth."""
    start, model = Bigram(345, 345, dtype=torch.double), Bigram(345, 345, dtype=torch.double)
    generator, gradients = torch.Generator().manual_seed(seed()), {}
    nn.init.normal_(start.weight, std=2.0, generator=generator)
    last = 0.9 * reference.flat(trained(start)) + 0.01
    monkeypatch.setattr(sys.modules[__name__], "fp64_model", lambda folder: start)
    for options in (name for name in OPTIONS if "lora" not in name):
        config = config_of(*overrides_of(OPTIONS[options], folders))
        weights = [0.9 * last] * (config.training.num_iterations - 1) + [last]
        gradients[options] = by_reference(model, weights, config, Path())[0][-1]
    for one, other in permutations(gradients, 2):
        assert reference.distance(gradients[one], gradients[other]) > 0.01, (one, other)


# Rows in which ranks have to agree: on denominators, the norm, rows that are left out, references
ON_TWO = ("grpo", "sequence", "sil, token", "a limited norm", "skip, token", "kl, lora")
ON_TWO += ("gspo, kl", "distill, mix")
ON_THREE = ("grpo", "token", "sil", "kl, skip", "ppo, kl", "skip", "skip, token")


def cases_of(num_ranks: int) -> list[tuple[str, str]]:
    """(row, way): by turns whole models and shards, into which no adapter is cut."""
    ways = [way for way, (ranks, *_) in WAYS.items() if ranks == num_ranks]
    names = ON_TWO if num_ranks == 2 else ON_THREE
    return [(name, ways["lora" not in name and i % 2]) for i, name in enumerate(names)]


def compare_all(world: World, folders: dict) -> list:
    return [compare(world, folders, *case) for case in cases_of(world.size)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_an_update_on_several_ranks_equals_the_reference(folders, tmp_path, num_ranks):
    results, *_ = run_on_ranks(compare_all, num_ranks, folders, folder=tmp_path, timeout_s=240)
    for case, numbers in zip(cases_of(num_ranks), results, strict=True):
        check(*case, *numbers)


def test_rows_share_a_micro_batch_as_long_as_they_fit():
    """In order of length: 3 x (3 + 4) would be above 16, 2 x (3 + 5) is not."""
    rows = reference.make_group(3, (4, 1, 5, 2), (0.0,) * 4)
    lengths = [[len(row.completion.token_ids) for row in batch] for batch in pack(rows, 16)]
    assert lengths == [[1, 2], [4, 5]]


def look_at_buckets(world: World, folder: Path) -> list[bool]:
    """Before each micro-batch of two passes: whether all gradients lie in DDP's buckets."""
    policy, in_buckets = make_policy(folder), []
    config = config_of(*GRPO, "training.num_iterations=2", "training.micro_batch_tokens=1")
    policy.scorer = DistributedDataParallel(policy.scorer, gradient_as_bucket_view=True)
    order_ddp_buckets(policy.scorer, world.device)

    def note(*_) -> None:
        """A gradient in a bucket shares its storage with others."""
        grads = [p.grad for p in trained(policy.model)]
        shared = [g is not None and g.untyped_storage().nbytes() > g.nbytes for g in grads]
        in_buckets.append(all(shared))

    policy.model.register_forward_pre_hook(note)
    update(policy, reference.Recorder(policy.model), make_groups(config, EASY, HARD), config)
    return in_buckets


def test_ddp_holds_gradients_once_in_its_buckets(rotary_model_folder, tmp_path):
    """Bug: gradients set to None were accumulated beside the buckets, which stayed allocated."""
    results = run_on_ranks(look_at_buckets, 1, rotary_model_folder, folder=tmp_path)
    assert results == [[True] * 16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_whatever_comes_of_an_update_the_sampler_has_its_weights(
    rotary_model_folder, monkeypatch, dtype
):
    """Bit for bit, in 16 bits; a pass may be broken behind one that has moved the weights.
    Bug: rows that skip_truncated takes out had weight 0, and AdamW still moved the weights."""
    compute_dtype = f"model.compute_dtype={str(dtype).removeprefix('torch.')}"
    options = [*GRPO, "training.skip_truncated=true", compute_dtype]
    policy = make_policy(rotary_model_folder, *options)
    config, accumulate = config_of(*options, "training.num_iterations=3"), main.accumulate_gradients
    optimizer, outcomes = make_optimizer(policy.model, config.training), []

    def accumulated(*given):
        loss = accumulate(*given)
        next(policy.model.parameters()).grad[next(broken_rows)] = torch.inf
        return loss

    monkeypatch.setattr(main, "accumulate_gradients", accumulated)
    cases = [(None, EASY), (0, EASY), (1, EASY), (2, EASY)]
    for broken, group in [*cases, (None, reference.EQUAL), (None, reference.TRUNCATED)]:
        broken_rows = iter([slice(i == broken) for i in range(3)])
        before = weights_of(policy)
        outcomes.append(update(policy, optimizer, make_groups(config, group), config).outcome)
        is_moved = not np.array_equal(before, weights_of(policy))
        assert is_moved == (group is EASY and broken != 0)
        sampler = policy.sampler.model
        pairs = zip(policy.model.parameters(), sampler.parameters(), strict=True)
        assert all(torch.equal(weight.to(dtype), copied) for weight, copied in pairs)
        # Bug: rotary frequencies were rounded too, and far positions had the wrong angle.
        pairs = zip(policy.model.buffers(), sampler.buffers(), strict=True)
        assert all(torch.equal(kept, copied) for kept, copied in pairs)
    failed = Outcome.OVERFLOWED if dtype == torch.float16 else Outcome.BROKEN
    assert outcomes == [Outcome.UPDATED, *[failed] * 3, *[Outcome.NOTHING_TO_TRAIN_ON] * 2]


def test_an_update_after_a_rollout_is_the_one_without(rotary_model_folder):
    """Sampling needs eval mode, in which gradient checkpointing is silently off."""
    length = f"training.max_new_gen_tokens={reference.MAX_NEW_TOKENS}"
    overrides = ["model.gradient_checkpointing=true", length]
    config, results = config_of(*GRPO), []
    for do_rollout in (False, True):
        policy = make_policy(rotary_model_folder, *overrides)
        passes, layer = [], policy.model.model.layers[0].mlp
        if do_rollout:
            sample(policy, [[5, 9, 30], [7] * 40], num_samples=4, temperature=1.3)
        layer.register_forward_pre_hook(lambda module, args, passes=passes: passes.append(1))
        gradient, metrics = reference.recorded(policy, make_groups(config, EASY, HARD), config)
        left = policy.model.config.to_dict(), policy.model.generation_config.to_dict()
        results.append((gradient.tolist(), metrics, left))
        assert len(passes) == 2  # forward, and once more in the backward pass
        assert {module.training for module in policy.model.modules()} == {True}
    assert results[0] == results[1]
