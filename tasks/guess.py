"""Guess a number in several turns: an environment says whether it is higher or lower.

An example is a row such as {"low": 23, "high": 37, "number": 31}: 15 numbers within 1 to 100, and
the one to find. To halve what is left finds each in 4 guesses, and a guess at random inside it 60%.
"""

import math
import random
import re

from engine.core.config import TaskSettings
from engine.questions.tasks import is_in_split

SIZE, MAX_GUESSES = 15, 4
REWARD_PARTS = ("answer", "narrowed", "inside")


def load_examples(
    source: str, split: str, *, num_examples: int | None, seed: int, **others: object
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
        self.num_inside = 0

    def respond(self, message: str) -> str | None:
        """Where the number is; None once it is found or no guess is left."""
        guess = int((re.findall("[0-9]{1,9}", message) or [0])[-1])
        self.guesses.append(guess)
        self.num_inside += self.low <= guess <= self.high
        if guess == self.number or len(self.guesses) == MAX_GUESSES:
            return None
        is_higher = self.number > guess
        if is_higher:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        return f"{'Higher' if is_higher else 'Lower'}: between {self.low} and {self.high}."

    def get_reward(self) -> dict[str, float]:
        """`answer`: found; `narrowed`: how often the range was halved, as a share of log2(15).

        Both are luck for the most part. `inside` is not: the share of guesses at what was left.
        """
        is_found = self.number in self.guesses
        num_left = 1 if is_found else self.high - self.low + 1
        num_guesses = len(self.guesses) if is_found else MAX_GUESSES
        return {
            "answer": float(is_found),
            "narrowed": math.log(SIZE / num_left, SIZE),
            "inside": self.num_inside / num_guesses,
        }
