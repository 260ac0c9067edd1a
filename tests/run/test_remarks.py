"""What a run says of itself: that it cannot learn, or that a node has newer checkpoints."""

from types import SimpleNamespace

import pytest
from harness import load_run, make_config, read_jsonl, read_rows

import main
from engine.core.user_file import RewardError
from engine.run.resume import check_newest

REWARDS = """
import asyncio
async def later(completions, **kwargs): return [None for _ in completions]
async def late(completions, **kwargs): await asyncio.sleep(9)
def logs(completions, log_metric, **kwargs):
    CALLS.append(1)
    if len(CALLS) > 20:  # in a later step
        log_metric("reward", 1e9)
    return [0.5 for _ in completions]
CALLS = []
def taken(completions, log_metric, **kwargs):
    log_metric("collapsed", 1.0)  # bug: the run's was written over it without a word
    return [0.5 for _ in completions]
def answer(completions, **kwargs): return [0.5 * (len(text) % 2) for text in completions]
"""
NEVER = """
def answer(completions, **kwargs): return [0.0 for _ in completions]
def brevity(completions, **kwargs): return [-len(text) for text in completions]
"""
OWN = "task.train=rows.jsonl validation.num_examples=2 validation.every=2 training.num_steps=4"
ONE, BF16 = "training.num_steps=1", "model.compute_dtype=bfloat16"
WORDS = "task.name=gsm8k task.train=rows.jsonl task.eval=rows.jsonl validation.num_examples=2"
# The settings; what the run remarks on, whatever it samples; and its exit status
CASES = {
    "none applies": (f"{OWN} task.reward=mine:later", {"alike", "unpaid", "untrained"}, 1),
    "async, late": (f"{OWN} task.reward=mine:late task.reward_timeout=0.01", {"timeouts"}, 1),
    "a name that is taken": (f"{OWN} task.reward=mine:logs", {"log_metric"}, 1),
    "a name that is taken at once": (f"{OWN} task.reward=mine:taken", set(), None),
    "never whole": (f"{OWN} task.reward=mine:answer", {"partly", "evaluations"}, 0),
    # Bug: a run that learned to be brief ended with 0, and no line said what it had learned.
    "never earned": (f"{OWN} task.reward=never:[answer,brevity]", {"zero answer", "unsolved"}, 0),
    # Bug: every run of GSM8K warned of three parts that only style tags pays.
    "nothing unpaid": (f"{ONE} {WORDS}", {"unsolved"}, None),
    "a part unweighed": (f"{ONE} {WORDS} task.prompt_style=tags", {"weight of integer"}, None),
    "a rate too low": (f"{ONE} training.learning_rate=1e-12", {"rate", "unsolved"}, None),
    "another sampler": (f"{OWN} task.reward=mine:answer", {"mismatch"}, 0),
    "a tenth of a rounding": (f"{ONE} {BF16} training.learning_rate=1e-4", {"unsolved"}, None),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_says_once_what_keeps_it_from_learning(
    name, rotary_model_folder, tmp_path, monkeypatch, capsys
):
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "never.py").write_text(NEVER)
    row = '{"prompt": "N + N?", "question": "N + N?", "answer": "N"}\n'
    rows = [row.replace("N", str(n)) for n in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    monkeypatch.chdir(tmp_path)
    settings, kinds, status = CASES[name]
    sizes = ["training.num_samples_per_step=8", "training.k_best_of_n=[4,4]"]
    sizes += ["training.max_new_gen_tokens=4", "validation.num_examples=4"]
    sizes += ["task.max_train_examples=99", f"model.name={rotary_model_folder}"]
    run = load_run(make_config(*sizes, *settings.split()))
    if name == "a name that is taken at once":
        with pytest.raises(RewardError, match="log_metric: collapsed is the run's own: rename"):
            main.run_training(run)
        return
    if name == "another sampler":
        score = main.CompletionScorer.forward
        monkeypatch.setattr(main.CompletionScorer, "forward", lambda *a, **b: score(*a, **b) + 0.02)
    given = main.run_training(run)
    assert status is None or given == status
    remarks = read_jsonl(run.folder / "remarks.jsonl")
    found = [row["kind"] for row in remarks]
    assert kinds <= {*found} and len(found) == len({*found})
    assert any("weight of" in kind for kind in found) == (name == "a part unweighed")
    assert ("zero answer" in found) == (name == "never earned")
    assert ("mismatch" in found) == (name == "another sampler")
    assert ("rate" in found) == (name == "a rate too low")
    rows = read_rows(run.folder)
    assert all(row.get("train/reward", 0) <= 1 and row.get("eval/reward", 0) <= 1 for row in rows)
    if "late" in name:
        assert rows[0]["eval/reward_timeouts"] == rows[1]["train/reward_timeouts"] == 1
        assert "100% of the rewards took too long" in remarks[0]["line"] and remarks[0]["step"] == 0
    output = capsys.readouterr().out
    assert status != 1 or output.count("grad norm -:") == 1
    assert all(output.count(f"warning: {row['line']}") == 1 for row in remarks)


def test_a_node_with_a_newer_checkpoint_than_rank_0s_ends_the_start(tmp_path):
    steps = [(2, "first"), (0, "node0"), (2, "node1")]  # of each node's newest
    world = SimpleNamespace(gather=lambda mine: steps, size=3)
    check_newest(tmp_path, world)
    steps[1:] = [(3, "node0"), (-1, "node1")]
    with pytest.raises(ValueError, match="node0 has a checkpoint of step 3, and first"):
        check_newest(tmp_path, world)
