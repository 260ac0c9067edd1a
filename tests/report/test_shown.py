"""All that a run shows is derived again from what was sampled: each line, each bar, the card.

Where two sections have a key of one name, they have other values here: validation above and below.
"""

import contextlib
import io
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import arguments, chatty, grade_by_text, load_run, read_jsonl, save_writer
from one_pass import assert_plain

import countdown
import logger
import main
from engine.core.config import ModelSettings
from engine.core.text import printable
from engine.core.types import SeedWord
from engine.questions.tasks import schema
from engine.run.config_file import load_config
from engine.run.state import Run
from tools import chat
from tools.export import card_of

# What is paid is a digest of what the model wrote; in the first step all are paid alike.
OWN = """
import hashlib, os, re

def share(target, text):
    digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
    return 0.5 if f"{target}" in os.environ["ALIKE"].split() else int.from_bytes(digest[:6]) / 2**48

def reward_function(completion, example, *, options, num_tokens):
    part = share(example["target"], completion)
    assert {*re.findall("on ([0-9]+)", completion)} <= {str(example["target"])}  # replies: its own
    return {"format": part, "answer": worth(part)}

def worth(part):
    return 2.0 if part < 0.5 else 0.5

def format(completions, target, **kwargs):
    return [share(*one) for one in zip(target, completions)]

def answer(completions, target, **kwargs):
    return [worth(share(*one)) for one in zip(target, completions)]
"""
GAME = """
REWARD_PARTS = ("format", "answer")

def load_examples(source, split, **how):
    return [{"target": n} for n in (range(50, 90) if split == "train" else range(5))]

def generate_prompt(example, *, options):
    return [{"role": "user", "content": f"Go on{' and on' * (example['target'] % 3)}. "}]

class Environment:
    def reset(self, target):
        self.num, self.target = 0, target

    def respond(self, message):
        self.num += 1
        return f"Go on {self.target}." if self.num < 2 else None
"""
SIZES = "training.num_steps=3 training.num_samples_per_step=2 validation.num_examples=5 "
SIZES += "task.reward_weights.format=0.25 logging.samples=8 logging.train_samples_every=1 "
SIZES += "sampling.max_batch_tokens=512 training.micro_batch_tokens=128 training.k_best_of_n=[4,4]"
ABOVE = "sampling.temperature=0.8 validation.temperature=1.25 training.max_new_gen_tokens=7 "
ABOVE += "validation.max_new_gen_tokens=31 validation.best_of_n=6 "
ABOVE += "checkpoint.every=1 validation.every=2"
BELOW = "sampling.temperature=1.25 validation.temperature=0.8 training.max_new_gen_tokens=31 "
BELOW += "validation.max_new_gen_tokens=7 validation.best_of_n=1 "
BELOW += "checkpoint.every=2 validation.every=1"
CASES = {  # settings, a task, a backend
    "countdown": (ABOVE, "task.name=countdown", "grouped"),
    "functions": (BELOW, "task.reward=own:[format,answer] task.name=gsm8k", "generate"),
    "a game": (f"{ABOVE} validation.best_by=best_of_n", "task.name=game", "generate"),
    "greedy": (f"{BELOW} validation.temperature=0", "task.name=game", "grouped"),
}
ENDS = ("", "_low", "_high")


def test_each_twin_of_a_key_differs():
    """A key that gets the name of one in another section joins by failing here."""
    sections = defaultdict(list)
    for section, keys in schema("countdown")().model_dump().items():
        for key in keys if isinstance(keys, dict) else ():
            sections[key].append(section)
    twins = {key: of for key, of in sections.items() if len(of) > 1 and key != "name"}
    for given in (ABOVE, BELOW):
        values = dict(text.split("=") for text in given.split())
        for key, of in twins.items():
            assert len({values[f"{section}.{key}"] for section in of}) == len(of), key


class Bar(logger.tqdm):
    """A bar that is noted where it is closed."""

    def close(self) -> None:
        if not self.disable:  # it closes itself again where it is freed
            self.noted.append((self.desc, self.n, self.total))
        super().close()


def watch(patch: pytest.MonkeyPatch, runs: list[Run]) -> list[SimpleNamespace]:
    """What is sampled from here on; each token is that of one plain pass by its own section."""
    calls, decode = [], main.decode_in_batches

    def decoded(sampler, prompts, params, *given, **settings):
        groups, config = decode(sampler, prompts, params, *given, **settings), runs[-1].config
        is_training = prompts.seeds[0][0] == SeedWord.TRAINING
        own = config.training if is_training else config.validation
        heat = (config.sampling if is_training else config.validation).temperature
        num = config.training.group_size if is_training else config.validation.best_of_n
        if calls and calls[-1].mode == config.mode == "evaluate":
            num, heat = 1, 0.0  # greedy
        assert [len(group) for group in groups] == [num] * len(prompts.token_ids)
        how = {"temperature": heat, "max_new_tokens": own.max_new_gen_tokens, "rounding": 1e-4}
        assert_plain(runs[-1].policy, prompts.token_ids, prompts.seeds, groups, **how)
        calls.append(SimpleNamespace(groups=groups, prompts=prompts.token_ids, mode=config.mode))
        return groups

    patch.setattr(main, "decode_in_batches", decoded)
    assign = main.assign_advantages  # a step's seconds are then not those of its rollout
    patch.setattr(main, "assign_advantages", lambda *given: time.sleep(0.15) or assign(*given))
    return calls


@pytest.fixture
def start(rotary_model_folder, tokenizer, tmp_path, monkeypatch, data) -> Callable[..., Run]:
    """Loads a run of a case, or its evaluation, in a folder with the files of all cases."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALIKE", "")
    Path("own.py").write_text(OWN)
    Path("game.py").write_text(OWN + GAME)
    rows = [{"prompt": f"{n}{' and' * (n % 3)} =", "target": n} for n in range(40)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    follows = {"\n": ["n", "u"], "n": ["u", "<|im_end|>"], "u": ["n", "<|im_end|>"]}
    save_writer(rotary_model_folder, chatty(tokenizer), follows, Path("chat"))
    exec(OWN, own := {})
    grade_by_text(monkeypatch)
    monkeypatch.setattr(countdown, "reward_function", own["reward_function"])

    def load(case: str, *more: str) -> Run:
        settings, task, backend = CASES[case]
        sources = data if "countdown" in task else ["task.train=rows.jsonl"] * ("own" in task)
        model = Path("chat") if "game" in task else rotary_model_folder
        given = [*task.split(), f"sampling.backend={backend}", *sources, *settings.split()]
        given += SIZES.split()
        return load_run(load_config(arguments(Path(), model, *given, *more)))

    return load


@pytest.mark.parametrize("case", CASES)
def test_each_line_bar_and_score_is_derived_a_second_time(start, monkeypatch, case):
    """Of a whole run, and of mode=evaluate on its best model; clocks and the disk's size apart."""
    monkeypatch.setattr("sys.stderr", terminal := io.StringIO())
    terminal.isatty = lambda: True
    Bar.noted, runs, outputs = [], [], [io.StringIO(), io.StringIO()]
    monkeypatch.setattr(logger, "tqdm", Bar)
    calls = watch(monkeypatch, runs)
    with contextlib.redirect_stdout(outputs[0]):
        runs.append(run := start(case))
        trained = [question for _, question in run.stream.take(0, 6)[0]]
        monkeypatch.setenv("ALIKE", " ".join(f"{q['target']}" for q in trained[:2]))
        assert main.run_training(run) == 0
        run.lock.close()
    num_trained = len(calls)
    before = {file: file.read_bytes() for file in run.folder.rglob("*") if file.is_file()}
    with contextlib.redirect_stdout(outputs[1]):
        runs.append(again := start(case, "mode=evaluate", "model.name=x/best", "run.name=null"))
        assert main.run_evaluation(again) == 0
    assert all(n == total for _, n, total in Bar.noted)
    sampled = [total for what, _, total in Bar.noted if what == "sampling"]
    assert sampled == [sum(map(len, call.groups)) for call in calls]
    after = {file: file.read_bytes() for file in before}
    assert after == before  # an evaluation leaves its run alone
    assert 1 <= len(Bar.noted) - len(calls) <= 2 * 8  # an update's, of 8 micro-batches at most
    begun, *shown = re.split(r"\n(?=evaluating: )", outputs[0].getvalue())
    shown = "\n".join(shown).partition("\nthe best model: ")[0].split("\n")
    lines = {line for line in begun.split("\n") if re.search(r"\d", line)}
    settings = {line for line in lines if "(default " in line or "look at it" in line}
    assert lines - settings == first_lines(run, calls[0])
    assert numbered(shown) == transcript(run)
    assert '"partly"' not in (run.folder / "remarks.jsonl").read_text()  # all is paid 2 or 0.5
    (ask,) = re.findall(r"ask it: .* -m tools.chat (.*)", outputs[0].getvalue())
    asked = chat.chat_config(chat.read_arguments(ask.split()))
    assert (asked.task, asked.model.name) == (run.config.task, "x/best")
    shown = outputs[1].getvalue().partition("\nevaluating: ")[2].partition("\nwritten to ")[0]
    assert numbered(shown.split("\n")) == report(again, calls[num_trained:])


def numbered(lines: list[str]) -> list[str]:
    """The lines without the time left, without texts that were read, and without remarks."""
    lines = [line.partition("  left ")[0] for line in lines]
    return [line for line in lines if not re.match("    (read|gold): |warning: ", line)]


def first_lines(run: Run, call: SimpleNamespace) -> set[str]:
    """What is said before the first evaluation, by what that samples."""
    lengths, model = [*map(len, call.prompts)], run.policy.model
    mean, num = sum(lengths) / len(lengths), len(run.stream.questions)
    prompts = f"prompts of validation questions: {mean:.0f} tokens on average"
    lines = {
        f"{prompts}, {max(lengths)} the longest",
        f"{num} training questions",
        f"logits of a micro-batch: {512 * model.config.vocab_size / 1e6:.1f} MB, made at once",
        f"{sum(p.numel() for p in model.parameters()):,} weights, on 1 x cpu; results in x",
        "3 steps of 8 rows: 2 questions on each rank, 4 samples of each",
    }
    held_out = f"5 of {num + 5} questions to train on are asked in validation too: left out"
    return lines | ({held_out} if run.task.functions else set())


def completions(samples: list[dict], start: Sequence[dict] = (), *, is_first: bool) -> list[str]:
    """The lines of three: of those whose verdict is another than at the start, or the first."""
    numbered = [*enumerate(samples, start=1)]
    pairs = zip(numbered, start, strict=False)
    changed = [one for one, before in pairs if one[1]["solved"] != before["solved"]]
    lines = []
    for number, row in (changed or numbered)[:3]:
        parts = row["reward_parts"]
        assert row["reward"] == 0.25 * parts["format"] + parts["answer"]
        assert row["solved"] == (parts["answer"] >= 1)
        said = f"(format {parts['format']:.2f}  answer {parts['answer']:.2f})"
        said = f"reward {row['reward']:.2f}  {said}  {row['tokens']} tokens"
        lines += [f"  completion {number}  {said}"]
        asked = row["prompt"].strip() if is_first else row["question"]
        is_first = False
        lines += [f"    > {line}" for line in asked.split("\n")]
        text = printable(row["completion"].strip("\n"))
        lines += [f"    {line}" for line in text.split("\n")]
    return lines


def scores_of(title: str, row: dict, **totals: int) -> list[str]:
    """An evaluation's lines, by what was logged of it."""
    names = [n[5:] for n in row if n.startswith("eval/") and not n.endswith(ENDS[1:])]
    width, lines = max(map(len, names)), [title]
    for name in names:
        value, digits = row[f"eval/{name}"], 1 if name.endswith("tokens") else 3
        line = f"  {name:<{width}} {value:7.{digits}f}"
        if total := totals.get(name.replace("@", "_at_")):
            line += f"  ({value * total:.0f} of {total})"
        if f"eval/{name}_low" in row:
            low, high = (row[f"eval/{name}{end}"] for end in ENDS[1:])
            line += f"  (95% interval {low:.3f} to {high:.3f})"
        lines.append(line)
    return lines


def transcript(run: Run) -> list[str]:
    """All lines from the first evaluation to the summary's first; the card has its scores too."""
    config, lines, scores = run.config, [], {}
    num, best_of = len(run.validation_questions), config.validation.best_of_n
    logged, kept = (read_jsonl(run.folder / f"{name}.jsonl") for name in ("metrics", "samples"))
    starts = [row for row in kept if row["step"] == 0]
    for row, after in zip(logged, [*logged[1:], {"step": 4}], strict=True):
        step, is_step = row["step"], "train/lr" in row
        rows = [r for r in kept if (r["step"], r["split"] == "train") == (step, is_step)]
        right, before = (sum(sample["solved"] for sample in some) for some in (rows, starts))
        if is_step:
            rewards = [{r["reward"] for r in rows[i::2]} for i in range(2)]
            teaches = max(map(len, rewards)) > 1
            assert ("train/grad_norm" in row) == teaches and teaches <= (step > 1)
            assert row["train/solved"] == right / 8 == sum(r["solved"] for r in rows) / len(rows)
            norm = f"{row['train/grad_norm']:6.3f}" if teaches else "     -"
            line = f"step {step}/3  reward {row['train/reward']:6.3f}  solved {right / 8:5.3f}  "
            line += f"length {row['train/completion_tokens']:5.0f}  entropy "
            line += f"{row['train/entropy']:5.3f}  grad norm {norm}  lr {1e-3 * step / 5:7.1e}  "
            lines += [f"{line}seconds {row['time/step_s']:6.1f}"]
            lines += [f"training completions of step {step}", *completions(rows, is_first=False)]
            nothing = "grad norm -: nothing to train on (a group teaches if its rewards differ)"
            lines += [nothing] * (step == 1)
            check_rollouts(run, step)
        else:
            scores[step] = row
            lines += [f"evaluating: {num} questions x {best_of} samples"]
            lines += scores_of(f"evaluation at step {step}", row, pass_at_1=num * best_of)
            told = f"  {right} of {min(8, num * best_of)} are right"
            lines += [told + f", {before} at the start" * (step > 0)]
            lines += completions(rows, starts if step > 0 else (), is_first=step == 0)
        is_due = step == 3 or (step > 0 and step % config.checkpoint.every == 0)
        saved = f"saved checkpoint x/checkpoints/step-00000{step}"
        lines += [saved] * (is_due and after["step"] > step)
    metric = "best_of_6" if config.validation.best_by else "pass@1"
    best = max(scores, key=lambda step: scores[step][f"eval/{metric}"])  # the first of equals
    check_card(run, scores, best, metric)
    first, last, highest = (scores[step][f"eval/{metric}"] for step in (0, 3, best))
    said = f"{metric} {first:.3f} at the start, {last:.3f} after step 3; best {highest:.3f} at"
    return [*lines, f"{said} step {best}, chosen on these same validation questions"]


def check_rollouts(run: Run, step: int) -> None:
    """A token weighs 1 / (2 x 4 rows x training.max_new_gen_tokens)."""
    for group in read_jsonl(run.folder / "rollouts.jsonl")[2 * step - 2 : 2 * step]:
        mean = sum(row["reward"] for row in group["completions"]) / 4
        for row in group["completions"]:
            assert row["advantage"] == pytest.approx(row["reward"] - mean, abs=1e-3)
            weight = 1 / (8 * run.config.training.max_new_gen_tokens) if row["advantage"] else 0.0
            assert row["weight"] == pytest.approx(weight, rel=1e-3) and group["step"] == step


def check_card(run: Run, scores: dict[int, dict], best: int, metric: str) -> None:
    """best/, its README, and the card of tools.export are of that step."""
    row, validation, score = scores[best], run.config.validation, scores[best][f"eval/{metric}"]
    kept = json.loads((run.folder / "best/best.json").read_text())
    by = validation.best_by or "pass@1"
    assert kept == {"best": score, "best_step": best, "best_by": by}
    readme = (run.folder / "best/README.md").read_text().splitlines()
    assert f"{metric} {score:.3f} after step {best}." in readme and len(readme) <= 4
    rates_of = lambda n: [scores[n][f"eval/pass@1{end}"] for end in ENDS]  # noqa: E731
    untrained, rates = ("{:.3f} | {:.3f} to {:.3f} |".format(*rates_of(n)) for n in (0, best))
    lines = [f"| before training | {untrained}", f"| this model, after step {best} | {rates}"]
    lines = lines if best > 0 else [f"| this model, before training | {rates}"]
    lines += [f"5 validation questions, {validation.best_of_n} samples each,"]
    lines += [f"temperature {validation.temperature}. This model is the best of its run so far, by"]
    lines += [f"{metric} on these same questions, so its score is a little too good."]
    names = [n for n in row if n.startswith("eval/") and n[5:].rpartition("_")[0] != "pass@1"]
    shown = ", ".join(f"{n[5:]} {row[n]:.3f}" for n in names if n != "eval/pass@1")
    lines += [f"Also measured of it: {shown}.", f"Steps taken: {best}. The settings:"]
    lines += [f"    max_new_tokens={validation.max_new_gen_tokens},"]
    is_greedy = validation.temperature == 0
    lines += ["    do_sample=False," if is_greedy else f"    temperature={validation.temperature},"]
    model = ModelSettings(name=str(run.folder / "best"), trust_remote_code=True)
    card = card_of(run.folder, model, is_adapter=False).split("\n")
    assert [line for line in lines if line not in card] == []


def report(run: Run, calls: list) -> list[str]:
    """The lines of mode=evaluate, which measures as the run did; greedy ones are sampled once."""
    num, best_of = len(run.validation_questions), run.config.validation.best_of_n
    assert len(calls) == 1 + (run.config.validation.temperature > 0)
    (folder,) = run.folder.glob("eval-*")
    row = json.loads((folder / "metrics.json").read_text())
    rows = read_jsonl(folder / "samples.jsonl")
    best = json.loads((run.folder / "best/best.json").read_text())
    logged = read_jsonl(run.folder / "metrics.jsonl")
    (before,) = (r for r in logged if (r["step"], "eval/reward" in r) == (best["best_step"], True))
    names = [name for name in before if name.startswith("eval/")]
    assert [row[name] for name in names] == [before[name] for name in names]
    lengths = [len(completion.token_ids) for (completion, *_) in calls[-1].groups]
    assert row["eval/greedy_tokens"] == sum(lengths) / num
    totals = {"pass_at_1": num * best_of, "greedy": num, "majority": num}
    lines = [f"{num} questions x {best_of} samples"]
    lines += scores_of(f"evaluation of x/best on {run.config.task.name}", row, **totals)
    right, num_kept = sum(sample["solved"] for sample in rows), min(8, num * best_of)
    return [*lines, f"  {right} of {num_kept} are right", *completions(rows, is_first=True)]
