"""Which alarms find a broken run, and which cry over a sound one? Nothing is run here.

    python benchmarks/ablations.py --lab symptoms --seeds 0 1 2    # results/symptoms.csv
    python benchmarks/symptoms.py                                  # the tables of symptoms.md

The rules are those that guides publish, and our own. A run of hard.csv is broken if it ends below
half of the default's pass@1, sound from 0.3 on, else left out; one of symptoms.csv by what it is.
The tables replace what is below `---` in results/symptoms.md.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from ablations import SOUND  # first: modules
from common import kept_runs
from pandas import DataFrame, Series

from engine import ROOT
from engine.core.files import write_atomically
from engine.report.pass_at_k import confidence_interval

FIRST = 3  # steps
Test = Callable[[Series, DataFrame], Series]  # a metric by step, and the run, to where it speaks


@dataclass
class Rule:
    says: str
    metric: str
    source: str
    published: Test | None
    share: Test | None = None  # of the metric divided by its mean over the first steps


def above(limit: float) -> Test:
    return lambda x, run: x >= limit


def below(limit: float) -> Test:
    return lambda x, run: x < limit


def is_far_above_recent(x: Series, run: DataFrame) -> Series:
    recent = x.shift(1).rolling(100, min_periods=20)
    return x > recent.mean() + 3 * recent.std()


def has_three_spikes(x: Series, run: DataFrame) -> Series:
    """Of 8 robust deviations and three times the median."""
    median = x.expanding().median()
    deviation = 1.4826 * (x - median).abs().expanding().median()
    return ((x > median + 8 * deviation) & (x >= 3 * median)).cumsum() >= 3


def grows_with_reward(x: Series, run: DataFrame) -> Series:
    """By half and more, at a rank correlation with the reward of 0.6 over at least ten steps."""
    reward = run["train/reward"]
    ends = range(1, len(x) + 1)
    so_far = [x[:end].rank().corr(reward[x.index[:end]].rank()) for end in ends]
    return (x >= 1.5) & (np.array(so_far) >= 0.6) & (np.array(ends) >= 10)


def stands_still(x: Series, run: DataFrame) -> Series:
    """Asked at the end: no trend in the last 35% of the run, and the best 30% of it behind."""
    last = x[-max(FIRST, round(0.35 * len(x))) :]
    is_flat = np.polyfit(last.index, last, deg=1)[0] <= 0
    is_behind = x.rolling(FIRST).mean().argmax() < 0.7 * len(x)
    return (x.index == x.index[-1]) & is_flat & is_behind


def falls_as_reward_rises(x: Series, run: DataFrame) -> Series:
    reward = run["train/reward"].dropna()
    has_risen = reward.rolling(FIRST).mean() > reward[:FIRST].mean()
    return (x < x.iloc[0]) & has_risen.reindex(x.index, fill_value=False)


# The detectors of varun1724/rlwatch and junglezke/rldoctor
WATCH, DOCTOR = "rlwatch", "rldoctor"
RULES = [
    Rule("entropy below 0.5 nats", "train/entropy", WATCH, below(0.5), below(1 / 3)),
    Rule("entropy below 10% of its start", "train/entropy", DOCTOR, None, below(0.1)),
    Rule("KL of 0.5", "train/kl", DOCTOR, above(0.5)),
    Rule("KL 3 deviations above its last steps", "train/kl", WATCH, is_far_above_recent),
    Rule("15% are cut off", "train/truncated_frac", DOCTOR, above(0.15), above(3)),
    Rule("length and reward grow", "train/completion_tokens", DOCTOR, None, grows_with_reward),
    Rule("the reward stands still", "train/reward", DOCTOR, stands_still),
    Rule("half the groups are equals", "train/zero_advantage_frac", DOCTOR, above(0.5), above(1.5)),
    Rule("three times the rewards' variance", "train/reward_std", WATCH, None, above(math.sqrt(3))),
    Rule("three times the advantages", "train/advantage_abs", WATCH, None, above(3)),
    Rule("three times the gradient", "train/grad_norm", WATCH, None, above(3)),
    Rule("three spikes of the gradient", "train/grad_norm", DOCTOR, has_three_spikes),
    Rule("20% of the tokens are clipped", "train/clip_frac", DOCTOR, above(0.2), above(3)),
    Rule("validation falls, reward rises", "eval/pass@1", DOCTOR, falls_as_reward_rises),
    Rule("sampler 0.1 from trainer", "train/sampler_mismatch", "slime", above(0.1), above(3)),
    Rule("sampler 0.01 from trainer", "train/sampler_mismatch", "our remark", above(0.01)),
    Rule("our warning of a collapse", "train/collapsed", "ours", above(1)),
]


def main() -> None:
    names = ("hard", "countdown-tiny-grpo", "countdown-tiny-sil", "symptoms")
    hard, grpo, sil, ours = (kept_runs(ROOT / f"results/{name}.csv") for name in names)
    ends = {name: run["eval/pass@1"].dropna().iloc[-1] for name, run in hard.items()}
    half = np.mean([ends[f"default-s{seed}"] for seed in range(3)]) / 2
    broken = {name: hard[name] for name, end in ends.items() if end < half}
    sound = grpo | sil | {name: hard[name] for name, end in ends.items() if end >= 0.3}
    text = f"\n## The lab's runs\n\n{table(broken, sound, RULES)}"
    if ours:
        remarks = sorted({name for run in ours.values() for name in run if "remark/" in name})
        rules = RULES + [Rule(f"our {name}", name, "ours", above(1)) for name in remarks]
        sound = {name: run for name, run in ours.items() if name.rpartition("-s")[0] in SOUND}
        broken = {name: run for name, run in ours.items() if name not in sound}
        text += f"\n## The runs made for this page\n\n{table(broken, sound, rules)}"
    page = ROOT / "results/symptoms.md"
    write_atomically(page, page.read_text("utf-8").partition("\n---\n")[0] + "\n---\n" + text)


def table(broken: dict[str, DataFrame], sound: dict[str, DataFrame], rules: list[Rule]) -> str:
    """A line of Markdown for each form of each rule: how often it speaks, when, and of what."""
    lines = [["rule", "from", "form", "speaks of broken", "at step", "of sound", "always of"]]
    lines.append(["---"] * len(lines[0]))
    for rule, form in itertools.product(rules, ("published", "share")):
        if getattr(rule, form) is not None:
            found, cried = first_steps(rule, form, broken), first_steps(rule, form, sound)
            at = sorted(step for step in found.values() if step < math.inf)
            when = f"{at[0]:g} to {at[-1]:g}" if at else ""
            rows = [(name.rpartition("-s")[0], step < math.inf) for name, step in found.items()]
            each = ", ".join(sorted({row for row, _ in rows if (row, False) not in rows}))
            lines.append([rule.says, rule.source, form, counted(found), when, counted(cried), each])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def first_steps(rule: Rule, form: str, runs: dict[str, DataFrame]) -> dict[str, float]:
    """The first step at which a rule speaks of each run that has its metric; inf if never."""
    steps, test = {}, getattr(rule, form)
    for name, run in runs.items():
        run = run.set_index("step")
        if rule.metric in run:
            x = run[rule.metric].dropna()
            is_spoken = test(x / x[:FIRST].mean() if form == "share" else x, run)
            steps[name] = min(x.index[is_spoken], default=math.inf)
        elif rule.source == "ours":
            steps[name] = math.inf
    return steps


def counted(steps: dict[str, float]) -> str:
    """How many of how many, with the 95% interval of that share."""
    if not steps:
        return "not measured"
    has_spoken = np.array([*steps.values()]) < math.inf
    low, high = confidence_interval(has_spoken.astype(float), is_binary=True)
    return f"{has_spoken.sum()} of {len(steps)} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
