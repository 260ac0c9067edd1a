"""Exact arithmetic with + - * / and parentheses, for the calculator and for graders: never eval."""

import operator
import re
from decimal import Decimal
from fractions import Fraction

MAX_CHARS = 200  # of an expression; it bounds the result too, since there are no powers
MAX_RESULT_CHARS = 32
MAX_DECIMALS = 12
CHARS = frozenset("0123456789.,+-*/() ")
# Digits, perhaps in groups of three with commas, and decimals; \d would match any script's digits.
WHOLE = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3}){1,30}|[0-9]{1,100})"
NUMBER = rf"(?:{WHOLE}(?:\.[0-9]{{1,100}})?|\.[0-9]{{1,100}})"
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "negate": 3}
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def evaluate_expression(expression: str) -> str | None:
    """The exact result of an expression as text, such as "0.875" for "(1.5 + 2) / 4".

    None for a text that is longer than MAX_CHARS or no expression, and for a result of more than
    MAX_DECIMALS decimals, such as 1 / 3, or MAX_RESULT_CHARS characters. Never raises.
    """
    if len(expression) > MAX_CHARS or not CHARS.issuperset(expression):
        return None
    try:
        scaled = value_of(re.findall(rf"{NUMBER}|[-+*/().,]", expression)) * 10**MAX_DECIMALS
    except (ValueError, ZeroDivisionError):
        return None
    if scaled.denominator != 1:
        return None
    text = f"{Decimal(f'{scaled.numerator}e-{MAX_DECIMALS}'):f}".rstrip("0").rstrip(".")
    return text if len(text) <= MAX_RESULT_CHARS else None


def value_of(tokens: list[str]) -> Fraction:
    """The exact value of an expression, given as its numbers, operators and parentheses.

    Dijkstra's shunting-yard algorithm needs no recursion, so parentheses may be nested to any
    depth. Raises ValueError for a malformed expression, ZeroDivisionError for a division by zero.
    """
    values = []
    pending = []  # the operators and "(" whose right-hand side is not complete
    expects_value = True
    for token in ["(", *tokens, ")"]:
        if expects_value and token[-1] in "0123456789":
            values.append(Fraction(token.replace(",", "")))
            expects_value = False
        elif expects_value and token in ("(", "-"):
            pending.append("negate" if token == "-" else "(")
        elif not expects_value and token in OPERATIONS:
            apply_pending(pending, values, min_precedence=PRECEDENCE[token])
            pending.append(token)
            expects_value = True
        elif not expects_value and token == ")":
            apply_pending(pending, values, min_precedence=1)
            if not pending:
                raise ValueError(") without (")
            pending.pop()
        else:
            raise ValueError(f"{token} cannot stand here")
    if pending:
        raise ValueError("( without )")
    return values.pop()


def apply_pending(pending: list[str], values: list[Fraction], *, min_precedence: int) -> None:
    """Apply pending operators, the last one first, until a "(" or one below `min_precedence`."""
    while pending and PRECEDENCE.get(pending[-1], 0) >= min_precedence:
        name = pending.pop()
        right = values.pop()
        values.append(-right if name == "negate" else OPERATIONS[name](values.pop(), right))
