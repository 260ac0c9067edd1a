r"""Whether a boxed answer equals the gold answer: exact layers first, math-verify last.

`grade` goes through these layers in order, and each may answer for good:

    1. the last \boxed{...} with balanced braces; without one the answer is wrong
    2. the same text after light normalisation: spaces, \dfrac, $, units, thousands, a leading x =
    3. two numeric literals: exact fractions decide
    4. words decide as text; of tuples, intervals, sets and matrices each entry is graded by itself
    5. guards: what is too long or too big, or what math-verify gets wrong, counts as wrong
    6. math-verify, in a worker process that can be killed (grader_worker.py)
"""

import functools
import importlib.util
import re
import unicodedata
from collections.abc import Callable, Iterator
from fractions import Fraction

from tasks.grader_worker import WORKER, OutOfPatience, WorkerLost

MAX_ANSWER_CHARS = 1_000
MAX_DEPTH = 8  # brackets in brackets; a real answer has 3 or 4
MAX_ENTRIES = 36  # of a tuple, set or matrix
MAX_LEAF_CHARS = 300  # of one entry that math-verify is asked about

Check = Callable[[str, str], bool]  # math-verify's opinion on (gold, prediction)


def grade(completion: str, gold: str, *, timeout_s: float) -> bool | None:
    """Whether the last boxed answer equals `gold`; None, so wrong, if grading took too long."""
    prediction = last_boxed(completion)
    try:
        return prediction is not None and grade_answer(prediction, gold, timeout_s)
    except OutOfPatience:
        return None


@functools.lru_cache(4_096)
def grade_answer(prediction: str, gold: str, timeout_s: float) -> bool | None:
    """The grade of a boxed text. Samples often repeat an answer; its time-out is cached too."""
    with WORKER.lock:
        check = functools.partial(WORKER.ask, deadline=WORKER.clock() + timeout_s)
        try:
            return is_equal(normalise(gold), normalise(prediction), check)
        except WorkerLost as error:
            if importlib.util.find_spec("math_verify") is None:  # else every answer is a time-out
                raise ModuleNotFoundError("MATH's grader: pip install math-verify") from error
            return None


def normal_answer(boxed: str) -> str:
    r"""One text for what layers 2 and 3 find equal: 1/2 for 0.50, \frac12, x = 1/2; 50 for 50\%."""
    text = normalise(boxed)
    value = text if is_too_complex(text) else take_apart(text)[1]
    number = literal(value)
    return value if number is None else str(number)


def is_equal(gold: str, prediction: str, check: Check) -> bool:
    """Layers 2 to 6 on normalised texts; `check` is layer 6."""
    if gold == prediction or is_too_complex(gold) or is_too_complex(prediction):
        return gold == prediction != ""
    (g_name, g, g_unit), (p_name, p, p_unit) = take_apart(gold), take_apart(prediction)
    if (g_name and p_name and g_name != p_name) or (g_unit and p_unit and g_unit != p_unit):
        return False
    by_value = "/" in g or "frac" in g or abs(literal(g) or 0) < 1  # 50% equals 0.5, 1/2 and 50
    if p_unit in PERCENT and not g_unit and by_value:
        p = "" if literal(p) is None else str(literal(p) / 100)
    if g == p:
        return g != ""
    numbers = literal(g), literal(p)
    if None not in numbers:
        is_share = g_unit in PERCENT and not p_unit  # 25% is 25, and 1/4 too
        return numbers[0] == numbers[1] or (is_share and numbers[0] == 100 * numbers[1])
    if WORDS.fullmatch(g) or WORDS.fullmatch(p):
        return words_of(g) == words_of(p) != "" and (len(g) > 2 or g in p)  # R is no \text{r}
    parts = entries(g), entries(p)
    if parts != (None, None):
        return None not in parts and same_entries(*parts, check)
    if "=" in g + p:  # compare whole equations, with what `take_apart` took for a name
        g, p = gold, prediction
    return is_safe(g, p) and check(*in_plain_letters(g, p))


# Layer 1: the box

BOX = "\\boxed{"
# \{ is a sign, \\ a new line, { a brace
BRACE = re.compile(r"\\[{}]|\\\\(?!boxed)|(?P<opening>\{)|(?P<closing>\})")


def last_boxed(completion: str) -> str | None:
    r"""The text in the last \boxed{...} whose braces are balanced; None if there is none.

    A box that the end of the text cuts off is passed over; one of more than MAX_ANSWER_CHARS is no
    answer. So only boxes near the end are tried: linear time.
    """
    completion = completion.replace("\\boxed {", BOX)
    end = len(completion)
    while (end := completion.rfind(BOX, 0, end)) >= 0:
        start = end + len(BOX)
        window = completion[start : start + MAX_ANSWER_CHARS + 1]
        for brace, depth in nesting(window, BRACE):
            if depth < 0:
                return window[: brace.start()]
        if start + len(window) < len(completion):
            return None
    return None


# Layer 2: light normalisation

SPELLINGS = {  # one spelling for what LaTeX and people spell in many ways
    "": r"$ \( \) \[ \] \displaystyle \left \right \big \Big \bigg \Bigg \bigl \bigr \Bigl \Bigr",
    " ": r"\, \; \: \! \> \quad \qquad \thinspace",
    "\\frac": r"\dfrac \tfrac \cfrac",
    "\\times": "\\cdot \u00d7 \u00b7",
    "\\leq": "\\le \\leqslant \u2264",
    "\\geq": "\\ge \\geqslant \u2265",
    "^{\\circ}": "\\degree \u00b0",
}
SYNONYMS = {name: spelling for spelling, names in SPELLINGS.items() for name in names.split()}
SYNONYMS |= {"\\ ": " ", "%": "\\%", r"\lt": "<", r"\gt": ">", r"\lbrace": "\\{", r"\rbrace": "\\}"}
SYNONYMS |= {r"\vert": "|", "\u221a": "\\sqrt", "\u03c0": "\\pi", "\u221e": "\\infty"}
SYNONYMS |= {"\u222a": "\\cup", "\u00b1": "\\pm", "\u2212": "-", "\u2011": "-", "\u00f7": "\\div"}
TOKEN = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mbox|math(?:rm|sf|tt)|hbox) ?"
    r"\{(?P<words>(?:[^{}\\]|\\.)*)\}"
    r"|\\sqrt ?\[[^]{]*\]|\\[a-zA-Z]+|\\.|."
)
NUM_ARGUMENTS = {"^": 1, "_": 1, "\\sqrt": 1, "\\frac": 2, "\\binom": 2}
FONT = re.compile(r"\\(?:math(?:rm|bf|it|sf|tt)|boldsymbol|bm|textbf|fbox)")  # around a formula
THOUSANDS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?!,?[0-9])")
SUPERSCRIPT = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u207b\u207f]+")  # x⁻¹² is x^{-12}
REWRITTEN = [
    (r"(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3}(?![0-9]))", ""),  # a narrow space parts thousands
    (r"[\s~]+", " "),
    (r"\\\\ ?\[-?[0-9.]+ ?(?:pt|ex|em|cm|mm|in)\]", r"\\\\"),  # the gap between two rows
    (
        r"\\math(?:rm|sf|tt) ?\{(?! ?[hms] ?\})([^a-zA-Z{}\\]*(?:[a-zA-Z][^a-zA-Z{}\\]*)?)\}",
        r" \1 ",
    ),
    # \text{50\%} and \text{x = 5} hold no words
    (r"\\(?:text|mbox) ?\{(?![ .,]*\})( ?(?:[a-z] ?[=<>])?[^a-zA-Z{}]*)\}", r" \1 "),
    # 3*sqrt(13) is LaTeX with a \times and braces left out
    (r"(?:(?<![a-zA-Z\\])sqrt|\u221a) ?(?:\(([^()]*)\)|([0-9]+))", r"\\sqrt{\1\2}"),
    (r"(?<=[\w)}]) ?\* ?(?=[\w(\\.])", r"\\times "),
    (r"(?<=[0-9])(?:\{,\}|,\\!|\\,|\\!,|,\\,) ?(?=[0-9]{3}(?![0-9]))", ""),  # 10,\!080
    (r"(?<=[ {])(?:and|or)(?=[ }])", ","),  # between two answers
]
LESS_SIGN = re.compile(r"[<>\u2264\u2265]|\\[lg](?:t|e|eq|eqslant)(?![a-zA-Z])")
LOG_OF_NUMBER = re.compile(r"(\\log_\{[^{}]*\})([0-9]+)(?=[-+=)},]|$)")  # \log_2 8
ODD_ROOT = re.compile(  # of a negative number: \sqrt[3]{-8} is -\sqrt[3]{8}
    r"(\\sqrt\[[0-9]*[13579]\]\{)(?:-(?!.*(?:[-+]|[mp][mp]))|(\\frac\{)-(?!.*(?:[-+^]|[mp][mp])))"
)
MIXED = re.compile(r"(?<![0-9.^_)}\] ])([0-9]+)\\frac\{([0-9]+)\}\{([0-9]+)\}")
FACTOR = re.compile(r"(?<=[0-9)])(?=\(-?[0-9.]+\))")  # between the brackets of (2)(3)
TOWER = re.compile(  # of three or four small numbers
    r"(?<![\w.)}\]])(?<![_^]\{)[0-9]{1,2}\^\{[0-9]{1,2}\^\{[0-9]{1,2}(?:\^\{[0-9]{1,2}\})?\}\}"
    r"(?![\w.!^({\\])"
)


def normalise(text: str) -> str:
    r"""The usual spelling of any text.

    `\dfrac 12` and `$\frac{1}{2}$` both become `\frac{1}{2}`; `10,\!080` and `10,080` become
    10080, but (10,080) is a pair. Spaces stay only between numbers, since 1 2 is not 12.
    """
    if LESS_SIGN.search(text):  # x < 2 or x > 5 is a union, not a list
        text = re.sub(r"\\(?:text|mbox) ?\{ ?or ?\}|(?<= )or(?= )", r"\\cup ", text)
    text = SUPERSCRIPT.sub(lambda power: f"^{{{unicodedata.normalize('NFKC', power[0])}}}", text)
    for pattern, spelling in REWRITTEN:
        text = re.sub(pattern, spelling, text)
    if not re.search(r"[(\[]|\\\{|\\lbrace", text):
        text = THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    tokens = map(usual_token, TOKEN.finditer(text))
    text = read_group(tokens, depth=0)
    for _ in range(MAX_DEPTH):  # {{7}} is 7
        text = text[1:-1] if text.startswith("{") and encloses(text) else text
    text = FACTOR.sub(r"\\times", MIXED.sub(improper, text.strip(" ;,").removesuffix(".")))
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])", text):
        text = DEGREES.sub(r"(\\frac{\\pi}{180}\\times \1)", text)
    return TOWER.sub(tower_value, LOG_OF_NUMBER.sub(r"\1(\2)", text))


def improper(mixed: re.Match[str]) -> str:
    r"""The fraction of a mixed number, which 2\frac13\pi has; 2\frac53\pi is a product."""
    whole, top, bottom = map(int, mixed.groups())
    return f"\\frac{{{whole * bottom + top}}}{{{bottom}}}" if top < bottom else mixed[0]


def tower_value(tower: re.Match[str]) -> str:
    """The value of a tower of powers; from 10^6 on the tower itself, which UNSAFE refuses."""
    *bases, value = map(int, re.findall("[0-9]+", tower[0]))
    for base in reversed(bases):
        if value > 20 or base**value >= 10**6:
            return tower[0]
        value = base**value
    return str(value)


def usual_token(token: re.Match[str]) -> str:
    r"""The usual spelling of a token; a `\text{...}` of a comma is that comma, of dots nothing."""
    words = token["words"]
    if words is None:
        return SYNONYMS.get(token[0], token[0].replace(" ", "") or " ")
    words = words.strip()
    if not words.strip(" ."):
        return ""
    return f"\\text{{{words}}}" if words.strip(" ,") else ","


def read_group(tokens: Iterator[str], *, depth: int) -> str:
    """The tokens as text, up to the brace that closes the group."""
    written, has_gap = "", False
    for token in tokens:
        if token == "}" and depth > 0:
            break
        if token == " ":
            has_gap = True
        elif token:
            piece = read_piece(token, tokens, depth=depth)
            between_digits = has_gap and written[-1:].isdigit() and piece[:1].isdigit()
            after_command = piece[:1].isalpha() and re.search(r"\\[a-zA-Z]+$", written)
            written += (" " if between_digits or after_command else "") + piece
            has_gap = False
    return written


def read_piece(token: str, tokens: Iterator[str], *, depth: int) -> str:
    r"""A token with its arguments in braces, such as `^{2}` for `^2`."""
    if depth > MAX_DEPTH:  # left as it is, since `is_too_complex` refuses it
        return token
    if token == "{":
        return "{" + read_group(tokens, depth=depth + 1) + "}"
    if FONT.fullmatch(token):
        content = read_argument(tokens, depth=depth + 1)[1:-1]
        return f"{token}{{{content}}}" if content in ("e", "i") else content  # these are vectors
    for _ in range(NUM_ARGUMENTS.get(token.partition("[")[0], 0)):
        token += read_argument(tokens, depth=depth + 1)
    if root := ODD_ROOT.match(token):
        token = f"(-{root[1]}{root[2] or ''}{token[root.end() :]})"
    return token


def read_argument(tokens: Iterator[str], *, depth: int) -> str:
    """The next token or group, in braces."""
    piece = read_piece(next((each for each in tokens if each.strip()), ""), tokens, depth=depth)
    return piece if piece.startswith("{") else "{" + piece + "}"


# Layer 2, continued: names and units, which may be left out of an answer

FUNCTIONS = (
    r"(?:frac|sqrt|times|div|binom|log|ln|exp|(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|min|max|gcd|lcm"
    r"|[lr](?:floor|ceil|vert)|pi|infty)(?![a-zA-Z])"
)
CAPITAL = "(?:Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega)"
GREEK = (
    r"(?:[bz]?eta|theta|(?:var)?(?:epsilon|phi)|alpha|gamma|delta|kappa|lambda|mu|nu|xi|rho|sigma"
    rf"|tau|chi|psi|omega|ell|{CAPITAL})(?![a-zA-Z])"
)
ANGLE_PART = rf"[0-9.]++|(?<![a-zA-Z\\])[a-zA-Z]|\\{GREEK}|\\frac|(?<![\^_])[({{][^(){{}}]*[)}}]"
DEGREES = re.compile(rf"((?:{ANGLE_PART}){{1,6}}+)(?:\^\{{\\circ\}}|\\text\{{degrees?\}})")
CONSTANT = rf"(?:[^a-zA-Z\\<>=,]|[ei](?![a-zA-Z])|\\{FUNCTIONS})"
VARIABLE = rf"(?:[a-zA-Z]|\\{GREEK})(?:_\{{[^{{}}]*\}})?(?:\([a-z]\))?"
NAME = re.compile(
    rf"({VARIABLE}|\([a-z](?:,[a-z])+\)|\\text\{{[a-zA-Z .()]*\}})"
    r"(?:=|\\in(?![a-zA-Z]) ?)([^=]+)"
)
LESS = r"<|>|\\[lg]eq ?"
INEQUALITY = re.compile(rf"(?:({CONSTANT}+)({LESS}))?({VARIABLE})(?:({LESS})({CONSTANT}+))?")
UNIT_SIGNS = {r"^\\\$(.+)$": "dollar", r"^(.+)\^\{\\circ\}$": "degree", r"^(.+)\\%$": "percent"}
PERCENT = ("percent", "per cent")
UNIT = re.compile(r"(.*[^\s=(,])(?:\\text\{([a-zA-Z ./]+)\}|(?<=[0-9}])([a-z]{2,}))(\^\{[23]\})?")
# These are units behind any value, such as 5x cm. Behind a number any other plural is its unit too,
# such as 12 students or 3 red balls, unless one of its words is among CHANGING_WORDS.
UNIT_SPELLINGS = (
    "degree cent dollar percent/percents inch/in/inche foot/ft/feet yard mile meter/m "
    "centimeter/cm millimeter/mm kilometer/km gram kilogram/kg pound ounce/oz liter gallon/gal per "
    "second/sec minute/min hour/h day week month year unit mph kph rpm radian/rad student "
    "person/people man/men woman/women child/children ^{2}/square/sq ^{3}/cubic"
)
UNITS = {name: unit.split("/")[0] for unit in UNIT_SPELLINGS.split() for name in unit.split("/")}
PARTS = "(?:illion|hundred|thousand|tie|teen|twelf|leven|ten|nin|eigh|seven|six|fif)th"
NOUN = re.compile(  # no million and no part, such as millionths, by their form
    rf"(?!.*(?:illion|{PARTS})s?\b)(?:[a-z]{{3,}} )?[a-z]+[^isu]s(?: per [a-z]{{3,}})?"
)
CHANGING_WORDS = (
    "and not nor but than more less fewer least most about above below under over minus negative "
    "mod modulo base times power squared cubed factorial pi zero one two three four five six seven "
    "eight nine ten twelve twenty dozen score gross hundred thousand lakh crore myriad half halve "
    "pair duo trio quartet quintet sextet octet third quarter fourth percentage basis plus without "
    "couple wrong false incorrect never always perhap yes was has doe"
)


def take_apart(text: str) -> tuple[str, str, str]:
    """Name, value and unit: x, 5 and centimeter for x = 5 cm. An empty name or unit is none."""
    match = NAME.fullmatch(text)
    name, value = match.groups() if match else interval(text)
    value, unit = split_unit(value) if len(split_list(value)) == 1 else (value, "")
    value = re.sub(r"^[({](-?[0-9A-Z.]+)[)}](?=_\{[^{}]*\}$)", r"\1", value.strip())  # (52)_8
    if value.startswith("(") and encloses(value) and len(split_list(value[1:-1])) == 1:
        inner_name, value, inner_unit = take_apart(value[1:-1])  # (x) is x, but (x, y) is a pair
        return name or inner_name, value, unit or inner_unit
    return name, value, unit


def interval(text: str) -> tuple[str, str]:
    r"""Letter and interval of an inequality: x and (2,5] for 2 < x \leq 5; else no letter."""
    match = INEQUALITY.fullmatch(text)
    left, before, letter, after, right = match.groups("") if match else [""] * 5
    ends = [(left, before), (right, after)]
    is_falling = {sign[:2] in (">", "\\g") for _, sign in ends if sign}
    (low, at_low), (high, at_high) = reversed(ends) if True in is_falling else ends
    numbers = literal(low), literal(high)
    if len(is_falling) != 1 or (None not in numbers and numbers[0] >= numbers[1]):
        return "", text
    opening, closing = "[" if "eq" in at_low else "(", "]" if "eq" in at_high else ")"
    return letter, opening + (low or r"-\infty") + "," + (high or r"\infty") + closing


def split_unit(value: str) -> tuple[str, str]:
    """The value and its unit, which has one name for inches^{2} and square inches; "" for none."""
    for pattern, unit in UNIT_SIGNS.items():
        value = re.sub(pattern, rf"\1\\text{{{unit}}}", value)
    # \text{6 hours} is 6\text{hours}
    match = UNIT.fullmatch(re.sub(r"^\\text\{(-?[0-9.]+) ", r"\1\\text{", value))
    if match is None:
        return value, ""
    number, text, plain, power = match.groups(default="")
    words = f"{text}{plain} {power}".replace(".", "").replace("/", " per ").split()
    words = [word if len(word) == 1 else word.lower() for word in words]  # M is no meter
    singular = ["second" if word == "s" else word.removesuffix("s") for word in words]
    units = sorted((UNITS.get(word, word) for word in singular), key=lambda unit: unit[:1] == "^")
    unit = " ".join(units)
    is_known = UNITS.keys() >= {*units} and not unit.startswith("^")
    is_changing = not {*words, *units}.isdisjoint(CHANGING_WORDS.split())
    is_noun = text and NOUN.fullmatch(" ".join(words)) and literal(number) is not None
    return (number, unit) if is_known or (is_noun and not is_changing) else (value, "")


# Layer 3: numbers

FRACTION = re.compile(r"\\frac\{(-?[0-9]+)\}\{(-?[0-9]+)\}(?![0-9])")
LITERAL = re.compile(
    r"(?P<sign>[-+]?)(?:(?:(?P<whole>[0-9]+) (?=[0-9]))? ?(?P<top>-?[0-9]+)/(?P<bottom>-?[0-9]+)"
    r"|(?P<decimal>(?=\.?[0-9]|\.\\o)[0-9]*(?P<point>\.[0-9]*)?)"
    r"(?(point)(?:\\overline\{(?P<repeated>[0-9]+)\})?)"
    r"(?:\\times10\^\{(?P<power>[-+]?[0-9]{1,3})\})?)"
)


def literal(value: str) -> Fraction | None:
    """The exact value of a fraction, mixed number or decimal, maybe recurring or times 10^n."""
    match = LITERAL.fullmatch(FRACTION.sub(r" \1/\2", value))
    if match is None or int(match["bottom"] or 1) == 0:
        return None
    part = match.groupdict(default="0")
    if match["top"]:
        number = int(part["whole"]) + Fraction(int(part["top"]), int(part["bottom"]))
    else:
        recurring = Fraction(int(part["repeated"]), 10 ** len(part["repeated"]) - 1)
        recurring /= 10 ** (len(part["point"]) - 1)
        number = (Fraction(f"0{part['decimal']}") + recurring) * Fraction(10) ** int(part["power"])
    return -number if part["sign"] == "-" else number


# Layer 4: words, and answers of several entries

WORDS = re.compile(r"\\text\{([^{}]*)\}")
MATRIX = re.compile(
    r"[(\[]?\\begin\{([pbv]?(?:small)?matrix|array)\}(?:\{[lcr|]*\})?((?:(?!\\begin).)*)\\end\{\1\}[)\]]?"
)
TUPLE = re.compile(r"(\(|\[|\\langle(?![a-zA-Z]))(.*)(\)|\]|\\rangle)")
BRACKET = re.compile(
    r"(?P<opening>[(\[{]|\\\{|\\langle(?![a-zA-Z])|\\begin\{[a-z]*\})"
    r"|(?P<closing>[)\]}]|\\\}|\\rangle(?![a-zA-Z])|\\end\{[a-z]*\})|\\[a-zA-Z]+|\\.|,"
)


def words_of(value: str) -> str:
    r"""The words in lower case, without brackets: `\text{(B)}` and B are the same choice."""
    return WORDS.sub(r"\1", value).strip("() .").casefold()


def entries(value: str) -> tuple[str, list[str]] | None:
    """Kind and entries of a matrix, union, tuple, interval or set; None for any other answer.

    Only answers of one kind can be equal: the kind tells brackets, and the shape of a matrix.
    """
    if match := MATRIX.fullmatch(value):
        rows = match[2].removesuffix("\\\\")
        kind = "determinant" if match[1].startswith("v") else "matrix"
        return kind + re.sub(r"(&|\\\\)|.", r"\1", rows), re.split(r"&|\\\\", rows)
    if len(parts := split_list(value, separator="\\cup")) > 1:
        return "union", parts
    if (match := TUPLE.fullmatch(value)) and encloses(value):
        brackets = (match[1] + match[3]).replace("\\langle\\rangle", "()")
        return brackets, split_list(match[2])
    is_set = value.startswith("\\{") and encloses(value)
    parts = split_list(value[2:-2] if is_set else value)
    if is_set or len(parts) > 1 or value.count("\\pm") == 1:
        return "set", [each for part in parts for each in both_signs(part)]
    return None


def both_signs(value: str) -> list[str]:
    r"""Both values of an answer with one `\pm`; any other answer alone."""
    signs = "+-" if value.count("\\pm") == 1 else ""
    return [re.sub(r"\\pm ?", sign, value).removeprefix("+") for sign in signs] or [value]


def same_entries(
    gold: tuple[str, list[str]], prediction: tuple[str, list[str]], check: Check
) -> bool:
    """Whether each entry has an equal: anywhere in a set or union, else at the same place."""
    (kind, values), (other_kind, left) = gold, prediction
    if kind != other_kind or not len(values) == len(left) <= MAX_ENTRIES:
        return False
    names = [NAME.fullmatch(value) for value in values]
    if kind == "set" and all(names) and "=" not in "".join(left):  # 3, -1 for x = 3, y = -1
        left = [f"{name[1]}={entry}" for name, entry in zip(names, left, strict=True)]
    if kind not in ("set", "union"):
        return all(is_equal(*pair, check) for pair in zip(values, left, strict=True))
    for value in values:
        candidates = sorted(left, key=value.__ne__)  # itself first
        match = next((entry for entry in candidates if is_equal(value, entry, check)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def split_list(value: str, *, separator: str = ",") -> list[str]:
    """The parts between the separators that are outside of all brackets."""
    parts, start = [], 0
    for token, depth in nesting(value):
        if token.group() == separator and depth == 0:
            parts.append(value[start : token.start()].strip())
            start = token.end()
    return [part for part in [*parts, value[start:].strip()] if part]


def encloses(value: str) -> bool:
    """Whether the bracket that opens the text is closed at its very end."""
    return next((token.end() for token, depth in nesting(value) if depth <= 0), 0) == len(value)


def is_too_complex(value: str) -> bool:
    """Whether the text is longer or nested deeper than any answer: grading it would take long."""
    depths = (depth for _, depth in nesting(value))
    return len(value) > 2 * MAX_ANSWER_CHARS or max(depths, default=0) > MAX_DEPTH


def nesting(value: str, tokens: re.Pattern = BRACKET) -> Iterator[tuple[re.Match[str], int]]:
    """Each bracket, comma and command in order, with the number of brackets open after it."""
    depth = 0
    for token in tokens.finditer(value):
        depth += (token.lastgroup == "opening") - (token.lastgroup == "closing")
        yield token, depth


# Layer 5: guards

UNSAFE = re.compile(
    r"\^\{[^{}]*\^|\^\{[^{}]*\{[^{}]*\^|\*\*"  # towers of powers
    r"|\^\{?[-+(]*[0-9.]{5,}|[0-9]{60,}"  # exponents and numbers of many digits
    r"|[0-9]{4,}\)*!|[)}!]\s*!|\\binom\{[^{}]*[0-9]{4,}"  # big factorials
    r"|(?:\|[^|]*){13}|(?:\\l(?:floor|ceil)[^r]*){4}"  # bars and corners, slow to parse
    r"|(?:\\(?:log|ln)(?:_\{[^{}]*\})?[^-+({]*(?:[({][^)]*)?){6}"  # logarithms of logarithms
    r"|[0-9] +[0-9]|[)}]\.?[0-9]|\.[0-9]*\."  # juxtaposed integers, which math-verify adds
    r"|[0-9)]_|^-?[0-9A-Z.]+_\{[^}]*\}$"  # number bases
    r"|['\"?:;&@#`%]|\|_|\\\\|\\frac\{d[a-z]?\}\{d[a-z]\}"  # what math-verify passes over
    rf"|\\(?!{FUNCTIONS}|{GREEK}|(?:[lg]eq|circ|overline|vec|hat|angle)(?![a-zA-Z]))[a-zA-Z]"
)
LETTER = re.compile(
    rf"(\\(?:gamma|infty)(?![a-zA-Z])|\\{CAPITAL}(?![a-zA-Z])|[a-zA-Z])|\\[a-zA-Z]+"
)
CAPITALS = re.compile("[A-Z]{3,}")  # a word, such as AAS; two may be a product
# What may stand left of an answer's =: a name, such as x_1, AB, f(2) or \cos B, or a sum of names
SUBJECT = rf"(?:{VARIABLE}|\\overline\{{[A-Z]+\}}|(?:m?\\angle ?)?[A-Z]+|[a-zA-Z]\([^()=]*\))"
ANGLE = rf"\\(?:sin|cos|tan) ?[({{]?(?:\\angle ?)?(?:{VARIABLE}|[A-Z]+)[)}}]?"
SUBJECT = rf"(?:{SUBJECT}(?:\+{SUBJECT})*|{ANGLE})"
PLAIN_LETTERS = "abghjklmnpqrsuvwxyz"  # they spell no word such as or, inf or pct


def is_safe(gold: str, prediction: str) -> bool:
    """Whether math-verify may be asked, and its answer be trusted."""
    for value in (gold, prediction):
        if not (0 < len(value) <= MAX_LEAF_CHARS and value.isascii()) or UNSAFE.search(value):
            return False
    left, sign, right = prediction.rpartition("=")
    constant = left + right if "=" in gold else left
    if "=" in left or (sign and re.fullmatch(f"{CONSTANT}*", constant)):
        return False  # of x = 3 = 7 and of 3 = 7 math-verify would take the 7
    sides = (left, right) if "=" in gold else (left,)
    is_solved = "=" not in gold or re.fullmatch(f"{SUBJECT}={CONSTANT}+", gold)
    if sign and is_solved and not any(re.fullmatch(SUBJECT, side) for side in sides):
        return False  # 2x = 5 and x - 1 = 5 are equations that have not been solved
    if CAPITALS.findall(gold.rpartition("=")[2]) != CAPITALS.findall(right):
        return False
    letters = {*LETTER.findall(gold)} | {"", "e", "i"}
    are_few = len(letters.union(LETTER.findall(left))) <= len(PLAIN_LETTERS)
    return are_few and letters.issuperset(LETTER.findall(right + left * ("+" in left)))


def in_plain_letters(*texts: str) -> list[str]:
    """The texts with their letters renamed alike, since math-verify takes R for r."""
    names = {letter for text in texts for letter in LETTER.findall(text)}
    letters = sorted(names - {"", "e", "i", "\\infty"})
    plain = dict(zip(letters, map(" {}".format, PLAIN_LETTERS), strict=False))
    return [LETTER.sub(lambda each: plain.get(each[1], each[0]), text) for text in texts]
