"""results/report.png: a group of completions as the report shows them, taken in a real browser.

    pip install playwright pillow   # and a Chromium
    python benchmarks/report_picture.py runs/countdown-tiny-grpo-s0

Of the groups that the run kept it takes the one with the fewest right answers, at least one, and of
that the two best and the two worst completions: what the update makes more likely stands beside
what it makes less likely.
"""

import argparse
import io
import shutil
import tempfile
from pathlib import Path

from common import print_table  # noqa: F401  first: it finds the script's modules
from PIL import Image
from playwright.sync_api import sync_playwright

from engine import ROOT
from engine.core.files import read_lines
from tools.page import by_step
from tools.report import write_report

SIZE = {"width": 820, "height": 1200}  # of the window: two completions side by side


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the run's folder")
    parser.add_argument("--out", type=Path, default=ROOT / "results/report.png")
    options = parser.parse_args()
    step, group = telling_group(options.folder)
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as api:
        file = Path(temporary, "report.html")
        write_report(options.folder, file)
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = api.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, device_scale_factor=2)
        page.goto(file.as_uri())
        page.locator("#step").select_option(str(step))
        page.locator("details.group").evaluate_all("groups => groups.forEach(g => g.open = true)")
        others = f"#groups > :not(#question-{group + 1})"
        between = "article:nth-child(n + 3):not(:nth-last-child(-n + 2))"  # best and worst are left
        around = f".controls, #count, h2, h2 + p, {between}"
        page.add_style_tag(content=f"{others}, {around} {{ display: none }}")
        picture = Image.open(io.BytesIO(page.locator("#rollouts").screenshot()))
        browser.close()
    picture.convert("P", palette=Image.Palette.ADAPTIVE).save(options.out, optimize=True)
    print(f"written: {options.out}")


def telling_group(folder: Path) -> tuple[int, int]:
    """The step and the place in it of the group with the fewest right answers, at least one."""
    groups = {}
    for step in by_step(read_lines(folder / "rollouts.jsonl")):
        for place, group in enumerate(step["rows"]):
            num_solved = sum(row["solved"] for row in group["completions"])
            if num_solved > 0:
                groups[step["step"], place] = num_solved
    return min(groups, key=groups.get)


if __name__ == "__main__":
    main()
