"""Sampling: what is drawn is what is scored, whatever the batch, the hub's defaults, the end."""

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
    make_policy,
    peak_bytes,
    save_random,
    seed,
)
from reference import score
from torch.profiler import ProfilerActivity, profile
from transformers import (
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
from engine.core.tensors import keep_likeliest
from engine.core.types import Completion, SamplingParams
from engine.model.policy import Policy, copy_in
from engine.model.probes import supports_grouped
from engine.sampling.batches import (
    cache_bytes_per_token,
    cached_layers,
    decode_bytes_per_row,
    decode_in_batches,
    tokens_that_fit,
)
from engine.sampling.cache import ReservedColumns
from engine.sampling.graphs import CapturedSteps
from main import DecodeBatch, decode_grouped, draw_uniforms, invert_cdf, sample_tokens

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
    """Samples of one question differ, and the trainer scores each token as it was drawn."""
    policy = make_policy(poisoned_folder, f"sampling.backend={backend}")
    assert policy.backend == backend
    for temperature in (0.7, 1.0, 1.3):
        groups = sample(policy, temperature=temperature)
        for prompt_ids, group in zip(RAGGED, groups, strict=True):
            assert len({tuple(c.token_ids) for c in group}) == len(group)
            for completion in group:
                rows = [prompt_ids], [completion.token_ids]
                scored, mask = score(policy, *rows, temperature=temperature)
                difference = scored[mask].detach().numpy() - completion.log_probs
                assert np.abs(difference).max() <= 1e-4


# Backend `grouped` against a plain loop, and against itself in other batches


def test_grouped_decoding_equals_a_plain_loop_without_cache_padding_or_batch(model_folder):
    """Each token is the one that its uniform number draws from the full forward's distribution.

    Its thresholds are sums of 345 probabilities, each of which fp32 rounds by up to 2**-24 of the
    sum. Log-probabilities and entropies differ as above.
    """
    policy = make_policy(model_folder)
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


def test_both_backends_draw_the_same_tokens_and_score_them_alike(poisoned_folder):
    """Also where the hub's settings would forbid half of the tokens."""
    policy = make_policy(poisoned_folder, is_exact=True)
    for changes in ({"temperature": 1.2}, {"top_p": 0.9, "top_k": 50}, {"temperature": 0.0}):
        grouped, generated = (
            sample(policy, backend=backend, eos_ids=MANY_EOS, **changes) for backend in BACKENDS
        )
        assert_equal(grouped, generated)


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
    model = make_policy(rotary_model_folder).sampler.eval()
    model.lm_head.register_forward_hook(lambda module, args, logits: logits + logits.max().item())
    assert supports_grouped(model, DecodeBatch)
    assert not supports_grouped(model, DecodeBatch, capture=True)
    assert Graph.num_captures == 0
    assert torch.cuda.get_sync_debug_mode() == 0  # put back


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
    assert not supports_grouped(make_policy(rotary_model_folder).sampler, DecodeBatch, capture=True)


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
        (3, 1.0, [0.0, 0.4, 0.2, 0.3]),
        (0, 0.01, [0.0, 0.4, 0.0, 0.0]),  # never nothing
        (0, 0.41, [0.0, 0.4, 0.0, 0.3]),
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
    tokens, log_probs, _ = results
    assert 0 <= tokens[1] < 50 and log_probs[1].isnan()


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
    """Bug: there was room for the longest completion of every row from the start."""
    monkeypatch.setattr("engine.sampling.cache.GROWTH", 16)
    model = make_policy(model_folder).sampler.eval()
    sizes = {"num_rows": 64, "max_new_tokens": 128}
    config, num_tokens = model.config, 3 + 128
    heads = config.num_attention_heads
    shares_keys = getattr(config, "num_key_value_heads", heads) < heads
    if shares_keys and not hasattr(sdpa_attention, "pack_gqa"):
        pytest.skip("transformers before 5.23 repeats shared keys in each layer: not in the limit")
    cached = cache_bytes_per_token(cached_layers(config), bytes_per_number=4)
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
    policy.scorer.in_blocks = chunked
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

    def count(free_gb: float, prompt: int, max_new_tokens: int, samples: int, top_p: float) -> int:
        state = {"memory_reserved": 0, "memory_allocated": 0, "mem_get_info": (1e9 * free_gb, 0)}
        for name, value in state.items():
            monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
        params = replace(PLAIN, max_new_tokens=max_new_tokens, top_p=top_p, group_size=samples)
        return tokens_that_fit(model, prompt, params) // (prompt + max_new_tokens)

    return count


def test_the_published_step_is_sampled_at_once_beside_ddps_gradients(rows_on_a_gpu):
    """Bug: the memory was reserved for completions that all get as long as they may."""
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


def test_a_batch_that_is_too_large_is_decoded_again_in_halves(rotary_model_folder, monkeypatch):
    """Each question has its own random numbers, so it gets the completions that it had anyway."""
    policy, decoded, lines = make_policy(rotary_model_folder, is_exact=True), [], []

    def decode(model, prompts, seeds, params, **settings):
        decoded.append(len(prompts))
        if len(prompts) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode_grouped(policy.sampler, prompts, seeds, params, **settings)

    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr("engine.sampling.batches.tokens_that_fit", lambda *arguments: 10**6)
    prompts, seeds = [*RAGGED, [33]], [*SEEDS, (seed(), 99)]
    params = replace(policy.params, max_new_tokens=12, eos_ids=(), group_size=4)
    settings = {"decode": decode, "max_batch_tokens": None, "log": lines.append}
    settings |= {"on_progress": lambda num_ended: None}
    limit = 2
    groups = decode_in_batches(on_gpu, prompts, seeds, params, **settings)
    assert decoded == [5, 3, 2, 2, 1] and lines == ["5 questions x 4 samples took 3 batches"]
    assert_equal(groups, sample(policy, prompts, seeds, num_samples=4, eos_ids=()))
    limit = 0
    with pytest.raises(torch.OutOfMemoryError):
        decode_in_batches(on_gpu, prompts, seeds, params, **settings)
    assert decoded[5:] == [5, 3, 2, 1]


# Attention


def test_the_probe_sees_a_mask_that_is_added_instead_of_applied(rotary_model_folder, monkeypatch):
    """Bug: in bf16 its tolerance was wider than the error, and its prompt had no padding."""
    reserve, overrides = ReservedColumns.reserve, ["model.attn_implementation=eager"]
    model = make_policy(rotary_model_folder, *overrides).sampler
    model = copy_in(torch.bfloat16, model, CPU)
    assert supports_grouped(model, DecodeBatch)

    monkeypatch.setattr(ReservedColumns, "reserve", lambda *given: reserve(*given) == 0)
    assert not supports_grouped(model, DecodeBatch)


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
    assert policy.backend == "grouped"
    expected = make_policy(rotary_model_folder, is_exact=True)
    assert token_ids(sample(policy)) == token_ids(sample(expected))


def test_a_recurrent_model_samples_with_generate(tmp_path, tokenizer):
    """Mamba hands no cache over under its usual name: the load says so, takes the other backend."""
    config = MambaConfig(vocab_size=345, hidden_size=32, num_hidden_layers=2, state_size=4)
    folder = save_random(MambaForCausalLM, config, tokenizer, tmp_path)
    policy = make_policy(folder, "model.attn_implementation=eager")
    assert not supports_grouped(policy.sampler, DecodeBatch)
    assert policy.backend == "generate"
    (group,) = sample(policy, RAGGED[:1], SEEDS[:1])
    assert len({tuple(c.token_ids) for c in group}) == 4


def test_the_bf16_sampler_keeps_its_rotary_frequencies(rotary_model_folder):
    """Bug: `.to(torch.bfloat16)` rounded the frequencies too: far positions had the wrong angle."""
    model = make_policy(rotary_model_folder).model
    copied = copy_in(torch.bfloat16, model, CPU)
    assert {p.dtype for p in copied.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in copied.parameters())
    buffers = zip(copied.buffers(), model.buffers(), strict=True)
    assert all(torch.equal(kept, original) for kept, original in buffers)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
