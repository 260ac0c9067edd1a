r"""Whether a boxed answer equals the gold answer: exact layers first, math-verify last.

`grade` goes through the layers in order, and each may answer for good:

    1. the last \boxed{...} with balanced braces; without one the answer is wrong
    2. the same text after light normalisation: spaces, \dfrac, $, units, thousands, a leading x =
    3. two numeric literals: exact fractions decide
    4. number bases and words: the text decides
       (tuples, intervals, sets and matrices are taken apart here: each entry is graded on its own)
    5. guards: what is too long or too big, and what math-verify is known to get wrong, is wrong
    6. math-verify, in a worker process that can be killed (grader_worker.py)

Nothing here runs the model's text as code.
"""

import functools
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

from grader_worker import WORKER, Deadline, OutOfPatience, WorkerLost

MAX_ANSWER_CHARS = 1_000
MAX_DEPTH = 20  # brackets in brackets; an answer has 3 or 4
MAX_ENTRIES = 36  # of a tuple, set or matrix
MAX_LEAF_CHARS = 300  # of one entry that math-verify is to compare
CACHE_SIZE = 4_096

Check = Callable[[str, str], bool]  # math-verify's opinion on (gold, prediction)


@dataclass(frozen=True)
class Grade:
    is_correct: bool
    timed_out: bool = False  # math-verify gave no answer in time; the prediction counts as wrong


def grade(completion: str, gold: str, *, timeout_s: float) -> Grade:
    """Whether the last boxed answer is mathematically equal to `gold`, in at most `timeout_s`."""
    prediction = last_boxed(completion)
    if prediction is None:
        return Grade(False)
    try:
        return grade_answer(prediction, gold, timeout_s)
    except OutOfPatience:
        return Grade(False, timed_out=True)


@functools.lru_cache(CACHE_SIZE)
def grade_answer(prediction: str, gold: str, timeout_s: float) -> Grade:
    """The grade of a boxed text.

    Remembered, time-outs too: the samples of a question often agree, and then cost one time-out.
    """
    check = functools.partial(WORKER.ask, deadline=Deadline(timeout_s))
    gold, prediction = normalise(gold), normalise(prediction)
    if is_too_complex(gold) or is_too_complex(prediction):
        return Grade(gold == prediction)
    try:
        return Grade(is_equal(gold, prediction, check))
    except WorkerLost:
        return Grade(False, timed_out=True)


def normal_answer(boxed: str) -> str:
    r"""One text for answers that layers 2 and 3 find equal: 0.50, \frac12 and x = 1/2 are 1/2."""
    text = normalise(boxed)
    value = text if is_too_complex(text) else take_apart(text).value
    number = literal(value)
    return value if number is None else str(number)


# Layer 1: the box

BOX = "\\boxed{"
BRACE = re.compile(r"\\[{}]|\\\\(?!boxed)|[{}]")  # \{ is a sign, \\ a new line, { a brace


def last_boxed(completion: str) -> str | None:
    r"""The text in the last \boxed{...} whose braces are balanced; None for none.

    A box that the end of the text cuts off does not count; one of more than MAX_ANSWER_CHARS is no
    answer, and neither are those before it. So only boxes near the end are tried: linear time.
    """
    end = len(completion)
    while (found := completion.rfind(BOX, 0, end)) >= 0:
        start = found + len(BOX)
        window = completion[start : start + MAX_ANSWER_CHARS + 1]
        length = group_length(window)
        is_cut_off = length is None and start + len(window) == len(completion)
        if not is_cut_off:
            return None if length is None else window[:length]
        end = found
    return None


def group_length(window: str) -> int | None:
    """The number of characters before the brace that closes the group; None where none does."""
    depth = 1
    for brace in BRACE.finditer(window):
        depth += (brace.group() == "{") - (brace.group() == "}")
        if depth == 0:
            return brace.start()
    return None


# Layer 2: light normalisation

UNICODE = str.maketrans(
    {
        "\u2212": "-",
        "\u00d7": "\\times ",
        "\u00b7": "\\cdot ",
        "\u03c0": "\\pi ",
        "\u221e": "\\infty ",
        "\u00b0": "^{\\circ}",
        "\u00b2": "^2",
        "\u00b3": "^3",
        "\u222a": "\\cup ",
        "\u00a0": " ",
        "~": " ",
    }
)
LATEX_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\s+|.", re.DOTALL)
SPACES = {"\\ ", "\\,", "\\;", "\\:", "\\!", "\\>", "\\quad", "\\qquad", "\\thinspace"}
SIZES = {"big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "left", "right"}
DROPPED = {f"\\{size}" for size in SIZES} | {"$", "\\(", "\\)", "\\[", "\\]", "\\displaystyle"}
TEXTS = ("text", "mbox", "textbf", "textit", "textrm", "textnormal", "mathrm", "hbox")
SYNONYMS = {
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\cfrac": "\\frac",
    "\\lbrace": "\\{",
    "\\rbrace": "\\}",
    "\\le": "\\leq",
    "\\ge": "\\geq",
    "\\lt": "<",
    "\\gt": ">",
    "\\cdot": "\\times",
    "\\degree": "^{\\circ}",
    **{f"\\{text}": "\\text" for text in TEXTS},
}
ARGUMENTS = {"^": 1, "_": 1, "\\sqrt": 1, "\\frac": 2, "\\binom": 2}
THOUSANDS_MARK = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\,|\\!,|,\\,)\s*(?=[0-9]{3}(?![0-9]))")
THOUSANDS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?!,?[0-9])")
BETWEEN_ANSWERS = re.compile(r"(?<=[\s{])(?:and|or)(?=[\s}])")


def normalise(text: str) -> str:
    r"""One spelling for what LaTeX and people spell in many ways; the text itself if it is broken.

    `\dfrac 12` and `$\frac{1}{2}$` both become `\frac{1}{2}`; `10,\!080` and `10,080` become
    10080, but (10,080) is a pair. Spaces stay between numbers alone, since 1 2 is not 12.
    """
    text = THOUSANDS_MARK.sub("", text.strip().translate(UNICODE))
    if not re.search(r"[(\[]|\\\{|\\lbrace", text):
        text = THOUSANDS.sub(lambda number: number.group().replace(",", ""), text)
    text = BETWEEN_ANSWERS.sub(",", text)
    tokens = deque(SYNONYMS.get(token, token) for token in LATEX_TOKEN.findall(text))
    try:
        return read_group(tokens, depth=0, until=None).strip(" ;,").removesuffix(".")
    except ValueError:
        return text


def read_group(tokens: deque[str], *, depth: int, until: str | None) -> str:
    """The tokens before `until` as text; ValueError where they nest too deep or end too soon."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deep")
    written, has_gap = "", False
    while tokens and tokens[0] != until:
        token = tokens.popleft()
        if token.isspace() or token in SPACES:
            has_gap = True
        elif token not in DROPPED:
            piece = read_piece(token, tokens, depth=depth)
            written += " " * needs_space(written, piece, has_gap=has_gap) + piece
            has_gap = False
    if until is not None:
        if not tokens:
            raise ValueError("a group that is not closed")
        tokens.popleft()
    return written


def needs_space(written: str, piece: str, *, has_gap: bool) -> bool:
    """Whether two pieces would become another thing without a space: 1 2, or \\pi r."""
    if has_gap and written[-1:].isdigit() and piece[:1].isdigit():
        return True
    return piece[:1].isalpha() and re.search(r"\\[a-zA-Z]+$", written) is not None


def read_piece(token: str, tokens: deque[str], *, depth: int) -> str:
    r"""A token with its arguments in braces: `^2` becomes `^{2}`."""
    if token == "{":
        return "{" + read_group(tokens, depth=depth + 1, until="}") + "}"
    if token == "}":
        raise ValueError("} without {")
    if token == "\\text":
        return read_text(tokens)
    index = ""
    if token == "\\sqrt" and tokens and tokens[0] == "[":
        tokens.popleft()
        index = "[" + read_group(tokens, depth=depth + 1, until="]") + "]"
    arguments = [read_argument(tokens, depth=depth + 1) for _ in range(ARGUMENTS.get(token, 0))]
    return token + index + "".join(arguments)


def read_argument(tokens: deque[str], *, depth: int) -> str:
    """The next group, or the next token as a group."""
    while tokens and (tokens[0].isspace() or tokens[0] in SPACES):
        tokens.popleft()
    if depth > MAX_DEPTH or not tokens:
        raise ValueError("nested too deep, or without an argument")
    piece = read_piece(tokens.popleft(), tokens, depth=depth)
    return piece if piece.startswith("{") else "{" + piece + "}"


def read_text(tokens: deque[str]) -> str:
    r"""`\text{...}` with single spaces; one that stands between two answers is their comma."""
    while tokens and tokens[0].isspace():
        tokens.popleft()
    if not tokens or tokens.popleft() != "{":
        raise ValueError("text without braces")
    words = ""
    while tokens and tokens[0] != "}":
        words += tokens.popleft()
    if not tokens:
        raise ValueError("text that is not closed")
    tokens.popleft()
    words = " ".join(words.split())
    if words and not words.strip(" ,"):
        return ","
    return f"\\text{{{words}}}" if words.strip(" .") else ""


# Layer 2, continued: what may be left out of an answer

REGULAR_UNITS = (  # their plural has an s
    "degree cent dollar percent inch yard mile meter centimeter kilometer millimeter gram kilogram "
    "pound ounce liter gallon second minute hour day week month year unit mph radian"
)
UNITS = {
    **{unit: unit for unit in REGULAR_UNITS.split()},
    **{f"{unit}s": unit for unit in REGULAR_UNITS.split()},
    **{"inches": "inch", "foot": "foot", "feet": "foot"},
    **{"m": "meter", "cm": "centimeter", "mm": "millimeter", "km": "kilometer", "kg": "kilogram"},
    **{"in": "inch", "ft": "foot", "min": "minute", "sec": "second", "s": "second", "h": "hour"},
}
CHANGING_WORDS = (
    "and or not no than more less fewer at least most about if to of mod modulo base times dozen "
    "hundred thousand million billion trillion k half squared cubed factorial pi"
)
NO_UNITS = frozenset(CHANGING_WORDS.split())
POWERS = {"square": "^{2}", "sq": "^{2}", "cubic": "^{3}"}
NAME = re.compile(
    r"([a-zA-Z](?:_\{[^{}]*\})?(?:\([a-z]\))?|\([a-z](?:,[a-z])+\)|\\text\{[^{}]*\})"
    r"(?:=|\\in(?![a-zA-Z]) ?)([^=]+)"
)
UNIT_TEXT = re.compile(
    r"(.*[^\s=(,])(?:\\text\{([a-zA-Z ./]+)\}|(?<=[0-9}])([a-z]{2,}))(\^\{[23]\})?"
)


@dataclass(frozen=True)
class Answer:
    """An answer taken apart: x = 5 cm has the name x, the value 5 and the unit centimeter."""

    name: str
    value: str
    unit: str


def take_apart(text: str) -> Answer:
    """The name and the unit, both empty where there is none, and the value between them."""
    name, value, unit = "", text, ""
    if match := NAME.fullmatch(text):
        name, value = match.groups()
    if value.startswith("\\$"):
        value, unit = value[2:], "dollar"
    elif value.endswith("^{\\circ}"):
        value, unit = value.removesuffix("^{\\circ}"), "degree"
    elif value.endswith("\\%"):
        value, unit = value.removesuffix("\\%"), "percent"
    elif match := UNIT_TEXT.fullmatch(value):
        unit = unit_name(match[2], match[3], power=match[4] or "", of=match[1])
        value = match[1] if unit else value
    return Answer(name, without_brackets(value.strip()), unit)


def unit_name(text: str | None, plain: str | None, *, power: str, of: str) -> str:
    r"""One name for `inches^2` and `square inches`; empty for words that are no unit.

    Any `\text{words}` behind a number are its unit, but for those that change it, such as million.
    """
    words = [UNITS.get(word, word) for word in (text or plain).lower().replace(".", "").split()]
    if len(words) == 2 and words[0] in POWERS and not power:
        power = POWERS[words.pop(0)]
    is_known = set(words) <= set(UNITS.values())
    is_noun = text is not None and literal(of) is not None and not set(words) & NO_UNITS
    return " ".join(words) + power if is_known or is_noun else ""


def without_brackets(value: str) -> str:
    """(x) is x, but (x, y) is a pair."""
    while value.startswith("(") and encloses(value) and len(split_list(value[1:-1])) == 1:
        value = value[1:-1]
    return value


# Layer 3: numbers

DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
LITERAL = re.compile(
    rf"(?P<sign>[-+]?)(?:(?P<decimal>{DECIMAL})(?:\\times10\^\{{(?P<power>[-+]?[0-9]{{1,3}})\}})?"
    r"|(?P<start>[0-9]*\.[0-9]*)\\overline\{(?P<repeated>[0-9]+)\}"
    r"|(?P<whole>[0-9]+(?=\\frac\{[0-9])|[0-9]+ )?"
    r"(?:\\frac\{(?P<top>-?[0-9]+)\}\{(?P<bottom>-?[0-9]+)\}|(?P<over>[0-9]+)/(?P<under>[0-9]+)))"
)


def literal(value: str) -> Fraction | None:
    """The exact value of a fraction, mixed number or decimal, maybe recurring or times 10^n."""
    match = LITERAL.fullmatch(value)
    if match is None:
        return None
    part = match.groupdict(default="0")
    with suppress(ZeroDivisionError):
        if match["decimal"]:
            number = Fraction(part["decimal"]) * Fraction(10) ** int(part["power"])
        elif match["repeated"]:
            period = Fraction(int(part["repeated"]), 10 ** len(part["repeated"]) - 1)
            number = Fraction(part["start"] + "0") + period / 10 ** len(part["start"].split(".")[1])
        elif match["top"]:
            number = int(part["whole"]) + Fraction(int(part["top"]), int(part["bottom"]))
        else:
            number = int(part["whole"]) + Fraction(int(part["over"]), int(part["under"]))
        return -number if part["sign"] == "-" else number
    return None


# Layer 4: bases, words, and answers of several entries

BASE = re.compile(r"-?[0-9A-Z]+(?:\.[0-9A-Z]+)?_\{(?:[0-9]+|\\text\{[a-z]+\})\}")
WORDS = re.compile(r"\\text\{([^{}]*)\}")
MATRIX = re.compile(
    r"[(\[]?\\begin\{([pbv]?matrix|array)\}(?:\{[lcr|]*\})?((?:(?!\\begin).)*)\\end\{\1\}[)\]]?"
)
BRACKET = re.compile(
    r"(?P<opening>[(\[{]|\\\{|\\langle(?![a-zA-Z])|\\begin\{[a-z]*\})"
    r"|(?P<closing>[)\]}]|\\\}|\\rangle(?![a-zA-Z])|\\end\{[a-z]*\})|\\[a-zA-Z]+|\\.|,"
)


def is_equal(gold: str, prediction: str, check: Check) -> bool:
    """Layers 2 to 6 on normalised texts; `check` is layer 6."""
    if gold == prediction:
        return gold != ""
    g, p = take_apart(gold), take_apart(prediction)
    if (g.name and p.name and g.name != p.name) or (g.unit and p.unit and g.unit != p.unit):
        return False
    if g.value == p.value:
        return g.value != ""
    numbers = literal(g.value), literal(p.value)
    if None not in numbers:
        return numbers[0] == numbers[1]
    if any(BASE.fullmatch(value) for value in (g.value, p.value)):
        return False
    if any(WORDS.fullmatch(value) for value in (g.value, p.value)):
        return words_of(g.value) == words_of(p.value) != ""
    parts = entries(g.value), entries(p.value)
    if parts != (None, None):
        return None not in parts and same_entries(*parts, check)
    if "=" in g.value + p.value:  # a whole equation: what looked like a name is a part of it
        g, p = Answer("", gold, ""), Answer("", prediction, "")
    return is_safe(g.value, p.value) and check(g.value, p.value)


def words_of(value: str) -> str:
    r"""Words whatever their case: `\text{(B)}` and B are the same choice."""
    return WORDS.sub(r"\1", value).strip("() .").casefold()


@dataclass(frozen=True)
class Entries:
    """The parts of a tuple, interval, set, union or matrix."""

    kind: str  # equal kinds may be equal: the brackets, or the shape of a matrix
    values: list[str]
    is_ordered: bool


def entries(value: str) -> Entries | None:
    """What the answer is made of; None where it is one thing."""
    if match := MATRIX.fullmatch(value):
        rows = [row.split("&") for row in match[2].removesuffix("\\\\").split("\\\\")]
        kind = "determinant" if match[1] == "vmatrix" else "matrix"
        shape = f"{kind} {[len(row) for row in rows]}"
        return Entries(shape, [cell for row in rows for cell in row], is_ordered=True)
    parts = split_list(value, separator="\\cup")
    if len(parts) > 1:
        return Entries("union", parts, is_ordered=False)
    if value.startswith("\\{") and encloses(value):
        return set_of(split_list(value[2:-2]))
    if value.startswith(("(", "[")) and encloses(value):
        return Entries(value[0] + value[-1], split_list(value[1:-1]), is_ordered=True)
    if value.startswith("\\langle") and value.endswith("\\rangle"):
        inside = value.removeprefix("\\langle").removesuffix("\\rangle")
        return Entries("()", split_list(inside), is_ordered=True)
    parts = split_list(value)
    return set_of(parts) if len(parts) > 1 or value.count("\\pm") == 1 else None


def set_of(values: list[str]) -> Entries:
    """Several answers in any order; one with a plus-minus sign is two."""
    both = []
    for value in values:
        signs = "+-" if value.count("\\pm") == 1 else ""
        both += [re.sub(r"\\pm ?", sign, value).removeprefix("+") for sign in signs] or [value]
    return Entries("set", both, is_ordered=False)


def same_entries(gold: Entries, prediction: Entries, check: Check) -> bool:
    """Each entry has its equal: at its place where the order counts, else anywhere."""
    left = list(prediction.values)
    if gold.kind != prediction.kind or not len(gold.values) == len(left) <= MAX_ENTRIES:
        return False
    if gold.is_ordered:
        return all(is_equal(*pair, check=check) for pair in zip(gold.values, left, strict=True))
    for value in gold.values:
        equals = (entry for entry in left if is_equal(value, entry, check))
        match = value if value in left else next(equals, None)
        if match is None:
            return False
        left.remove(match)
    return True


def split_list(value: str, *, separator: str = ",") -> list[str]:
    """The parts between separators that stand in no bracket."""
    parts, start = [], 0
    for token, depth in nesting(value):
        if token.group() == separator and depth == 0:
            parts.append(value[start : token.start()].strip())
            start = token.end()
    parts.append(value[start:].strip())
    return [part for part in parts if part]


def encloses(value: str) -> bool:
    """Whether the bracket that opens the text is closed by the one that ends it."""
    closing = (token for token, depth in nesting(value) if depth <= 0)
    return (first := next(closing, None)) is not None and first.end() == len(value)


def is_too_complex(value: str) -> bool:
    """Longer or nested deeper than any answer; taking it apart would take long."""
    depths = (depth for _, depth in nesting(value))
    return len(value) > 2 * MAX_ANSWER_CHARS or max(depths, default=0) > MAX_DEPTH


def nesting(value: str) -> Iterator[tuple[re.Match[str], int]]:
    """Brackets, commas and commands in order, with how many brackets are open behind each."""
    depth = 0
    for token in BRACKET.finditer(value):
        depth += (token.lastgroup == "opening") - (token.lastgroup == "closing")
        yield token, depth


# Layer 5: guards

UNSAFE = re.compile(
    r"\^\{[^{}]*\^|\^\{[^{}]*\{[^{}]*\^|\*\*"  # towers of powers
    r"|\^\{?[-+(]*[0-9.]{5,}|[0-9]{60,}"  # exponents and numbers of many digits
    r"|[0-9]{4,}\)*!|[)}!]\s*!|\\binom\{[^{}]*[0-9]{4,}"  # big factorials
    r"|\\(?:sum|prod|o?i+nt|lim|neq?|not|approx|sim|simeq|text|[lc]?dots|pm|mp)(?![a-zA-Z])"
    r"|[0-9] +[0-9]|[)}][0-9]"  # juxtaposed integers, which math-verify adds
    r"|[0-9]_|['\"?:;&@#`]|\\prime|\\[bp]?mod(?![a-zA-Z])|\.\.|\\\\"  # signs that it passes over
)
COMMAND = re.compile(r"\\[a-zA-Z]+")
CONSTANT = re.compile(r"(?:[^a-zA-Z\\]|\\(?:frac|sqrt|times|binom|pi)(?![a-zA-Z]))*")


def is_safe(gold: str, prediction: str) -> bool:
    """Whether math-verify may be asked, and its answer be trusted."""
    both = (gold, prediction)
    if not all(0 < len(value) <= MAX_LEAF_CHARS and value.isascii() for value in both):
        return False
    if any(UNSAFE.search(value) for value in both):
        return False
    if is_constant_equation(prediction) and not is_constant_equation(gold):
        return False  # of 3 = 7 math-verify would take the 7
    # letters that the gold answer lacks, which math-verify takes for a unit, or R for r
    return letters(prediction.rpartition("=")[2]) - {"e", "i"} <= letters(gold)


def is_constant_equation(value: str) -> bool:
    return "=" in value and CONSTANT.fullmatch(value) is not None


def letters(value: str) -> set[str]:
    """The variables: letters that are not in the name of a command."""
    return set(re.findall("[a-zA-Z]", COMMAND.sub(" ", value)))
