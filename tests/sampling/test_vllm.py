"""vLLM as the sampler: the tokens, numbers and ends of `decode_grouped`, up to rounding.

    python -m pytest -m vllm    # where vLLM is installed; .ci/run makes an environment for it

vLLM's kernels round otherwise than transformers'. Where a uniform number lies that near a boundary
between two tokens, the two may draw different ones, and their completions part.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import test_calculator_tool
import test_environment
import torch
from harness import (
    ROOT,
    SIZES,
    load_run,
    make_config,
    make_policy,
    read_rows,
    sample,
    save_random,
    tokens_of,
    train,
    train_forked,
)
from plain import assert_plain
from transformers import (
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import main
from engine.core.types import Completion
from engine.model.policy import Policy
from engine.model.sampler import LoopSampler
from engine.run.state import Run
from engine.sampling.grouped import decode_grouped
from engine.sampling.vllm import VllmEngine

pytestmark = pytest.mark.vllm
BACKENDS = ("grouped", "vllm")
VLLM = ("sampling.backend=vllm", "sampling.vllm_memory_gb=0.1")
SEED = ("training.seed=0", "validation.num_examples=4", "validation.best_of_n=2")
SEED += ("validation.pass_k=[1]", "checkpoint.every=100", "training.num_samples_per_step=4")
LONGEST = 200
ROUNDING = 1e-4  # between two ways to compute a log-probability in fp32, in nats
folder, folders = test_environment.folder, test_calculator_tool.folders  # models that use tools


@pytest.fixture(scope="module")
def rotary_model_folder(tmp_path_factory, tokenizer) -> Path:
    """A random model for those, with one head: on a CPU vLLM has none of fewer than 32 numbers."""
    sizes = SIZES | {"num_attention_heads": 1, "num_key_value_heads": 1}
    config = Qwen2Config(tie_word_embeddings=False, **sizes, **tokens_of(tokenizer))
    return save_random(Qwen2ForCausalLM, config, tokenizer, tmp_path_factory.mktemp("one-head"))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Run]:
    """Three steps of tiny, whose rollouts vLLM made."""
    settings = (f"run.dir={tmp_path_factory.mktemp('runs')}", "run.name=x", "training.num_steps=3")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        run = load_run(make_config("model.name=tiny", *VLLM, *SEED, *settings))
        assert main.run_training(run) == 0
    yield run


def prompts_of(tokenizer: PreTrainedTokenizerFast, num: int) -> list[list[int]]:
    numbers = np.random.default_rng(0).integers(1, 50, (num, 3))
    return [tokenizer.encode(f"numbers: {a} {b} {c}, target: {a + b}") for a, b, c in numbers]


def by_both(
    policy: Policy, num_prompts: int = 16, num_samples: int = 16, **changes
) -> tuple[list[Completion], list[Completion]]:
    """The completions of `decode_grouped` and of vLLM."""
    prompts, seeds = prompts_of(policy.tokenizer, num_prompts), [(0, 0, i) for i in range(99)]
    both = []
    for backend in BACKENDS:
        groups = sample(
            policy, prompts, seeds[:num_prompts], num_samples=num_samples, backend=backend,
            **{"max_new_tokens": LONGEST} | changes,
        )  # fmt: skip
        both.append([completion for group in groups for completion in group])
    return tuple(both)


def numbers_differ_by(ours: list[Completion], theirs: list[Completion]) -> float:
    """The largest difference of log-probabilities and entropies, up to where tokens part."""
    worst = 0.0
    for one, other in zip(ours, theirs, strict=True):
        pairs = enumerate(zip(one.token_ids, other.token_ids, strict=False))
        end = next((t for t, (a, b) in pairs if a != b), len(one.token_ids))
        for name in ("log_probs", "entropies"):
            a, b = (getattr(c, name)[:end] for c in (one, other))
            worst = max(worst, float(np.abs(a - b).max(initial=0)))
    return worst


def share_equal(ours: list[Completion], theirs: list[Completion]) -> float:
    return np.mean([a.token_ids == b.token_ids for a, b in zip(ours, theirs, strict=True)])


def test_tokens_and_numbers_are_those_of_one_plain_forward_pass(run):
    """After three updates: rows mixed up, t off by one, or old weights would show.

    In 256 completions of up to 200 tokens; a uniform may lie 5e-5 from the boundary of its token.
    """
    prompts, seeds = prompts_of(run.policy.tokenizer, 16), [(0, 0, i) for i in range(16)]
    changes = {"max_new_tokens": LONGEST}
    groups = sample(run.policy, prompts, seeds, num_samples=16, backend="vllm", **changes)
    assert len({tuple(c.token_ids) for group in groups for c in group}) > 128
    assert_plain(run.policy, prompts, seeds, groups, rounding=5e-5, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
        {"temperature": 0.0, "num_samples": 1},
        {"eos_ids": tuple(range(0, 554, 8)), "max_new_tokens": 40},  # many rows end early
    ],
)
def test_temperature_truncation_greedy_and_ends_are_those_of_grouped(run, changes):
    ours, theirs = by_both(run.policy, **changes)
    assert share_equal(ours, theirs) >= 0.97
    assert numbers_differ_by(ours, theirs) < ROUNDING
    if "eos_ids" in changes:
        assert 0 < sum(c.truncated for c in theirs) < len(theirs)
        pairs = zip(ours, theirs, strict=True)
        assert all(a.truncated == b.truncated for a, b in pairs if a.token_ids == b.token_ids)


def test_each_steps_rollouts_are_of_that_steps_weights(run):
    """The update moved log-probabilities by far more than the mismatch of the next step."""
    assert_on_policy(run.folder, num_steps=3)
    started = make_policy(ROOT / "tiny")
    prompts = prompts_of(run.policy.tokenizer, 1)
    moved = [p.model(input_ids=torch.tensor(prompts)).logits for p in (started, run.policy)]
    assert (moved[0].log_softmax(-1) - moved[1].log_softmax(-1)).abs().mean() > 10 * ROUNDING


def test_an_evaluation_is_that_of_grouped(run):
    by_vllm = main.sample_validation(run)
    engine = run.policy.sampler
    run.policy.sampler = LoopSampler(run.policy.model, run.policy.model, decode_grouped)
    by_grouped = main.sample_validation(run)
    run.policy.sampler = engine
    pairs = [
        (a, b)
        for one, other in zip(by_vllm, by_grouped, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    assert np.mean([a.text == b.text for a, b in pairs]) >= 0.8  # of 8 completions one may part
    assert all(a.reward == b.reward for a, b in pairs if a.text == b.text)


def test_logits_that_are_not_finite_end_in_completions_that_are_broken(run):
    """As with the other backends: noise is drawn, and the update skips the step."""
    policy, weight = run.policy, run.policy.model.get_input_embeddings().weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    policy.sampler.refresh()
    (group,) = sample(policy, prompts_of(policy.tokenizer, 1), num_samples=3, max_new_tokens=5)
    with torch.no_grad():
        weight.copy_(before)
    policy.sampler.refresh()
    assert all(completion.is_broken for completion in group)


def test_an_adapter_is_merged_for_vllm_and_never_into_the_model():
    policy = make_policy(ROOT / "tiny", *VLLM, "model.lora={r: 4}")
    before = {name: w.clone() for name, w in policy.model.state_dict().items()}
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
                before[name] = weight.clone()
    policy.sampler.refresh()
    ours, theirs = by_both(policy, num_prompts=4)
    assert share_equal(ours, theirs) >= 0.95  # of 64
    assert numbers_differ_by(ours, theirs) < ROUNDING
    assert all(torch.equal(w, before[name]) for name, w in policy.model.state_dict().items())


def test_there_is_no_16_bit_copy_beside_vllms_bf16_one():
    policy = make_policy(ROOT / "tiny", *VLLM, "model.compute_dtype=bfloat16")
    assert isinstance(policy.sampler, VllmEngine) and policy.sampler.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in policy.model.parameters())


@pytest.mark.parametrize("style", test_calculator_tool.STYLES)
def test_a_calculator_writes_what_it_writes_into_groupeds_completions(folders, style):
    given = (folders[style], f"sampling.calculator={style}")
    _, _, ours = test_calculator_tool.sample(*given)
    _, _, theirs = test_calculator_tool.sample(*given, *VLLM, backend="vllm")
    assert any(completion.is_inserted.any() for completion in theirs)
    assert_same(ours, theirs)


@pytest.mark.parametrize("code", ["", test_environment.ECHO])
def test_environments_get_and_give_what_they_do_with_grouped(folder, code, tmp_path, monkeypatch):
    """Tools, and replies in several turns, which some completions have no room for."""
    monkeypatch.chdir(tmp_path)
    grouped, vllm = (test_environment.make(folder, code, *some) for some in ((), VLLM))
    for longest in (150, 60):
        ours = test_environment.play(grouped, max_new_tokens=longest)
        theirs = test_environment.play(vllm, backend="vllm", max_new_tokens=longest)
        assert any(t.completion.num_turns > 1 for t in theirs)
        assert [t.reward for t in ours] == [t.reward for t in theirs]
        assert_same([t.completion for t in ours], [t.completion for t in theirs])


def assert_same(ours: list[Completion], theirs: list[Completion]) -> None:
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    assert [c.truncated for c in ours] == [c.truncated for c in theirs]
    assert [c.is_inserted.tolist() for c in ours] == [c.is_inserted.tolist() for c in theirs]
    assert numbers_differ_by(ours, theirs) < ROUNDING


def test_two_ranks_go_on_with_the_weights_at_which_one_was_killed(tmp_path):
    """What is equal after a resume: data, seeds and weights, which vLLM has to get too."""
    settings = (*VLLM, "validation.every=10", "checkpoint.every=1", "training.num_steps=3")
    fault = {"do": "kill", "saves": 1, "delay_s": 0.1}
    status, _ = train_forked(tmp_path, ROOT / "tiny", *settings, num_ranks=2, fault=fault)
    assert status != 0
    output = train(tmp_path, ROOT / "tiny", *settings, num_ranks=2)
    assert "resumed after step" in output
    assert "Traceback" not in output  # at exit vLLM's own clean-up found no process group
    assert_on_policy(tmp_path / "x", num_steps=3)


def test_two_ranks_give_vllm_the_weights_of_all_their_shards(tmp_path):
    settings = (*VLLM, "model.shard=true", "training.num_steps=2", "validation.every=10")
    train(tmp_path, ROOT / "tiny", *settings, num_ranks=2)
    assert_on_policy(tmp_path / "x", num_steps=2)


def test_sil_trains_on_what_vllm_samples(tmp_path):
    sil = ("training.learning_type=sil", "training.k_best_of_n=[2, 8]", "training.num_steps=2")
    train(tmp_path, ROOT / "tiny", *VLLM, *sil, "validation.every=10")
    assert_on_policy(tmp_path / "x", num_steps=2)


def assert_on_policy(run: Path, *, num_steps: int) -> None:
    """Each step trained on samples of its own weights."""
    rows = [row for row in read_rows(run) if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    assert all(row["train/sampler_mismatch"] < ROUNDING for row in rows)


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        ("version", r"vLLM 0\.33\.0 was not tried: pip install '\.\[vllm\]'$"),
        (
            "device",
            r"vLLM has cuda, a rank here cpu: start one rank for each GPU, or",
        ),
        ("weights", r"it computes another model than ours: write grouped$"),
        ("model", r"vLLM cannot sample .*; write grouped$"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    rotary_model_folder, tokenizer, tmp_path, monkeypatch, change, fix
):
    import vllm
    from vllm.platforms import current_platform

    model = rotary_model_folder
    if change == "version":
        monkeypatch.setattr(vllm, "__version__", "0.33.0")
    if change == "device":
        monkeypatch.setattr(type(current_platform), "device_type", "cuda")
    if change == "weights":
        monkeypatch.setattr(VllmEngine, "refresh", lambda _: None)  # they stay random
    if change == "model":
        config = OpenAIGPTConfig(n_embd=32, n_layer=1, n_head=1, **tokens_of(tokenizer))
        model = save_random(OpenAIGPTLMHeadModel, config, tokenizer, tmp_path)
    with pytest.raises(ValueError, match=r"^sampling\.backend = vllm: " + fix) as error:
        make_policy(model, *VLLM, "model.attn_implementation=eager")
    assert "\n" not in str(error.value)
