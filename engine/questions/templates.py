"""A model's chat template: messages become a text, and what it may do to them is checked."""

import functools
import inspect
import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast as Tokenizer
from transformers.utils import get_json_schema

from engine.questions.contract import Task, assistant_prefix

QUESTION = {"role": "user", "content": "A made-up question."}
TURN = {"role": "assistant", "content": "A made-up turn."}


@functools.cache
def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)


def whole_characters(text: str) -> str:
    """JSON can hold half a character, at which a tokenizer would fail: it becomes a "?"."""
    return text.encode("utf-8", "replace").decode("utf-8")


def render_prompt(
    messages: list[dict] | str, tokenizer: Tokenizer, tools: Sequence[dict] = ()
) -> str:
    """The chat as a text that the model continues; a last assistant message is continued too."""
    if isinstance(messages, str):  # many base models have a template, but have never seen a chat
        return messages
    if tokenizer.chat_template is None:
        return "\n".join(message["content"] for message in messages)
    prefix = assistant_prefix(messages)
    chat = messages[:-1] if prefix else messages
    # Some templates rewrite what an assistant says, so we append the prefix to the text.
    text = apply_template(chat, tokenizer, tools)
    opened = re.search(r"(<\w+>)\s*$", text)  # a template may open <think> itself, as R1-Distill's
    return text + (prefix.replace(opened[1], "", 1) if opened else prefix)


@functools.cache
def tool_schemas(task: Task) -> list[dict]:
    """The tools of the task's Environment, its public methods, as a chat template tells of them."""
    try:
        environment = task.Environment() if task.Environment else None
        methods = inspect.getmembers(type(environment), inspect.isfunction)
        names = [name for name, _ in methods if not re.match("_|(reset|respond|get_reward)$", name)]
        return [get_json_schema(getattr(environment, name)) for name in names]
    except Exception as error:  # of arguments that it asks for, or types that have no schema
        raise ValueError(f"{task.file}: Environment: {error}") from error


def apply_template(chat: list[dict], tokenizer: Tokenizer, tools: Sequence[dict]) -> str:
    """The chat in the tokenizer's template, up to where the assistant speaks.

    Some templates, such as Gemma 2's, refuse a system message, and others leave it out. Then we put
    it before the user's message. Raises ValueError for a template that fails all the same.
    """
    has_system = chat[0]["role"] == "system"
    render = functools.partial(
        tokenizer.apply_chat_template,
        tools=tools or None,
        tokenize=False,
        add_generation_prompt=True,
    )
    try:
        text = render(chat)
    except Exception as error:  # a template is a program, which may raise anything
        if not has_system:
            model = tokenizer.name_or_path
            raise ValueError(f"the chat template of {model} fails: {error}") from error
    else:
        if not has_system or text != render([QUESTION | {"role": "system"}, *chat[1:]]):
            return text
    system, user, *others = chat
    user = user | {"content": f"{system['content']}\n\n{user['content']}"}
    return apply_template([user, *others], tokenizer, tools)


def check_chat(chat: list[dict] | str, tokenizer: Tokenizer) -> None:
    """Raises ValueError if what the user says, but for spaces at its ends, is not in the prompt."""
    if isinstance(chat, str) or tokenizer.chat_template is None:
        return
    prompt = render_prompt(chat, tokenizer)
    for text in (m["content"].strip() for m in chat if m["role"] not in ("system", "assistant")):
        if text not in prompt:
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path} leaves out what the user says, "
                f"{text!r:.80}: return plain text as the prompt"
            )


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """The special token that the chat template writes after an assistant's message, if any."""
    try:
        text = tokenizer.apply_chat_template([QUESTION, TURN], tokenize=False)
    except Exception:  # no template; or it fails, as a program may in any way
        return None
    _, _, after = text.partition(TURN["content"])
    (first,) = tokenizer.encode(after.lstrip(), add_special_tokens=False)[:1] or [None]
    return first if first in special_ids(tokenizer) else None
