"""How things are measured: intervals by hand, each number of a run a second time."""

import contextlib
import io
import itertools
import pkgutil
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace

import harness
import numpy as np
import pytest
import torch
from harness import ROOT, alone, arguments, make_row, read_jsonl, run_main, save_writer, seed
from transformers import PreTrainedTokenizerFast

from engine.core.measures import reduce_means
from engine.core.types import Groups, Trajectory
from engine.report.boards import BOARDS, Board
from engine.report.metrics import mean_rewards, rollout_metrics
from engine.report.pass_at_k import solve_rates
from logger import Logger


def test_the_interval_is_wilsons_or_where_rates_are_shares_the_bootstraps():
    for solved, interval, slack in (
        (8 * [[1.0]] + 2 * [[0.0]], (0.4902, 0.9433), 1e-4),  # Wilson's tables
        (10 * [[0.0]], (0.0, 0.2775), 1e-4),
        ([[0.0] * 2, [1.0] * 2] * 50, (0.402, 0.598), 0.011),  # 0.5 +- 1.96 * 0.5 / sqrt(100)
    ):
        rates = solve_rates(np.array(solved), [1])
        found = [rates[f"eval/pass@1_{end}"] for end in ("low", "high")]
        assert found == pytest.approx(interval, abs=slack)


def test_a_parts_mean_is_over_what_it_applies_to():
    """In training over completions, in an evaluation over the means of its questions."""
    random, names = Random(seed()), ("often", "seldom", "never")
    groups = [[make_row() for _ in range(3)] for _ in range(9)]
    for t in itertools.chain(*groups):
        often, seldom = random.random() < 0.7, random.random() < 0.3
        t.reward_parts = {"often": random.random() if often else None, "never": None}
        t.reward_parts["seldom"] = random.random() if seldom else None
    trained = reduce_means(rollout_metrics(groups, names), alone())
    measured = mean_rewards(groups, names, len(groups), alone())
    for name in names:
        of_groups = [[t.reward_parts[name] for t in group] for group in groups]
        applying = [[x for x in values if x is not None] for values in of_groups]
        applying = [values for values in applying if values]
        flat, means = [*itertools.chain(*applying)], [*map(statistics.fmean, applying)]
        assert trained.get(f"train/part_{name}") == (pytest.approx(np.mean(flat)) if flat else None)
        found = measured.get(f"eval/part_{name}")
        assert found == (pytest.approx(np.mean(means)) if means else None)


# A run, each number of which is derived a second time: from ids, from what was paid, from one plain
# forward pass, from the system's accounting, and from clocks inside and around what is timed

END, BEGIN = "<|im_end|>", "<|im_start|>assistant\n"
GAME = """
import time
REWARD_PARTS = ("answer", "said", "timeout")

def load_examples(source, split, **how):
    return [{"n": n} for n in (range(50, 58) if split == "train" else range(12))]

def generate_prompt(example, *, options):
    return [{"role": "user", "content": f"Go {'on and ' * (example['n'] % 5)}on. "}]

class Environment:
    def reset(self, n):
        self.n, self.said, self.is_over = n, [], False

    def respond(self, message):
        time.sleep(0.002)
        self.said.append(message)
        self.is_over = len(self.said) == 3 or message.endswith("n")
        return None if self.is_over else "Go on."

    def get_reward(self):
        answer = self.n % 2 * 0.875 + "".join(self.said).count("u") / 8
        return {"answer": answer, "said": self.said[:1] > ["u"], "timeout": len(self.said) == 2}
"""
WEIGHTS, RATE, HEAT = {"answer": 1.0, "said": 0.25, "timeout": 0.0}, 2e-3, 0.8
SETTINGS = "logging.mlflow=true task.name=game task.reward_weights.said=0.25 training.num_steps=2 "
SETTINGS += f"training.max_new_gen_tokens=30 training.learning_rate={RATE} "
SETTINGS += "training.warmup_steps=3 training.max_grad_norm=0.001 validation.num_examples=12 "
SETTINGS += "validation.best_of_n=3 validation.pass_k=[1,2] logging.samples=5 "
SETTINGS += "training.loss_normalization=token logging.experiment=shown "
SETTINGS += f"sampling.temperature={HEAT} validation.temperature=1.25 "
SETTINGS += "validation.max_new_gen_tokens=40 logging.completions_every=1"
WATCHED = ["engine.questions.data.QuestionStream.take", "main.make_prompts"]
WATCHED += ["engine.run.log.describe_step", "engine.questions.environment.Conversation.ask"]
WATCHED += ["logger.Logger.print_step"]
WATCHED += [f"main.{name}" for name in ("decode_in_batches", "compute_rewards", "update_policy")]
WATCHED += [f"main.{name}" for name in ("assign_advantages", "step_metrics", "sample_validation")]
WATCHED += [f"main.{name}" for name in ("evaluation_metrics", "log_evaluation")]
# From the beginning of one to the end of another, at least; at most from there to there
TIMES = {
    "time/rollout_s": "decode_in_batches decode_in_batches make_prompts compute_rewards",
    "time/reward_s": "compute_rewards compute_rewards decode_in_batches assign_advantages",
    "time/update_s": "update_policy update_policy assign_advantages step_metrics",
    "time/step_s": "take update_policy before step_metrics",
    "time/rollouts_log_s": "describe_step describe_step step_metrics print_step",
    "time/eval_s": "sample_validation evaluation_metrics before log_evaluation",
}
# The tests that derive the numbers which this run does not have
ELSEWHERE = {"train/kl": "update/test_update.py", "train/clip_frac": "update/test_trl_numbers.py"}
ELSEWHERE |= {"train/loss_scale": "update/test_loss_scale.py"}
ELSEWHERE |= {"eval/greedy_tokens": "report/test_evaluate.py"}
Moment = dict[str, list[SimpleNamespace]]  # the calls of a step or of an evaluation, by their names


def watch(patch: pytest.MonkeyPatch) -> list[Moment]:
    """What is called from here on: what it returns, when, and the most memory until then."""
    started = SimpleNamespace(end_s=time.perf_counter())
    moments: list[Moment] = [defaultdict(list, before=[started])]

    def watched(place: str, name: str) -> Callable:
        function = pkgutil.resolve_name(place)

        def replacement(*given, **named):
            if name == "update_policy":
                moments[-1]["plain"] = by_plain_pass(given[0].policy.model, given[1])
            call = SimpleNamespace(begin_s=time.perf_counter())
            call.result = function(*given, **named)
            call.end_s = time.perf_counter()
            status = Path("/proc/self/status").read_text()
            call.peak_gb = int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) * 1.024e-6
            if name == "decode_in_batches":  # let them differ from the scorer's
                for completion in itertools.chain(*call.result):
                    shift = np.linspace(0, 1, len(completion.token_ids), dtype=np.float32)
                    completion.log_probs[:] += shift * ~completion.is_inserted
            moments[-1][name].append(call)
            if name in ("print_step", "log_evaluation"):
                moments.append(defaultdict(list, before=[call]))
            return call.result

        return replacement

    for place in WATCHED:
        patch.setattr(place, watched(place, place.rpartition(".")[2]))
    return moments


def by_plain_pass(model: torch.nn.Module, groups: Groups) -> dict[str, float]:
    """What an update finds of these rows, each of which goes through the model alone."""
    loss, gaps, entropies = 0.0, [], []
    for group in groups:
        mean = np.mean([t.reward for t in group])
        for t in group:
            ids, start = torch.tensor(t.prompt_ids + t.completion.token_ids), len(t.prompt_ids)
            logits = model(input_ids=ids[None]).logits[0, start - 1 : -1] / HEAT
            log_probs = logits.log_softmax(dim=-1)
            drawn = ~torch.from_numpy(t.completion.is_inserted)
            entropies.append(-(log_probs.exp() * log_probs).sum(dim=-1)[drawn].detach())
            chosen = log_probs.gather(1, ids[start:, None])[drawn, 0]
            loss = loss - (t.reward - mean) * chosen.sum()
            gap = (chosen.detach() - torch.tensor(t.completion.log_probs)[drawn]).abs()
            gaps += [gap] * bool(t.reward != mean)
    loss = loss / len(torch.cat(entropies))  # all tokens that were drawn
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    return {
        "train/loss": loss.item(),
        "train/grad_norm": torch.cat([g.flatten() for g in gradients]).norm().item(),
        "train/sampler_mismatch": torch.cat(gaps).mean().item(),
        "train/entropy": torch.cat(entropies).mean().item(),
    }


def of_completion(t: Trajectory, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Its numbers, by its ids and by what its environment knows."""
    ids, environment = t.completion.token_ids, t.completion.conversation.environment
    parts, is_over = environment.get_reward(), environment.is_over
    _, *turns = tokenizer.decode(ids).split(BEGIN)
    return {
        "reward": sum(WEIGHTS[name] * parts[name] for name in parts),
        "part_answer": parts["answer"],
        "part_said": parts["said"],
        "reward_timeouts": parts["timeout"],
        "solved": parts["answer"] >= 1,
        "solved_and_ended": parts["answer"] >= 1 and is_over,
        "completion_tokens": len(ids),
        "truncated_frac": not is_over,
        "turns": 1 + sum(map(bool, turns)),
    }


def derive(moment: Moment, step: int, tokenizer: PreTrainedTokenizerFast) -> dict:
    """All numbers of a step or an evaluation; of some the least and the most that they can be."""
    (call,), is_step, found = moment["compute_rewards"], "plain" in moment, {}
    rows = [[of_completion(t, tokenizer) for t in group] for group in call.result]
    tables = {n: np.array([[row[n] for row in group] for group in rows], float) for n in rows[0][0]}
    for name, places in TIMES.items():
        if is_step == (name != "time/eval_s"):
            first, last, before, after = (moment[place] for place in places.split())
            found[name] = last[-1].end_s - first[0].begin_s, after[0].begin_s - before[-1].end_s
    if not is_step:
        solved = tables.pop("solved")
        for k, name in ((1, "pass@1"), (2, "pass@2"), (3, "best_of_3")):
            subsets = [[*itertools.combinations(row, k)] for row in solved]
            found[f"eval/{name}"] = np.mean([[any(some) for some in of] for of in subsets])
        for name in ("pass@1", "reward", "part_answer", "part_said"):
            means = tables.get(name, solved).mean(axis=1)
            half = 1.96 * means.std() / len(means) ** 0.5  # of a bootstrap of many questions
            for end, far, near in (("low", -1.3, -0.7), ("high", 0.7, 1.3)):
                found[f"eval/{name}_{end}"] = tuple(means.mean() + half * np.array([far, near]))
        return found | {f"eval/{name}": table.mean() for name, table in tables.items()}
    rewards, num_tokens = tables["reward"], tables["completion_tokens"].sum()
    said = [t.completion.conversation.environment.said for t in itertools.chain(*call.result)]
    found |= {f"train/{name}": table.mean() for name, table in tables.items()} | moment["plain"]
    before_gb, after_gb = (moment[n][0].peak_gb for n in ("update_policy", "step_metrics"))
    return found | {
        "train/reward_std": rewards.std(axis=1, ddof=1).mean(),
        "train/advantage_abs": abs(rewards - rewards.mean(axis=1, keepdims=True)).mean(),
        "train/zero_advantage_frac": np.mean([len({*row}) == 1 for row in rewards]),
        "train/lr": RATE * step / 3,
        "train/skipped_steps": 0,
        "train/collapsed": 0,
        "time/environment_s": (
            0.002 * sum(map(len, said)),
            sum(call.end_s - call.begin_s for call in moment["ask"]),
        ),
        "perf/tokens_per_s": tuple(num_tokens / s for s in reversed(found["time/step_s"])),
        "perf/peak_memory_gb": (0.99 * before_gb, 1.01 * after_gb),
    }


def test_the_time_left_is_that_of_the_last_steps_with_what_came_between_them(monkeypatch, capsys):
    """Of the last 19, as clocks say; the first step has its own time alone."""
    random, log, num_steps = Random(seed()), Logger(rank=0), 1000
    printed_s = [*itertools.accumulate(random.uniform(1, 60) for _ in range(60))]
    for step, now_s in enumerate(printed_s, start=1):
        monkeypatch.setattr(time, "monotonic", lambda now_s=now_s: now_s)
        log.print_step(step, num_steps, {"time/step_s": 7.25})
    shown = re.findall(r"left (?:(\d+) days?, )?(\d+):(\d+):(\d+)$", capsys.readouterr().out, re.M)
    for i, (days, hours, minutes, seconds) in enumerate(shown):
        past = [b - a for a, b in itertools.pairwise(printed_s[: i + 1])][-19:] or [7.25]
        left_s = statistics.fmean(past) * (num_steps - 1 - i)
        found_s = 60 * (60 * (24 * int(days or 0) + int(hours)) + int(minutes)) + int(seconds)
        assert abs(found_s - left_s) <= 0.501
    assert len(shown) == 60


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's accounting of memory")
def test_each_number_that_a_run_shows_is_derived_a_second_time(
    rotary_model_folder, tokenizer, tmp_path, monkeypatch
):
    """In metrics.jsonl, on boards, of samples; a new one needs one too. Lines: test_shown.py."""
    monkeypatch.chdir(tmp_path)
    Path("game.py").write_text(GAME)
    follows = {"\n": ["n", "u"], "n": ["u", END], "u": ["n", END]}
    save_writer(rotary_model_folder, tokenizer := harness.chatty(tokenizer), follows, Path("model"))
    board, about, sent, tables = Board.__new__(Board), {}, [], []
    vars(board).update(title="Shown", server="", finish=print, send_samples=tables.append)
    board.start = lambda *given: about.update(given[-1]) or ("1", "here")
    board.send_metrics = lambda step, is_evaluation, found: sent.append({"step": step} | found)
    monkeypatch.setitem(BOARDS, "mlflow", lambda: board)
    # Only our own tasks may count time-outs; the game's are here to be derived too.
    monkeypatch.setattr("engine.questions.tasks.problems_of_task", lambda task: [])
    moments = watch(monkeypatch)
    with contextlib.redirect_stdout(io.StringIO()):
        assert run_main(*arguments(Path(), Path("model"), *SETTINGS.split())) == 0
    named = (about["experiment"], about["run_name"], about["params"]["training.learning_rate"])
    assert named == ("shown", "x", RATE) and about["description"].startswith("- run.name: x")
    names = ("metrics", "samples", "completions")
    rows, samples, completions = (read_jsonl(Path(f"x/{name}.jsonl")) for name in names)
    steps = [0, 1, 2, 2]  # the first and the last are evaluations
    seconds = [derive(*of, tokenizer) for of in zip(moments[:4], steps, strict=True)]
    assert [row["step"] for row in rows] == steps and sent == rows
    for row, second in zip(rows, seconds, strict=True):
        assert row.keys() == second.keys() | {"step"}
        for name, found in second.items():
            low, high = found if isinstance(found, tuple) else (found, found)
            slack = 1e-5 * abs(high) + 1e-7
            assert low - slack <= row[name] <= high + slack, (name, row[name], found)
    first, *steps, last = (moment["compute_rewards"][0].result for moment in moments[:4])
    kept = [group[0] for groups in (first, last) for group in groups[:5]]
    trained = [t for groups in steps for t in itertools.chain(*groups)]
    shown = {"tokens": "completion_tokens", "reward": "reward", "truncated": "truncated_frac"}
    for name, own in shown.items():
        for found, of in ((samples, kept), (completions, trained)):
            second = [of_completion(t, tokenizer)[own] for t in of]
            assert [row[name] for row in found] == pytest.approx(second)
        assert [value for table in tables for value in table[name]] == [s[name] for s in samples]
    sources = [ROOT / "main.py", ROOT / "logger.py", *ROOT.glob("engine/**/*.py")]
    code, derived = "".join(path.read_text() for path in sources), {*seconds[0], *seconds[1]}
    named = {*re.findall(r'"((?:train|eval|perf)/[\w@]+)"', code)}
    named |= {f"time/{phase}_s" for phase in re.findall(r'clock\("(\w+)"\)', code)}
    assert named - derived == {*ELSEWHERE}
    for name, file in ELSEWHERE.items():
        assert f'"{name}"' in (ROOT / "tests" / file).read_text()
