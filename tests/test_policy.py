"""The policy: what it scores and how it is loaded from folders that mean well."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import CPU, make_config, make_policy
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from data import encode_prompts
from optimizer import make_optimizer
from policy import load_policy, load_tokenizer, plain_text, render_prompt, token_log_probs
from sampler import left_pad

PROMPTS = [[5, 9, 30], [40, 41, 42, 43, 44, 45, 46], [7], [60, 5, 61, 5, 62]]
COMPLETIONS = [[80, 81, 82, 83, 0], [90, 0], [100, 101, 102], [0]]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "user", "content": "Make 24."},
    {"role": "assistant", "content": "Let me see.\n<think>"},
]


def score(policy, prompts, completions, *, pad_id=1, temperature=1.0, after_end=1):
    """log pi (B, T) of padded rows, and the mask of their completion tokens (B, T)."""
    prompt_ids, prompt_mask = left_pad(prompts, pad_id, CPU)
    longest = max(len(ids) for ids in completions)
    ids = torch.tensor([ids + [after_end] * (longest - len(ids)) for ids in completions])
    mask = torch.tensor([[t < len(ids) for t in range(longest)] for ids in completions])
    log_probs = policy.scorer(
        torch.cat([prompt_ids, ids], dim=1),
        torch.cat([prompt_mask, mask], dim=1),
        num_tokens=longest,
        temperature=temperature,
    )
    return log_probs, mask


def load(folder: Path, *overrides: str):
    """The policy of a folder, and the lines that loading it says."""
    said = []
    config = make_config(f"model.name={folder}", *overrides)
    return load_policy(config, device=CPU, num_ranks=1, say=said.append), said


def copy_of(folder: Path, tmp_path: Path, **tokenizer_settings) -> Path:
    """A copy of a model's folder whose tokenizer_config.json is changed; None removes a key."""
    copied = shutil.copytree(folder, tmp_path / "copy")
    file = copied / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | tokenizer_settings
    file.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    return copied


# Traps 2 and 3: shift, padding, positions, the end


def test_log_probs_of_tokens_by_hand():
    """softmax(log 1, log 2, log 5) = (1, 2, 5) / 8; at temperature 1/2 (1, 4, 25) / 30."""
    logits = torch.tensor([[[1.0, 2.0, 5.0], [2.0, 2.0, 4.0]]]).log()  # (1, 2, 3)
    ids = torch.tensor([[2, 0]])
    whole = token_log_probs(logits, ids, temperature=1.0).exp()
    assert whole.flatten().tolist() == pytest.approx([5 / 8, 2 / 8])
    sharper = token_log_probs(logits, ids, temperature=0.5).exp()
    assert sharper.flatten().tolist() == pytest.approx([25 / 30, 4 / 24])


def test_log_probs_are_computed_in_fp32_from_bf16_logits():
    logits = torch.zeros((1, 1, 1000), dtype=torch.bfloat16)
    log_probs = token_log_probs(logits, torch.tensor([[3]]), temperature=1.0)
    assert log_probs.dtype == torch.float32
    assert log_probs.item() == pytest.approx(-math.log(1000), abs=1e-5)


def test_padded_and_batched_log_probs_equal_those_of_each_row_alone(model_folder):
    """Each row alone: no padding, no position ids, the whole logits, shifted by one by hand."""
    policy = make_policy(model_folder)
    log_probs, mask = score(policy, PROMPTS, COMPLETIONS, temperature=0.7)
    for row, (prompt_ids, token_ids) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        ids = torch.tensor([prompt_ids + token_ids])
        logits = policy.model(input_ids=ids).logits[0] / 0.7
        expected = logits.log_softmax(dim=-1)[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
        assert torch.allclose(log_probs[row, mask[row]], expected[-len(token_ids) :], atol=1e-5)


def test_the_padding_token_and_what_stands_after_the_end_change_nothing(model_folder):
    policy = make_policy(model_folder)
    results = []
    for pad_id, after_end in ((1, 1), (0, 0), (77, 200)):
        policy.model.zero_grad()
        log_probs, mask = score(policy, PROMPTS, COMPLETIONS, pad_id=pad_id, after_end=after_end)
        log_probs[mask].sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
        results.append((log_probs[mask].detach(), gradient))
    for log_probs, gradient in results[1:]:
        assert torch.allclose(log_probs, results[0][0], atol=1e-6)
        assert (gradient - results[0][1]).norm() <= 1e-6 * gradient.norm()
        assert gradient.isfinite().all()


# Loading: trap 13, low precision


@pytest.fixture
def bf16_folder(absolute_model_folder: Path, tmp_path: Path) -> Path:
    """The GPT-2, whose embeddings are tied, with its weights saved in bf16."""
    folder = shutil.copytree(absolute_model_folder, tmp_path / "bf16")
    model = AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16)
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    return folder


def test_weights_and_adamw_moments_are_fp32_though_the_folder_holds_bf16(bf16_folder):
    """At a learning rate of 1e-6 bf16 weights would stay where they are; over 99% of these move."""
    config = make_config(f"model.name={bf16_folder}", "training.learning_rate=1e-6")
    policy = load_policy(config, device=CPU, num_ranks=1, say=lambda line: None)
    parameters = list(policy.model.parameters())
    assert {p.dtype for p in parameters} == {torch.float32}
    before = [p.detach().clone() for p in parameters]
    optimizer = make_optimizer(policy.model, config)
    log_probs, mask = score(policy, PROMPTS, COMPLETIONS)
    log_probs[mask].sum().backward()
    optimizer.step()
    moments = [optimizer.state[p][name] for p in parameters for name in ("exp_avg", "exp_avg_sq")]
    assert {moment.dtype for moment in moments} == {torch.float32}
    used = [p.grad != 0 for p in parameters]  # positions beyond the rows have no gradient
    moved = sum(
        (p[u] != old[u]).sum().item() for p, old, u in zip(parameters, before, used, strict=True)
    )
    assert moved > 0.99 * sum(u.sum().item() for u in used) > 30_000


def test_bf16_compute_leaves_the_weights_and_their_gradients_in_fp32(rotary_model_folder):
    policy = make_policy(rotary_model_folder, "model.compute_dtype=bfloat16")
    log_probs, mask = score(policy, PROMPTS, COMPLETIONS)
    log_probs[mask].sum().backward()
    assert log_probs.dtype == torch.float32
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in policy.model.parameters()} == {torch.float32}
    exact, _ = score(make_policy(rotary_model_folder), PROMPTS, COMPLETIONS)
    assert 1e-5 < (log_probs - exact)[mask].abs().max() < 0.5


def test_weight_decay_is_on_matrices_only_and_every_weight_is_in_the_optimizer(model_folder):
    config = make_config("training.weight_decay=0.1")
    policy = make_policy(model_folder)
    groups = make_optimizer(policy.model, config).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    expected = {id(p): 0.1 if p.ndim >= 2 else 0.0 for p in policy.model.parameters()}
    assert decay == expected


def test_dropout_of_the_folders_config_is_off(model_folder):
    """Else the scored policy is not the sampled one: training twice gives the same numbers."""
    saved = json.loads((model_folder / "config.json").read_text())
    assert 0.1 in (saved.get("attention_dropout"), saved.get("resid_pdrop"))
    policy = make_policy(model_folder)
    policy.model.train()
    first, mask = score(policy, PROMPTS, COMPLETIONS)
    second, _ = score(policy, PROMPTS, COMPLETIONS)
    assert torch.equal(first, second)
    policy.model.eval()
    assert torch.allclose(score(policy, PROMPTS, COMPLETIONS)[0][mask], first[mask], atol=1e-6)


def test_every_declared_end_token_ends_a_completion(rotary_model_folder, tmp_path):
    """Chat models end a turn with another token than a text; both are in generation_config."""
    folder = shutil.copytree(rotary_model_folder, tmp_path / "copy")
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [7, 12]}))
    assert make_policy(folder).params.eos_ids == (0, 7, 12)


def test_gradient_checkpointing_changes_no_gradient(model_folder):
    gradients = []
    for checkpointing in (False, True):
        policy = make_policy(model_folder, f"model.gradient_checkpointing={checkpointing}")
        policy.model.train()
        log_probs, mask = score(policy, PROMPTS, COMPLETIONS)
        log_probs[mask].sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() <= 1e-6 * gradients[0].norm()


# Loading: trap 15, the tokenizer


def test_tokens_are_those_of_tokenizer_json(rotary_model_folder):
    """AutoTokenizer replaces the pre-tokenizer of a qwen2 folder by the family's own."""
    text = "Use the numbers [12, 345] to make 12.\n<think> é"
    expected = Tokenizer.from_file(str(rotary_model_folder / "tokenizer.json")).encode(text).ids
    replaced = AutoTokenizer.from_pretrained(rotary_model_folder)
    assert replaced.encode(text) != expected  # the trap is there
    policy, said = load(rotary_model_folder)
    assert policy.tokenizer.encode(text) == expected
    assert policy.tokenizer.decode(expected) == text
    assert any("AutoTokenizer changes this model's tokens" in line for line in said)


def test_nothing_is_said_of_a_tokenizer_that_is_loaded_as_it_is(absolute_model_folder, tokenizer):
    policy, said = load(absolute_model_folder)
    assert policy.tokenizer.encode("Use 12 é") == tokenizer.encode("Use 12 é")
    assert said == ["the tokenizer has no chat template: the prompt is plain text"]


def test_a_replaced_tokenizer_keeps_its_chat_template_and_special_tokens(
    rotary_model_folder, tmp_path
):
    folder = copy_of(rotary_model_folder, tmp_path)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    policy, said = load(folder)
    assert len(said) == 1 and "AutoTokenizer" in said[0]
    assert policy.tokenizer.chat_template == CHAT_TEMPLATE
    assert (policy.tokenizer.eos_token_id, policy.tokenizer.pad_token_id) == (0, 1)


def test_a_missing_pad_token_is_replaced_by_eos_and_said(absolute_model_folder, tmp_path):
    policy, said = load(copy_of(absolute_model_folder, tmp_path, pad_token=None))
    assert policy.tokenizer.pad_token_id == policy.params.pad_id == 0
    assert any("no pad token: its eos token is used" in line for line in said)


# Prompts


def test_a_chat_template_renders_the_chat_and_the_assistants_beginning_stays_open(tokenizer):
    tokenizer = load_tokenizer_with_template(tokenizer)
    assert render_prompt(CHAT, tokenizer) == (
        "<user>Make 24.</user>\n<assistant>Let me see.\n<think>"
    )
    assert render_prompt(CHAT[:1], tokenizer) == "<user>Make 24.</user>\n<assistant>"


def load_tokenizer_with_template(tokenizer):
    copied = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|end|>")
    copied.chat_template = CHAT_TEMPLATE
    return copied


def test_without_a_chat_template_the_prompt_is_plain_text(tokenizer):
    assert render_prompt(CHAT, tokenizer) == plain_text(CHAT)
    assert plain_text(CHAT) == "Make 24.\nLet me see.\n<think>"


def test_encoded_prompts_are_the_tokens_of_the_rendered_text(tokenizer):
    examples = [{"nums": [3, 7, 25], "target": 46}, {"nums": [1, 2], "target": 3}]
    for one in (tokenizer, load_tokenizer_with_template(tokenizer)):
        encoded = encode_prompts(examples, config=make_config(), tokenizer=one)
        texts = [one.decode(ids) for ids in encoded]
        assert all("<think>" in text for text in texts) and "46" in texts[0]
        assert all("<|end|>" not in text for text in texts)
        assert [one(t, add_special_tokens=False)["input_ids"] for t in texts] == encoded


def test_no_questions_make_no_prompts(tokenizer):
    """Bug: the tokenizer raises IndexError for an empty list, where a rank had no question."""
    assert encode_prompts([], config=make_config(), tokenizer=tokenizer) == []


# A user's mistakes: one useful line, for main to print


def mistake(folder: Path, *overrides: str) -> str:
    """The one line that main prints of the error that loading raises."""
    with pytest.raises(ValueError) as caught:
        make_policy(folder, *overrides)
    line = str(caught.value)
    assert line.startswith(f"model.name = {folder}: ") and "\n" not in line
    return line


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        (["model.safetensors"], "model.safetensors"),
        (["config.json"], "config.json"),
        (["tokenizer.json", "tokenizer_config.json"], "tokenizer.json"),
    ],
)
def test_a_folder_that_lacks_a_file_is_refused(rotary_model_folder, tmp_path, missing, named):
    """Bug: without tokenizer files AutoTokenizer made one that turns every text into nothing."""
    folder = copy_of(rotary_model_folder, tmp_path)
    for name in missing:
        (folder / name).unlink()
    assert named in mistake(folder)


def test_a_missing_folder_and_an_unknown_hub_id_are_refused(tmp_path):
    """Bug: for a hub id transformers' message had two lines, and neither named the model."""
    mistake(tmp_path / "nothing")
    mistake(Path("nobody/no-such-model"))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_broken_file_is_refused(rotary_model_folder, tmp_path, name):
    """Bug: half a weights file ended in a traceback: SafetensorError is not a ValueError."""
    folder = copy_of(rotary_model_folder, tmp_path)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    mistake(folder)


def test_a_folder_that_lacks_some_weights_is_refused(rotary_model_folder, tmp_path):
    """Bug: transformers draws them at random and only warns, so the run trained on noise."""
    folder = copy_of(rotary_model_folder, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    kept = {k: v for k, v in model.state_dict().items() if "layers.1.mlp.up_proj" not in k}
    model.save_pretrained(folder, state_dict=kept)
    assert "layers.1.mlp.up_proj" in mistake(folder)


def test_a_tokenizer_without_pad_and_eos_is_refused(absolute_model_folder, tmp_path):
    folder = copy_of(absolute_model_folder, tmp_path, pad_token=None, eos_token=None)
    assert "neither a pad nor an eos token" in mistake(folder)


def test_a_model_without_any_end_token_is_refused(absolute_model_folder, tmp_path):
    folder = copy_of(absolute_model_folder, tmp_path, eos_token=None)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text()) | {"eos_token_id": None}
        (folder / name).write_text(json.dumps(settings))
    assert "which token ends text" in mistake(folder)


def test_an_unknown_attention_kernel_is_refused(rotary_model_folder):
    line = mistake(rotary_model_folder, "model.attn_implementation=no_such_kernel")
    assert "attn_implementation" in line


def test_the_same_tokenizer_is_loaded_from_a_saved_policy(rotary_model_folder, tmp_path):
    """best/ goes through the same check, so its tokens are those that were trained."""
    policy = make_policy(rotary_model_folder)
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(make_config(f"model.name={tmp_path}"), lambda line: None)
    text = "Use the numbers [12, 345]\n<answer>7</answer>"
    assert again.encode(text) == policy.tokenizer.encode(text)
    assert again.get_vocab() == policy.tokenizer.get_vocab()


@pytest.mark.parametrize("name", ["/nowhere", "./nowhere", "runs/x/nowhere"])
def test_a_folder_that_is_not_there_is_said_and_not_looked_up_on_the_hub(name):
    with pytest.raises(ValueError, match=f"^model.name = {name}: no such folder; give a folder"):
        load_policy(make_config(f"model.name={name}"), device=CPU, num_ranks=1, say=print)
