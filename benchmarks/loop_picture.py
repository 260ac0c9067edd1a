"""results/loop.svg: one step of the algorithm as a drawing, legible on white and on black.

python benchmarks/loop_picture.py
"""

from common import print_table  # noqa: F401  first: it finds the script's modules

from engine import ROOT

BOXES = (  # title, two lines, the function of main.py
    ("questions", "N of them, in a", "fixed random order", "run_training"),
    ("sample", "G completions of", "each: a group", "sample_trajectories"),
    ("reward", "a rule reads each", "and pays it", "compute_rewards"),
    ("compare", "reward minus the", "group's mean", "grpo_advantages"),
    ("update", "what was better", "gets likelier", "micro_batch_loss"),
)
SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 180">
<title>One step: questions, sample, reward, compare, update, and again</title>
<style>
  text {{ font: 13px sans-serif; text-anchor: middle; fill: #808080 }}
  rect {{ fill: #0072b2 }}
  .title {{ font-size: 17px; font-weight: bold }} .title, .on-box {{ fill: white }}
  path {{ stroke: #808080; stroke-width: 2; fill: none; marker-end: url(#head) }}
  marker path {{ fill: #808080; stroke: none; marker-end: none }}
</style>
<marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" markerHeight="6"
    orient="auto">
  <path d="M0 0 L8 4 L0 8 z"/>
</marker>
{boxes}
<path d="M778 136 V152 H82 V140"/>
<text x="430" y="170">the next step, with the new weights</text>
</svg>
"""
BOX = """<g transform="translate({x} 16)">
  <rect width="148" height="92" rx="10"/>
  <text class="title" x="74" y="28">{}</text>
  <text class="on-box" x="74" y="50">{}</text>
  <text class="on-box" x="74" y="67">{}</text>
  <text x="74" y="112">{}</text>
</g>"""
ARROW = '<path d="M{x} 62 h16"/>'


def main() -> None:
    boxes = [BOX.format(*texts, x=8 + 174 * i) for i, texts in enumerate(BOXES)]
    boxes += [ARROW.format(x=159 + 174 * i) for i in range(len(BOXES) - 1)]
    (ROOT / "results/loop.svg").write_text(SVG.format(boxes="\n".join(boxes)), encoding="utf-8")


if __name__ == "__main__":
    main()
