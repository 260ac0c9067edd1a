"""LoRA: only the adapter is trained; it is switched off, merged, put on 4 bits, saved, resumed."""

import contextlib
import functools
import io
import json
import os
import re
import shutil
import sys
import warnings
from pathlib import Path

import harness
import peft
import pytest
import reference
import torch
from harness import SHORT_RUN, load_run, make_config, make_policy, read_jsonl, save_adapter, seed
from one_pass import ATOL, assert_plain
from reference import EASY, GRPO, config_of, distance, make_groups, recorded, row_log_probs, trained
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import main
from engine.core.config import Config
from engine.model.adapters import keep_4bit_layout, quantization_config
from engine.model.load import base_of, load_model_and_tokenizer
from engine.model.policy import Policy
from engine.run.fingerprint import of_files
from engine.run.start import settle_config
from engine.sampling import batches
from engine.update.head import ChunkedScorer
from logger import Logger
from main import CompletionScorer
from tools import export

LORA = "model.lora={r: 4, alpha: 8}"
BRIEF = "training.max_new_gen_tokens=10"  # of what is sampled
IN_4BIT = "model.load_in_4bit=true"
KL = "training.kl_coef=0.5"
KINDS = {"fp32": [LORA], "4 bits": [LORA, IN_4BIT]}
PROMPTS = [[5, 9, 30], [7]]


def make_moved_policy(folder: Path, *overrides: str) -> Policy:
    """A policy whose adapter does something, the same each time."""
    policy = make_policy(folder, *overrides)
    generator = torch.Generator().manual_seed(seed())
    with torch.no_grad():
        for parameter in trained(policy.model):
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return policy


def test_each_linear_layer_but_the_head_has_an_adapter_in_fp32(model_folder):
    policy = make_policy(model_folder, LORA, "model.compute_dtype=bfloat16")
    plain = AutoModelForCausalLM.from_pretrained(model_folder)
    head = plain.get_output_embeddings()
    kinds = ("Linear", "Conv1D")
    linear = {n for n, m in plain.named_modules() if type(m).__name__ in kinds and m is not head}
    assert len(linear) in (14, 8)
    parameters = dict(policy.model.named_parameters())
    names = {name for name, p in parameters.items() if p.requires_grad}
    assert names == {f"{name}.lora_{ab}.default.weight" for name in linear for ab in "AB"}
    assert {parameters[name].dtype for name in names} == {torch.float32}
    assert {p.dtype for name, p in parameters.items() if name not in names} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["query", "lm_head"])
def test_a_layer_that_is_not_there_or_not_adapted_is_refused(rotary_model_folder, name):
    """peft ignores a name that no layer has, as long as some layer has another of the names."""
    named = f"{LORA[:-1]}, target_modules: [q_proj, {name}]}}"
    with pytest.raises(ValueError, match=rf"target_modules: no layer is named {name}, but down_pr"):
        make_policy(rotary_model_folder, named)


def test_the_adapter_starts_from_the_seed_and_changes_nothing(rotary_model_folder):
    state = torch.get_rng_state()
    seeds = [f"training.seed={seed(n)}" for n in (0, 0, 1)]
    policies = [make_policy(rotary_model_folder, LORA, given) for given in seeds]
    assert torch.equal(torch.get_rng_state(), state)
    one, same, other = (torch.cat([p.flatten() for p in trained(p.model)]) for p in policies)
    assert torch.equal(one, same) and not torch.equal(one, other)
    row = make_groups(config_of(*GRPO), EASY)[0][0]
    plain = make_policy(rotary_model_folder).model
    assert torch.equal(row_log_probs(policies[0].model, row), row_log_probs(plain, row))


def test_the_gradient_in_4_bits_is_that_of_all_rows_for_any_micro_batch_size(model_folder):
    """That on weights in fp32 is in test_update.py."""
    policy = make_moved_policy(model_folder, LORA, IN_4BIT, KL, BRIEF)
    config = config_of(*GRPO, LORA, IN_4BIT, KL)
    groups = make_groups(config, EASY, reference.EQUAL, reference.HARD)
    start = make_policy(model_folder, "mode=evaluate", IN_4BIT).model
    ref = [row_log_probs(start, t).detach() for group in groups for t in group]
    expected, *_ = reference.reference(policy.model, groups, config, ref=ref)
    at_once, ways = reference.ALL_TOGETHER, [(reference.ONE_BY_ONE, CompletionScorer)]
    for limit, scorer in [*ways, (at_once, CompletionScorer), (at_once, ChunkedScorer)]:
        config = config_of(*GRPO, LORA, IN_4BIT, KL, f"training.micro_batch_tokens={limit}")
        policy.scorer = scorer(policy.model, policy.compute_dtype)
        harness.sample(policy, PROMPTS, num_samples=4)  # leaves nothing that a gradient notices
        assert distance(recorded(policy, groups, config)[0], expected) <= reference.FP32_ROUNDING


def test_dropout_acts_in_the_update_alone(rotary_model_folder):
    kinds, config = ("model.lora={r: 4, alpha: 8, dropout: 0.5}", LORA), config_of(*GRPO, KL)
    groups = make_groups(config, EASY)
    policy, plain = (make_moved_policy(rotary_model_folder, kind, KL, BRIEF) for kind in kinds)
    (first, _), (second, _) = (recorded(policy, groups, config) for _ in range(2))
    assert distance(first, second) > 0.1
    drawn = [harness.sample(p, PROMPTS, num_samples=4) for p in (policy, plain)]
    tokens = [[c.token_ids for group in groups for c in group] for groups in drawn]
    assert tokens[0] == tokens[1]
    batch = torch.arange(2, 12)[None], torch.ones((1, 10), dtype=torch.bool)
    policy.model.train()
    ref = [p.score_by_reference(*batch) for p in (policy, plain)]
    assert torch.equal(*ref)


def test_an_error_leaves_the_adapter_on(rotary_model_folder):
    policy = make_moved_policy(rotary_model_folder, LORA, KL)
    seen = []
    policy.reference.register_forward_pre_hook(lambda *_: seen.append(len(trained(policy.model))))
    with pytest.raises(TypeError):
        policy.score_by_reference("no ids", "no mask")
    assert seen == [0]
    assert len(trained(policy.model)) == 28


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("backend", ["grouped", "generate"])
def test_the_model_with_its_adapter_samples_what_it_scores(rotary_model_folder, kind, backend):
    policy = make_moved_policy(rotary_model_folder, *kind, f"sampling.backend={backend}")
    assert policy.sampler.model is policy.model and harness.loop_of(policy) == backend
    seeds, changes = [(seed(), 0), (seed(), 1)], {"temperature": 0.7, "max_new_tokens": 10}
    groups = harness.sample(policy, PROMPTS, seeds, num_samples=4, **changes)
    assert_plain(policy, PROMPTS, seeds, groups, rounding=ATOL, **changes)


def test_a_rows_memory_is_estimated_in_the_dtype_that_decodes(rotary_model_folder, monkeypatch):
    """Bug: a GPU's first estimate ran the fp32 adapter on layers in bf16, and raised."""
    monkeypatch.setattr(batches, "CPU_BATCH_TOKENS", 10**9)
    ours, plain = (
        make_policy(rotary_model_folder, *lora, "model.compute_dtype=bfloat16")
        for lora in ([LORA], [])
    )
    fit = plain.sampler.tokens_at_once(9, plain.params)
    assert ours.sampler.tokens_at_once(9, ours.params) == fit < 10**9


def test_inputs_of_an_adapter_are_not_cast_to_fp32_and_back(rotary_model_folder):
    """Bug: peft cast each layer's, twice as many kernels for a token."""
    policy, dtypes = make_policy(rotary_model_folder, LORA, "model.compute_dtype=bfloat16"), []
    for name, factor in policy.model.named_modules():
        if name.endswith("lora_A.default"):
            factor.register_forward_pre_hook(lambda factor, args: dtypes.append(args[0].dtype))
    ids = torch.tensor([[5, 9, 30, 7]])
    policy.scorer(ids, ids > 0, temperature=1.0)
    assert dtypes == [torch.bfloat16] * 14


def test_a_run_in_two_parts_is_bit_for_bit_the_unbroken_one(tmp_path, rotary_model_folder, data):
    """In 4 bits, with dropout: its random numbers follow from a step's questions."""
    overrides = [*KINDS["4 bits"], "model.lora.dropout=0.1", KL, "training.num_iterations=2"]
    output = harness.assert_resumes(tmp_path, rotary_model_folder, *overrides, *data)
    weights, *_ = harness.what_is_left(tmp_path / "whole")
    adapter = [value for name, value in weights.items() if "last" in name and "lora_B" in name]
    assert len(adapter) == 14 and all(value.abs().max() > 0 for value in adapter)
    assert re.search(r"\d weights \(\d\d?\.\d\d% trained\), on 1 x cpu", output)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, rotary_model_folder, data) -> Path:
    """The folder of a run in 4 bits, whose best/ is neither the base nor the last model."""
    folder = tmp_path_factory.mktemp("finished")
    overrides = [*KINDS["4 bits"], *data, "training.num_steps=4", "training.warmup_steps=0"]
    overrides += ["training.learning_rate=0.03", "validation.best_of_n=8"]
    model, rates = Path(os.path.relpath(rotary_model_folder)), [0.1, 0.0, 0.4, 0.0, 0.3]
    harness.train_on_rank(harness.alone(), folder, model, *overrides, rates=rates)
    return folder / "x"


@pytest.fixture(scope="module")
def exported(finished) -> None:
    """Merged, and in 4 bits; what cannot be pushed without a network is said once all is saved."""
    lines = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("HF_TOKEN", "some token")
        command = ["export", str(finished), "--merge", "--4bit", "--push=nobody/nothing"]
        patch.setattr(sys, "argv", command)
        both = contextlib.redirect_stdout(lines), contextlib.redirect_stderr(lines)
        with both[0], both[1], pytest.raises(SystemExit, match="2"):
            export.main()
    *printed, last = lines.getvalue().splitlines()  # the tokenizer and bitsandbytes may warn
    told = [Path(line).name for line in printed if line.startswith("the best model, ")]
    assert told == ["merged", "merged-4bit"]
    assert last.startswith("error: ") and "offline" in last


def test_best_loads_from_anywhere(finished, rotary_model_folder, tmp_path, monkeypatch):
    best = finished / "best"
    saved = json.loads((best / "adapter_config.json").read_text())
    assert Path(saved["base_model_name_or_path"]) == rotary_model_folder
    assert not (best / "model.safetensors").exists()
    monkeypatch.chdir(tmp_path)
    ids = torch.arange(2, 12)[None]
    plain = AutoModelForCausalLM.from_pretrained(rotary_model_folder, dtype=torch.float32)
    before = plain(ids).logits
    by_transformers = AutoModelForCausalLM.from_pretrained(best, dtype=torch.float32)(ids).logits
    by_peft = peft.PeftModel.from_pretrained(plain, best)(ids).logits
    assert torch.allclose(by_transformers, by_peft, atol=1e-5)
    assert (by_peft - before).abs().max() > 0.01


def test_merged_is_the_base_in_bf16_plus_the_adapter(exported, finished, rotary_model_folder):
    """The base as it is on disk, not as it was in 4 bits."""
    settings = json.loads((finished / "merged/config.json").read_text())
    assert settings["dtype"] == "bfloat16" and "quantization_config" not in settings
    assert not (finished / "merged/adapter_config.json").exists()  # else it is loaded as an adapter
    merged = AutoModelForCausalLM.from_pretrained(finished / "merged").state_dict()
    base = AutoModelForCausalLM.from_pretrained(rotary_model_folder, dtype=torch.bfloat16)
    adapter = AutoModelForCausalLM.from_pretrained(finished / "best").state_dict()
    assert merged.keys() == base.state_dict().keys()
    num_adapted = 0
    for name, value in base.state_dict().items():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.default.weight" in adapter:
            a, b = (adapter[f"{layer}.lora_{ab}.default.weight"].float() for ab in "AB")
            exact = value.float() + 8 / 4 * (b @ a)
            assert (merged[name].float() - value.float()).abs().max() > 0.001
            assert torch.allclose(merged[name].float(), exact, rtol=2**-8, atol=1e-6)
            num_adapted += 1
        else:
            assert torch.equal(merged[name], value)
    assert num_adapted == 14


def test_an_adapter_is_evaluated_on_its_base(finished, tmp_path, monkeypatch):
    """With the run's own configuration it gives the samples and figures that were logged then."""
    logged = {0: [], 2: [], 4: []}
    for sample in read_jsonl(finished / "samples.jsonl"):
        logged[sample.pop("step")].append(sample)
    assert logged[0] != logged[2] != logged[4] != logged[0]
    row = harness.read_rows(finished)[2]
    figures = {name: value for name, value in row.items() if "eval/" in name}
    assert figures.pop("eval/pass@1") == 0.4  # as given
    harness.grade_by_text(monkeypatch)
    overrides = [f"--config={finished / 'config.yaml'}", "mode=evaluate"]
    overrides += [f"model.name={finished / 'best'}", f"run.dir={tmp_path}"]
    run = load_run(make_config(*overrides))
    assert main.run_evaluation(run) == 0
    (written,) = (tmp_path / "x").glob("eval-*")
    measured = json.loads((written / "metrics.json").read_text())
    assert measured.items() >= figures.items()
    assert read_jsonl(written / "samples.jsonl") == logged[2]
    assert len(trained(run.policy.model)) == 0
    assert {p.dtype for p in run.policy.model.parameters()} == {torch.uint8, torch.float32}


EVALUATE, TRAIN = ["mode=evaluate"], ["model.load_in_4bit=false", "model.lora=null"]
AT = "base_model.model.model"
EMBEDDINGS = f"{AT}.embed_tokens.weight"
NO_FIT = "does not fit its base model"
SPOILT = {  # what is made of an adapter's weights or set in its config, and what is said of it
    "a layer less": (
        lambda weights: {k: weights[k] for k in weights if "layers.1.mlp.up" not in k},
        f"{NO_FIT}, as at {AT}.layers.1.mlp.up_proj",
    ),
    "of a deeper model": (
        lambda weights: weights | {k.replace("s.1", "s.7"): weights[k].clone() for k in weights},
        f"{NO_FIT}, as at {AT}.layers.7.mlp.down_proj",
    ),
    "more embeddings": (
        lambda weights: weights | {EMBEDDINGS: torch.zeros(346, 32)},
        f"size mismatch for {EMBEDDINGS}",
    ),
    "no head": ({"modules_to_save": ["lm_head"]}, f"{NO_FIT}: 'base_model.model.lm_head.weight'"),
    # bugs: "not NoneType"; "need to have sentencepiece"; "Repo id must be in the form"
    "no base": ({"base_model_name_or_path": None}, "its base is not named, but must"),
    "on an adapter": ({"base_model_name_or_path": "HERE"}, "adapter, but must be a whole model"),
    "a base that is gone": ({"base_model_name_or_path": "/moved/away"}, "base is /moved/away, but"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_an_adapter_that_has_no_whole_base_is_refused(finished, tmp_path, name):
    """Bugs: the weights that it lacked were drawn at random, or a run began without its layers."""
    asked = (EVALUATE, TRAIN)[[*SPOILT].index(name) % 2]  # by turns
    spoil, problem = SPOILT[name]
    adapter = Path(shutil.copytree(finished / "best", tmp_path / "adapter"))
    if isinstance(spoil, dict):
        here = {key: str(adapter) for key, value in spoil.items() if value == "HERE"}
        harness.change_json(adapter / "adapter_config.json", **spoil | here)
    else:
        file = adapter / "adapter_model.safetensors"
        save_file(spoil(load_file(file)), file)
    overrides = [f"--config={finished / 'config.yaml'}", *asked]
    with pytest.raises(ValueError) as caught:
        load_run(make_config(*overrides, f"model.name={adapter}", f"run.dir={tmp_path}"))
    line = str(caught.value)
    assert line.startswith(f"model.name = {adapter}: ") and problem in line and "\n" not in line


def settled(adapter: Path, folder: Path, asked: str = "mode=train") -> Config:
    """The config of a run in `folder`; to train, the adapter is merged into its base."""
    config = make_config(f"model.name={adapter}", asked, f"run.dir={folder}", "run.name=x")
    return settle_config(config, harness.alone(), Logger(rank=0))


def test_an_adapter_of_a_run_stays_with_the_base_of_that_run(
    rotary_model_folder, tmp_path, data, capsys
):
    """Bug: when its run was moved, it was added to the base of the next run of that name."""
    train = functools.partial(harness.train_on_rank, harness.alone())
    first, second = (save_adapter(tmp_path / f"{n}", rotary_model_folder, n) for n in range(2))
    moved, given = tmp_path / "moved", [*data, LORA, "training.num_steps=1"]
    train(tmp_path, first, *given)
    sums = load_file((tmp_path / "x").rename(moved) / "base/model.safetensors")
    train(tmp_path, second, *given)
    capsys.readouterr()
    for adapter in (moved / "best", moved / "checkpoints/last"):
        overrides = make_config(f"model.name={adapter}", "mode=evaluate", *data)
        model, *_ = load_model_and_tokenizer(overrides, harness.CPU, print)
        layer = model.get_submodule("model.layers.0.self_attn.q_proj").base_layer
        assert torch.equal(layer.weight, sums["model.layers.0.self_attn.q_proj.weight"])
    # Trained on in 4 bits it names the base that it was found with.
    train(tmp_path / "4", moved / "best", *data, "training.num_steps=1", IN_4BIT)
    assert "does not say" not in capsys.readouterr().out
    assert base_of(tmp_path / "4/x/best")[0] == str(moved / "base")
    shutil.rmtree(moved / "base")
    with pytest.raises(ValueError, match="x/base is not the model that it was trained on: put th"):
        load_model_and_tokenizer(overrides, harness.CPU, print)
    harness.change_json(adapter / "adapter_config.json", revision=None)  # as before there was one
    load_model_and_tokenizer(overrides, harness.CPU, print)
    assert capsys.readouterr().out.count("does not say what its base") == 1


SHAPES = {"plain": {}, "DoRA": {"use_dora": True}}
SHAPES["a whole layer"] = {"modules_to_save": ["lm_head"]}
SHAPES["single tokens"] = {"trainable_token_indices": {"embed_tokens": [5, 9]}}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_an_adapter_computes_what_peft_says_alone_and_merged(rotary_model_folder, tmp_path, shape):
    """Bug: DoRA's and single tokens' trained, but could not be evaluated: half was not loaded."""
    adapter, ids = save_adapter(tmp_path / "a", rotary_model_folder, **shape), torch.arange(2, 12)
    base = AutoModelForCausalLM.from_pretrained(rotary_model_folder, dtype=torch.float32)
    before = base(ids[None]).logits
    expected = peft.PeftModel.from_pretrained(base, adapter)(ids[None]).logits
    assert (expected - before).abs().max() > 0.01
    for asked in ("mode=evaluate", "mode=train"):
        model, *_ = load_model_and_tokenizer(settled(adapter, tmp_path, asked), harness.CPU, print)
        assert torch.allclose(model(ids[None]).logits, expected, atol=1e-4)


def test_an_adapter_of_embeddings_that_are_the_head_is_not_merged(absolute_model_folder, tmp_path):
    """Bug: the sum changed both, and its logits were off by 18."""
    adapter = save_adapter(tmp_path / "a", absolute_model_folder, target_modules=["wte"])
    with pytest.raises(ValueError, match="a: cannot be used: it adapts one of embeddings and head"):
        settled(adapter, tmp_path)


def own_tokenizer(adapter: Path, *, begin: str = "", end: str = "", **tokens: str) -> str:
    """Save a tokenizer beside an adapter whose base lacks the `tokens`; gives its chat template."""
    tokenizer = harness.train_tokenizer()
    tokenizer.add_special_tokens(tokens)
    message = begin + "{{ m.content }}" + end
    tokenizer.chat_template = "{% for m in messages %}" + message + "{% endfor %}"
    tokenizer.save_pretrained(adapter)
    return tokenizer.chat_template


def test_an_adapters_own_tokenizer_is_that_of_the_run(rotary_model_folder, tmp_path, data):
    """Bug: that of its base was taken. Trainers add a pad token, which has no embedding there."""
    adapter = save_adapter(tmp_path / "a", rotary_model_folder)
    template = own_tokenizer(adapter, begin="Q: ", pad_token="<|new|>")
    given = [*data, f"model.name={adapter}", f"run.dir={tmp_path}", "run.name=x", *SHORT_RUN]
    for asked in ("mode=evaluate", "mode=train"):
        run = load_run(make_config(*given, asked))
        main.sample_validation(run)  # pads rows
        tokenizer = run.policy.tokenizer
        assert tokenizer.chat_template == template and tokenizer.pad_token == tokenizer.eos_token
    before = of_files(run.config.model_copy(update={"model": make_config(*given).model}))
    template = own_tokenizer(adapter, begin="A: ", pad_token="<|new|>")
    now = of_files(make_config(*given))
    assert [before[key] == now[key] for key in now] == [False, True]  # its own files, its base's
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["export", str(adapter), "--merge"])
        export.main()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(adapter / "merged")
    assert tokenizer.chat_template == template and tokenizer.pad_token == tokenizer.eos_token


NEW = {"bos_token": "<|new|>"}


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        ("mode=evaluate", {"begin": "<|new|>"} | NEW),  # in a prompt
        ("mode=train", {"end": "<|new|>"} | NEW),  # behind a turn
        ("mode=train", {"eos_token": "<|new|>"}),
    ],
)
def test_a_token_without_an_embedding_is_refused_where_a_run_can_meet_it(
    rotary_model_folder, tmp_path, asked, tokens
):
    adapter = save_adapter(tmp_path / "a", rotary_model_folder)
    own_tokenizer(adapter, **tokens)
    with pytest.raises(ValueError, match="a: cannot be used: its tokenizer gives ids up to 345, b"):
        load_model_and_tokenizer(settled(adapter, tmp_path, asked), harness.CPU, print)


def test_the_copy_in_4_bits_is_the_merged_model_rounded(exported, finished):
    """It loads by itself, as the model that `load_in_4bit` makes of the merged one."""
    merged, small = finished / "merged", finished / "merged-4bit"
    in_4bit = {"quantization_config": quantization_config(harness.CPU, torch.bfloat16)}
    rounded = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.bfloat16, **in_4bit)
    copied = AutoModelForCausalLM.from_pretrained(small)
    weights = [model.model.layers[0].mlp.up_proj.weight for model in (rounded, copied)]
    assert weights[0].dtype == torch.uint8 and torch.equal(*weights)
    for model in (rounded, copied):
        keep_4bit_layout(model)  # else they may be packed anew, for which its rows are too short
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(rounded(ids).logits, copied(ids).logits)
