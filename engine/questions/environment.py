"""Environments: a task's class that the model talks with for several turns, by the rules of TRL.

Each completion has an instance of its own; docs/tasks.md explains its methods. What the model wrote
is never rendered again, since a template may give it other tokens: a reply is inserted as ids.
"""

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from engine.core.config import Config
from engine.core.measures import Clock
from engine.core.tensors import seeded
from engine.core.types import PromptBatch, Questions, SamplingParams, Seed
from engine.core.user_file import RewardError, naming_mistakes
from engine.questions import templates
from engine.questions.contract import Task, assistant_prefix

REPLY = "A made-up reply."
# How Qwen2.5, Qwen3 and Hermes write calls, in the form of transformers' `response_template`.
TURN_FORM = {
    "start_anchor_pattern": r"\A",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"function": "{content}"},
        },
        "thinking": {"open": "<think>", "close": "</think>"},
    },
}


def start_conversations(
    policy: Any,  # model/policy.py's Policy
    task: Task,
    questions: Questions,
    seeds: list[Seed],
    params: SamplingParams,
    clock: Clock,
) -> PromptBatch:
    """The prompts, and a conversation with the task's Environment for each sample of them."""
    turns = Turns(policy.tokenizer, task)
    groups = []
    room = (policy.context_length or 10**9) - params.max_new_tokens
    for question, seed in zip(questions, seeds, strict=True):
        prompt_ids = []  # filled below, once `reset` has said what it adds
        group = [
            Conversation(
                task,
                turns,
                question,
                prompt_ids,
                (*seed, sample),
                params,
                policy.model.device,
                clock,
            )
            for sample in range(1, params.group_size + 1)
        ]
        texts = {conversation.opening for conversation in group}
        *others, last = task.pose(question)
        last = last | {"content": last["content"] + turns.clean(min(texts))}
        prompt_ids += turns.encode(turns.render([*others, last]))
        if len(texts) > 1:
            raise group[0].error("reset", f"returned different texts to a group: {sorted(texts)}")
        if len(prompt_ids) > room:
            raise group[0].error("reset", f"made the prompt longer than the {room} tokens of room")
        groups.append(group)
    return PromptBatch([group[0].prompt_ids for group in groups], seeds, groups)


@dataclass
class Conversation:
    """The tool of a row that replies to each turn of the model: its environment."""

    task: Task
    turns: "Turns"
    question: dict
    prompt_ids: list[int]
    seed: Seed  # the question's, and the number of the sample, from 1 on
    params: SamplingParams
    device: torch.device
    clock: Clock
    num_turns: int = 0  # of the model, so far
    start: int = 0  # of the model's next turn in the completion

    def __post_init__(self) -> None:
        self.asking_ids = [self.turns.end_id]
        with seeded([self.seed[:-1]], self.device):
            self.environment = self.task.Environment()
        self.opening = self.ask("reset", **copy.deepcopy(self.question)) or ""

    def reply(self, token_ids: list[int]) -> list[int] | None:
        """The ids that answer the turn which ends here; None if the conversation does."""
        before = self.turns.decode(self.prompt_ids + token_ids[: self.start])
        text = self.turns.decode(token_ids[self.start : -1])
        self.num_turns += 1
        calls = self.turns.read_calls(text, before=before)
        replies = [self.call(call["name"], call.get("arguments")) for call in calls]
        if not calls and hasattr(self.environment, "respond"):
            said = self.ask("respond", text)
            replies = [] if said is None else [{"role": "user", "content": said}]
        if not replies or self.num_turns >= self.params.max_turns:
            return None
        # What cannot fit is cut before it is tokenised.
        num_chars = self.turns.longest * (self.params.max_new_tokens - len(token_ids))
        for reply in replies:
            reply["content"] = self.turns.clean(reply["content"][:num_chars])
        reply_ids = self.turns.render_reply(replies)
        self.start = len(token_ids) + len(reply_ids)
        return reply_ids

    def call(self, name: str, arguments: Any) -> dict[str, str]:
        """The message with what a tool returns; the model also reads what goes wrong in a call."""
        try:
            if name not in self.turns.names:
                raise NameError(f"there is no tool {name}")
            content = str(self.ask(name, **(arguments or {})))
        except Exception as error:
            content = f"error: {type(error).__name__}: {error}"
        return {"role": "tool", "name": self.turns.clean(name), "content": content}

    def reward(self) -> dict:
        """The parts of the reward that the environment pays, if it pays any."""
        paid = self.ask("get_reward") if hasattr(self.environment, "get_reward") else {}
        return paid if isinstance(paid, dict) else {"answer": paid}

    def ask(self, method: str, /, *arguments: str, **named: Any) -> Any:
        """Call a method; its random numbers follow from question, sample and turn."""
        words = self.seed[:-1] if method == "reset" else (*self.seed, self.num_turns)
        passes = Exception if method in self.turns.names else RewardError  # a tool's: it is read
        function = getattr(self.environment, method)
        guard = naming_mistakes(
            self.task.file, function, self.question, name=f"Environment.{method}", passes=passes
        )
        with self.clock("environment"), seeded([words], self.device), guard:
            result = function(*arguments, **named)
        if method in ("reset", "respond") and not isinstance(result, str | None):
            raise self.error(method, f"must return a text or None, not {result!r:.80}")
        return result

    def error(self, method: str, problem: str) -> RewardError:
        return RewardError(
            f"{self.task.file}: Environment.{method} {problem}: question {self.question!r:.200}"
        )


def problems_of_environment(
    task: Task, config: Config, tokenizer: PreTrainedTokenizerFast, question: dict
) -> Iterator[str]:
    """Why it cannot be played. The first is the one to mend: what comes later may rest on it."""
    environment = task.Environment()
    model = tokenizer.name_or_path
    responds = hasattr(environment, "respond")
    prompt = task.pose(question)
    if not hasattr(environment, "reset"):
        yield "has no reset: write def reset(self, **example)"
    if not hasattr(environment, "get_reward") and task.reward_function is None:
        yield "has no get_reward, and the task no reward_function: write one of them"
    if config.sampling.calculator:
        yield "replies alone: write sampling.calculator=null"
    if isinstance(prompt, str) or assistant_prefix(prompt):
        yield "needs generate_prompt to return messages, the last one the user's"
    if templates.end_of_turn(tokenizer) is None:
        yield f"needs a chat template that ends turns by a special token, which {model} lacks"
    turns = Turns(tokenizer, task)
    if templates.tool_schemas(task) and not turns.tools and not responds:
        yield f"has tools, of which {model}'s chat template does not tell: write respond(message)"
    replies = [{"role": "user", "content": REPLY}] if responds else []
    if turns.tools:
        turn = made_up_turn(turns.names[:1])
        written = turns.render([templates.QUESTION, turn]).split(turns.end)[-2]
        if turns.read_calls(written, before="") != [turn["tool_calls"][0]["function"]]:
            yield f"has tools, but how {model} calls them is unknown: it has no response_template"
        replies += [{"role": "tool", "name": turns.names[0], "content": REPLY}]
    for reply in replies:
        if REPLY not in turns.decode(turns.render_reply([reply])):
            yield f"cannot reply: {model}'s chat template drops messages of role {reply['role']}"


class Turns:
    """How a model's chat template writes replies, and how the model writes calls of tools."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, task: Task):
        self.tokenizer = tokenizer
        tools = templates.tool_schemas(task)
        self.end_id = templates.end_of_turn(tokenizer)  # this token asks for a reply
        self.end = tokenizer.convert_ids_to_tokens(self.end_id)
        self.longest = max(map(len, tokenizer.get_vocab()))  # token, in characters
        self.decode = functools.partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        render = functools.partial(templates.apply_template, tokenizer=tokenizer)
        plain, text = (render([templates.QUESTION], tools=some) for some in ([], tools))
        self.tools = tools if text != plain else []  # not every template tells the model of tools
        self.names = [tool["function"]["name"] for tool in self.tools]
        self.render = functools.partial(render, tools=self.tools)

    def encode(self, text: str) -> list[int]:
        text = templates.whole_characters(text)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def clean(self, text: str) -> str:
        """The text without special tokens, with which it could end the turn that it stands in."""
        # They are found in its ids: a normalizer may make one of other characters.
        special = templates.special_ids(self.tokenizer)
        while not special.isdisjoint(ids := self.encode(text)):
            text = self.decode([i for i in ids if i not in special])
        return text

    def render_reply(self, replies: list[dict]) -> list[int]:
        """The ids of messages behind a turn's end token, up to where the model speaks again.

        They follow as many end tokens as the chat has without them. What two texts have in common
        would not do: Qwen3 and Phi-3 write earlier turns in another way once a reply is there.
        """
        turn = made_up_turn([reply["name"] for reply in replies if "name" in reply])
        chat = [templates.QUESTION, turn]
        before = self.render(chat)
        rest = self.render(chat + replies).split(self.end, before.count(self.end))[-1]
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
    called = [
        {"type": "function", "function": {"name": name, "arguments": {"a": 1}}} for name in calls
    ]
    return templates.TURN | ({"content": "", "tool_calls": called} if calls else {})
