"""How a model's chat template writes replies, and how the model writes calls of tools."""

import functools
from types import ModuleType

from transformers import PreTrainedTokenizerFast as Tokenizer

from engine.questions.prompts import (
    QUESTION,
    TURN,
    apply_template,
    end_of_turn,
    special_ids,
    tool_schemas,
    whole_characters,
)

# How Qwen2.5, Qwen3 and Hermes write calls, in the form of transformers' `response_template`.
CALL = {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True}
FIELDS = {"tool_calls": CALL | {"transform": {"function": "{content}"}}}
FIELDS |= {"thinking": {"open": "<think>", "close": "</think>"}}
TURN_FORM = {"start_anchor_pattern": r"\A", "fields": FIELDS}


class Turns:
    """How a model's chat template writes replies, and how the model writes calls of tools."""

    def __init__(self, tokenizer: Tokenizer, task: ModuleType):
        self.tokenizer, tools = tokenizer, tool_schemas(task)
        self.end_id = end_of_turn(tokenizer)  # this token asks for a reply
        self.end = tokenizer.convert_ids_to_tokens(self.end_id)
        self.encode = functools.partial(tokenizer.encode, add_special_tokens=False)
        self.decode = functools.partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        plain, text = (apply_template([QUESTION], tokenizer, some) for some in ([], tools))
        self.tools = tools if text != plain else []  # not every template tells the model of tools
        self.names = [tool["function"]["name"] for tool in self.tools]
        self.render = functools.partial(apply_template, tokenizer=tokenizer, tools=self.tools)

    def clean(self, text: str) -> str:
        """The text without special tokens, with which it could end the turn that it stands in.

        They are found in its ids: a normalizer may make one of other characters.
        """
        text, special = whole_characters(text), special_ids(self.tokenizer)
        while not special.isdisjoint(ids := self.encode(text)):
            text = self.decode([i for i in ids if i not in special])
        return text

    def render_reply(self, replies: list[dict]) -> list[int]:
        """The ids of messages behind a turn's end token, up to where the model speaks again.

        They follow as many end tokens as the chat has without them. What two texts have in common
        would not do: Qwen3 and Phi-3 write earlier turns in another way once a reply is there.
        """
        chat = [QUESTION, made_up_turn([reply["name"] for reply in replies if "name" in reply])]
        before, text = self.render(chat), self.render(chat + replies)
        rest = text.split(self.end, before.count(self.end))[-1]
        return self.encode(self.end + rest)[1:]  # some tokenizers mark the start of a text

    def read_calls(self, text: str, *, before: str) -> list[dict]:
        """The calls in a turn, each with its name; none if one cannot be read."""
        form = getattr(self.tokenizer, "response_template", None) or TURN_FORM
        begun = before.rpartition(self.end)[2]  # may have begun the turn, such as with <think>
        parse = functools.partial(self.tokenizer.parse_response, prefix=begun, tools=self.tools)
        try:
            turn = parse(text, form) if self.tools else {}
            calls = [call["function"] for call in turn.get("tool_calls", [])]
            return calls if all(isinstance(call["name"], str) for call in calls) else []
        except (ValueError, TypeError, LookupError, RecursionError):  # such as bad JSON
            return []


def made_up_turn(calls: list[str]) -> dict:
    """A turn of the model that calls these tools, or that only says something."""
    functions = [{"name": name, "arguments": {"a": 1}} for name in calls]
    called = [{"type": "function", "function": function} for function in functions]
    return TURN | ({"content": "", "tool_calls": called} if calls else {})
