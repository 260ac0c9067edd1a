"""The tokenizer: its ids are those of its tokenizer.json, and the model must have them all."""

import functools
import re
from datetime import datetime

from tokenizers import Tokenizer
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import cached_file

from engine.core.config import Config
from engine.core.types import Log
from engine.questions.templates import end_of_turn, render_prompt, special_ids

TOKENIZER_PROBE = "Use [3, 17, 255] to make 46.\n<think>12 * 3 = 36, don't</think>\n\n  été"
TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")  # a template's call for the date


def load_tokenizer(config: Config, log: Log) -> PreTrainedTokenizerFast:
    """The model's tokenizer, checked against its own tokenizer.json."""
    name = config.model.name
    revision = config.model.revision
    tokenizer = AutoTokenizer.from_pretrained(
        name, revision=revision, trust_remote_code=config.model.trust_remote_code
    )
    ids = tokenizer.encode(TOKENIZER_PROBE, add_special_tokens=False)
    if not ids:
        raise ValueError("it has no tokenizer files, such as tokenizer.json")
    file = cached_file(
        name, "tokenizer.json", revision=revision, _raise_exceptions_for_missing_entries=False
    )
    if file:
        expected = Tokenizer.from_file(file).encode(TOKENIZER_PROBE, add_special_tokens=False)
        if ids != expected.ids:  # its pre-tokenizer was replaced by that of the model's family
            log("AutoTokenizer changes this model's tokens: PreTrainedTokenizerFast is used")
            tokenizer = PreTrainedTokenizerFast.from_pretrained(name, revision=revision)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError("its tokenizer has neither a pad nor an eos token")
        log("the tokenizer has no pad token: its eos token is used")
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.chat_template is None:
        log("the tokenizer has no chat template: the prompt is plain text")
    options = config.task.template_options
    if unread := [name for name in options if name not in str(tokenizer.chat_template)]:
        raise ValueError(f"task.template_options: its chat template has no {unread[0]}")
    if tokenizer.chat_template is not None and config.task.template_date is not None:
        day = datetime.fromisoformat(config.task.template_date)
        template = TODAY.sub(lambda m: repr(day.strftime(m[2])), tokenizer.get_chat_template())
        options = options | {"chat_template": template}  # best/ keeps the template as it was
    # Every call of it gets them: for prompts, for checks, for the token that ends a turn.
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **options)
    return tokenizer


def check_vocabulary(model: nn.Module, tokenizer: PreTrainedTokenizerFast, log: Log) -> None:
    """Raise ValueError if the tokenizer can give an id that the model has no embedding for.

    A special token that no prompt contains, such as Gemma 3's for images, may have none. Nor need a
    pad token, which many trainers of adapters add: an end token, masked as well, takes its place.
    """
    num_embeddings = len(model.get_input_embeddings().weight)
    if tokenizer.pad_token_id >= num_embeddings and tokenizer.eos_token is not None:
        log("the tokenizer's pad token has no embedding: its eos token is used")
        tokenizer.pad_token = tokenizer.eos_token
    chat = [{"role": "user", "content": TOKENIZER_PROBE}]
    used = {*tokenizer.encode(render_prompt(chat, tokenizer), add_special_tokens=True)}
    used |= {tokenizer.pad_token_id, tokenizer.eos_token_id, end_of_turn(tokenizer)}
    largest = max({*tokenizer.get_vocab().values()} - (special_ids(tokenizer) - used))
    if largest >= num_embeddings:
        raise ValueError(
            f"its tokenizer gives ids up to {largest}, but it has {num_embeddings} embeddings; "
            "give a tokenizer that belongs to it"
        )


def find_eos_ids(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast, *, stop: list[str]
) -> list[int]:
    """The ids that end a completion, from tokenizer, generation config, model config and `stop`.

    The chat template's end of a turn too: base models such as Qwen2.5's write but do not name it.
    """
    declared = [
        tokenizer.eos_token_id,
        model.generation_config.eos_token_id,
        model.config.get_text_config().eos_token_id,
        end_of_turn(tokenizer),
        [id for token, id in tokenizer.get_added_vocab().items() if token in stop],
    ]
    eos_ids = {i for ids in declared for i in (ids if isinstance(ids, list) else [ids])} - {None}
    if not eos_ids:
        raise ValueError("neither tokenizer nor model says which token ends text")
    return sorted(eos_ids)
