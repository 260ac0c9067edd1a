"""The policy: what it scores, and how it is loaded from folders with surprises in them."""

import json
import os
import shutil
from pathlib import Path

import harness
import pytest
import torch
from harness import SIZES, TURNS, alone, change_json, load_trained, make_config, make_policy
from reference import COMPLETIONS, PROMPTS, flat, score
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import countdown
from engine.model.policy import Policy
from engine.model.tokenizer import load_tokenizer
from engine.questions.prompts import completion_text
from engine.questions.templates import end_of_turn
from engine.sampling.draw import TokenBuffer
from engine.update.optimizer import make_optimizer


def test_weights_and_moments_are_fp32_though_the_folder_holds_bf16(absolute_model_folder, tmp_path):
    """At a learning rate of 1e-6 bf16 weights would stay where they are; over 99% of these move."""
    folder = copy_of(absolute_model_folder, tmp_path)
    AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    policy, training = make_policy(folder), make_config("training.learning_rate=1e-6").training
    optimizer = make_optimizer(policy.model, training)
    parameters = list(policy.model.parameters())
    before = flat(parameters)
    log_probs, mask = score(policy, PROMPTS, COMPLETIONS)
    log_probs[mask].sum().backward()
    optimizer.step()
    moments = [optimizer.state[p][name] for p in parameters for name in ("exp_avg", "exp_avg_sq")]
    assert {kept.dtype for kept in parameters + moments} == {torch.float32}
    used = flat([p.grad for p in parameters]) != 0  # others: unused positions
    assert (flat(parameters) != before)[used].sum() > 0.99 * used.sum() > 30_000


def test_the_dropout_in_a_folders_config_is_off(model_folder):
    """Otherwise the scored policy is not the sampled one."""
    saved = json.loads((model_folder / "config.json").read_text())
    assert 0.1 in (saved.get("attention_dropout"), saved.get("resid_pdrop"))
    policy = make_policy(model_folder)
    policy.model.train()
    trained, mask = score(policy, PROMPTS, COMPLETIONS)
    policy.model.eval()
    assert torch.allclose(score(policy, PROMPTS, COMPLETIONS)[0][mask], trained[mask], atol=1e-6)


def load(folder: Path) -> tuple[PreTrainedTokenizerFast, list[str]]:
    """The policy's tokenizer, and the lines that loading the policy logs."""
    lines: list[str] = []
    policy = load_trained(make_config(f"model.name={folder}"), alone(), lines.append)
    assert policy.params.pad_id == policy.tokenizer.pad_token_id
    return policy.tokenizer, lines


def copy_of(folder: Path, tmp_path: Path, **tokenizer_settings) -> Path:
    """A copy of a model's folder with these changes to its tokenizer_config.json."""
    copied = shutil.copytree(folder, tmp_path / "copy")
    change_json(copied / "tokenizer_config.json", **tokenizer_settings)
    return copied


def test_tokens_are_those_of_tokenizer_json(rotary_model_folder, tmp_path):
    """AutoTokenizer replaces the pre-tokenizer of a qwen2 folder by the family's own."""
    text = "Use the numbers [12, 345] to make 12.\n<think> é"
    expected = Tokenizer.from_file(str(rotary_model_folder / "tokenizer.json")).encode(text).ids
    replaced = AutoTokenizer.from_pretrained(rotary_model_folder)
    assert replaced.encode(text) != expected  # or this test would show nothing
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    folder = copy_of(rotary_model_folder, tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer, lines = load(folder)
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text
    assert any("AutoTokenizer changes this model's tokens" in line for line in lines)
    assert tokenizer.chat_template == template
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)


def test_a_missing_pad_token_becomes_eos_with_a_message(absolute_model_folder, tmp_path):
    folder = copy_of(absolute_model_folder, tmp_path, pad_token=None)
    tokenizer, lines = load(folder)
    assert tokenizer.pad_token_id == 0
    assert any("no pad token: its eos token is used" in line for line in lines)


def written(policy: Policy, text: str) -> str:
    """What is kept of a completion in which the model draws the tokens of this text."""
    ids = policy.tokenizer.encode(text, add_special_tokens=False)
    drawn = TokenBuffer(1, policy.params, policy.model.device)
    for token_id in ids:
        drawn.append(torch.tensor([token_id]), torch.zeros(1), torch.zeros(1))
    (completion,) = drawn.completions()
    return completion_text(completion, policy.tokenizer)


def test_a_completion_ends_where_the_chat_template_ends_a_turn(chat_folder):
    """Bug: Qwen2.5-3B closes its answer with <|im_end|>, and went on to the length limit. One that
    is cut off has no end token to leave out: it would lose its answer's last digit."""
    policy = make_policy(chat_folder)
    assert policy.params.eos_ids == tuple(policy.tokenizer.encode("<|end|><|im_end|>"))
    answer = "12 </think>\n<answer>12</answer>"
    text = written(policy, f"{answer}<|im_end|>\n<|im_start|>user\nMore")
    assert text == answer
    assert countdown.format_reward_function(text) == 1.0
    assert written(policy, f"{answer}<|end|>More") == answer
    assert policy.end_tokens == "<|end|> or <|im_end|>"
    policy = make_policy(chat_folder, "training.max_new_gen_tokens=2")
    assert written(policy, "12") == "12"


def test_an_option_that_the_chat_template_does_not_read_is_refused(chat_folder):
    with pytest.raises(ValueError, match=r"template_options: its chat template has no thinks"):
        make_policy(chat_folder, "task.template_options={thinks: true}")


def test_the_end_of_a_turn_is_what_the_template_writes_behind_it(chat_folder):
    tokenizer = load_tokenizer(make_config(f"model.name={chat_folder}"), lambda line: None)
    for template, token in (
        (TURNS.replace("<|im_end|>", "\n <|im_end|>"), "<|im_end|>"),  # white space before it
        (TURNS.replace("<|im_end|>", " Over."), None),  # no special token
        (TURNS.replace("m.content", "'Hello.'"), None),  # the turn is not in the text
        ("{{ raise_exception('no assistant') }}", None),
    ):
        tokenizer.chat_template = template
        assert end_of_turn(tokenizer) == (token and tokenizer.convert_tokens_to_ids(token))


def test_files_and_config_may_name_tokens_that_end_a_completion(absolute_model_folder, tmp_path):
    folder = copy_of(absolute_model_folder, tmp_path)
    change_json(folder / "generation_config.json", eos_token_id=[7])
    change_json(folder / "config.json", eos_token_id=12)
    policy = make_policy(folder, "sampling.stop=['<answer>7</answer>', no token]")
    assert {*policy.params.eos_ids} == {0, 7, 12, *policy.tokenizer.encode("<answer>7</answer>")}
    assert policy.params.stop.texts == ["no token"]


def mistake(folder: Path | str) -> str:
    """The error that loading raises: one line that names the model."""
    with pytest.raises(ValueError) as caught:
        make_policy(folder)
    line = str(caught.value)
    assert line.startswith(f"model.name = {folder}: ") and "\n" not in line
    return line


def test_a_folder_without_a_model_or_a_token_that_ends_text_is_refused(
    absolute_model_folder, tmp_path, monkeypatch
):
    (tmp_path / "models/mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    folder = copy_of(absolute_model_folder, tmp_path, eos_token=None)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text()) | {"eos_token_id": None}
        (folder / name).write_text(json.dumps(settings))
    assert "which token ends text" in mistake(folder)
    change_json(folder / "tokenizer_config.json", pad_token=None)
    assert "neither a pad nor an eos token" in mistake(folder)
    for name, near in (("models/mime", "models/mine"), ("nobody/no-such-model", "")):
        assert near in mistake(name)  # bugs: a message of the hub's, in two lines and with no name


def drop_a_layer(folder: Path) -> None:
    """transformers draws weights that are not there at random, and only warns."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    kept = {k: v for k, v in model.state_dict().items() if "layers.1.mlp.up_proj" not in k}
    model.save_pretrained(folder, state_dict=kept)


def save_encoder(folder: Path) -> None:
    """A random BERT, which sees the words behind a word, in place of the model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    harness.save_random("bert", tokenizer, folder, initializer_range=0.5, **SIZES)


WEIGHTS, POINTER = "model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:1\n"
MISFITS = [  # what is done to the folder or set in its config.json, and what is said of it
    (save_encoder, "it sees the tokens that come later"),
    # git leaves a pointer where it has not fetched a large file
    (lambda folder: (folder / WEIGHTS).write_text(POINTER), "fetch the file with `git lfs pull`"),
    (drop_a_layer, "layers.1.mlp.up_proj"),
    # AutoTokenizer makes one of nothing that turns every text into nothing
    (lambda folder: [file.unlink() for file in folder.glob("tokenizer*")], "tokenizer.json"),
    # SafetensorError is not a ValueError
    (lambda folder: os.truncate(folder / WEIGHTS, 9_999), "cannot be used: "),
    ({"hidden_size": 64}, "do not fit its config.json, such as"),
]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("spoil", "problem"), MISFITS)
def test_a_model_that_misfits_its_config_is_refused(rotary_model_folder, tmp_path, spoil, problem):
    """Bugs: an encoder was trained as it was, and noise; the others ended in tracebacks."""
    folder = copy_of(rotary_model_folder, tmp_path)
    if isinstance(spoil, dict):
        change_json(folder / "config.json", **spoil)
    else:
        spoil(folder)
    assert problem in mistake(folder)


def test_weights_that_the_config_leaves_out_are_named(rotary_model_folder, tmp_path):
    """Bug: a config.json with fewer layers than the files made another model without a word."""
    folder = copy_of(rotary_model_folder, tmp_path)
    change_json(folder / "config.json", num_hidden_layers=1, layer_types=["full_attention"])
    (line,) = [line for line in load(folder)[1] if "ignored" in line]
    assert "warning: 12 weights" in line and "layers.1." in line
