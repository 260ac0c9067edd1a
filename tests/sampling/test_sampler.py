"""Sampling: what is drawn is what one plain forward pass gives, in any batch, by any backend."""

import ctypes
import math
import os
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import harness
import pytest
import torch
import transformers
from graphs import Graph
from harness import CPU, alone, listener, loop_of, make_config, make_policy, peak_bytes, seed
from one_pass import assert_plain
from reference import score
from torch.profiler import ProfilerActivity, profile
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.core.types import Completion, PromptBatch, SamplingParams
from engine.model.policy import Policy, load_policy
from engine.sampling import batches
from engine.sampling.cache import ReservedColumns
from engine.sampling.draw import TokenBuffer, invert_cdf, sample_tokens
from engine.sampling.graphs import CapturedSteps
from engine.sampling.grouped import decode_grouped
from engine.sampling.sampler import copy_in, supports_grouped
from engine.update.head import ChunkedScorer
from main import CompletionScorer

RAGGED = [[5, 9, 30], [40, 41, 42, 43, 44, 45, 46, 47, 48], [7], [60, 5, 61, 5, 62]]
EQUAL = [[5, 9], [5, 9]]  # two questions with one text
BESIDE_A_LONG_ONE = [*RAGGED, list(range(2, 240))]
SEEDS = [(seed(), 0, i) for i in range(len(BESIDE_A_LONG_ONE))]
BELOW_ONE = 1 - 2**-24  # the largest number below 1 in fp32
PLAIN = SamplingParams(12, 1.0, top_p=1.0, top_k=0, eos_ids=(0,), pad_id=1, group_size=1)
MANY_EOS = tuple(range(0, 345, 8))  # about one token in eight ends a completion
SHORT = {"num_samples": 4, "max_new_tokens": 12, "max_batch_tokens": 10**6, "eos_ids": MANY_EOS}


def sample(policy: Policy, prompts: list[list[int]] = RAGGED, **changes) -> list[list[Completion]]:
    """Completions of the prompts: 4 of at most 12 tokens each, unless `changes` say otherwise."""
    return harness.sample(policy, prompts, SEEDS[: len(prompts)], **(SHORT | changes))


def tokens_of(groups: list[list[Completion]]) -> list[list[int]]:
    return [completion.token_ids for group in groups for completion in group]


WAYS = {  # the decode loop, and the attention in the model
    "grouped": ("grouped", "sdpa"),
    "generate": ("generate", "sdpa"),
    "captured": ("captured", "sdpa"),  # its steps are replayed: see graphs.py
    "grouped, eager": ("grouped", "eager"),
    "grouped, mask of two dimensions": ("grouped", "by_2d_mask"),
}
SETTINGS = {  # the prompts, and how they are sampled
    "hot": (RAGGED, {"temperature": 1.2}),
    "cool, one question at a time": (RAGGED, {"temperature": 0.7, "max_batch_tokens": 1}),
    "top-p, in batches": (RAGGED, {"top_p": 0.9, "top_k": 50, "max_batch_tokens": 150}),
    "greedy": (RAGGED, {"temperature": 0.0, "top_p": 0.9, "num_samples": 1}),
    "no end": (EQUAL, {"eos_ids": ()}),
    "an end as padding": (
        RAGGED,
        {"pad_id": 8, "max_new_tokens": 3, "num_samples": 10, "eos_ids": tuple(range(2, 345, 3))},
    ),
    # Attention leaps to more columns, and rows leave before and after it does
    "long": (BESIDE_A_LONG_ONE, {"max_new_tokens": 32, "eos_ids": tuple(range(0, 345, 20))}),
}


def attend_by_2d_mask(module, query, key, value, attention_mask, **settings):
    """Attention that takes a mask (B, columns) or none, as flash_attention_2 does."""
    shape = query.shape[0], 1, query.shape[2], key.shape[2]
    mask = torch.ones(shape, dtype=torch.bool).tril(shape[3] - shape[2])
    if attention_mask is not None:
        assert attention_mask.ndim == 2
        mask = mask & attention_mask[:, None, None].bool()
        mask |= ~mask.any(dim=-1, keepdim=True)  # padding sees anything: of nothing comes NaN
    return sdpa_attention_forward(module, query, key, value, mask, **settings)


@pytest.mark.parametrize(
    ("model_folder", "way"),
    [("rotary", way) for way in WAYS] + [("absolute", way) for way in [*WAYS][:3]],
    indirect=["model_folder"],
)
def test_what_is_drawn_is_what_one_plain_forward_pass_gives(
    model_folder, tmp_path, graphs, monkeypatch, way
):
    """Whatever the batch, the model's own generation config and torch's random state."""
    attention, masks = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
    monkeypatch.setitem(attention._global_mapping, "by_2d_mask", attend_by_2d_mask)
    monkeypatch.setitem(masks._global_mapping, "by_2d_mask", flash_attention_mask)
    backend, attention = WAYS[way]
    loop = "generate" if backend == "generate" else "grouped"
    overrides = [f"sampling.backend={loop}", f"model.attn_implementation={attention}"]
    folder = shutil.copytree(model_folder, tmp_path / "poisoned")
    poison = {"do_sample": True, "temperature": 0.1, "top_k": 1, "repetition_penalty": 1.3}
    poison |= {"min_p": 0.3, "eos_token_id": 0}
    poison |= {"suppress_tokens": [*range(2, 345, 2)]}  # a field that nobody thinks of
    transformers.GenerationConfig(**poison).save_pretrained(folder)
    policy = make_policy(folder, *overrides, is_exact=attention != "eager")
    assert loop_of(policy) == loop  # a model that the probe refuses would be sampled otherwise
    ends = set()
    for name, (prompts, changes) in SETTINGS.items():
        if attention == "eager" and "top_p" in changes:  # made for fp32, where its edge is luck
            continue
        state, done = torch.get_rng_state(), []
        changes = SHORT | changes
        groups = sample(policy, prompts, backend=backend, on_progress=done.append, **changes)
        assert torch.equal(torch.get_rng_state(), state)
        num_samples, max_batch_tokens = map(changes.pop, ("num_samples", "max_batch_tokens"))
        assert_plain(policy, prompts, SEEDS[: len(prompts)], groups, **changes)
        rows, lengths = tokens_of(groups), Counter(map(len, tokens_of(groups)))
        assert len(rows) == num_samples * len(prompts) == sum(done) and min(done) >= 0
        if backend == "grouped" and max_batch_tokens == 10**6:  # each token tells whom it ended
            assert [n for n in done if n > 0] == [lengths[n] for n in sorted(lengths)]
        if name == "an end as padding":
            ends |= {(len(c.token_ids) == 3, c.truncated) for group in groups for c in group}
            assert len({c.token_ids[-1] for g in groups for c in g if not c.truncated}) > 1
        if name == "long":
            assert min(lengths) < 16 and max(lengths) > 256 - 238
    assert ends == {(True, True), (True, False), (False, False)}  # an end at the limit is one too
    assert backend != "captured" or Graph.num_captures > 1


def test_a_step_that_waits_for_a_value_or_would_not_replay_is_not_captured(
    rotary_model_folder, graphs, monkeypatch
):
    """Bug: torch does not clean up after a failed capture, and soon runs out of memory."""
    model = make_policy(rotary_model_folder).sampler.model.eval()
    wait = lambda module, args, logits: logits + logits.max().item()  # noqa: E731
    waits = model.lm_head.register_forward_hook(wait)
    assert supports_grouped(model)
    assert not supports_grouped(model, CapturedSteps)
    assert Graph.num_captures == 0
    assert torch.cuda.get_sync_debug_mode() == 0  # put back
    waits.remove()
    assert supports_grouped(model, CapturedSteps)
    # A graph that repeats its first step's result is found out by the probe.
    monkeypatch.setattr(CapturedSteps, "capture", lambda steps, num_columns: lambda: None)
    assert not supports_grouped(model, CapturedSteps)


@pytest.mark.parametrize("num_logits", [3, 255, 256, 257, 554, 5000])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_a_draw_is_that_of_the_plain_formulas_in_double_precision(num_logits, temperature):
    """The token whose part of the cumulative sum holds the uniform, to rounding."""
    generator = torch.Generator().manual_seed(seed() + num_logits)
    logits = torch.randn((200, num_logits), generator=generator) * 5 + 20
    logits[:, ::7] = logits[:, -1:] = -math.inf
    uniforms = torch.rand(200, generator=generator)
    uniforms[:50], uniforms[50:100] = 0.0, BELOW_ONE
    drawn = sample_tokens(logits, uniforms, replace(PLAIN, temperature=temperature))
    log_probs = (logits.double() / temperature).log_softmax(dim=-1)
    tokens = drawn[0][:, None]
    upper = log_probs.exp().cumsum(dim=-1).gather(1, tokens)
    lower = upper - log_probs.exp().gather(1, tokens)
    assert ((lower - 1e-5 < uniforms[:, None]) & (uniforms[:, None] < upper + 1e-5)).all()
    assert set(tokens[:50, 0].tolist()) == {1}
    entropies = -torch.special.xlogy(log_probs.exp(), log_probs.exp()).sum(dim=-1)
    assert drawn[1].isfinite().all()
    assert torch.allclose(drawn[1].double(), log_probs.gather(1, tokens)[:, 0], atol=1e-5)
    assert torch.allclose(drawn[2].double(), entropies, atol=2e-5)


def test_rows_are_drawn_in_blocks_as_all_at_once(monkeypatch):
    """Three blocks of 7, 7 and 6 rows."""
    monkeypatch.setattr("engine.sampling.draw.CPU_BLOCK", 7 * 50 + 49)
    logits = torch.randn((20, 50), generator=torch.Generator().manual_seed(seed()))
    drawn, uniforms = TokenBuffer(20, PLAIN, CPU), logits[:, 0].sigmoid()
    drawn.draw(logits, uniforms)
    columns = (drawn.tokens[:, 0], drawn.log_probs[:, 0], drawn.entropies[:, 0])
    for column, expected in zip(columns, sample_tokens(logits, uniforms, PLAIN), strict=True):
        assert torch.allclose(column, expected)


def test_a_cumulative_sum_that_falls_draws_no_token_of_mass_0(monkeypatch):
    """Made up, as a GPU may round: the sum rises where no mass is, and falls after it."""
    probs = torch.tensor([[0.4, 0.0, 0.05, 0.0, 0.55]])
    cdf = torch.tensor([[0.4, 0.46, 0.45, 0.44, 1.0]])
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda weights, dim: cdf)
    expected = {0.0: 0, 0.39: 0, 0.42: 4, 0.455: 4, 0.5: 4, BELOW_ONE: 4}
    found = {u: invert_cdf(probs, torch.tensor([u]))[0].item() for u in expected}
    assert found == expected


def test_the_rest_of_a_uniform_is_a_uniform_again():
    """The sums of blocks round: the second block of mass 5 seems to begin at 8 below its end."""
    index, rest = invert_cdf(torch.tensor([[1e8, 5.0]]), torch.tensor([BELOW_ONE]))
    assert (index.item(), rest.item()) == (1, 0.0)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_truncated_sampling_draws_from_what_transformers_keeps(temperature):
    """Of 10,000 evenly spaced uniforms each token gets its share, to one of them."""
    logits = torch.randn((1, 50), generator=torch.Generator().manual_seed(seed()))
    uniforms = (torch.arange(10_000) + 0.5) / 10_000
    for top_k, top_p in ((10, 1.0), (0, 0.8), (10, 0.8), (1, 1.0), (0, 0.01)):
        warpers = [transformers.TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k or 50)]
        warped = LogitsProcessorList([*warpers, TopPLogitsWarper(top_p)])(None, logits)
        expected = 10_000 * warped.softmax(dim=-1)[0]
        params = replace(PLAIN, temperature=temperature, top_k=top_k, top_p=top_p)
        tokens, _, _ = sample_tokens(logits.expand(10_000, -1), uniforms, params)
        counts = torch.bincount(tokens, minlength=50)
        assert torch.equal(counts > 0, expected > 0)
        assert ((counts - expected).abs() < 1.1).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])  # which 0.7 makes infinite
def test_a_row_of_broken_logits_gets_a_log_probability_of_nan_and_harms_no_other(value):
    """Bug: the draw was out of range, which raised, and on a GPU ended the process."""
    logits = torch.randn((3, 50), generator=torch.Generator().manual_seed(seed()))
    uniforms = torch.tensor([0.2, 0.5, 0.9])
    params = replace(PLAIN, temperature=0.7)
    expected = sample_tokens(logits, uniforms, params)
    broken = logits.clone()
    broken[1, 7] = value
    results = sample_tokens(broken, uniforms, params)
    for result, whole in zip(results, expected, strict=True):
        assert torch.equal(result[[0, 2]], whole[[0, 2]])
    tokens, log_probs, entropies = results
    assert tokens[1] == 0.5 * 50 and log_probs[1].isnan()  # all tokens are alike
    assert entropies[1].item() == pytest.approx(math.log(50))


def test_the_cache_grows_as_long_as_rows_stay_and_within_the_limit(model_folder, monkeypatch):
    """Bug: there was room for the longest completion of every row from the start."""
    monkeypatch.setattr("engine.sampling.cache.GROWTH", 16)
    model, num_rows, num_tokens = make_policy(model_folder).sampler.model.eval(), 64, 3 + 64
    heads, peaks = model.config.num_attention_heads, []
    shares_keys = getattr(model.config, "num_key_value_heads", heads) < heads
    if shares_keys and not hasattr(sdpa_attention, "pack_gqa"):
        pytest.skip("transformers before 5.23 repeats shared keys in each layer: not in the limit")
    for eos_ids in ((), tuple(range(0, 345, 10))):
        params = replace(PLAIN, max_new_tokens=64, eos_ids=eos_ids, group_size=num_rows)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            decode_grouped(model, [[5, 9, 30]], [(seed(), 0)], params, on_progress=lambda num: None)
        peaks.append(peak_bytes(profiler) / num_rows)
    cached, _ = batches.kept_bytes(model)
    limit = batches.decode_bytes_per_row(model.config, num_tokens, cached=cached, top_p=1.0)
    limit, cache = limit + 64 * num_tokens, num_tokens * cached
    assert cache < peaks[0] <= limit and peaks[1] <= limit - cache / 2


@pytest.mark.parametrize("scorer", [CompletionScorer, ChunkedScorer])
def test_the_head_reads_rows_that_lie_together(rotary_model_folder, scorer):
    """Bug: the last column of many prompts is a slice: torch copied the head row by row."""
    policy, inputs = make_policy(rotary_model_folder), []
    policy.scorer = scorer(policy.model, policy.compute_dtype)
    head = policy.model.get_output_embeddings()  # fp32: the same model samples
    head.register_forward_pre_hook(lambda head, args: inputs.append(args[0]))
    groups = sample(policy, num_samples=1)
    num_read = len(inputs)
    score(policy, RAGGED, [completion.token_ids for (completion,) in groups])
    assert num_read > 0 and (len(inputs) > num_read) == (scorer is CompletionScorer)
    assert all(hidden.is_contiguous() for hidden in inputs)


def test_a_batch_has_room_for_the_prompts_and_their_new_tokens():
    """Without the new tokens all four questions would share the first batch, and fill the GPU."""
    decoded = []

    def decode(prompts, seeds, params, **settings):
        decoded.append([len(prompt) for prompt in prompts])
        return [None] * (len(prompts) * params.group_size)

    params = replace(PLAIN, max_new_tokens=12, group_size=2)
    prompts = PromptBatch(RAGGED, SEEDS[:4])
    sampler = SimpleNamespace(decode=decode)
    batches.decode_in_batches(sampler, prompts, params, 84, listener(print), generate=None)
    assert decoded == [[9, 5], [3, 1]]  # 4 rows of 9 + 12 tokens, then 5 of 3 + 12


@pytest.mark.parametrize(
    ("cached", "states", "num_rows"),
    [
        (8_192, 0, 2**30 // (512 * (8_192 + 4_096) + 24 * 80)),  # a layer of two is copied
        (0, 2**22, 255),  # a recurrent model: each row's states, and what draws its token
        (0, 0, 1_024),  # no bytes to speak of: 524,288 tokens
    ],
)
def test_a_cpu_decodes_as_many_rows_as_take_a_gigabyte(cached, states, num_rows, monkeypatch):
    """Bug: 131,072 tokens, whatever a token took: few rows of a small model, 15 GB of a large."""
    config = SimpleNamespace(vocab_size=80, num_hidden_layers=2)
    config.get_text_config = lambda: config
    model, params = SimpleNamespace(device=CPU, config=config), replace(PLAIN, max_new_tokens=500)
    monkeypatch.setattr(batches, "kept_bytes", lambda model: (cached, states))
    assert batches.tokens_that_fit(model, 12, params) // 512 == num_rows


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_a_rollout_gives_back_the_memory_that_an_update_has_left(monkeypatch):
    """Bug: a run of a 0.5B model on a CPU grew from 14 to 23 GB in twelve steps, and kept 8."""

    def held_mb() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    monkeypatch.setattr("engine.sampling.batches.SMALL_PROCESS_KB", 0)
    sampler = SimpleNamespace(decode=lambda prompts, *_, **__: [None] * len(prompts))
    arguments = (PromptBatch(RAGGED, SEEDS[:4]), PLAIN, 10**6, listener(print))
    torch.ones(2**22 * 15 // 8)  # once freed, blocks of up to 30 MB come from the heap
    batches.decode_in_batches(sampler, *arguments, generate=None)
    before = held_mb()
    blocks = [(torch.ones(2**20), torch.ones(2**17)) for _ in range(100)]  # 4 and 0.5 MB each
    small = [pair[1] for pair in blocks]
    blocks.clear()
    assert held_mb() - before > 300 and len(small) == 100  # they hold what lies between them
    batches.decode_in_batches(sampler, *arguments, generate=None)
    assert held_mb() - before < 150


def test_the_probe_sees_a_mask_that_is_added_instead_of_applied(rotary_model_folder, monkeypatch):
    """Bug: in bf16 its tolerance was wider than the error, and its prompt had no padding."""
    reserve, overrides = ReservedColumns.visible_mask, ["model.attn_implementation=eager"]
    model = make_policy(rotary_model_folder, *overrides).sampler.model
    model = copy_in(torch.bfloat16, model, CPU)
    assert supports_grouped(model)

    monkeypatch.setattr(ReservedColumns, "visible_mask", lambda *given: reserve(*given) == 0)
    assert not supports_grouped(model)


def test_a_mistake_of_ours_is_not_only_blamed_on_the_model(rotary_model_folder, monkeypatch):
    """Bug: with a newer transformers an attribute was gone, and "its cache cannot be shared"."""
    monkeypatch.delattr(ReservedColumns, "visible_mask")
    lines, config = [], make_config(f"model.name={rotary_model_folder}")
    load_policy(config, alone(), lines.append)
    assert re.match(r"AttributeError\(.*visible_mask", lines[-2])
    assert lines[-1].startswith("this model's cache cannot be shared")
