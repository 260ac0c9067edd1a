"""vLLM as the sampler: the tokens, numbers and ends of `decode_grouped`, up to rounding.

    python -m pytest -m vllm    # where vLLM is installed; .ci/run makes an environment for it

vLLM's kernels round otherwise than transformers'. Where a uniform number lies that near a boundary
between two tokens, the two may draw different ones, and their completions part.
"""

from collections.abc import Iterator
from pathlib import Path

import harness
import numpy as np
import pytest
import test_calculator_tool
import test_environment
import torch
from harness import ROOT, SIZES, make_config, make_policy, read_rows, save_random
from one_pass import assert_plain
from transformers import PreTrainedTokenizerFast

import main
from engine.core.types import Completion
from engine.model.policy import Policy
from engine.run.state import Run
from engine.sampling.vllm import VllmEngine

pytestmark = pytest.mark.vllm
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
    sizes |= {"tie_word_embeddings": False}
    return save_random("qwen2", tokenizer, tmp_path_factory.mktemp("one-head"), **sizes)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Run]:
    """Three steps of tiny, whose rollouts vLLM made."""
    settings = (f"run.dir={tmp_path_factory.mktemp('runs')}", "run.name=x", "training.num_steps=3")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        run = harness.load_run(make_config("model.name=tiny", *VLLM, *SEED, *settings))
        assert main.run_training(run) == 0
    yield run


def prompts_of(tokenizer: PreTrainedTokenizerFast, num: int) -> list[list[int]]:
    numbers = np.random.default_rng(0).integers(1, 50, (num, 3))
    return [tokenizer.encode(f"numbers: {a} {b} {c}, target: {a + b}") for a, b, c in numbers]


def assert_plainly_drawn(
    policy: Policy, num_prompts: int, num_samples: int = 16, **changes
) -> list[Completion]:
    """The completions of some prompts; a uniform may lie 5e-5 from the boundary of its token."""
    prompts, seeds = prompts_of(policy.tokenizer, num_prompts), [(0, 0, i) for i in range(99)]
    seeds, changes = seeds[:num_prompts], {"max_new_tokens": LONGEST} | changes
    how = {"num_samples": num_samples, "backend": "vllm"}
    groups = harness.sample(policy, prompts, seeds, **how, **changes)
    assert_plain(policy, prompts, seeds, groups, rounding=5e-5, **changes)
    return [completion for group in groups for completion in group]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
        {"temperature": 0.0, "num_samples": 1},
        {"eos_ids": tuple(range(0, 554, 8)), "max_new_tokens": 40},  # many rows end early
    ],
    ids=["all", "truncated", "greedy", "ends"],
)
def test_tokens_numbers_and_ends_are_those_of_one_plain_forward_pass(run, changes):
    """After three updates: rows mixed up, t off by one, or old weights would show."""
    drawn = assert_plainly_drawn(run.policy, 16, **changes)
    assert changes or len({tuple(c.token_ids) for c in drawn}) > 128
    assert "eos_ids" not in changes or 0 < sum(c.truncated for c in drawn) < len(drawn)


GIVEN = ("model.revision=one", "model.trust_remote_code=true", "model.compute_dtype=float32")
ARRIVES = [  # what of vLLM's config has a value of ours, which is not vLLM's own
    (lambda c: c.model_config.revision, "one"),
    (lambda c: c.model_config.trust_remote_code, True),
    (lambda c: c.model_config.dtype, torch.float32),
    (lambda c: c.model_config.skip_tokenizer_init, True),
    (lambda c: c.model_config.generation_config, "vllm"),
    (lambda c: c.model_config.enforce_eager, True),
    (lambda c: c.model_config.max_model_len, 512),
    (lambda c: c.load_config.load_format, "dummy"),
    (lambda c: c.cache_config.kv_cache_memory_bytes, 100_000_000),
    (lambda c: c.cache_config.gpu_memory_utilization, 0.01),
    (lambda c: c.scheduler_config.async_scheduling, False),
]


def test_an_adapter_is_merged_for_vllm_and_never_into_the_model():
    policy = make_policy(ROOT / "tiny", *VLLM, "model.lora={r: 4}", *GIVEN)
    config = policy.sampler.llm.llm_engine.vllm_config
    assert [read(config) for read, _ in ARRIVES] == [value for _, value in ARRIVES]
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    before = {name: w.clone() for name, w in policy.model.state_dict().items()}
    policy.sampler.refresh()
    assert_plainly_drawn(policy, 4)
    assert all(torch.equal(w, before[name]) for name, w in policy.model.state_dict().items())


def test_each_steps_rollouts_are_of_that_steps_weights(run):
    """The update moved log-probabilities by far more than the mismatch of the next step."""
    assert_on_policy(run.folder, num_steps=3)
    started = make_policy(ROOT / "tiny")
    prompts = prompts_of(run.policy.tokenizer, 1)
    moved = [p.model(input_ids=torch.tensor(prompts)).logits for p in (started, run.policy)]
    assert (moved[0].log_softmax(-1) - moved[1].log_softmax(-1)).abs().mean() > 10 * ROUNDING


@pytest.mark.parametrize("style", test_calculator_tool.STYLES)
def test_a_calculator_writes_what_it_writes_into_groupeds_completions(folders, style):
    given = (folders[style], f"sampling.calculator={style}")
    _, _, ours = test_calculator_tool.sample(*given)
    _, _, theirs = test_calculator_tool.sample(*given, *VLLM, backend="vllm")
    assert any(completion.is_inserted.any() for completion in theirs)
    assert_same(ours, theirs)


STOP = 'sampling.stop=["2}}"]'  # the environment hears a turn that it ends


@pytest.mark.parametrize(("code", "own"), [("", []), ("", [STOP]), (test_environment.ECHO, [])])
def test_environments_get_and_give_as_with_grouped(folder, code, own, tmp_path, monkeypatch):
    """Tools, and replies in several turns, which some completions have no room for."""
    monkeypatch.chdir(tmp_path)
    grouped, vllm = (test_environment.make(folder, code, *own, *some) for some in ((), VLLM))
    for longest in (150, 60):
        ours = test_environment.play(grouped, max_new_tokens=longest)
        theirs = test_environment.play(vllm, backend="vllm", max_new_tokens=longest)
        assert any(t.completion.num_turns > 1 for t in theirs)
        assert [t.reward for t in ours] == [t.reward for t in theirs]
        assert_same([t.completion for t in ours], [t.completion for t in theirs])


def assert_same(ours: list[Completion], theirs: list[Completion]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one.token_ids, one.truncated) == (other.token_ids, other.truncated)
        assert one.is_inserted.tolist() == other.is_inserted.tolist()
        for name in ("log_probs", "entropies"):
            assert np.allclose(getattr(one, name), getattr(other, name), rtol=0, atol=ROUNDING)


def test_two_ranks_give_vllm_the_weights_of_all_their_shards(tmp_path):
    settings = (*VLLM, "model.shard=true", "training.num_steps=2", "validation.every=10")
    harness.train(tmp_path, ROOT / "tiny", *settings, num_ranks=2)
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
        ("device", r"vLLM has cuda, a rank here cpu: start one rank for each GPU, or"),
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
        sizes = {"n_embd": 32, "n_layer": 1, "n_head": 1}
        model = save_random("openai-gpt", tokenizer, tmp_path, **sizes)
    with pytest.raises(ValueError, match=r"^sampling\.backend = vllm: " + fix) as error:
        make_policy(model, *VLLM, "model.attn_implementation=eager")
    assert "\n" not in str(error.value)
