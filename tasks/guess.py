"""Guess a number in several turns: an environment says whether it is higher or lower.

An example is a row such as {"low": 23, "high": 72, "number": 41}: 50 numbers within 1 to 100, and
the one to find. To halve what is left finds each in 6 guesses, and in 4.86 on average.
"""

import math
import random
import re

from engine.config import TaskSettings
from engine.data import is_in_split

SIZE, MAX_GUESSES = 50, 6
REWARD_PARTS = ("answer", "narrowed")


def load_examples(
    source: str, split: str, *, options: TaskSettings, num_examples: int | None, seed: int, **others
) -> list[dict]:
    """Each number of each range of the split, drawn by the seed; no range is in both splits."""
    lows = [low for low in range(1, 102 - SIZE) if is_in_split(f"guess from {low}", split)]
    ranges = [{"low": low, "high": low + SIZE - 1} for low in lows]
    rows = [row | {"number": row["low"] + i} for row in ranges for i in range(SIZE)]
    return random.Random(f"guess {seed}").sample(rows, min(num_examples or len(rows), len(rows)))


def generate_prompt(example: dict, *, options: TaskSettings) -> list[dict]:
    """One chat message. The number in it shows how to write a guess, and is never right."""
    text = f"Choose a number between {example['low']} and {example['high']}."
    return [{"role": "user", "content": f"{text} Just write the number, such as 0."}]


class Environment:
    """Knows the number. The last number of a turn is the guess, so a list of them gains nothing."""

    def reset(self, low: int, high: int, number: int) -> None:
        self.low, self.high, self.number, self.guesses = low, high, number, []

    def respond(self, message: str) -> str | None:
        """Where the number is; None once it is found or no guess is left."""
        self.guesses.append(int((re.findall("[0-9]{1,9}", message) or [0])[-1]))
        if self.number in self.guesses or len(self.guesses) == MAX_GUESSES:
            return None
        is_higher = self.number > self.guesses[-1]
        if is_higher:
            self.low = max(self.low, self.guesses[-1] + 1)
        else:
            self.high = min(self.high, self.guesses[-1] - 1)
        return f"{'Higher' if is_higher else 'Lower'}: between {self.low} and {self.high}."

    def get_reward(self) -> dict[str, float]:
        """`answer`: found; `narrowed`: how often the range was halved, as a share of log2(50)."""
        is_found = self.number in self.guesses
        num_left = 1 if is_found else self.high - self.low + 1
        return {"answer": float(is_found), "narrowed": math.log(SIZE / num_left, SIZE)}
