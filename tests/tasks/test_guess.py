"""The guessing game: what its environment says and pays, and that its recipe runs."""

import copy
import functools
import json
import math
from pathlib import Path

import pytest
from harness import ROOT, load_run, read_jsonl, read_rows, save_writer, seed
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

import main
from engine.run.config_file import load_config
from tasks import guess

QUESTION = {"low": 23, "high": 37, "number": 28}
RECIPE = ROOT / "configs/guess-smollm2.yaml"


def play(*messages: str) -> tuple[list[str | None], dict[str, float]]:
    """What the environment says to each message, and what it pays."""
    environment = guess.Environment()
    environment.reset(**QUESTION)
    return [environment.respond(message) for message in messages], environment.get_reward()


def test_halving_finds_each_number_in_four_guesses_and_327_on_average():
    counts = []
    for number in range(23, 38):
        environment = guess.Environment()
        environment.reset(low=23, high=37, number=number)
        reply = ""
        while reply is not None:
            reply = environment.respond(str((environment.low + environment.high) // 2))
        assert environment.get_reward() == {"answer": 1.0, "narrowed": 1.0, "inside": 1.0}
        counts.append(len(environment.guesses))
    assert max(counts) == 4 and sum(counts) == 49  # 3.27 on average


def test_it_says_higher_or_lower_and_what_is_left():
    replies, paid = play("35.", "I say 25", "22", "between 20 and 26: 100")
    assert replies[0] == "Lower: between 23 and 34."
    assert replies[1] == replies[2] == "Higher: between 26 and 34."
    assert replies[3] is None
    narrowed = pytest.approx(math.log(15 / 9, 15))
    assert paid == {"answer": 0.0, "narrowed": narrowed, "inside": 0.5}
    assert play("28") == ([None], {"answer": 1.0, "narrowed": 1.0, "inside": 1.0})
    assert play("1", "28")[1] == {"answer": 1.0, "narrowed": 1.0, "inside": 0.5}
    assert play("30")[1]["inside"] == 0.25  # a game that ends early has missed the other guesses


def test_nothing_is_paid_for_lists_repetitions_or_numbers_outside():
    lists = ["27 28 29", "28 0", " ".join(map(str, range(100)))]
    for message in ("", "1", "999", "-5", "9" * 10_000, *lists):
        assert play(*[message] * 4)[1]["answer"] == 0
    assert play("1", "1", "100", "100")[1] == {"answer": 0.0, "narrowed": 0.0, "inside": 0.0}


def test_ranges_are_either_trained_on_or_validated():
    how = {"options": None, "seed": 0, "held_out": True, "exclude": []}
    load = functools.partial(guess.load_examples, "generated", **how)
    training, validation = (load(split, num_examples=None) for split in ("train", "validation"))
    assert not {row["low"] for row in training} & {row["low"] for row in validation}
    assert len(training) + len(validation) == 86 * 15
    for row in training + validation:
        assert 1 <= row["low"] <= row["number"] <= row["high"] == row["low"] + 14 <= 100
    assert len(load("validation", num_examples=10)) == 10


TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# this tokenizer has other tokens to stop at
SMALL = ["run.name=x", "sampling.stop=[]", f"training.seed={seed()}"]
SMALL += ["training.num_steps=2", "training.num_samples_per_step_global=4", "checkpoint.every=1"]
SMALL += ["validation.num_examples=4", "validation.every=1", "logging.rollouts_every=1"]


@pytest.fixture
def folder(rotary_model_folder, tokenizer: PreTrainedTokenizerFast, tmp_path) -> Path:
    """A chat model whose turns are numbers of two digits."""
    tokenizer, end = copy.deepcopy(tokenizer), "<|im_end|>"
    tokenizer.add_tokens(["<|im_start|>", end], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    follows = {"\n": list("34567")} | {digit: list("01289") for digit in "34567"}
    follows |= {digit: [end] for digit in "01289"}
    model = Qwen2ForCausalLM.from_pretrained(rotary_model_folder)
    return save_writer(model, tokenizer, follows, tmp_path / "writer")


def test_the_recipe_trains_saves_and_evaluates_in_bf16(folder, tmp_path):
    settings = ["--config", str(RECIPE), f"model.name={folder}", f"run.dir={tmp_path}", *SMALL]
    run = load_run(load_config(settings))
    assert main.run_training(run) == 0
    first, *rows = read_rows(run.folder)
    assert first["eval/turns"] > 1
    for row in rows:  # its guesses may all be useless
        assert row["train/turns"] > 2 and row["train/grad_norm"] > 0 and row["eval/turns"] > 1
        parts = [row[f"train/part_{name}"] for name in guess.REWARD_PARTS]
        assert row["train/reward"] == pytest.approx(sum(parts))
        assert all(0 <= part <= 1 for part in parts)
    line = read_jsonl(run.folder / "rollouts.jsonl")[0]
    inserted = ["".join(c["tokens"][i] for i in c["inserted"]) for c in line["completions"]]
    assert any("er: between " in text for text in inserted)  # lower or higher
    best = [*settings, f"model.name={run.folder / 'best'}", "mode=evaluate"]
    assert main.run_evaluation(load_run(load_config(best))) == 0
    (measured,) = run.folder.glob("eval-*/metrics.json")
    metrics = json.loads(measured.read_text())
    assert "eval/majority" not in metrics and metrics["eval/turns"] > 1
