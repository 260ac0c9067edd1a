"""Animate what a run answers to one question at each of its evaluations, line by line, as a GIF.

python -m tools.think runs/x                                  # writes think.gif
python -m tools.think results/a.samples.jsonl --question 1 --out results/think.gif
"""

import argparse
import json
from pathlib import Path
from typing import Any

from engine.packages import import_package

WIDTH, LINE_HEIGHT = 800, 26  # pixels
LINE_S, HOLD_S = 0.35, 2.5  # seconds until the next line, and until the next answer
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
    """(title, lines so far, colour of the last one, seconds) for each picture."""
    frames = []
    for row in answers:
        lines = row["completion"].strip().splitlines() or ["(nothing)"]
        is_solved = row["reward_parts"]["answer"] == 1.0
        title = f"after {row['step']} steps" if row["step"] else "before training"
        frames += [(title, lines[:i], PLAIN, LINE_S) for i in range(1, len(lines))]
        frames.append((title, lines, GOOD if is_solved else BAD, HOLD_S))
    return frames


def animate(path: Path, out: Path, *, question: int = 0) -> None:
    """Write the GIF; raises OSError or ValueError, one line, for what cannot be drawn."""
    import_package("matplotlib", key="tools.think")  # if it is missing, this says how to install it
    frames = frames_of(read_answers(path, question))
    num_lines = max(len(lines) for _, lines, _, _ in frames)
    pictures = [draw_frame(*frame[:3], num_lines=num_lines) for frame in frames]
    durations_ms = [round(1000 * seconds) for *_, seconds in frames]
    pictures[0].save(
        out, save_all=True, append_images=pictures[1:], duration=durations_ms, loop=0, optimize=True
    )


def draw_frame(title: str, lines: list[str], color: str, *, num_lines: int) -> Any:
    """One picture, a PIL image of few colours."""
    from matplotlib.font_manager import findfont
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (WIDTH, LINE_HEIGHT * (num_lines + 3)), "white")
    draw = ImageDraw.Draw(image)
    bold, mono = (ImageFont.truetype(findfont(name), 14) for name in ("sans:bold", "monospace"))
    draw.text((16, LINE_HEIGHT), title, PLAIN, bold, anchor="lm")
    for i, line in enumerate(lines):
        is_last = i == len(lines) - 1
        y = LINE_HEIGHT * (i + 2.2)
        draw.text((16, y), line, color if is_last else PLAIN, mono, anchor="lm")
    return image.convert("P", palette=Image.Palette.ADAPTIVE)


def main() -> None:
    parser = argparse.ArgumentParser("python -m tools.think", description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="a run's folder, or its samples.jsonl")
    parser.add_argument("--question", type=int, default=0, help="which of the samples' questions")
    parser.add_argument("--out", type=Path, default=Path("think.gif"))
    options = parser.parse_args()
    try:
        animate(options.path.expanduser(), options.out.expanduser(), question=options.question)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
