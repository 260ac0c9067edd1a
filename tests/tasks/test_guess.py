"""The guessing game: what its environment says and pays."""

import functools
import math

import pytest

from tasks import guess


def play(*messages: str) -> tuple[list[str | None], dict[str, float]]:
    """What the environment says to each message, and what it pays."""
    environment = guess.Environment()
    environment.reset(low=23, high=37, number=28)
    return [environment.respond(message) for message in messages], environment.get_reward()


def test_halving_finds_each_number_in_four_guesses_and_327_on_average():
    counts = []
    for number in range(23, 38):
        environment = guess.Environment()
        environment.reset(low=23, high=37, number=number)
        reply = ""
        while reply is not None:
            reply = environment.respond(str((environment.low + environment.high) // 2))
        assert environment.get_reward() == {"answer": 1.0, "narrowed": 1.0, "inside": 1.0}
        counts.append(len(environment.guesses))
    assert max(counts) == 4 and sum(counts) == 49  # 3.27 on average


def test_it_says_higher_or_lower_and_what_is_left():
    replies, paid = play("37.", "I say 23", "22", "between 20 and 26: 100")
    assert replies[0] == "Lower: between 23 and 36."
    assert replies[1] == replies[2] == "Higher: between 24 and 36."
    assert replies[3] is None
    narrowed = pytest.approx(math.log(15 / 13, 15))
    assert paid == {"answer": 0.0, "narrowed": narrowed, "inside": 0.5}
    assert play("28") == ([None], {"answer": 1.0, "narrowed": 1.0, "inside": 1.0})
    assert play("1", "28")[1] == {"answer": 1.0, "narrowed": 1.0, "inside": 0.5}
    assert play("30")[1]["inside"] == 0.25  # a game that ends early has missed the other guesses


def test_nothing_is_paid_for_lists_repetitions_or_numbers_outside():
    lists = ["27 28 29", "28 0", " ".join(map(str, range(100)))]
    for message in ("", "1", "999", "-5", "9" * 10_000, *lists):
        assert play(*[message] * 4)[1]["answer"] == 0
    assert play("1", "1", "100", "100")[1] == {"answer": 0.0, "narrowed": 0.0, "inside": 0.0}


def test_ranges_are_either_trained_on_or_validated():
    how = {"options": None, "seed": 0, "held_out": True, "exclude": []}
    load = functools.partial(guess.load_examples, "generated", **how)
    training, validation = (load(split, num_examples=None) for split in ("train", "validation"))
    assert not {row["low"] for row in training} & {row["low"] for row in validation}
    assert len(training) + len(validation) == 86 * 15
    for row in training + validation:
        assert 1 <= row["low"] <= row["number"] <= row["high"] == row["low"] + 14 <= 100
    assert len(load("validation", num_examples=10)) == 10
