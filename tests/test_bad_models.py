"""Odd models and odd outputs: whatever is loaded or sampled, a run neither hangs nor crashes."""

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    ALONE,
    NUMBERS,
    make_config,
    make_policy,
    run_on_ranks,
    seed,
    train_tokenizer,
)
from graded import by_text, grade_by_text
from runs import ENVIRONMENT
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import countdown
import main
from distributed import World
from logger import Logger
from policy import Policy
from sampler import Completion, sample_completions

ROOT = Path(__file__).resolve().parent.parent
MAX_NEW_TOKENS = 12
SIZES = [
    "run.name=x",
    f"training.seed={seed()}",
    "training.num_steps=2",
    "training.warmup_steps=0",
    "training.learning_rate=0.003",
    f"training.max_new_gen_tokens={MAX_NEW_TOKENS}",
    "training.k_best_of_n=[4,4]",
    "training.num_samples_per_step=4",
    "validation.every=2",
    "validation.num_examples=4",
    "validation.best_of_n=2",
    "validation.pass_k=[1,2]",
    "model.compute_dtype=float32",
]
ALWAYS, OFTEN, NEVER = 5.0, 1.0, -5.0  # logits of about 28, 5.7 and -28, others have about 0


# Models that prefer some tokens, and whole runs of them


def write_model(
    source: Path,
    folder: Path,
    leanings: dict[int, float],
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    num_embeddings: int | None = None,
    **settings,
) -> Path:
    """A copy of a Qwen2 that leans to some tokens, with other embeddings, tokenizer or settings.

    The first number of every embedding is made large, so that the output weights of the first
    hidden unit act as a bias. `settings` go into tokenizer_config.json.
    """
    shutil.copytree(source, folder)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    rows = num_embeddings or len(tokenizer or model.get_input_embeddings().weight)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed())
        model.resize_token_embeddings(rows, mean_resizing=False)
        model.get_input_embeddings().weight[:, 0] = 100.0
        model.get_output_embeddings().weight[:, 0] = torch.zeros(rows)
        for token, leaning in leanings.items():
            model.get_output_embeddings().weight[token, 0] = leaning
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    change_json(folder / "tokenizer_config.json", settings)
    return folder


def change_json(file: Path, changes: dict) -> None:
    """Set keys of a JSON file; None removes one."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


@pytest.fixture(scope="module")
def answers(tokenizer) -> dict[int, float]:
    """A leaning to answers and the end of thinking."""
    texts = [f"<answer>{n}</answer>" for n in NUMBERS]
    leanings = dict.fromkeys(tokenizer.convert_tokens_to_ids(texts), 0.4)
    return leanings | {tokenizer.convert_tokens_to_ids("</think>\n"): 0.7}


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    """Questions whose prompts are of very different lengths; a single token solves each."""
    rows = [{"nums": [n] + [1] * (20 * (n % 4)), "target": n if n % 4 == 0 else 1} for n in NUMBERS]
    file = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def arguments(model: Path, questions: Path, folder: Path, *more: str) -> list[str]:
    data = [f"task.train={questions}", f"task.eval={questions}"]
    paths = [f"--config={os.devnull}", f"model.name={model}", f"run.dir={folder / 'runs'}"]
    return [*paths, *data, *SIZES, *more]


@pytest.fixture
def train(monkeypatch, capsys, questions, tmp_path) -> Callable[..., tuple[Path, str]]:
    """Whole runs in this process: `train(model, *overrides)` is a run's folder and its output."""

    def run(model: Path, *overrides: str) -> tuple[Path, str]:
        command = arguments(model, questions, tmp_path, *overrides)
        monkeypatch.setattr(sys, "argv", ["main.py", *command])
        main.main()
        return tmp_path / "runs/x", capsys.readouterr().out

    return run


@pytest.fixture
def graded(monkeypatch) -> None:
    """Rewards that differ wherever texts do."""
    grade_by_text(monkeypatch)


def rows_of(run: Path) -> list[dict]:
    """The rows of a run's metrics, all of which must be finite."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert all(value is not None for value in row.values()), row
    return rows


def samples_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def weights_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gives_finite_logits(folder: Path) -> bool:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return bool(model(torch.arange(2, 40)[None]).logits.isfinite().all())


def sample(policy: Policy, prompts: list[list[int]], *, num_samples: int) -> list[Completion]:
    """Completions of all prompts in one list, by the policy's own settings."""
    groups = sample_completions(
        policy.sampler.eval(),
        prompts,
        [(seed(), i) for i in range(len(prompts))],
        num_samples=num_samples,
        params=policy.params,
        backend=policy.backend,
        max_batch_tokens=policy.max_batch_tokens,
        on_progress=lambda n: None,
    )
    return [completion for group in groups for completion in group]


def check_micro_batch(policy: Policy, completions: list[Completion]) -> None:
    """The tokens that are trained are the sampled ones, the end included, the padding not."""
    rows = [main.Trajectory([5] * (3 + i % 4), c, "", {}, 0.0) for i, c in enumerate(completions)]
    settings = {"num_rows": len(rows), "num_tokens": 1}
    batch = main.make_micro_batch(rows, policy, make_config(), ALONE, **settings)
    num_tokens = batch.completion_mask.shape[1]
    for row, ids, whole_mask, mask, weights in zip(
        rows, batch.input_ids, batch.mask, batch.completion_mask, batch.weights, strict=True
    ):
        assert ids[whole_mask].tolist() == row.prompt_ids + row.completion.token_ids
        assert ids[-num_tokens:][mask].tolist() == row.completion.token_ids
        assert ((weights > 0) == mask).all()
        assert mask.sum() == len(row.completion.token_ids)


# The end of a completion


@pytest.mark.parametrize("backend", ["grouped", "generate"])
def test_tokenizer_model_and_generation_config_may_name_different_ends(
    rotary_model_folder, tmp_path, train, answers, backend
):
    """Each of the three ends a completion, and is trained with it."""
    ends = (0, 7, 12)
    leanings = answers | dict.fromkeys(ends, OFTEN)
    model = write_model(rotary_model_folder, tmp_path / "model", leanings)
    change_json(model / "generation_config.json", {"eos_token_id": [7]})
    change_json(model / "config.json", {"eos_token_id": 12})

    overrides = [f"sampling.backend={backend}", f"training.max_new_gen_tokens={MAX_NEW_TOKENS}"]
    policy = make_policy(model, *overrides)
    completions = sample(policy, [[5, 9], [40, 41, 42, 43]], num_samples=40)
    for completion in completions:
        assert not set(completion.token_ids[:-1]) & set(ends)
        assert completion.truncated == (completion.token_ids[-1] not in ends)
        text = main.completion_text(completion, policy.tokenizer)
        written = len(completion.token_ids) - (not completion.truncated)
        assert text == policy.tokenizer.decode(completion.token_ids[:written])
    # each of the three is a third of all ends, so that one is missing with a chance of 1e-14
    assert {c.token_ids[-1] for c in completions} >= set(ends)
    check_micro_batch(policy, completions)

    run, _ = train(model, f"sampling.backend={backend}")
    assert len(rows_of(run)) == 3
    assert all(row["train/truncated_frac"] < 0.5 for row in rows_of(run)[1:])


def test_an_end_that_is_also_the_padding_changes_nothing(
    rotary_model_folder, tmp_path, train, answers, graded
):
    """The first end is in, the rest is out; the run is the one with a padding token of its own."""
    leanings = answers | {0: OFTEN}
    runs = []
    for name, settings in (("own", {}), ("shared", {"pad_token": None})):
        model = write_model(rotary_model_folder, tmp_path / name, leanings, **settings)
        policy = make_policy(model, f"training.max_new_gen_tokens={MAX_NEW_TOKENS}")
        assert policy.params.pad_id == (1 if name == "own" else 0)
        completions = sample(policy, [[5, 9], [40, 41, 42, 43]], num_samples=20)
        assert {completion.token_ids.count(0) for completion in completions} <= {0, 1}
        # one token in four is an end, so that lengths differ whatever is sampled
        assert len({len(completion.token_ids) for completion in completions}) > 3
        check_micro_batch(policy, completions)
        run, _ = train(model, f"run.name={name}")
        runs.append((rows_of(run.parent / name), samples_of(run.parent / name)))
    (own_rows, own_samples), (rows, samples) = runs
    assert samples == own_samples
    for own, row in zip(own_rows, rows, strict=True):
        # what is masked weighs exactly 0; sums over other padding may round in another order
        kept = [name for name in own if not name.startswith(("time/", "perf/"))]
        assert [row[name] for name in kept] == pytest.approx([own[name] for name in kept], abs=1e-6)
    assert own_rows[1]["train/grad_norm"] > 0


@pytest.mark.parametrize("learning", [[], ["training.learning_type=sil"]], ids=["grpo", "sil"])
def test_a_run_whose_completions_are_all_empty_goes_on_and_learns_nothing(
    rotary_model_folder, tmp_path, train, learning
):
    """The end comes at once, for every question: no step of the optimizer, and none skipped."""
    model = write_model(rotary_model_folder, tmp_path / "model", {0: ALWAYS})
    more = [*learning, "training.k_best_of_n=[2,4]"] if learning else []
    run, _ = train(model, *more, "training.num_steps=3")
    first, *rows, last = rows_of(run)
    assert first["eval/completion_tokens"] == 1 and first["eval/pass@1"] == 0
    assert [row["step"] for row in (*rows, last)] == [1, 2, 3]
    for row in (*rows, last):
        assert row["train/completion_tokens"] == row["train/zero_advantage_frac"] == 1
        assert row["train/reward"] == row["train/truncated_frac"] == row["train/solved"] == 0
        assert row["train/skipped_steps"] == row["train/advantage_abs"] == 0
        assert "train/loss" not in row and "train/grad_norm" not in row
    assert {sample["completion"] for sample in samples_of(run)} == {""}
    assert not any(sample["truncated"] for sample in samples_of(run))
    assert torch.equal(weights_of(run / "checkpoints/last"), weights_of(model))


@pytest.mark.parametrize("normalization", ["token", "sequence"])
def test_some_empty_completions_among_others_are_trained_like_any(
    rotary_model_folder, tmp_path, train, answers, graded, monkeypatch, normalization
):
    """Of 128 completions a step six in ten are empty: none and all have no chance to speak of."""
    model = write_model(rotary_model_folder, tmp_path / "model", answers | {0: 1.3})
    more = [f"training.loss_normalization={normalization}", "training.k_best_of_n=[32,32]"]
    texts, assign_advantages = [], main.assign_advantages

    def note_and_assign(groups, config):
        texts.append([row.text for group in groups for row in group])
        return assign_advantages(groups, config)

    monkeypatch.setattr(main, "assign_advantages", note_and_assign)
    run, _ = train(model, *more)
    assert [len(step) for step in texts] == [128, 128]
    assert all("" in step and any(step) for step in texts)
    assert all(row["train/grad_norm"] > 0 for row in rows_of(run)[1:])
    assert not torch.equal(weights_of(run / "checkpoints/last"), weights_of(model))


def test_completions_that_never_end_are_cut_off_and_counted(
    rotary_model_folder, tmp_path, train, answers, graded
):
    model = write_model(rotary_model_folder, tmp_path / "model", answers | {0: NEVER})
    run, _ = train(model)
    for row in rows_of(run)[1:]:
        assert row["train/truncated_frac"] == 1
        assert row["train/completion_tokens"] == MAX_NEW_TOKENS
        assert row["train/grad_norm"] > 0
    assert rows_of(run)[0]["eval/truncated_frac"] == 1
    assert all(sample["truncated"] for sample in samples_of(run))


def test_a_run_that_skips_truncated_rows_goes_on_when_all_are_truncated(
    rotary_model_folder, tmp_path, train, answers, graded
):
    model = write_model(rotary_model_folder, tmp_path / "model", answers | {0: NEVER})
    run, _ = train(model, "training.skip_truncated=true")
    for row in rows_of(run)[1:]:
        assert row["train/truncated_frac"] == 1 and row["train/skipped_steps"] == 0
        assert row["train/advantage_abs"] > 0 and "train/grad_norm" not in row
    assert torch.equal(weights_of(run / "checkpoints/last"), weights_of(model))


# Vocabularies


def test_a_model_may_have_more_embeddings_than_its_tokenizer_has_tokens(
    rotary_model_folder, tokenizer, tmp_path, train
):
    """Qwen2.5 has 151,936 for 151,665. An id without a token has no text, but is trained."""
    known, rows = len(tokenizer), len(tokenizer) + 27
    leanings = dict.fromkeys(range(known, rows), ALWAYS)
    model = write_model(rotary_model_folder, tmp_path / "model", leanings, num_embeddings=rows)
    policy = make_policy(model, f"training.max_new_gen_tokens={MAX_NEW_TOKENS}")
    completions = sample(policy, [[5, 9], [40, 41, 42, 43]], num_samples=4)
    assert {known <= token < rows for c in completions for token in c.token_ids} == {True}
    assert {main.completion_text(c, policy.tokenizer) for c in completions} == {""}
    check_micro_batch(policy, completions)

    run, _ = train(model)
    assert {sample["completion"] for sample in samples_of(run)} == {""}
    for row in rows_of(run)[1:]:
        assert row["train/completion_tokens"] == MAX_NEW_TOKENS and row["train/reward"] == 0


def test_ids_without_a_token_are_left_out_of_the_text_only(
    rotary_model_folder, tokenizer, tmp_path, train, answers, graded
):
    """They are a fifth of all tokens, so that 96 tokens have some, and no 12 are only those."""
    rows = len(tokenizer) + 27
    leanings = answers | dict.fromkeys(range(len(tokenizer), rows), 0.4) | {0: NEVER}
    model = write_model(rotary_model_folder, tmp_path / "model", leanings, num_embeddings=rows)
    run, _ = train(model)
    assert all(row["train/grad_norm"] > 0 for row in rows_of(run)[1:])
    assert len(AutoModelForCausalLM.from_pretrained(run / "best").lm_head.weight) == rows
    policy = make_policy(run / "best", f"training.max_new_gen_tokens={MAX_NEW_TOKENS}")
    completions = sample(policy, [[5, 9]], num_samples=8)
    assert any(token >= len(tokenizer) for c in completions for token in c.token_ids)
    for completion in completions:
        with_text = [token for token in completion.token_ids if 0 < token < len(tokenizer)]
        expected = policy.tokenizer.decode(with_text)
        assert main.completion_text(completion, policy.tokenizer) == expected != ""


@pytest.mark.parametrize("what", ["tokens", "padding"])
def test_a_tokenizer_with_ids_beyond_the_models_embeddings_is_refused(
    rotary_model_folder, tokenizer, tmp_path, capsys, monkeypatch, questions, what
):
    """Bug: the run started, and ended in an IndexError at the first prompt with such a token."""
    one = train_tokenizer()
    if what == "padding":  # as when a padding token is added, and the model not resized
        one.add_special_tokens({"pad_token": "<|padding|>"})
        named = f"ids up to {len(tokenizer)}, but it has {len(tokenizer)} embeddings"
    else:
        one.add_tokens(["Use the numbers"])
        named = f"ids up to {len(tokenizer)}, but it has {len(tokenizer)} embeddings"
    model = tmp_path / "model"
    write_model(rotary_model_folder, model, {}, tokenizer=one, num_embeddings=len(tokenizer))
    command = arguments(model, questions, tmp_path)
    monkeypatch.setattr(sys, "argv", ["main.py", *command])
    with pytest.raises(SystemExit) as caught:
        main.main()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert caught.value.code == 2
    assert line.startswith(f"error: model.name = {model}: ") and named in line
    assert not (tmp_path / "runs").exists()


def test_a_special_token_that_no_prompt_has_may_lie_beyond_the_embeddings(
    rotary_model_folder, tokenizer, tmp_path
):
    """Gemma 3's token for images is id 262,144 of 262,144 embeddings in the model without them."""
    one = train_tokenizer()
    one.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    assert one.convert_tokens_to_ids("<image_soft_token>") == len(tokenizer)
    model = tmp_path / "model"
    write_model(rotary_model_folder, model, {}, tokenizer=one, num_embeddings=len(tokenizer))
    assert make_policy(model).tokenizer.pad_token_id == 1
    (model / "chat_template.jinja").write_text("{{ '<image_soft_token>' }}")
    with pytest.raises(ValueError, match=f"ids up to {len(tokenizer)}"):
        make_policy(model)


# Texts


def test_bytes_that_make_no_text_are_scored_shown_and_kept(
    rotary_model_folder, tokenizer, tmp_path, train, monkeypatch
):
    """Half characters become the replacement character everywhere, in MLflow too."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)  # MLflow keeps artifacts beside
    halves = [i for i in range(2, len(tokenizer)) if tokenizer.decode([i]) == "\ufffd"]
    assert len(halves) > 100
    model = write_model(rotary_model_folder, tmp_path / "model", dict.fromkeys(halves, ALWAYS))
    run, output = train(model, "logging.mlflow=true", "training.num_steps=1")
    assert all("\ufffd" in sample["completion"] for sample in samples_of(run))
    assert "\ufffd" in output and "warning" not in output
    assert rows_of(run)[1]["train/reward"] == 0
    shown = mlflow.MlflowClient().list_artifacts((run / "mlflow_run_id").read_text().strip())
    assert {"config.yaml", "curves.png", "samples.json"} <= {file.path for file in shown}


def test_tags_control_codes_and_endless_lines_harm_neither_console_nor_files(
    rotary_model_folder, tmp_path, train
):
    """The console shows 600 characters, none of which a terminal obeys; the file holds all."""
    one = train_tokenizer()
    wild = ["\x1b[2J\x1b]0;title\x07", "\x00", "\r", "\u202e", "\x9b31m", "\U000e0041", "</s>"]
    wild += ["<answer>", "</answer>", "<answer><answer>", "<think>", '{"a": "', "[/INST]"]
    one.add_tokens([*wild, "A" * 16_000])
    ids = one.convert_tokens_to_ids([*wild, "A" * 16_000])
    leanings = dict.fromkeys(ids, 1.3) | {ids[0]: 1.6, ids[-1]: 1.6}  # a quarter is the long one
    model = write_model(rotary_model_folder, tmp_path / "model", leanings, tokenizer=one)
    more = ["training.max_new_gen_tokens=36", "logging.samples=7", "validation.num_examples=7"]
    run, output = train(model, *more)
    texts = [sample["completion"] for sample in samples_of(run)]
    # 504 tokens: each of the others is one in 23, and a text of 36 has 8 or 9 of the long one
    assert max(map(len, texts)) > 100_000
    for token in wild:
        assert any(token in text for text in texts), token
    assert len(output) < 12_000
    assert "characters ...]" in output and "\\x1b" in output
    obeyed = {c for c in output if not c.isprintable()} - {"\n", "\t"}
    assert not obeyed
    for sample in samples_of(run):
        assert countdown.reward_function(sample["completion"], {"nums": [1], "target": 1}).keys()
    assert len(rows_of(run)) == 3


# Prompts


def test_a_chat_template_that_says_nothing_leaves_the_completions_beginning(
    rotary_model_folder, tmp_path, train, answers, graded
):
    """The shortest prompt there is: all questions look alike, and their rewards still differ."""
    model = write_model(rotary_model_folder, tmp_path / "model", answers)
    (model / "chat_template.jinja").write_text("{{ '' }}")
    run, _ = train(model)
    assert {sample["prompt"] for sample in samples_of(run)} == {countdown.ASSISTANT_PREFIX}
    assert all(row["train/grad_norm"] > 0 for row in rows_of(run)[1:])


def question_of(prompt: str) -> dict:
    """The question that a prompt asks."""
    nums, target = re.search(r"numbers \[(.*?)\].*to make (\d+)\.", prompt).groups()
    return {"nums": [int(number) for number in nums.split(", ")], "target": int(target)}


def evaluate_on_this_rank(world: World, model: Path, limit: int) -> tuple[dict, list[dict]]:
    """Metrics and this rank's samples of ten questions with prompts of very different lengths."""
    overrides = [*SIZES, f"sampling.max_batch_tokens={limit}", "logging.samples=100"]
    policy = make_policy(model, *overrides, num_ranks=world.size, is_exact=True)
    lengths = random.Random(seed()).sample(range(1, 90, 9), 10)
    asked = [{"nums": [n + 1] * length, "target": n + 1} for n, length in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        grade_by_text(patch)
        metrics, samples = main.evaluate(
            policy,
            asked,
            config=make_config(*overrides),
            world=world,
            logger=Logger(rank=world.rank),
        )
    assert [question_of(s["prompt"]) for s in samples] == asked[world.rank :: world.size]
    return metrics, samples


def test_every_reward_is_that_of_its_own_question_after_sorting_and_sharding(
    rotary_model_folder, tmp_path, answers
):
    """Trap 8: prompts are sorted by length to be sampled; order, and so rewards, must survive.

    The same text earns another reward for another question.
    """
    model = write_model(rotary_model_folder, tmp_path / "model", answers)
    metrics, samples = evaluate_on_this_rank(ALONE, model, 10**6)
    assert len({s["completion"] for s in samples}) == 10
    for s in samples:
        scored = by_text(countdown.reward_function)(s["completion"], question_of(s["prompt"]))
        assert s["reward_parts"] == scored
    for limit in (1, 1500):
        assert evaluate_on_this_rank(ALONE, model, limit) == (metrics, samples)
    ranks = run_on_ranks(evaluate_on_this_rank, 2, model, 1500, folder=tmp_path)
    assert [result[0] for result in ranks] == [metrics] * 2
    assert [result[1] for result in ranks] == [samples[::2], samples[1::2]]


# A model that goes NaN: trap 16


def test_a_model_that_goes_nan_ends_the_run_with_the_key_to_change(
    rotary_model_folder, tmp_path, questions
):
    overrides = ["training.learning_rate=1e30", "training.num_steps=20", "checkpoint.every=1"]
    overrides += ["training.max_skipped_steps=3"]
    command = arguments(rotary_model_folder, questions, tmp_path, *overrides)
    result = subprocess.run(
        [sys.executable, ROOT / "tests/graded.py", "{}", *command],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    message = result.stderr.splitlines()[-1]
    assert "3 steps in a row" in message and "training.learning_rate" in message
    run = tmp_path / "runs/x"
    assert [row["train/skipped_steps"] for row in rows_of(run)[1:]] == [0, 1, 2, 3]
    assert gives_finite_logits(run / "best")


def learning_rate_until(step: int, rate: float) -> Callable[..., float]:
    """A schedule that is sound up to a step, and then not."""
    return lambda at, config: 0.003 if at <= step else rate


@pytest.mark.parametrize(
    ("rate", "keep", "num_left"),
    [(1e30, 1, 1), (1e14, 2, 2)],
    ids=["too large to save", "finite"],
)
def test_the_last_good_checkpoint_is_kept_when_the_model_goes_nan(
    rotary_model_folder, tmp_path, train, answers, graded, monkeypatch, rate, keep, num_left
):
    """Bug: each skipped step saved the ruined weights again, until no good checkpoint was left.

    1e30 leaves weights that are not worth saving. Those of 1e14 are finite, but give no gradient,
    which shows a step later: they are saved once, beside the good ones.
    """
    model = write_model(rotary_model_folder, tmp_path / "model", answers)
    overrides = [f"checkpoint.keep={keep}", "checkpoint.every=1", "validation.every=100"]
    overrides += ["training.max_skipped_steps=3", "training.num_steps=20"]
    monkeypatch.setattr(main, "learning_rate_at", learning_rate_until(3, rate))
    with pytest.raises(FloatingPointError, match=r"3 steps in a row.*training\.learning_rate"):
        train(model, *overrides)
    checkpoints = tmp_path / "runs/x/checkpoints"
    left = sorted(path.name for path in checkpoints.iterdir() if path.name != "last")
    assert len(left) == num_left and "step-000003" in left
    assert gives_finite_logits(checkpoints / "step-000003")
    assert not torch.equal(weights_of(checkpoints / "step-000003"), weights_of(model))
    assert weights_of(checkpoints / "last").isfinite().all()
    if rate == 1e30:
        assert (checkpoints / "last").resolve().name == "step-000003"
        monkeypatch.setattr(main, "learning_rate_at", learning_rate_until(20, rate))
        run, output = train(model, *overrides, "training.num_steps=4")  # it can go on from there
        assert "resumed after step 3" in output
        assert [row["step"] for row in rows_of(run)] == list(range(5))


def test_a_single_skipped_step_costs_no_checkpoint(
    rotary_model_folder, tmp_path, train, answers, graded, monkeypatch
):
    """The weights from before it are saved at the next occasion, skipped or not."""
    model = write_model(rotary_model_folder, tmp_path / "model", answers)
    compute_gradient = main.compute_gradient
    steps = iter(range(1, 100))

    def fails_in_step_four(*args):
        return compute_gradient(*args) * (math.nan if next(steps) == 4 else 1.0)

    monkeypatch.setattr(main, "compute_gradient", fails_in_step_four)
    overrides = ["checkpoint.every=2", "training.num_steps=4", "validation.every=100"]
    run, _ = train(model, *overrides)
    assert '"train/skipped_steps": 1.0' in (run / "metrics.jsonl").read_text().splitlines()[-1]
    checkpoints = run / "checkpoints"
    assert (checkpoints / "last").resolve().name == "step-000004"
    assert not torch.equal(
        weights_of(checkpoints / "last"), weights_of(checkpoints / "step-000002")
    )


def test_noise_from_a_broken_model_solves_nothing_and_is_never_the_best(
    rotary_model_folder, tmp_path, train, answers, monkeypatch
):
    """Bug: logits of NaN are sampled as if all were 0; by luck that solved more than the model did,
    and best/ was overwritten by weights that are not finite."""
    leanings = dict.fromkeys(answers, NEVER) | {list(answers)[-1]: 0.7}
    model = write_model(rotary_model_folder, tmp_path / "model", leanings)
    overrides = ["training.learning_rate=1e30", "validation.best_of_n=64", "validation.every=1"]
    overrides += ["training.k_best_of_n=[32,32]"]
    run, _ = train(model, *overrides)
    first, *rows = rows_of(run)
    assert first["eval/pass@1"] == 0
    # its rewards differ by the end of thinking, which three of four completions have
    assert rows[0]["train/grad_norm"] > 0 and rows[1]["train/skipped_steps"] == 1
    assert all(row["eval/pass@1"] == row["train/solved"] == 0 for row in rows)
    assert torch.equal(weights_of(run / "best"), weights_of(model))


def test_a_completion_of_nan_log_probabilities_is_broken():
    finite, broken = np.array([-1.0, -2.0], np.float32), np.array([-1.0, math.nan], np.float32)
    for log_probs, expected in ((finite, False), (broken, True)):
        completion = Completion([7, 8], log_probs, finite, True, is_inserted=np.zeros(2, bool))
        assert completion.is_broken is expected
        row = main.Trajectory([5], completion, "", {"answer": 1.0}, 1.0)
        assert row.is_solved is not expected
