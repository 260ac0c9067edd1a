"""Odd models and odd outputs: whatever is loaded or sampled, a run neither hangs nor crashes."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import harness
import pytest
import torch
from harness import NUMBERS, grade_by_text, make_policy, make_row, sample, seed
from transformers import AutoModelForCausalLM

from engine.questions.prompts import completion_text

MAX_NEW_TOKENS = 12
LENGTH = f"training.max_new_gen_tokens={MAX_NEW_TOKENS}"
SIZES = ["training.num_steps=2", "training.k_best_of_n=[4,4]", "training.num_samples_per_step=4"]
SIZES += ["training.learning_rate=0.003", "training.warmup_steps=0", "model.compute_dtype=float32"]
ALWAYS, NEVER = 5.0, -5.0  # biases; they make logits of about 28 and -28


@pytest.fixture
def make_model(rotary_model_folder, tmp_path) -> Callable[..., Path]:
    """`make_model(biases)` is the folder of a Qwen2 that prefers some tokens."""

    def make(biases: dict[int, float], num_embeddings: int | None = None) -> Path:
        folder = shutil.copytree(rotary_model_folder, tmp_path / "model")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        rows = num_embeddings or len(model.get_input_embeddings().weight)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed())
            model.resize_token_embeddings(rows, mean_resizing=False)
            model.get_input_embeddings().weight[:, 0] = 100.0  # output weights become a bias
            model.get_output_embeddings().weight[:, 0] = torch.zeros(rows)
            for token, bias in biases.items():
                model.get_output_embeddings().weight[token, 0] = bias
        model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def answers(tokenizer) -> dict[int, float]:
    """Biases towards answers and the end of thinking."""
    texts = [f"<answer>{n}</answer>" for n in NUMBERS]
    biases = dict.fromkeys(tokenizer.convert_tokens_to_ids(texts), 0.4)
    return biases | {tokenizer.convert_tokens_to_ids("</think>\n"): 0.7}


@pytest.fixture
def train(monkeypatch, capsys, tmp_path) -> Callable[..., tuple[Path, str]]:
    """Whole runs in this process: `train(model, *overrides)` is a run's folder and its output."""
    rows = [{"nums": [n] + [1] * (20 * (n % 4)), "target": n if n % 4 == 0 else 1} for n in NUMBERS]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(model: Path, *overrides: str, status: int = 0):
        grade_by_text(monkeypatch)
        given = [*SIZES, LENGTH, f"task.train={file}", f"task.eval={file}", *overrides]
        ended = harness.run_main(*harness.arguments(tmp_path / "runs", model, *given))
        output, errors = capsys.readouterr()
        untrained = "no step has trained the model" in output
        assert ended == (status or int(untrained)), errors
        return tmp_path / "runs/x", output + errors

    return run


def rows_of(run: Path) -> list[dict]:
    """The rows of a run's metrics, all of which must be finite."""
    rows = harness.read_rows(run)
    assert all(value is not None for row in rows for value in row.values())
    return rows


def weights_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gives_finite_logits(folder: Path) -> bool:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return bool(model(torch.arange(2, 40)[None]).logits.isfinite().all())


@pytest.mark.parametrize(("end", "num_tokens"), [(ALWAYS, 1), (NEVER, MAX_NEW_TOKENS)])
def test_a_run_that_has_nothing_to_learn_goes_on(make_model, answers, train, end, num_tokens):
    """All completions are empty and equal, or all are cut off and skipped: no step is taken."""
    model = make_model({0: end} if end == ALWAYS else answers | {0: end})
    run, _ = train(model, "training.skip_truncated=true")
    first, *rows = rows_of(run)
    is_cut = end == NEVER
    assert first["eval/completion_tokens"] == num_tokens
    assert first["eval/truncated_frac"] == is_cut
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["train/completion_tokens"] == num_tokens
        assert row["train/truncated_frac"] == is_cut
        assert (row["train/advantage_abs"] > 0) == is_cut
        assert row["train/skipped_steps"] == 0 and "train/grad_norm" not in row
    samples = harness.read_jsonl(run / "samples.jsonl")
    assert {sample["truncated"] for sample in samples} == {is_cut}
    assert torch.equal(weights_of(run / "checkpoints/last"), weights_of(model))


def test_a_model_may_have_more_embeddings_than_tokens(make_model, answers, tokenizer, train):
    """Qwen2.5 has 151,936 for 151,665 tokens. An id without a token has no text, but is trained."""
    known, rows = len(tokenizer), len(tokenizer) + 27
    biases = answers | dict.fromkeys(range(known, rows), 0.4) | {0: NEVER}
    run, _ = train(make_model(biases, num_embeddings=rows), "training.num_steps=1")
    assert rows_of(run)[1]["train/grad_norm"] > 0
    assert len(AutoModelForCausalLM.from_pretrained(run / "best").lm_head.weight) == rows
    policy = make_policy(run / "best", LENGTH)
    groups = sample(policy, [[5, 9], [40, 41, 42, 43]], num_samples=4)
    completions = [completion for group in groups for completion in group]
    assert any(token >= known for c in completions for token in c.token_ids)
    for completion in completions:
        with_text = [token for token in completion.token_ids if 0 < token < known]
        expected = policy.tokenizer.decode(with_text)
        assert completion_text(completion, policy.tokenizer) == expected != ""


def ruin_after(monkeypatch: pytest.MonkeyPatch, step: int, rate: float) -> None:
    """Give a learning rate that is usable up to a step, and ruins the model after it."""
    rates = lambda at, training: 0.003 if at <= step else rate  # noqa: E731
    monkeypatch.setattr("engine.update.optimizer.learning_rate_at", rates)


@pytest.mark.parametrize(
    ("rate", "every", "saved"),
    [(1e30, 1, ["step-000002"]), (1e14, 2, ["step-000002", "step-000004"])],
    ids=["too large to save", "finite"],
)
def test_a_model_that_goes_nan_ends_the_run_and_the_last_good_checkpoint_is_kept(
    make_model, answers, tmp_path, train, monkeypatch, rate, every, saved
):
    """Bugs: each skipped step saved the ruined weights again, until no good checkpoint was left;
    logits of NaN are sampled as if all were 0, and by luck that solved more than the model."""
    model, run = make_model(answers), tmp_path / "runs/x"
    overrides = [f"checkpoint.every={every}", f"checkpoint.keep={len(saved)}"]
    overrides += ["validation.every=1", "training.max_skipped_steps=3", "training.num_steps=20"]
    ruin_after(monkeypatch, 2, rate)
    with pytest.raises(FloatingPointError, match=r"3 steps in a row.*training\.learning_rate"):
        train(model, *overrides)
    rows = rows_of(run)
    assert [row["train/skipped_steps"] for row in rows[1:]] == [0, 0, 0, 1, 2, 3]
    assert not any(row["eval/pass@1"] for row in rows[3:6])  # texts alone solve half of them
    assert not any(row["train/solved"] for row in rows[4:])
    checkpoints = run / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir() if path.name != "last") == saved
    assert gives_finite_logits(run / "best") and gives_finite_logits(checkpoints / "step-000002")
    assert not torch.equal(weights_of(checkpoints / "step-000002"), weights_of(model))
    assert weights_of(checkpoints / "last").isfinite().all()
    assert (checkpoints / "last").resolve().name == saved[-1]
    if rate == 1e30:
        ruin_after(monkeypatch, 20, rate)  # it can go on from there
        run, output = train(model, *overrides, "training.num_steps=3")
        assert "resumed after step 2" in output
        assert [row["step"] for row in rows_of(run)] == list(range(4))


def test_an_evaluation_of_a_model_whose_logits_are_nan_says_so_and_fails(make_model, train):
    model = make_model(dict.fromkeys(range(300), math.nan))
    _, output = train(model, "mode=evaluate", status=2)
    assert "completions ended at logits that were not finite" in output


@pytest.mark.parametrize(("log_prob", "is_broken"), [(-2.0, False), (math.nan, True)])
def test_a_completion_of_nan_log_probabilities_is_broken_and_not_solved(log_prob, is_broken):
    row = make_row(1.0, solved=True)
    row.completion.log_probs[2] = log_prob
    assert row.completion.is_broken is is_broken and row.is_solved is not is_broken
