"""Write a page in which anybody can ask the embedded model, before and after a run, without Python.

    python -m tools.play runs/x                     # writes docs/play/index.html
    python -m tools.play trained                    # a model's folder with its run's metrics.jsonl
    python -m tools.play runs/x --out elsewhere.html

The page is docs/play/page.html with the weights of both models, in half precision, and with tables:
random numbers, the ids of a prompt's pieces, held-out questions.
"""

import argparse
import base64
import json
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from engine import ROOT
from engine.core.files import read_lines
from engine.core.types import SamplingParams, SeedWord
from engine.questions.prompts import encode_prompt
from engine.questions.tasks import load_task, schema
from engine.run.config_file import read_file, task_name
from engine.run.mistakes import mistakes_cost_one_line
from engine.sampling.draw import draw_uniforms
from tools.page import to_json

TINY, TEMPLATE = ROOT / "tiny", ROOT / "docs/play/page.html"  # the data replace its {{data}}
NUM_DRAWS, NUM_QUESTIONS, MAX_TOKENS = 16, 100, 320


def to_base64(numbers: Tensor) -> str:
    return base64.b64encode(numbers.numpy().tobytes()).decode()


def model_data(folder: Path, name: str, pass_at_1: float) -> dict:
    weights = load_file(folder / "model.safetensors")
    halves = {key: to_base64(weights[key].half()) for key in weights}
    return {
        "name": name,
        "score": f"solves {pass_at_1:.0%} of held-out questions",
        "weights": halves,
    }


def tables() -> dict:
    """What the page knows beside the weights."""
    options = schema("countdown")().task
    task, tokenizer = load_task(options), PreTrainedTokenizerFast.from_pretrained(TINY)
    rows = task.generate_questions(
        "validation", options=options, num_examples=NUM_QUESTIONS, seed=0, exclude=[]
    )
    numbers = [token for n in range(100) for token in tokenizer.encode(str(n))]  # one token each
    ids = encode_prompt({"nums": [77, 88], "target": 99}, task, tokenizer)
    a, b, c = (ids.index(numbers[n]) for n in (77, 88, 99))
    params = SamplingParams(MAX_TOKENS, 1.0, 1.0, 0, (), 0, group_size=NUM_DRAWS)
    return {
        "config": json.loads((TINY / "config.json").read_bytes()),
        "tokens": [tokenizer.decode([i]) for i in range(len(tokenizer))],
        "prompt": [ids[:a], ids[a + 1 : b], ids[b + 1 : c], ids[c + 1 :]],
        "numbers": numbers,
        "questions": [[row["nums"], row["target"]] for row in rows],
        "reward_weights": options.reward_weights,
        "draws": NUM_DRAWS,
        "max_tokens": MAX_TOKENS,
        "uniforms": to_base64(draw_uniforms([(SeedWord.TYPED, 0, 0)], params)),
    }


def main() -> None:
    parser = argparse.ArgumentParser("python -m tools.play", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a default run's, or its model's")
    parser.add_argument("--out", type=Path, default=TEMPLATE.with_name("index.html"))
    options = parser.parse_args()
    with mistakes_cost_one_line():
        scores = {
            row["step"]: row["eval/pass@1"]
            for row in read_lines(options.folder / "metrics.jsonl")
            if "eval/pass@1" in row
        }
        settings = options.folder / "config.yaml"
        if settings.is_file() and (name := task_name(read_file(settings))) != "countdown":
            raise ValueError(f"{options.folder}: its task is {name}, and the page plays countdown")
        if 0 not in scores:
            raise ValueError(f"{options.folder}: no run whose pass@1 was measured at its start")
        best = options.folder / "best"
        best = best if best.is_dir() else options.folder  # a model's
        step = json.loads((best / "best.json").read_bytes())["best_step"]
        before = model_data(TINY, "before training", scores[0])
        after = model_data(best, f"after {step} steps", scores[step])
        if len(to_json(before["weights"])) != len(to_json(after["weights"])):
            raise ValueError(f"{options.folder}: its model is not the embedded one")
        page = TEMPLATE.read_text(encoding="utf-8")
        page = page.replace("{{data}}", to_json(tables() | {"models": [before, after]}))
        options.out.write_text(page, encoding="utf-8")
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
