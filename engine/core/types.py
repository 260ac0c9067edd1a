"""What a step makes of its questions: completions, trajectories, micro-batches.

Shapes: B rows, T completion tokens, S longest prompt with its completion. Masks: True = keep.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
from torch import Tensor

Questions = list[dict]  # what a task poses: each a row, by its columns
Prompts = list[list[int]]  # the token ids of each
Parts = dict[str, float | None]  # of a reward, by name; None is one that does not apply
Metrics = dict[str, float]  # what is measured, by name
Sums = dict[str, tuple[float, float]]  # of metrics, on one rank: sum and count
Log = Callable[[str], None]  # prints a line, on rank 0
Seed = Sequence[int]  # a SeedWord, then numbers such as training.seed and a question's place


def no_log(line: str) -> None:
    """A Log for what is said elsewhere."""


class SeedWord(IntEnum):
    """The first word of a seed, so that the random numbers of these never meet."""

    TRAINING = 0
    VALIDATION = 1
    TYPED = 2  # a question that a person types into tools.chat
    IMITATION = 3
    COLLECTED = 4  # what tools.collect samples
    ORDER = 5  # in which order an epoch has the questions


class Tool(Protocol):
    """Writes into completions: the calculator, or a row's conversation with its environment."""

    asking_ids: list[int]  # a completion asks it by one of these tokens, which does not end it

    def reply(self, token_ids: list[int]) -> list[int] | None:
        """What to write behind these tokens of a completion; None if the completion ends here."""


@dataclass(frozen=True)
class SamplingParams:
    """What completions of a prompt are drawn from, how many, and when one ends."""

    max_new_tokens: int
    temperature: float  # 0 is greedy: always the likeliest token, scored at temperature 1
    top_p: float  # 1 is off
    top_k: int  # 0 is off
    eos_ids: tuple[int, ...]
    pad_id: int
    group_size: int  # completions of each prompt
    calculator: Tool | None = None  # writes the result where a completion asks for it
    max_turns: int = 1  # of a conversation
    stop: Any = None  # the StopTexts (engine/sampling/stop_texts.py) that end a completion
    conversations: Sequence[Tool] = ()  # of the rows with their environments (environment.py)


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of some questions, and what their completions are drawn by."""

    token_ids: Prompts
    seeds: list[Seed]
    conversations: list[list[Tool]] = field(default_factory=list)  # a list for each prompt, or none


@dataclass(frozen=True)
class Completion:
    """One completion as it was sampled, of T tokens."""

    token_ids: list[int]  # up to and including the first EOS
    log_probs: np.ndarray  # (T,), of each token under softmax(logits / temperature), untruncated
    entropies: np.ndarray  # (T,), of that distribution, in nats
    truncated: bool  # ended by the length limit instead of an EOS
    is_inserted: np.ndarray  # (T,), True for the tokens of a tool, whose two numbers are 0
    ends_in_text: bool = False  # a stop text, of which the last token is a part
    conversation: Any = None  # the Conversation (engine/questions/environment.py) that it was

    @property
    def num_sampled(self) -> int:
        """The number of tokens that the model chose itself."""
        return len(self.token_ids) - int(self.is_inserted.sum())

    @property
    def num_turns(self) -> int:
        """How often the model spoke: at first, and after each reply."""
        return 1 + int((np.diff(self.is_inserted.astype(int)) < 0).sum())

    @property
    def is_broken(self) -> bool:
        """True if some logits were not finite: the tokens drawn from them are noise."""
        return not np.isfinite(self.log_probs).all()


Progress = Callable[[int], None]  # is told how many more completions have ended
DecodeLoop = Callable[..., list[Completion]]  # such as main.py's `generate`, and decode_grouped


@dataclass
class Trajectory:
    """One completion of one question: what was sampled, what it earned, what it teaches."""

    prompt_ids: list[int]
    completion: Completion
    text: str  # the completion without its end-of-sequence token
    reward_parts: Parts
    reward: float
    advantage: float = 0.0
    in_batch: bool = True  # counts in the loss's denominator; sil leaves out all but the k best

    @property
    def num_tokens(self) -> int:
        """Of prompt and completion together."""
        return len(self.prompt_ids) + len(self.completion.token_ids)

    @property
    def answer(self) -> float:
        """The part of the reward that says whether it is solved: `answer`, else the first."""
        parts = {"answer": self.reward_parts.get("answer")} | self.reward_parts
        return next((x for name, x in parts.items() if x is not None and name != "timeout"), 0.0)

    @property
    def is_solved(self) -> bool:
        return self.answer >= 1.0 and not self.completion.is_broken

    @property
    def is_solved_and_ended(self) -> bool:
        return self.is_solved and not self.completion.truncated


Groups = list[list[Trajectory]]  # of each question the trajectories of its completions


@dataclass
class MicroBatch:
    """Trajectories that go through the model together, padded on the right."""

    trajectories: list[Trajectory]  # B
    input_ids: Tensor  # (B, S), prompt and completion
    completion_mask: Tensor  # (B, S), True for what was sampled, the first EOS too
    advantages: Tensor  # (B,)
    token_weights: Tensor  # (B, S); 0 all over where a rank has nothing to train on
    sampler_log_probs: Tensor  # (B, S)
    old_log_probs: Tensor | None = None  # (B, S), of the first pass
    ref_log_probs: Tensor | None = None  # (B, S), set by the first pass if there is a KL penalty
