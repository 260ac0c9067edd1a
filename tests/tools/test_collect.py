"""What a run has learned becomes a file that another model can begin with."""

import json

import harness
import pytest
from harness import ROOT, load_rows, make_config, make_policy, make_run, read_jsonl, seed

import countdown
import main
from engine.questions.tasks import load_task
from tools import collect, imitate

SETTINGS = ["training.max_new_gen_tokens=200", f"training.seed={seed()}"]


def test_each_row_solves_a_training_question_and_tools_imitate_takes_it(run, call):
    """The embedded model solves a third of the questions: some of 64 samples in any case."""
    _, output, _ = call(collect, run, "--questions", 16, "--samples", 4, *SETTINGS)
    rows, config = read_jsonl(run / "answers.jsonl"), make_config(*SETTINGS)
    assert f"written: {run / 'answers.jsonl'}, {len(rows)} different ans" in output
    (counts,) = (line for line in output.splitlines() if "of 64 samples solve" in line)
    assert len(rows) <= int(counts.split()[0]) <= 64
    texts = [(countdown.question_key(some), some["completion"]) for some in rows]
    assert 0 < len(set(texts)) == len(texts)
    held_out = load_rows(countdown, "generated", "validation", 512)
    assert all(some.keys() == {"nums", "target", "completion"} for some in rows)
    other, file = make_policy(ROOT / "tiny", *SETTINGS), str(run / "answers.jsonl")
    other = make_run(other, config, questions=held_out)
    read = imitate.read_answers(load_task(config.task), config, file)
    chosen = imitate.choose_answers(other, read, file, only_solved=True)
    assert [answer.text for answer in chosen] == [text for _, text in texts]


@pytest.mark.parametrize("num", [1, 31, 32, 33])
def test_what_is_said_to_be_sampled_was(num, run, call, capsys, monkeypatch, tmp_path):
    """Questions times samples, where batches are of 32: in each way to sample but training."""
    sampled, decode = [], main.decode_in_batches

    def decoded(*given, **settings):
        groups = decode(*given, **settings)
        sampled.append(sum(map(len, groups)))
        return groups

    monkeypatch.setattr(main, "decode_in_batches", decoded)
    sizes = ["training.max_new_gen_tokens=8", "task.max_train_examples=99"]
    sizes += [f"validation.num_examples={num}", "validation.best_of_n=2"]
    _, output, _ = call(collect, run, "--questions", num, "--samples", 2, *sizes)
    assert sum(sampled) == 2 * num and f"of {2 * num} samples solve" in output
    if num in (1, 33):  # their batches have no limit of their own
        sampled.clear()
        assert harness.run_main("mode=evaluate", f"run.dir={tmp_path}/runs", *sizes) == 0
        output, said = capsys.readouterr().out, f"evaluating: {num} questions x 2 samples\n"
        assert said in output and f" of {2 * num})  (95%" in output and sampled == [2 * num, num]
        row = {"nums": [1, 2, 3], "target": 6, "completion": "1 + 2"}
        (tmp_path / "answers.jsonl").write_text(json.dumps(row))
        given = [tmp_path / "answers.jsonl", "--steps=1", f"--out={tmp_path}/o", *sizes]
        sampled.clear()
        status, output, _ = call(imitate, ROOT / "tiny", *given, "training.num_samples_per_step=1")
        assert status == 0 and output.count(said) == 2 and sampled == [2 * num] * 2


def test_an_answer_that_was_cut_off_is_not_collected(run, call, monkeypatch):
    """Who imitates it learns to stop in mid-sentence. Here every text is paid, and none ends."""
    paid = {"format": 1, "answer": 1}
    monkeypatch.setattr(countdown, "reward_function", lambda *_, **__: paid)
    short = ["--questions", 2, "--samples", 2, "training.max_new_gen_tokens=2"]
    assert "0 of 4 samples solve their question and end" in call(collect, run, *short)[1]
    assert read_jsonl(run / "answers.jsonl") == []


def test_what_cannot_be_collected_is_one_line(run, call):
    status, _, errors = call(collect, run, "--samples", "0")
    assert (status, errors.count("\n")) == (2, 1) and "each must be at least 1" in errors
