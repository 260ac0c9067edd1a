"""Small models and questions with which the recipes of equality.py run in seconds, without a hub.

The models are random but for this: of some tokens they know what may come next. So they write
answers in the form that a recipe asks for, and some of them earn rewards.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    NanoChatConfig,
    NanoChatForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils import logging

logging.disable_progress_bar()

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
START, END = "\n", "<|im_end|>"  # the last token of a prompt, and the end of a turn
CALL, CALLED, RESULT, RETURNED = (
    f"<|{what}|>" for what in ("python_start", "python_end", "output_start", "output_end")
)
SPECIAL = ["<|end|>", "<|pad|>", "<|bos|>", "<|im_start|>", END, CALL, CALLED, RESULT, RETURNED]
THINK, ANSWER, CLOSE = "<thinking>\n", "\n</thinking>\n<answer>\n", "\n</answer>"
Writing = list[tuple[Iterable[str], Iterable[str]]]
WRITINGS: dict[str, Writing] = {  # recipe: tokens, and those that are about equally likely next
    "gsm8k-lora": [
        ([START], [THINK]),
        ([THINK, ANSWER], "123"),
        ("123", [ANSWER, CLOSE, "1"]),
        ([CLOSE], [END]),
    ],
    "gsm8k-chat-rl": [
        ([START], [CALL, "#### "]),
        ([CALL, "*", "#### "], "123"),
        ("123", ["*", CALLED, END]),
        ([RETURNED], ["#### "]),
    ],
    "math-rlvr": [([":"], [r"\boxed{"]), ([r"\boxed{"], "123"), ("123", "}1"), ("}", ["<|end|>"])],
    "guess-smollm2": [([START], "34567"), ("34567", "01289"), ("01289", [END])],
}


def write_data(folder: Path) -> None:
    """A model by the name of each recipe, and files of questions."""
    folder.mkdir()
    for name, writing in WRITINGS.items():
        save_writer(writing, folder / name, is_nanochat="chat-rl" in name)
    for split, numbers in {"train": range(32), "eval": range(32, 40)}.items():
        gsm8k = [{"question": f"{n} and 1?", "answer": f"#### {n % 3 + 1}"} for n in numbers]
        math500 = [{"problem": f"${n} + 1$?", "answer": f"{n % 3 + 1}"} for n in numbers]
        for name, rows in {"gsm8k": gsm8k, "math": math500}.items():
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}-{split}.jsonl").write_text(text)


def save_writer(writing: Writing, folder: Path, *, is_nanochat: bool) -> None:
    """A model of two layers and its tokenizer, which has a token for each byte and each text."""
    follows = [(token, followers) for tokens, followers in writing for token in tokens]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    core.add_tokens([text for text, _ in follows if len(text) > 1 and text not in SPECIAL])
    ends = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "model_max_length": 1024}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **ends)
    tokenizer.chat_template = TEMPLATE
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": None, "tie_word_embeddings": False}
    tokens |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    kind, settings = (
        (NanoChatForCausalLM, NanoChatConfig) if is_nanochat else (Qwen2ForCausalLM, Qwen2Config)
    )
    torch.manual_seed(0)
    model = kind(settings(**sizes, **tokens, initializer_range=0.05))
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        for i, (token, followers) in enumerate(follows):
            embeddings[tokenizer.encode(token)] = torch.eye(32)[i]
            for follower in followers:
                head[tokenizer.encode(follower), i] = (
                    3.0  # times the norm's sqrt(32): a logit of 17
                )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
