"""Sampling: what is drawn is what is scored, whatever the batch, the hub's defaults, the end."""

import contextlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import harness
import numpy as np
import pytest
import torch
from graphs import Graph, install_graphs
from harness import (
    CPU,
    ROOT,
    SIZES,
    listener,
    load_rows,
    loop_of,
    make_config,
    make_policy,
    peak_bytes,
    save_random,
    seed,
)
from reference import score
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    Qwen2Config,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.core.distributed import init_world
from engine.core.tensors import left_pad, right_pad
from engine.core.types import Completion, PromptBatch, SamplingParams
from engine.model.policy import Policy
from engine.model.probes import supports_grouped
from engine.model.sampler import copy_in
from engine.questions.prompts import encode_prompts
from engine.questions.tasks import load_task
from engine.sampling.batches import (
    decode_bytes_per_row,
    decode_in_batches,
    kept_bytes,
    tokens_that_fit,
)
from engine.sampling.cache import ReservedColumns, grown_length
from engine.sampling.draw import draw_uniforms, invert_cdf, keep_likeliest, sample_tokens
from engine.sampling.graphs import CapturedSteps
from engine.sampling.grouped import DecodeBatch, decode_grouped
from engine.update.head import ChunkedScorer
from main import CompletionScorer, get_generation_config

RAGGED = [[5, 9, 30], [40, 41, 42, 43, 44, 45, 46, 47, 48], [7], [60, 5, 61, 5, 62]]
SEEDS = [(seed(), 0, i) for i in range(len(RAGGED))]
BELOW_ONE = 1 - 2**-24  # the largest number below 1 in fp32
PLAIN = SamplingParams(12, 1.0, top_p=1.0, top_k=0, eos_ids=(0,), pad_id=1, group_size=1)
MANY_EOS = tuple(range(0, 345, 8))  # about one token in eight ends a completion
BACKENDS = ("grouped", "generate")
SHORT = {"num_samples": 4, "max_new_tokens": 12, "max_batch_tokens": 10**6}

each_backend = pytest.mark.parametrize("backend", BACKENDS)


def sample(
    policy: Policy,
    prompts: list[list[int]] = RAGGED,
    seeds: list[tuple[int, ...]] = SEEDS,
    **changes,
) -> list[list[Completion]]:
    """Completions of the prompts: 4 of at most 12 tokens each, unless `changes` say otherwise."""
    return harness.sample(policy, prompts, seeds, **(SHORT | changes))


def token_ids(groups: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def assert_equal(groups: list[list[Completion]], others: list[list[Completion]]) -> None:
    """The same tokens and, to the rounding of fp32, the same numbers."""
    assert token_ids(groups) == token_ids(others)
    for group, other in zip(groups, others, strict=True):
        for c, d in zip(group, other, strict=True):
            assert c.truncated == d.truncated
            assert np.allclose([c.log_probs, c.entropies], [d.log_probs, d.entropies], atol=1e-5)


@torch.no_grad()
def full_log_probs(model: torch.nn.Module, ids: list[int], temperature: float) -> torch.Tensor:
    """log softmax(logits / temperature) after each of `ids`, (T, V): no cache, no padding."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return (logits / temperature).log_softmax(dim=-1)


# The sampled distribution is the scored one


@pytest.fixture
def poisoned_folder(model_folder: Path, tmp_path: Path) -> Path:
    """The model with a generation_config that makes sampling greedy and forbids half the tokens."""
    folder = shutil.copytree(model_folder, tmp_path / "poisoned")
    GenerationConfig(
        do_sample=True,
        temperature=0.1,
        top_k=1,
        repetition_penalty=1.3,
        min_p=0.3,
        suppress_tokens=list(range(2, 345, 2)),  # a field that nobody thinks of
        eos_token_id=0,
    ).save_pretrained(folder)
    assert json.loads((folder / "generation_config.json").read_text())["top_k"] == 1
    return folder


@each_backend
def test_the_hubs_generation_config_does_not_leak_into_sampling(poisoned_folder, backend):
    """Samples of one question differ, and the trainer scores each token as it was drawn.

    To 1e-4: log-probabilities of fp32, down to -20, differ by the rounding of some 100 operations.
    """
    policy = make_policy(poisoned_folder, f"sampling.backend={backend}")
    assert loop_of(policy) == backend
    for temperature in (0.7, 1.0, 1.3):
        groups = sample(policy, temperature=temperature)
        for prompt_ids, group in zip(RAGGED, groups, strict=True):
            assert len({tuple(c.token_ids) for c in group}) == len(group)
            for completion in group:
                rows = [prompt_ids], [completion.token_ids]
                scored, mask = score(policy, *rows, temperature=temperature)
                difference = scored[mask].detach().numpy() - completion.log_probs
                assert np.abs(difference).max() <= 1e-4


@each_backend
def test_backends_draw_each_first_token_as_often_as_its_probability_says(poisoned_folder, backend):
    """The ten likeliest tokens and the rest, each within five standard errors."""
    policy = make_policy(poisoned_folder, f"sampling.backend={backend}")
    num_samples = 4000
    changes = {"num_samples": num_samples, "max_new_tokens": 1, "temperature": 1.3}
    (group,) = sample(policy, RAGGED[:1], SEEDS[:1], **changes)
    counts = Counter(c.token_ids[0] for c in group)
    expected = full_log_probs(policy.model, RAGGED[0], 1.3)[-1].exp() * num_samples
    likeliest = expected.topk(10).indices.tolist()
    seen = [counts[token] for token in likeliest]
    wanted = expected[likeliest].tolist()
    seen, wanted = [*seen, num_samples - sum(seen)], [*wanted, num_samples - sum(wanted)]
    assert min(wanted) > 20  # so that counts are nearly normal
    for count, mean in zip(seen, wanted, strict=True):
        standard_error = math.sqrt(mean * (1 - mean / num_samples))
        assert abs(count - mean) < 5 * standard_error


def test_generation_config_sets_every_field_that_changes_the_distribution():
    """A field left None would be filled from the model's own generation config."""
    params = replace(PLAIN, max_new_tokens=7, temperature=0.7, top_p=0.9, top_k=20, eos_ids=(3, 4))
    config = get_generation_config(replace(params, group_size=2))
    expected = {
        "do_sample": True,
        "temperature": 0.7,  # with the next two: for benchmarks, which call plain `generate`
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.0,
        "typical_p": 1.0,
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
        "max_new_tokens": 7,
        "num_return_sequences": 2,
        "eos_token_id": [3, 4],
    }
    assert {name: getattr(config, name) for name in expected} == expected


# Backend `grouped` against a plain loop, and against itself in other batches


def test_grouped_decoding_equals_a_plain_loop_without_cache_padding_or_batch(model_folder):
    """Each token is the one that its uniform number draws from the full forward's distribution.

    Its thresholds are sums of 345 probabilities, each of which fp32 rounds by up to 2**-24 of the
    sum. Log-probabilities and entropies differ as above.
    """
    policy = make_policy(model_folder)
    assert loop_of(policy) == "grouped"  # a model that the probe refuses would be sampled otherwise
    groups = sample(policy, temperature=1.2, eos_ids=MANY_EOS, num_samples=16)
    num_dropped = 0
    for prompt_ids, words, group in zip(RAGGED, SEEDS, groups, strict=True):
        uniforms = draw_uniforms([words], replace(PLAIN, group_size=16))
        for completion, row_uniforms in zip(group, uniforms, strict=True):
            ids = list(prompt_ids)
            for t, uniform in enumerate(row_uniforms):
                log_probs = full_log_probs(policy.model, ids, 1.2)[-1]
                token = completion.token_ids[t]
                cdf = log_probs.double().exp().cumsum(0)
                assert cdf[token] - log_probs[token].exp() <= uniform + 345 * 2**-24
                assert uniform <= cdf[token] + 345 * 2**-24
                assert completion.log_probs[t] == pytest.approx(log_probs[token].item(), abs=1e-4)
                entropy = -(log_probs.exp() * log_probs).sum().item()
                assert completion.entropies[t] == pytest.approx(entropy, abs=1e-4)
                ids.append(token)
                if token in MANY_EOS:
                    break
            assert ids == prompt_ids + completion.token_ids
            num_dropped += not completion.truncated
    # rows did leave the batch on the way: about four in five of 64, as one token in 8 is an end
    assert num_dropped > 6


@each_backend
def test_a_question_gets_the_same_completions_in_every_batch(model_folder, backend):
    policy = make_policy(model_folder, f"sampling.backend={backend}", is_exact=True)
    together = token_ids(sample(policy, eos_ids=MANY_EOS))
    assert token_ids(sample(policy, eos_ids=MANY_EOS, max_batch_tokens=1)) == together
    assert token_ids(sample(policy, eos_ids=MANY_EOS, max_batch_tokens=150)) == together
    turned = token_ids(sample(policy, RAGGED[::-1], SEEDS[::-1], eos_ids=MANY_EOS))
    assert turned[::-1] == together
    fewer = token_ids(sample(policy, eos_ids=MANY_EOS, num_samples=1))
    assert fewer == [group[:1] for group in together]
    for i, (prompt_ids, words) in enumerate(zip(RAGGED, SEEDS, strict=True)):
        assert token_ids(sample(policy, [prompt_ids], [words], eos_ids=MANY_EOS)) == [together[i]]


def test_both_backends_draw_the_same_tokens_and_score_them_alike(model_folder):
    policy = make_policy(model_folder, is_exact=True)
    for changes in ({"temperature": 1.2}, {"top_p": 0.9, "top_k": 50}, {"temperature": 0.0}):
        grouped, generated = (
            sample(policy, backend=backend, eos_ids=MANY_EOS, **changes) for backend in BACKENDS
        )
        assert_equal(grouped, generated)


def test_the_trained_model_samples_itself_so_that_only_rounding_differs():
    """In fp32 the sampler's log-probabilities are the trainer's: the same weights and formula.

    A cache in place of whole rows rounds otherwise, as README and docs/comparison.md say.
    """
    policy, task = make_policy(ROOT / "tiny"), load_task("countdown")
    questions = load_rows(task, "generated", "train", 8)
    prompts = encode_prompts(
        questions, task=task, options=make_config().task, tokenizer=policy.tokenizer
    )
    groups = harness.sample(policy, prompts, num_samples=16, max_new_tokens=320)
    rows = [(ids, c) for ids, group in zip(prompts, groups, strict=True) for c in group]
    token_ids = right_pad([ids + c.token_ids for ids, c in rows], 0)
    log_probs = right_pad([[0.0] * len(ids) + c.log_probs.tolist() for ids, c in rows], 0.0)
    mask = right_pad([[False] * len(ids) + [True] * len(c.token_ids) for ids, c in rows], False)
    with torch.no_grad():
        scored = policy.scorer(token_ids, mask, temperature=1.0)
    difference = (scored - log_probs).abs()[mask]
    print(f"{len(difference)} tokens: {difference.mean():.1e} on average, {difference.max():.1e}")
    assert len(difference) > 2000 and difference.mean() < 1e-5 and difference.max() < 2e-4


@pytest.fixture
def graphs(monkeypatch) -> None:
    """This machine has no CUDA graphs: others take their place, see graphs.py."""
    install_graphs(monkeypatch)


def test_replayed_steps_draw_the_same_tokens(model_folder, graphs):
    """In a replay rows leave late, attention sees columns that are masked out, no Python runs."""
    policy = make_policy(model_folder, is_exact=True)
    prompts, seeds = [*RAGGED, list(range(2, 240))], [*SEEDS, (seed(), 0, 99)]
    settings = {"eos_ids": tuple(range(0, 345, 20)), "max_new_tokens": 40, "num_samples": 16}
    plain = sample(policy, prompts, seeds, **settings)
    lengths = [len(c.token_ids) for group in plain for c in group]
    assert min(lengths) < 16 and max(lengths) > 256 - 238  # attention leaps, and rows leave
    replayed = sample(policy, prompts, seeds, backend="captured", **settings)
    assert Graph.num_captures > 1
    assert_equal(replayed, plain)


def test_a_step_that_waits_for_a_value_is_refused_before_any_capture(rotary_model_folder, graphs):
    """Bug: torch does not clean up after a failed capture, and soon runs out of memory."""
    model = make_policy(rotary_model_folder).sampler.model.eval()
    model.lm_head.register_forward_hook(lambda module, args, logits: logits + logits.max().item())
    assert supports_grouped(model)
    assert not supports_grouped(model, CapturedSteps)
    assert Graph.num_captures == 0
    assert torch.cuda.get_sync_debug_mode() == 0  # put back


def test_a_capture_that_fails_leaves_no_stream_behind(rotary_model_folder, graphs, monkeypatch):
    """Bug: torch stayed on the stream of the capture, on which nothing else waits for it."""
    stream = ["default"]

    def fail(graph, capture_error_mode: str) -> None:
        stream[0] = "the capture's"
        raise RuntimeError("operation not permitted when stream is capturing")

    class OnStream(contextlib.nullcontext):
        def __exit__(self, *error):
            stream[0] = self.enter_result

    monkeypatch.setattr(torch.cuda, "graph", fail)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream[0])
    monkeypatch.setattr(torch.cuda, "stream", OnStream)
    model = make_policy(rotary_model_folder).sampler.model
    assert not supports_grouped(model, CapturedSteps)
    assert stream == ["default"]


def test_full_memory_is_not_taken_for_a_cache_that_cannot_be_shared(
    rotary_model_folder, monkeypatch
):
    """Bug: the run went on with the slow backend, and failed later."""

    def fill_memory(*arguments) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(DecodeBatch, "step", fill_memory)
    with pytest.raises(torch.OutOfMemoryError):
        make_policy(rotary_model_folder)


def test_a_step_that_would_not_replay_is_not_captured(rotary_model_folder, graphs, monkeypatch):
    """A graph that repeats its first step's result is found out by the probe."""
    monkeypatch.setattr(CapturedSteps, "capture", lambda steps, num_columns: lambda: None)
    assert not supports_grouped(make_policy(rotary_model_folder).sampler.model, CapturedSteps)


@each_backend
def test_temperature_0_takes_the_likeliest_tokens_and_scores_them_at_1(model_folder, backend):
    """Whatever the seed, and though top-p would leave several tokens to draw from.

    In the first round no token is an end, so that all completions are cut off. In the second the
    fourth token of each completion is one.
    """
    policy = make_policy(model_folder, f"sampling.backend={backend}", is_exact=True)
    settings = {"num_samples": 1, "temperature": 0.0, "top_p": 0.9}
    others = [(seed(), 1, i) for i in range(len(RAGGED))]
    eos_ids, is_cut_off = (), True
    for _ in range(2):
        groups = sample(policy, eos_ids=eos_ids, **settings)
        for prompt_ids, (completion,) in zip(RAGGED, groups, strict=True):
            ids = list(prompt_ids)
            for token, log_prob in zip(completion.token_ids, completion.log_probs, strict=True):
                expected = full_log_probs(policy.model, ids, 1.0)[-1]
                assert token == int(expected.argmax())
                # kept in fp32, in which log-probabilities down to -20 are rounded by 1e-6
                assert log_prob == pytest.approx(expected[token].item(), abs=1e-4)
                ids.append(token)
            assert completion.truncated == is_cut_off
            assert len(completion.token_ids) == 12 if is_cut_off else ids[-1] in eos_ids
        other_groups = sample(policy, seeds=others, eos_ids=eos_ids, **settings)
        assert token_ids(other_groups) == token_ids(groups)
        if is_cut_off:
            eos_ids, is_cut_off = tuple({c.token_ids[3] for (c,) in groups}), False


def test_of_tokens_that_are_equally_likely_the_greedy_one_is_the_first():
    """Softmax of ln (1, 3, 3, 1) is (1, 3, 3, 1) / 8."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0], [3.0, 1.0, 1.0, 3.0]]).log()
    uniforms = torch.tensor([0.99, 0.99])
    tokens, log_probs, entropies = sample_tokens(logits, uniforms, replace(PLAIN, temperature=0.0))
    assert tokens.tolist() == [1, 0]
    assert log_probs.tolist() == pytest.approx([math.log(3 / 8)] * 2)
    expected = 0.75 * math.log(8 / 3) + 0.25 * math.log(8)
    assert entropies.tolist() == pytest.approx([expected] * 2)


@each_backend
def test_two_equal_questions_with_different_seeds_get_different_samples(
    rotary_model_folder, backend
):
    policy = make_policy(rotary_model_folder, f"sampling.backend={backend}")
    first, second = token_ids(sample(policy, [[5, 9], [5, 9]], [(seed(), 0, 1), (seed(), 0, 2)]))
    assert all(a != b for a in first for b in second)


@each_backend
def test_sampling_depends_on_no_random_state_and_leaves_it_alone(rotary_model_folder, backend):
    policy = make_policy(rotary_model_folder, f"sampling.backend={backend}")
    torch.manual_seed(seed(1))
    first, after = token_ids(sample(policy)), torch.rand(())
    torch.manual_seed(seed(2))
    assert token_ids(sample(policy)) == first
    torch.manual_seed(seed(1))
    assert torch.rand(()) == after


@each_backend
def test_progress_counts_every_completion(rotary_model_folder, backend):
    """Bug: the bar stood at 0 until a batch had ended; the default backend counts within it."""
    policy = make_policy(rotary_model_folder, f"sampling.backend={backend}")
    for max_batch_tokens in (70, 10**6):
        done: list[int] = []
        settings = {"max_batch_tokens": max_batch_tokens, "on_progress": done.append}
        groups = sample(policy, eos_ids=MANY_EOS, **settings)
        assert sum(done) == 4 * 4 and min(done) >= 0
    if backend == "grouped":  # in one batch: after each token those that it ended
        lengths = sorted(len(c.token_ids) for group in groups for c in group)
        assert [n for n in done if n > 0] == list(Counter(lengths).values())


@each_backend
@pytest.mark.parametrize("pad_id", [1, 8], ids=["pad is not eos", "pad is eos"])
def test_a_completion_ends_with_its_first_eos_or_at_the_limit(rotary_model_folder, backend, pad_id):
    policy = make_policy(rotary_model_folder, f"sampling.backend={backend}")
    changes = {"num_samples": 100, "max_new_tokens": 6, "eos_ids": MANY_EOS, "pad_id": pad_id}
    rows = [completion for group in sample(policy, **changes) for completion in group]
    for completion in rows:
        ends = [token in MANY_EOS for token in completion.token_ids]
        assert not any(ends[:-1])
        assert completion.truncated == (not ends[-1])
        assert len(ends) == 6 or ends[-1]
        assert len(completion.log_probs) == len(completion.entropies) == len(ends)
        assert (completion.log_probs < 0).all()
    seen = {(len(c.token_ids) == 6, c.truncated) for c in rows}
    # an EOS exactly at the limit is an end too; about one in fifteen of 400 completions has one
    assert seen == {(True, True), (True, False), (False, False)}
    assert len({c.token_ids[-1] for c in rows if not c.truncated}) > 1


# Drawing one token


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_extreme_uniforms_never_draw_a_token_of_probability_zero(temperature):
    generator = torch.Generator().manual_seed(seed())
    logits = torch.randn((64, 1000), generator=generator) * 5
    logits[:, :3] = -math.inf
    logits[:, -3:] = -math.inf
    for uniform, first_tokens in ((0.0, {3}), (BELOW_ONE, None)):
        params = replace(PLAIN, temperature=temperature)
        tokens, log_probs, _ = sample_tokens(logits, torch.full((64,), uniform), params)
        assert log_probs.isfinite().all()
        assert first_tokens is None or set(tokens.tolist()) == first_tokens


class CountWhole(TorchDispatchMode):
    """Counts the tensors of one shape that are made, each in at least one pass over all of it."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.count += isinstance(result, torch.Tensor) and result.shape == self.shape
        return result


@pytest.mark.parametrize(("temperature", "num_whole"), [(0.7, 4), (1.0, 3)])
def test_a_draw_makes_few_tensors_of_all_logits(temperature, num_whole):
    """p, log p, p log p, and if it is not 1 the logits over the temperature.

    Bug: a second exponential, xlogy, a cumulative sum and a mask for broken rows, of which there
    are none, took four times as long.
    """
    logits = torch.randn((64, 1000), generator=torch.Generator().manual_seed(seed())) * 3
    with CountWhole(logits.shape) as counter:
        sample_tokens(logits, torch.rand(64), replace(PLAIN, temperature=temperature))
    assert counter.count == num_whole


@pytest.mark.parametrize("num_logits", [3, 255, 256, 257, 554, 5000])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_draw_is_that_of_the_plain_formulas_in_double_precision(num_logits, temperature):
    """The token whose part of the cumulative sum holds the uniform, to rounding; some have no part.

    A sum of n numbers in fp32 is off by up to 2**-24 of it per addition; of one part that is 1e-5.
    """
    generator = torch.Generator().manual_seed(seed() + num_logits)
    logits = torch.randn((200, num_logits), generator=generator) * 5 + 20
    logits[:, 1::7] = -math.inf
    uniforms = torch.rand(200, generator=generator)
    drawn = sample_tokens(logits, uniforms, replace(PLAIN, temperature=temperature))
    log_probs = (logits.double() / temperature).log_softmax(dim=-1)
    tokens = drawn[0][:, None]
    upper = log_probs.exp().cumsum(dim=-1).gather(1, tokens)
    lower = upper - log_probs.exp().gather(1, tokens)
    assert ((lower - 1e-5 < uniforms[:, None]) & (uniforms[:, None] < upper + 1e-5)).all()
    entropies = -torch.special.xlogy(log_probs.exp(), log_probs.exp()).sum(dim=-1)
    assert torch.allclose(drawn[1].double(), log_probs.gather(1, tokens)[:, 0], atol=1e-5)
    assert torch.allclose(drawn[2].double(), entropies, atol=2e-5)


def test_a_certain_token_is_drawn_by_any_uniform_and_has_no_entropy():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf]]).expand(2, 3)
    drawn = sample_tokens(logits, torch.tensor([0.0, BELOW_ONE]), PLAIN)
    assert [numbers.tolist() for numbers in drawn] == [[1, 1], [0, 0], [0, 0]]


def test_a_cumulative_sum_that_falls_draws_no_token_of_mass_0(monkeypatch):
    """Made up, as a GPU may round: the sum rises where no mass is, and falls after it."""
    probs = torch.tensor([[0.4, 0.0, 0.05, 0.0, 0.55]])
    cdf = torch.tensor([[0.4, 0.46, 0.45, 0.44, 1.0]])
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda weights, dim: cdf)
    found = {
        uniform: invert_cdf(probs, torch.tensor([uniform]))[0].item()
        for uniform in (0.0, 0.39, 0.42, 0.455, 0.5, BELOW_ONE)
    }
    assert found == {0.0: 0, 0.39: 0, 0.42: 4, 0.455: 4, 0.5: 4, BELOW_ONE: 4}


def test_the_rest_of_a_uniform_is_a_uniform_again():
    """The sums of blocks round: the second block of mass 5 seems to begin at 8 below its end."""
    index, rest = invert_cdf(torch.tensor([[1e8, 5.0]]), torch.tensor([BELOW_ONE]))
    assert (index.item(), rest.item()) == (1, 0.0)


def test_log_probs_and_entropies_are_those_of_the_whole_distribution_at_the_temperature():
    """(1/2, 1/4, 1/4): 1.5 ln 2 nats. At temperature 1/2 it is (4, 1, 1) / 6."""
    logits = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).log()
    uniforms = torch.tensor([0.0])
    _, log_probs, entropies = sample_tokens(logits, uniforms, replace(PLAIN, top_p=0.4, top_k=1))
    assert log_probs.item() == pytest.approx(-math.log(2))  # though nothing else can be drawn
    assert entropies.item() == pytest.approx(1.5 * math.log(2))
    _, log_probs, entropies = sample_tokens(logits, uniforms, replace(PLAIN, temperature=0.5))
    assert log_probs.item() == pytest.approx(math.log(4 / 6))
    assert entropies.item() == pytest.approx(math.log(6) - 4 / 6 * math.log(4))


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, [0.1, 0.4, 0.2, 0.3]),
        (1, 1.0, [0.0, 0.4, 0.0, 0.0]),
        (3, 1.0, [0.0, 0.4, 0.2, 0.3]),
        (0, 0.01, [0.0, 0.4, 0.0, 0.0]),  # never nothing
        (0, 0.41, [0.0, 0.4, 0.0, 0.3]),
        (0, 0.71, [0.0, 0.4, 0.2, 0.3]),
        (0, 0.91, [0.1, 0.4, 0.2, 0.3]),
        (2, 0.56, [0.0, 0.4, 0.0, 0.0]),  # 0.4 of 0.7 is a share of 0.57
        (2, 0.58, [0.0, 0.4, 0.0, 0.3]),
    ],
)
def test_top_k_and_top_p_keep_the_likeliest(top_k, top_p, kept):
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    assert keep_likeliest(probs, top_p=top_p, top_k=top_k).tolist() == torch.tensor([kept]).tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize(("top_k", "top_p"), [(10, 1.0), (50, 0.8), (10, 0.8)])
def test_truncated_sampling_draws_from_what_transformers_keeps(temperature, top_k, top_p):
    """Of 10,000 evenly spaced uniforms each token gets its share, to one of them."""
    logits = torch.randn((1, 50), generator=torch.Generator().manual_seed(seed()))
    warpers = TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)
    expected = 10_000 * LogitsProcessorList(warpers)(None, logits).softmax(dim=-1)[0]
    uniforms = (torch.arange(10_000) + 0.5) / 10_000
    params = replace(PLAIN, temperature=temperature, top_k=top_k, top_p=top_p)
    tokens, _, _ = sample_tokens(logits.expand(10_000, -1), uniforms, params)
    counts = torch.bincount(tokens, minlength=50)
    assert torch.equal(counts > 0, expected > 0)
    assert ((counts - expected).abs() < 1.1).all()


# Logits that are not finite


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_of_broken_logits_gets_a_log_probability_of_nan_and_harms_no_other(value):
    """Bug: the draw was out of range, which raised, and on a GPU ended the process."""
    logits = torch.randn((3, 50), generator=torch.Generator().manual_seed(seed()))
    uniforms = torch.tensor([0.2, 0.5, 0.9])
    expected = sample_tokens(logits, uniforms, PLAIN)
    broken = logits.clone()
    broken[1, 7] = value
    results = sample_tokens(broken, uniforms, PLAIN)
    for result, whole in zip(results, expected, strict=True):
        assert torch.equal(result[[0, 2]], whole[[0, 2]])
    tokens, log_probs, entropies = results
    assert tokens[1] == 0.5 * 50 and log_probs[1].isnan()  # all tokens are alike
    assert entropies[1].item() == pytest.approx(math.log(50))


@each_backend
def test_finite_logits_may_overflow_at_a_low_temperature(rotary_model_folder, backend):
    """Bug: 3e38 / 0.7 is infinite, which was checked before the division: the draw raised."""
    policy = make_policy(rotary_model_folder, f"sampling.backend={backend}")
    with torch.no_grad():
        policy.model.lm_head.weight *= 1e37
    assert policy.model(torch.tensor([RAGGED[0]])).logits.isfinite().all()
    completions = [c for group in sample(policy, temperature=0.01) for c in group]
    assert len(completions) == 4 * len(RAGGED) and all(c.is_broken for c in completions)
    assert all(0 <= token < 345 for c in completions for token in c.token_ids)


# Memory


def peak_of_decoding(model, *, num_rows: int, max_new_tokens: int, eos_ids: tuple) -> float:
    """Bytes a row, all rows of one question."""
    params = replace(PLAIN, max_new_tokens=max_new_tokens, eos_ids=eos_ids, group_size=num_rows)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        decode_grouped(model, [[5, 9, 30]], [(seed(), 0)], params, on_progress=lambda num: None)
    return peak_bytes(profiler) / num_rows


def test_the_cache_grows_as_long_as_rows_stay_and_within_the_limit(model_folder, monkeypatch):
    """Bug: there was room for the longest completion of every row from the start.

    The limit holds if all rows stay to the end, with 64 bytes a token for records and the like. If
    rows leave early, at least half of the cache is never taken.
    """
    monkeypatch.setattr("engine.sampling.cache.GROWTH", 16)
    model = make_policy(model_folder).sampler.model.eval()
    sizes = {"num_rows": 64, "max_new_tokens": 128}
    config, num_tokens = model.config, 3 + 128
    heads = config.num_attention_heads
    shares_keys = getattr(config, "num_key_value_heads", heads) < heads
    if shares_keys and not hasattr(sdpa_attention, "pack_gqa"):
        pytest.skip("transformers before 5.23 repeats shared keys in each layer: not in the limit")
    cached, _ = kept_bytes(model)
    limit = decode_bytes_per_row(config, num_tokens, cached=cached, top_p=1.0) + 64 * num_tokens
    cache = num_tokens * cached
    assert cache < peak_of_decoding(model, **sizes, eos_ids=()) <= limit
    assert peak_of_decoding(model, **sizes, eos_ids=tuple(range(0, 345, 10))) <= limit - cache / 2


@pytest.mark.parametrize("chunked", [False, True])
def test_the_head_reads_rows_that_lie_together(rotary_model_folder, chunked):
    """Bug: the last column of many prompts is a slice, for which torch copied the head row by row.

    A model of 135 million weights took 14 GB and 30 s for 256 prompts in bf16, and now 0.5 GB.
    """
    policy, inputs = make_policy(rotary_model_folder), []
    policy.scorer = (ChunkedScorer if chunked else CompletionScorer)(
        policy.model, policy.compute_dtype
    )
    head = policy.model.get_output_embeddings()  # fp32: the same model samples
    head.register_forward_pre_hook(lambda head, args: inputs.append(args[0]))
    groups = sample(policy, num_samples=1)
    num_read = len(inputs)
    score(policy, RAGGED, [completion.token_ids for (completion,) in groups])
    assert num_read > 0 and (len(inputs) > num_read) != chunked
    assert all(hidden.is_contiguous() for hidden in inputs)


@pytest.fixture
def rows_on_a_gpu(monkeypatch) -> Callable[..., int]:
    """How many rows of Qwen2.5-3B in bf16 are decoded together where `free_gb` are free."""
    shape = {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16}
    shape |= {"intermediate_size": 11008, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=151_936, **shape)
    model = SimpleNamespace(config=config, device=torch.device("cuda"), dtype=torch.bfloat16)
    cached = 36 * 2 * 2 * 128 * 2  # layers, keys and values, heads, their size, bytes
    monkeypatch.setattr("engine.sampling.batches.kept_bytes", lambda model: (cached, 0))

    def count(free_gb: float, prompt: int, max_new_tokens: int, samples: int, top_p: float) -> int:
        state = {"memory_reserved": 0, "memory_allocated": 0, "mem_get_info": (1e9 * free_gb, 0)}
        for name, value in state.items():
            monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
        params = replace(PLAIN, max_new_tokens=max_new_tokens, top_p=top_p, group_size=samples)
        return tokens_that_fit(model, prompt, params) // (prompt + max_new_tokens)

    return count


def test_the_published_step_is_sampled_at_once_beside_ddps_gradients(rows_on_a_gpu):
    """Bug: the memory was reserved for completions that all get as long as they may.

    Of a card of 80.0e9 bytes 23.8 GB are free beside weights, averages, gradients, the copy that
    samples and CUDA's own. Then 28 questions were decoded together, and 4 afterwards.
    """
    assert rows_on_a_gpu(23.8, 128, 1024, samples=16, top_p=1.0) >= 512


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "samples", "top_p", "bytes_per_row"),
    [(1000, 1024, 1, 1.0, 121e6), (200, 128, 1, 1.0, 24e6), (137, 64, 16, 0.9, 14.4e6)],
)
def test_prompts_that_are_read_and_top_p_have_room(
    rows_on_a_gpu, prompt, max_new_tokens, samples, top_p, bytes_per_row
):
    """Bug: only the cache and the draw counted, so greedy evaluations ran out of memory.

    `bytes_per_row` is the peak of torch's allocator for 512 rows. Of the 78 GB that 3B leave in a
    card of 80 GiB, at least half are used.
    """
    num_rows = rows_on_a_gpu(78, prompt, max_new_tokens, samples, top_p)
    assert 78e9 / 2 < num_rows * bytes_per_row < 78e9


def test_a_batch_has_room_for_the_prompts_and_their_new_tokens():
    """Without the new tokens all four questions would share the first batch, and fill the GPU."""
    decoded = []

    def decode(prompts, seeds, params, **settings):
        decoded.append([len(prompt) for prompt in prompts])
        return [None] * (len(prompts) * params.group_size)

    params = replace(PLAIN, max_new_tokens=12, group_size=2)
    sampler = SimpleNamespace(decode=decode)
    decode_in_batches(sampler, PromptBatch(RAGGED, SEEDS), params, 84, listener(print))
    assert decoded == [[9, 5], [3, 1]]  # 4 rows of 9 + 12 tokens, then 5 of 3 + 12


def test_a_batch_that_is_too_large_is_decoded_again_in_halves(rotary_model_folder, monkeypatch):
    """Each question has its own random numbers, so it gets the completions that it had anyway."""
    policy, decoded, lines = make_policy(rotary_model_folder, is_exact=True), [], []

    def decode(model, prompts, seeds, params, **settings):
        decoded.append(len(prompts))
        if len(prompts) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode_grouped(model, prompts, seeds, params, **settings)

    policy.sampler.loop = decode
    monkeypatch.setattr("engine.model.sampler.tokens_that_fit", lambda *arguments: 10**6)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    prompts, seeds = [*RAGGED, [33]], [*SEEDS, (seed(), 99)]
    params = replace(policy.params, max_new_tokens=12, eos_ids=(), group_size=4)
    logger = listener(lambda num_ended: None, lines.append)
    limit = 2
    groups = decode_in_batches(policy.sampler, PromptBatch(prompts, seeds), params, None, logger)
    assert decoded == [5, 3, 2, 2, 1] and lines == ["5 questions x 4 samples took 3 batches"]
    plain = sample(policy, prompts, seeds, num_samples=4, eos_ids=(), backend="grouped")
    assert_equal(groups, plain)
    limit = 0
    with pytest.raises(torch.OutOfMemoryError):
        decode_in_batches(policy.sampler, PromptBatch(prompts, seeds), params, None, logger)
    assert decoded[5:] == [5, 3, 2, 1]


# Models whose steps can be captured


def test_no_step_asks_for_a_value():
    """Tensors on the meta device have none: `.item()`, a condition, `tolist` or `nonzero` raises.

    The prompts are read without a mask, in which a model may look for padding; steps have masks.
    Other models are captured in test_architectures.py, in which only `tolist` would not be seen.
    """
    sizes = SIZES | {"num_key_value_heads": 2, "vocab_size": 345, "pad_token_id": 1}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes), dtype=torch.bfloat16)
    uniforms, params = torch.empty(16, 12, device="meta"), replace(PLAIN, group_size=4)
    batch = UnmaskedPrefill(model.eval(), RAGGED, uniforms, params)
    assert batch.reserved.is_possible
    with torch.no_grad():
        for num_columns in (11, 12, 13):
            batch.step(num_columns)
    with pytest.raises(RuntimeError, match="meta"):
        batch.drawn.active.tolist()  # what a step must not do


class UnmaskedPrefill(DecodeBatch):
    @torch.no_grad()
    def __init__(self, *arguments):
        super().__init__(*arguments)

    def read(self, token_ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor):
        return super().read(token_ids, None if mask.ndim == 2 else mask, positions)


# Attention


def test_no_layer_has_to_convert_the_mask_or_to_pad_it(rotary_model_folder):
    """Bug: sdpa made a bool mask a float one in each layer, and copied one of 21 columns.

    The last columns of the longest rows are fewer than a leap.
    """
    model = make_policy(rotary_model_folder).sampler.model.eval()
    uniforms = torch.zeros(len(RAGGED), PLAIN.max_new_tokens)
    with torch.no_grad():
        batch = DecodeBatch(model, RAGGED, uniforms, PLAIN)
    limit = batch.mask.shape[1]
    num_columns = grown_length(limit, limit=limit)
    mask = batch.reserved.visible_mask(batch.mask, num_columns)
    assert limit % 16 != 0 and num_columns % 16 == 0
    assert mask.dtype == model.dtype and mask.shape == (len(RAGGED), 1, 1, num_columns)
    assert torch.equal(mask[:, 0, 0, :limit] == 0, batch.mask)
    assert (mask[..., limit:] < -1e38).all()
    assert all(layer.keys.shape[2] == num_columns for layer in batch.cache.layers)


@pytest.mark.parametrize("backend", ["grouped", "captured"])
def test_eager_attention_is_scored_as_it_was_sampled(model_folder, graphs, backend):
    """Bug: eager attention adds its mask, and was given True and False, that is 1 and 0.

    Captured steps see the columns ahead too. To 1e-4, as above.
    """
    policy = make_policy(model_folder, "model.attn_implementation=eager")
    assert loop_of(policy) == "grouped"
    for prompt_ids, group in zip(RAGGED, sample(policy, backend=backend), strict=True):
        for completion in group:
            ids = prompt_ids + completion.token_ids
            log_probs = full_log_probs(policy.model, ids, 1.0)[len(prompt_ids) - 1 : -1]
            expected = log_probs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            assert np.abs(expected.numpy() - completion.log_probs).max() <= 1e-4


def test_the_probe_sees_a_mask_that_is_added_instead_of_applied(rotary_model_folder, monkeypatch):
    """Bug: in bf16 its tolerance was wider than the error, and its prompt had no padding."""
    reserve, overrides = ReservedColumns.visible_mask, ["model.attn_implementation=eager"]
    model = make_policy(rotary_model_folder, *overrides).sampler.model
    model = copy_in(torch.bfloat16, model, CPU)
    assert supports_grouped(model)

    monkeypatch.setattr(ReservedColumns, "visible_mask", lambda *given: reserve(*given) == 0)
    assert not supports_grouped(model)


def test_on_a_gpu_cudnns_attention_is_off(monkeypatch):
    """Bug: torch prefers it on an H100, where it spends a second on each new shape."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        world, _ = init_world()
        assert world.device.type == "cuda" and not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


def attend_by_2d_mask(module, query, key, value, attention_mask, **settings):
    """Attention that takes a mask (B, columns) or none, as flash_attention_2 does."""
    shape = query.shape[0], 1, query.shape[2], key.shape[2]
    mask = torch.ones(shape, dtype=torch.bool).tril(shape[3] - shape[2])
    if attention_mask is not None:
        assert attention_mask.ndim == 2
        mask = mask & attention_mask[:, None, None].bool()
        mask |= ~mask.any(dim=-1, keepdim=True)  # padding sees anything: of nothing comes NaN
    return sdpa_attention_forward(module, query, key, value, mask, **settings)


def test_attention_that_takes_no_4d_mask_gets_its_own(rotary_model_folder, monkeypatch):
    """Bug: flash_attention_2 was given a mask of four dimensions, which it cannot take."""
    attention, masks = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
    monkeypatch.setitem(attention._global_mapping, "by_2d_mask", attend_by_2d_mask)
    monkeypatch.setitem(masks._global_mapping, "by_2d_mask", flash_attention_mask)
    policy = make_policy(rotary_model_folder, "model.attn_implementation=by_2d_mask", is_exact=True)
    assert loop_of(policy) == "grouped"
    expected = make_policy(rotary_model_folder, is_exact=True)
    assert token_ids(sample(policy)) == token_ids(sample(expected))


# Models


def test_a_recurrent_model_samples_with_generate(tmp_path, tokenizer):
    """Mamba hands no cache over under its usual name: the load says so, takes the other backend."""
    config = MambaConfig(vocab_size=345, hidden_size=32, num_hidden_layers=2, state_size=4)
    folder = save_random(MambaForCausalLM, config, tokenizer, tmp_path)
    policy = make_policy(folder, "model.attn_implementation=eager")
    assert not supports_grouped(policy.sampler.model)
    assert loop_of(policy) == "generate"
    (group,) = sample(policy, RAGGED[:1], SEEDS[:1])
    assert len({tuple(c.token_ids) for c in group}) == 4


def test_left_pad_puts_tokens_last_and_marks_them():
    ids, mask = left_pad([[1, 2, 3], [4]], 9, CPU)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert mask.tolist() == [[True, True, True], [False, False, True]]


def test_the_bf16_sampler_keeps_its_rotary_frequencies(rotary_model_folder):
    """Bug: `.to(torch.bfloat16)` rounded the frequencies too: far positions had the wrong angle.

    On a model of 4 layers the difference to the trainer's log-probabilities grew from 0.02 at the
    start to 0.09 after 1,400 tokens, where it now stays at 0.02.
    """
    model = make_policy(rotary_model_folder).model
    copied = copy_in(torch.bfloat16, model, CPU)
    assert {p.dtype for p in copied.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in copied.parameters())
    buffers = zip(copied.buffers(), model.buffers(), strict=True)
    assert all(torch.equal(kept, original) for kept, original in buffers)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
