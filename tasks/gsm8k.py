"""GSM8K: grade-school word problems whose answer is a number.

An example is a row of openai/gsm8k, {"question": "...", "answer": "... #### 18"}: the gold number
stands behind the mark ####. The graders take time linear in a text's length, and never raise.
"""

import re
from itertools import islice
from typing import Literal

from pydantic import PositiveInt, ValidationInfo, field_validator

from engine.core.config import Section
from engine.questions.tasks import Hub
from engine.sampling.arithmetic import NUMBER


class Options(Section):
    """GSM8K's own keys in the config's `task` section."""

    prompt_style: Literal["plain", "tags"] = "plain"
    """What is asked for. plain poses the bare question and reads the number behind ####; tags asks
    for a <thinking> and an <answer> block, reads the answer block, and grades the layout too."""
    tag_grading: Literal["lenient", "strict"] = "lenient"
    """How style tags is graded. lenient forgives white space between the blocks. strict wants a
    newline behind each opening tag and before each closing one, one newline between the blocks, and
    nothing else in the text. It pays -0.5 for the ending if </answer> is missing too, takes digits
    with a sign for an integer, but no commas, and reads <ANSWER> as <answer>."""
    grading: Literal["exact", "official"] = "exact"
    """How the number is read. exact reads it as a person would: $18.00 is 18, and 1/2 is not 1.
    official is the published regex for the text behind ####; it allows comparisons with published
    results."""
    answer_mark: Literal["hashes", "boxed"] = "hashes"
    r"""Where style plain reads the number: behind ####, or in the last whole \boxed{}. (The gold
    number stands behind #### in any case.) The prompt must ask for what is read; write \boxed{} in
    it, since {answer} in a prompt becomes the right answer."""
    max_tokens: PositiveInt | None = None
    """A completion of more tokens than this gets -0.5 in the reward part `length`; null is off."""

    @field_validator("answer_mark")
    @classmethod
    def check_mark(cls, mark: str, fields: ValidationInfo) -> str:
        """Refuse a mark that other options do not read, or that the prompt does not ask for."""
        known, is_boxed = fields.data, mark == "boxed"
        is_plain, grading = known.get("prompt_style") == "plain", known.get("grading")
        if is_boxed and not (is_plain and grading == "exact"):
            raise ValueError("it needs task.prompt_style=plain and task.grading=exact")
        asked = f"{known.get('system_prompt')} {known.get('prompt')}"
        is_bare = known.get("prompt") is None and "boxed" not in asked  # a tuned model knows ####
        is_asked_for = "boxed" in asked if is_boxed else MARK in asked or is_bare
        if "prompt" in known and is_plain and not is_asked_for:
            reads = r"\boxed{}" if is_boxed else MARK
            raise ValueError(f"task.prompt must ask for {reads}, since the answer is read there")
        return mark


EXAMPLE_ROW = {"question": "How many is a dozen and a half?", "answer": "12 + 6 = 18 #### 18"}
HUB = Hub(usual_id="openai/gsm8k", config="main", validation_split="test", divides_train=False)


def question_key(example: dict) -> str:
    """Equal for equal questions, whatever their capitals and extra spaces."""
    return " ".join(example["question"].lower().split())


def parse_row(row: dict, *, options: Options) -> dict:
    """The example in a row; an answer 18 or "18" becomes #### 18. ValueError says what is wrong."""
    question, answer = row["question"], row["answer"]
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"question is {question!r:.60}, not a text")
    marked = f"{answer}" if MARK in f"{answer}" else f"{MARK} {answer}"
    if type(answer) not in (str, int) or marked_answer(marked) is None:
        raise ValueError(f"answer is {answer!r:.60}, without a number behind {MARK}")
    if options.grading == "official" and official_answer(marked) is None:
        raise ValueError(f'answer is {answer!r:.60}; official grading needs "{MARK} 18", one space')
    return {"question": question.strip(), "answer": marked}


def parse_question(text: str) -> dict:
    """The example in a text typed by a person; its answer may follow behind ####."""
    question, mark, answer = text.partition(MARK)
    if not question.strip() or (mark and marked_answer(text) is None):
        raise ValueError('write the question, and if you like "#### 18" with its answer behind it')
    return {"question": question.strip(), "answer": mark + answer}


SYSTEM_PROMPT = (
    "Solve the problem of the user. Answer in this layout, and write nothing after it:\n"
    "<thinking>\nyour reasoning, step by step\n</thinking>\n"
    "<answer>\nthe answer, a whole number and nothing else\n</answer>"
)


def generate_prompt(example: dict, *, options: Options) -> list[dict]:
    """Chat messages that pose the question."""
    messages = [{"role": "user", "content": example["question"]}]
    if options.prompt_style == "tags":
        messages.insert(0, {"role": "system", "content": SYSTEM_PROMPT})
    return messages


REWARD_PARTS = ("format", "answer", "ending", "integer", "length")
TAGS = ("<thinking>", "</thinking>", "<answer>", "</answer>")
LAYOUT = re.compile(r"\s*<thinking>.*</thinking>\s*<answer>.*</answer>", re.DOTALL)
STRICT_LAYOUT = ("<thinking>\n", "\n</thinking>\n<answer>\n", "\n</answer>")


def reward_function(
    completion: str, example: dict, *, options: Options, num_tokens: int
) -> dict[str, float]:
    """`answer` is 0 or 1, `length` -0.5 or 0; the others are `tag_rewards`, 0 in style plain."""
    parts = dict.fromkeys(REWARD_PARTS, 0.0)
    if options.prompt_style == "tags":
        parts |= tag_rewards(completion, is_strict=options.tag_grading == "strict")
    if options.max_tokens is not None and num_tokens > options.max_tokens:
        parts["length"] = -0.5
    read_gold = official_answer if options.grading == "official" else marked_answer
    gold = read_gold(example["answer"])
    predicted = extract_answer(completion, example, options=options)
    parts["answer"] = float(predicted is not None and predicted == gold)
    return parts


def tag_rewards(completion: str, *, is_strict: bool) -> dict[str, float]:
    """What style tags pays for the layout; Options says how strict differs.

    `format` is 1 for a thinking block and then an answer block, else -1; `integer` is 1 if the
    answer block holds an integer and nothing else, else -1; `ending` is -0.5 for text behind it.
    """
    answer = (find_answer(completion, in_any_case=is_strict) or "").strip()
    _, closing, rest = completion.partition("</answer>")
    if is_strict:
        start, middle, end = STRICT_LAYOUT
        is_framed = completion.startswith(start) and completion.endswith(end)
        has_layout = is_framed and middle in completion[len(start) : -len(end)]
        is_integer = re.fullmatch("[-+]?[0-9]+", answer)
    else:
        has_layout = all(completion.count(tag) == 1 for tag in TAGS) and LAYOUT.match(completion)
        is_integer = "." not in answer and re.fullmatch(f"-?{NUMBER}", answer)
    return {
        "format": 1.0 if has_layout else -1.0,
        "ending": -0.5 if rest.strip() or (is_strict and not closing) else 0.0,
        "integer": 1.0 if is_integer else -1.0,
    }


def is_lenient_solved(completion: str, example: dict, *, options: Options) -> bool:
    """Whether the last number of the text, wherever it stands, is the right one."""
    return lenient_answer(completion) == marked_answer(example["answer"])


# Reading answers. Each repeat in these regexes is bounded, so that no text takes long to match.

MARK = "####"
MINUS = "\N{MINUS SIGN}"
# LaTeX has 9{,}500, 9\,500 and 9,\!500 for 9,500, and others a space that is no ordinary one.
GROUPED = NUMBER.replace("(?:,", r"(?:(?:,|\{,\}|,?\\[,!]|[\u00a0\u2009\u202f])")
NUMERIC = r"[\d¹²³⁰⁴-⁹¼-¾⅐-⅞]"  # digits of any script, powers and fractions
# What may stand before a number: $18, **18**, (18), = 18, \boxed{18}, US$18
OPENING = r"""[\s$€£¥₹*_`"'(\[{:=\\]{0,20}(?:boxed\{[\s$*\\]{0,20})?
    (?:[A-Z]{1,3}[ ]?\\?[$€£¥₹][ ]?)?"""
# Words and signs behind it that make another number of it
LARGE = "(?:hundred|thousand|[a-z]{1,9}illion|lakh|crore|doz(?:en)?)s?"
CHANGED = "(?:(?:doubl|tripl|quadrupl|halv)ed)"
NOT_CHANGED = rf"""(?!
      !  | [^\S\r\n]{{0,20}}[kKMB](?![A-Za-z&-])                    # 5!  5k  5 k
    | [^\W\d_\x00-\u024f]                                       # a letter of another script
    | [^\S\r\n]{{0,20}}-?(?i:
          (?:{LARGE}|{CHANGED}|grand|score|pairs?|couples?|[bmt]l?n|mi[lo]|twice|thrice|squared
          |cubed|halves|half(?!-[a-z]+\ [a-z])|third(?!-[a-z]|\ [a-z]+s\b)|(?:third|fifth|ninth)s)\b
        | and[ ](?:a|an|one|two|three)[ ](?:hal|third|quarter|fourth|fifth|sixth|eighth|tenth)
        | (?:%|percent|per[ ]cent)[ ]of\b
    ))"""
# What must not come behind it, since the number would then be a part of something else
NOT_CONTINUED = rf"""(?!(?:
      [^\w\r\n(\[.\#<]{{0,20}}         # 1/2  3:30  7,8,9  18-20  3 * 6  10^3  1 000
    | _ | \.{{1,20}}                    # 18.5.3  1_000  5..7
    | [A-Za-z]{{1,20}}[-+]?(?![²³])    # 1e3  1e-3  0x12  3x4, but not cm²
    | [^\S\r\n]{{1,20}}[eE][-+]?       # 5 e5
    | [^\S\r\n]{{0,20}}(?:and|or|to|[xX])[^\w\r\n]{{0,20}}  # 2 and 1/2  18 or 20  3 x 4
    | [^\S\r\n]{{0,20}}\\(?:[dt]?frac\{{|times[ ]?|cdot[ ]?|div[ ]?)
    ){NUMERIC})"""
SIGNED = (
    rf"(?P<sign>[-+{MINUS}\u2011]?)\\?[$€£¥₹]?(?P<number>{GROUPED}){NOT_CHANGED}{NOT_CONTINUED}"
)
TITLE = r"(?:\s{0,20}[*_$]{0,2}(?:(?i:(?:final\s)?answer)[*_]{0,2}\s?[:\n]|[A-Za-z]\s?=))?"
ANSWER = re.compile(TITLE + OPENING + SIGNED, re.VERBOSE)  # at a text's start or behind a mark
# What an answer's line may hold behind the number: units such as m^2, and explanations in brackets
# such as 18 (2 * 9), but not (or 19), (+ 1), (3), (maybe 19) or (in thousands). In lower case.
HEDGE = r"""(?: \? | \bor[ ]{1,5}\$?\d | \b(?:maybe|may[ ]be|perhaps|possibly|is[ ]possible
    |probably|actually|rather(?![ ]than)|instead(?![ ]of)|otherwise|alternatively|unless|if[ ]not
    |wait,|well,|hmm|sorry|correct(?:ion|ed)|(?:could|might)(?:[ ]also)?[ ]be))"""
JOINT = r"""(?:[-+/^&±\xd7\xf7] | \b(?:or|and|to|plus|minus|times)\b
    | [*]{1,2}(?=[(\[]) | (?<=[\s(\[])[*]{1,2}(?=\s))"""  # not the end of **18**
IGNORED = re.compile(  # replaced by "(", so that OTHER still finds the "+ (" of 5 + (2 * 9)
    rf"""(?<![a-z])(?:[cdkm]?m|ft|in|yd|mi)\}}?\^?\{{?[23²³]
    | [\^²³](?<=[a-z]{{3}}.)(?:(?<!\^)|\{{?[23])                         # yard^2  units³
    | (?<=[^\\\w)\]])[(\[]
      (?![^()\[\]]{{0,200}}{HEDGE})
      (?!(?:in[ ])?{LARGE}\b | {CHANGED})
      (?!\s{{0,20}}+(?:{JOINT} | [$*]{{0,3}}[$\d.,;\s]{{0,50}}(?:/\d{{1,9}})?[$*]{{0,3}}[)\]]))
      (?:[^()\[\]] | [(\[][^()\[\]]{{0,200}}[)\]]){{0,500}}+[)\]]""",
    re.VERBOSE,
)
# What stands right behind the number and makes an expression, a bound, a guess or no answer of it
UNKNOWN = r"(?![ai][ ]\w)(?:[a-z]|pi)(?![\w'/-])"
JOINED = re.compile(
    rf"""[\s*_$`"')\]}}(,\\]{{0,20}}(?:
      [+<>≤≥≠≈±√÷\xd7?~] | => | \^(?!\{{?\\?circ) | (?<=\s)[*](?=\s\w) | -?ish\b  # 5 + tax  5ish
    | (?:[a-z]?\s?[^\w\s.=/°'"]|[a-z]\s?=|/(?!\s?[dhms]\b))\s{{0,3}}{UNKNOWN}    # 5 - k  5a = b
    | (?:[nxyz\u03b1-\u03c9]|pi|sqrt)(?![\w'/-])                                # 5x, but 5 g
    | (?:[a-z]{{1,20}}[ ]){{0,5}}(?:as|than|times|by|over)[ ]{UNKNOWN}  # 5 times as many as k
    | (?:[a-z]{{3,20}}[ ]){{0,3}}(?:at[ ](?:\w{{1,9}}[ ]){{0,2}}(?:most|least|min|max)(?:imum)?|tops
      |(?:min|max)imum|(?:up|down)wards?|(?:and|or)[ ](?:up|more|less|so|over|under|above|below
      |counting|(?:old|high|great)er)|or[ ]\w+er)\b
    | (?:or|if[ ]not|plus|minus|divided|multiplied|mod(?:ulo)?|factorial|approx(?:imately)?|about
      |roughly|nearly|almost|max)\b(?!-)
    | (?:and[ ]\w+ing|no(?:t|pe)?|wrong|incorrect|false)(?:\W*\Z|[.,;:!])
    | (?:is|was|seems|(?:would|can.{{1,3}})[ ]be)[ ](?:\w{{1,9}}[ ]){{0,3}}(?:too[ ]\w
      |(?:wrong|incorrect|false)\b(?![ ]\w+s\b))
    | (?:(?:is|was|does)(?:[ ]not|n.?t)|can(?:[ ]?not|.?t)[ ]be)\b)""",
    re.VERBOSE,
)
OTHER = re.compile(  # a digit, a bracket that a sign joins, a number word (but not ten-dollar)
    rf"""{NUMERIC} | (?:{JOINT}|=)\s{{0,20}}[(\[] | (?:-|[ ]an?[ ])(?:third|quarter)
    | (?<![a-z])(?:(?:one|ten|half)(?![a-z])|zero|two|three|four|five|six|seven|eight|nine|tent(?=h)
      |eleven|twel|twent|thirt|fift|forty|{LARGE}|{CHANGED})(?!\w{{0,4}}(?:-[a-z]|h\ [a-z]+s\b))""",
    re.VERBOSE,
)
# A dash may be a minus. Then the number is not 85, and whether it is -85 is anyone's guess.
BEFORE = rf"""(?P<dash>(?:[\u02d7\u2010-\u2015\u2043\u207b\u208b\u2796\u2e3a\u2e3b\ufe58\ufe63]
    | [\uff0d±] | \b(?i:minus|negative)\b | {MINUS}(?=\s) | [-{MINUS}](?=[*({{]|\\b)){OPENING})?
    (?<![\w.])(?<![0-9][-,:/^'* ])(?<![0-9][eE][-+])"""
ANY_NUMBER = re.compile(BEFORE + SIGNED, re.VERBOSE)
HEADING = re.compile(r"\s{0,20}[*_]{0,2}\d[.)]\s{1,5}[*_]{0,2}[A-Za-z]")  # 1. Find the cost
LINE_END = re.compile(r"[\r\n]|####|<[|/]|<[a-z_]{2,30} ?/?>|<<[^<>A-Za-z]{0,200}=")  # or a tag
# A box's words, and what may stand outside of them, where "text" stands for them
WORDS = re.compile(r"\\(?:(?:text|math(?!bb))\w{0,2}|mbox|boldsymbol) ?\{((?:[^{}]|\{[^{}]*\})*)\}")
PLAIN = re.compile(
    rf"""(?:\s*[A-Za-z]\s?=)?(?:[\s\d.,:;$€£¥₹¢%°*"()\[\]{{}}=] | [-+{MINUS}/](?=[\s$€£\\({{]*\d)
    | \\(?:[\s,;:!$%{{}}]|q?quad(?![a-z])|(?:times|cdot)[ ]?(?=\d)) | \^\{{?\\circ\}}? | \\degree
    | /(?=\s?[A-Za-z]{{2}}) | (?<=[a-z])(?:/[hs]\b|\^\{{?[23]|[²³])
    | (?<![\dA-Za-z])[A-Za-z]{{2,}}+ | (?<=\d)(?:[A-Za-z]{{3,}}+|[cdkm]m|[km]g)(?![A-Za-z]))*+""",
    re.VERBOSE,
)
NOTE = re.compile(r"[(\[](?=[^)\]]*\d)[^)\]]*(?<![\\A-Za-z])[a-z]")  # words and a number
OFFICIAL_ANSWER = re.compile(r"#### (\-?[0-9\.\,]+)")  # openai/grade-school-math, dataset.py
MAX_MARKS = 1_000
MAX_TAIL_CHARS = 10_000
MAX_REST_CHARS = 500  # of an answer's line


def extract_answer(completion: str, example: dict, *, options: Options) -> str | None:
    """The answer in a normal form, so that equal numbers are equal text; None if there is none."""
    if options.grading == "official":
        return official_answer(completion)
    if options.prompt_style == "tags":
        answer = find_answer(completion, in_any_case=options.tag_grading == "strict")
        return only_number(answer or "")
    return (boxed_answer if options.answer_mark == "boxed" else marked_answer)(completion)


def official_answer(text: str) -> str | None:
    """What the published code reads, quirks included: 1/2 is 1, and $18 is nothing."""
    match = OFFICIAL_ANSWER.search(text)
    return match.group(1).strip().replace(",", "") if match else None


def marked_answer(text: str) -> str | None:
    """The number behind the first of MAX_MARKS #### that one follows, a heading's only if alone."""
    answer = None
    for mark in islice(re.finditer(f"{MARK}(?!#)", text), MAX_MARKS):
        number = only_number(text, mark.end())
        answer = number or answer
        if number and not HEADING.match(text, mark.end()):
            break
    return answer


def boxed_answer(text: str) -> str | None:
    r"""The number in the last whole box, where nothing but PLAIN stands around it: \text{18}."""
    from tasks.grader import last_boxed

    boxed = re.sub(r"\s*[\r\n~]\s*", " ", last_boxed(text) or "")
    line = WORDS.sub(r" \1", boxed)
    is_plain = PLAIN.fullmatch(WORDS.sub(" text", boxed)) and not NOTE.search(line)
    return only_number(line) if is_plain else None


def only_number(text: str, start: int = 0) -> str | None:
    """The number at `start`; None if its line names another: 5 hours and 30 minutes are not 5."""
    match = ANSWER.match(text, start)
    if match is None:
        return None
    rest = text[match.end() : match.end() + MAX_REST_CHARS]
    rest = IGNORED.sub("(", LINE_END.split(rest, maxsplit=1)[0].lower())
    return None if JOINED.match(rest) or OTHER.search(rest) else normal_form(match)


def find_answer(completion: str, *, in_any_case: bool) -> str | None:
    """The text between the first <answer> and the first </answer> after it."""
    flags = re.ASCII | (re.IGNORECASE if in_any_case else 0)
    if opening := re.search("<answer>", completion, flags):
        completion = completion[opening.end() :]
        if closing := re.search("</answer>", completion, flags):
            return completion[: closing.start()]
    return None


def lenient_answer(completion: str) -> str | None:
    """The last number in the text's last MAX_TAIL_CHARS characters, wherever it stands."""
    matches = list(ANY_NUMBER.finditer(completion, max(0, len(completion) - MAX_TAIL_CHARS)))
    return normal_form(matches[-1]) if matches and not matches[-1]["dash"] else None


def normal_form(match: re.Match[str]) -> str:
    """The number without plus, commas and needless zeros: +1,800.50 is 1800.5, -0.0 is 0."""
    whole, _, decimals = re.sub("[^0-9.]", "", match["number"]).partition(".")
    whole, decimals = whole.lstrip("0") or "0", decimals.rstrip("0")
    text = f"{whole}.{decimals}" if decimals else whole
    return f"-{text}" if match["sign"] not in ("", "+") and text != "0" else text
