"""Exact arithmetic with + - * / and parentheses: no eval, no rounding, no recursion.

`Calculator` is the tool that completions use; Countdown's grader uses `value_of`.
"""

import operator
import re
from decimal import Decimal
from fractions import Fraction

from transformers import PreTrainedTokenizerFast

MAX_CHARS = 200  # of an expression; it bounds the result too, since there are no powers
MAX_RESULT_CHARS = 32
MAX_DECIMALS = 12
CHARS = frozenset("0123456789.,+-*/() ")
# Digits, perhaps in groups of three with commas, and decimals; \d would match any script's digits.
WHOLE = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3}){1,30}|[0-9]{1,100})"
NUMBER = rf"(?:{WHOLE}(?:\.[0-9]{{1,100}})?|\.[0-9]{{1,100}})"
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "negate": 3}
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
STYLES = {  # the text before an expression, the text that asks for its result, our reply
    "gsm8k": ("<<", "=", "{}>>"),
    "nanochat": ("<|python_start|>", "<|python_end|>", "<|output_start|>{}<|output_end|>"),
}


class Calculator:
    """Writes the result into a completion that asks for it, in one of the STYLES.

    gsm8k is the tool of "Training Verifiers to Solve Math Word Problems" (arXiv:2110.14168,
    appendix C). nanochat's markers are special tokens of nanochat's models: raises ValueError if
    the tokenizer lacks one of them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, style: str):
        self.tokenizer = tokenizer
        self.opening, self.closing, self.form = STYLES[style]
        vocabulary = tokenizer.get_vocab()
        for token in re.findall(r"<\|\w+\|>", "".join(STYLES[style])):
            if token not in vocabulary:
                problem = f"this tokenizer has no token {token}; write gsm8k, or null for none"
                raise ValueError(f"sampling.calculator = {style}: {problem}")
        ids = sorted(vocabulary.values())
        self.asking_ids = [i for i in ids if tokenizer.decode(i).endswith(self.closing)]

    def reply(self, token_ids: list[int]) -> list[int]:
        """The ids of our reply if `token_ids` end in a request for a result; else no ids."""
        # Each token of an expression has at least one character: these ids hold even the longest.
        text = self.tokenizer.decode(token_ids[-MAX_CHARS - 3 :])
        _, opening, expression = text.rpartition(self.opening)
        result = evaluate(expression.removesuffix(self.closing)) if opening else None
        if result is None:
            return []
        return self.tokenizer.encode(self.form.format(result), add_special_tokens=False)


def evaluate(expression: str) -> str | None:
    """The exact result of an expression as text, such as "0.875" for "(1.5 + 2) / 4".

    None for a text that is no expression or is longer than MAX_CHARS, and for a result that needs
    more than MAX_DECIMALS decimals, such as 1 / 3, or MAX_RESULT_CHARS characters. Never raises.
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
    values: list[Fraction] = []
    pending: list[str] = []  # the operators and "(" whose right-hand side is not complete
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
        name, right = pending.pop(), values.pop()
        values.append(-right if name == "negate" else OPERATIONS[name](values.pop(), right))
