"""Animate what a run answers to one question at three moments, line by line, as a GIF.

python -m tools.think runs/x                                  # writes think.gif
python -m tools.think results/a.samples.jsonl --question 1 --out results/think.gif
"""

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

from engine.packages import import_package

WIDTH, LINE_HEIGHT, MAX_COLUMNS = 560, 26, 58  # pixels, and characters of a line
LINE_S, HOLD_S = 0.7, 4.0  # seconds until the next line, and until the next answer
GOOD, BAD, PLAIN = "#00795c", "#b3401a", "#333333"


def read_answers(path: Path, question: int) -> list[dict]:
    """The samples of a validation question (0 is the first) in a run's folder or samples.jsonl."""
    file = path / "samples.jsonl" if path.is_dir() else path
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        rows = [row for row in rows if row.get("split") != "train"]
        prompts = list(dict.fromkeys(row["prompt"] for row in rows))
        keys = {"step", "completion", "reward_parts"}
        if not all(keys <= row.keys() for row in rows):
            raise ValueError(f"a line lacks one of {', '.join(sorted(keys))}")
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{file}: not a run's samples.jsonl: {error}") from None
    if not 0 <= question < len(prompts):
        raise ValueError(f"--question {question}: {file} has {len(prompts)}, the first is 0")
    return [row for row in rows if row["prompt"] == prompts[question]]


def frames_of(answers: list[dict]) -> list[tuple[str, list[str], str, float]]:
    """(moment, lines so far, the last one's colour, seconds); of the first, middle and last row."""
    frames = []
    for i in sorted({0, (len(answers) - 1) // 2, len(answers) - 1}):
        row = answers[i]
        whole = row["completion"].strip().splitlines() or ["(nothing)"]
        lines = [part for line in whole for part in textwrap.wrap(line, MAX_COLUMNS) or [""]]
        moment = f"after {row['step']} steps" if row["step"] else "before training"
        frames += [(moment, lines[:i], PLAIN, LINE_S) for i in range(1, len(lines))]
        is_solved = row["reward_parts"]["answer"] == 1.0
        verdict, color = ("solved", GOOD) if is_solved else ("not solved", BAD)
        frames.append((f"{moment}: {verdict}", lines, color, HOLD_S))
    return frames


def animate(path: Path, out: Path, *, question: int, title: str) -> None:
    """Write the GIF; raises OSError or ValueError, one line, for what cannot be drawn."""
    import_package("matplotlib", key="tools.think")  # if it is missing, this says how to install it
    frames = frames_of(read_answers(path, question))
    num_lines = max(len(lines) for _, lines, _, _ in frames)
    pictures = [draw_frame(title, *frame[:3], num_lines=num_lines) for frame in frames]
    durations_ms = [round(1000 * seconds) for *_, seconds in frames]
    pictures[0].save(
        out, save_all=True, append_images=pictures[1:], duration=durations_ms, loop=0, optimize=True
    )


def draw_frame(title: str, moment: str, lines: list[str], color: str, *, num_lines: int) -> Any:
    """One picture, a PIL image of few colours."""
    from matplotlib.font_manager import findfont
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (WIDTH, LINE_HEIGHT * (num_lines + 4)), "white")
    draw = ImageDraw.Draw(image)
    bold, mono = (ImageFont.truetype(findfont(name), 15) for name in ("sans:bold", "monospace"))
    for i, line in enumerate([title, moment, *lines]):
        y = LINE_HEIGHT * (i + (1 if i < 2 else 1.3))
        shown_color = color if i in (1, len(lines) + 1) else PLAIN
        draw.text((12, y), line, shown_color, bold if i < 2 else mono, anchor="lm")
    return image.convert("P", palette=Image.Palette.ADAPTIVE)


def main() -> None:
    parser = argparse.ArgumentParser("python -m tools.think", description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="a run's folder, or its samples.jsonl")
    parser.add_argument("--question", type=int, default=0, help="which of the samples' questions")
    parser.add_argument("--title", default="", help="the question, above its answers")
    parser.add_argument("--out", type=Path, default=Path("think.gif"))
    options = parser.parse_args()
    try:
        looks = {"question": options.question, "title": options.title}
        animate(options.path.expanduser(), options.out.expanduser(), **looks)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
