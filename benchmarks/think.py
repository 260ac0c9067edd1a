"""results/think.gif: what a run answers to one question before, during and after its training.

    python benchmarks/think.py results/countdown-tiny-grpo-s0.samples.jsonl --question 1 \\
        --title "Make 54 from 11, 4, 45 and 6" --out results/think.gif
"""

import argparse
import json
import textwrap
from pathlib import Path

from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont

WIDTH, LINE_HEIGHT, MAX_COLUMNS = 560, 26, 58  # pixels, and characters of a line
LINE_MS, HOLD_MS = 700, 4000  # until the next line, and until the next answer
GOOD, BAD, PLAIN = "#00795c", "#b3401a", "#333333"


def frames_of(answers: list[dict]) -> list[tuple[str, list[str], str, int]]:
    """(moment, lines so far, the last one's colour, ms); of the first, middle and last answer."""
    frames = []
    for i in sorted({0, (len(answers) - 1) // 2, len(answers) - 1}):
        row = answers[i]
        whole = row["completion"].strip().splitlines()
        lines = [part for line in whole for part in textwrap.wrap(line, MAX_COLUMNS) or [""]]
        moment = f"after {row['step']} steps" if row["step"] else "before training"
        frames += [(moment, lines[:i], PLAIN, LINE_MS) for i in range(1, len(lines))]
        is_solved = row["reward_parts"]["answer"] == 1.0
        verdict, color = ("solved", GOOD) if is_solved else ("not solved", BAD)
        frames.append((f"{moment}: {verdict}", lines, color, HOLD_MS))
    return frames


def draw(title: str, moment: str, lines: list[str], color: str, *, num_lines: int) -> Image.Image:
    image = Image.new("RGB", (WIDTH, LINE_HEIGHT * (num_lines + 4)), "white")
    pen = ImageDraw.Draw(image)
    bold, mono = (ImageFont.truetype(findfont(name), 15) for name in ("sans:bold", "monospace"))
    for i, line in enumerate([title, moment, *lines]):
        y = LINE_HEIGHT * (i + (1 if i < 2 else 1.3))
        shown = color if i in (1, len(lines) + 1) else PLAIN
        pen.text((12, y), line, shown, bold if i < 2 else mono, anchor="lm")
    return image.convert("P", palette=Image.Palette.ADAPTIVE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("samples", type=Path, help="a run's samples.jsonl")
    parser.add_argument("--question", type=int, default=0, help="which of its questions, from 0")
    parser.add_argument("--title", default="", help="the question, above its answers")
    parser.add_argument("--out", type=Path, default=Path("think.gif"))
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.samples.read_text(encoding="utf-8").splitlines()]
    prompts = list(dict.fromkeys(row["prompt"] for row in rows))
    frames = frames_of([row for row in rows if row["prompt"] == prompts[options.question]])
    num_lines = max(len(lines) for _, lines, _, _ in frames)
    first, *others = [draw(options.title, *frame[:3], num_lines=num_lines) for frame in frames]
    durations = [milliseconds for *_, milliseconds in frames]
    looks = {"duration": durations, "loop": 0, "optimize": True}
    first.save(options.out, save_all=True, append_images=others, **looks)


if __name__ == "__main__":
    main()
