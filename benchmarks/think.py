"""results/think.gif: one question's answers before and after training, token by token.

    python benchmarks/think.py --title "Make 11 from 24, 9, 12 and 14"

results/think.jsonl has a line for each model, as the page of `python -m tools.report RUN --serve`
asked it: validation question number 3, the same random numbers, temperature 1. The less likely a
token was when it was sampled, the fuller its colour.
"""

import argparse
import json
from pathlib import Path

from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "results/think.jsonl"
COLUMN, LEFT, TOP, LINE = 450, 14, 72, 22  # pixels
TOKENS_PER_FRAME, FRAME_MS, HOLD_MS = 2, 110, 6000
GOOD, BAD, PLAIN = "#00795c", "#b3401a", "#333333"
UNLIKELY, FULL_NATS, MAX_ALPHA = (150, 70, 190), 3, 0.6  # the hue of tools/report.html


def draw(title: str, answers: list[dict], shown: int) -> Image.Image:
    """The picture once each answer has written `shown` tokens."""
    num_lines = max("".join(answer["tokens"]).strip().count("\n") for answer in answers) + 1
    image = Image.new("RGB", (2 * COLUMN, TOP + LINE * (num_lines + 1)), "white")
    pen = ImageDraw.Draw(image)
    bold, mono = (ImageFont.truetype(findfont(name), 14) for name in ("sans:bold", "monospace"))
    pen.text((LEFT, 20), title, PLAIN, bold, anchor="lm")
    for i, (answer, moment) in enumerate(zip(answers, ("before", "after 20 steps"), strict=True)):
        x, y = i * COLUMN + LEFT, TOP
        if shown >= len(answer["tokens"]):
            moment += ": solved" if answer["is_solved"] else ": not solved"
            color = GOOD if answer["is_solved"] else BAD
        else:
            color = PLAIN
        pen.text((x, 48), moment, color, bold, anchor="lm")
        written = list(zip(answer["tokens"], answer["log_probs"], strict=True))[:shown]
        for text, log_prob in written:
            alpha = MAX_ALPHA * min(1, -log_prob / FULL_NATS)
            back = tuple(round(255 + alpha * (part - 255)) for part in UNLIKELY)
            for part in text.splitlines(keepends=True):
                word = part.rstrip("\n")
                width = pen.textlength(word, mono)
                pen.rectangle((x, y - LINE / 2 + 2, x + width, y + LINE / 2 - 2), fill=back)
                pen.text((x, y), word, PLAIN, mono, anchor="lm")
                x += width
                if part.endswith("\n") and (y > TOP or x > i * COLUMN + LEFT):
                    x, y = i * COLUMN + LEFT, y + LINE
    return image.convert("P", palette=Image.Palette.ADAPTIVE, colors=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--title", default="", help="the question, above its answers")
    parser.add_argument("--out", type=Path, default=ROOT / "results/think.gif")
    options = parser.parse_args()
    answers = [json.loads(line) for line in KEPT.read_text(encoding="utf-8").splitlines()]
    longest = max(len(answer["tokens"]) for answer in answers)
    counts = [*range(TOKENS_PER_FRAME, longest, TOKENS_PER_FRAME), longest]
    first, *others = [draw(options.title, answers, shown) for shown in counts]
    durations = [FRAME_MS] * (len(counts) - 1) + [HOLD_MS]
    looks = {"duration": durations, "loop": 0, "optimize": True}
    first.save(options.out, save_all=True, append_images=others, **looks)


if __name__ == "__main__":
    main()
