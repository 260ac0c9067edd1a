"""Write a page in which anybody can ask the embedded model, before and after a run, without Python.

    python -m tools.play runs/x                     # writes docs/play/index.html
    python -m tools.play runs/x --out elsewhere.html

The page is docs/play/page.html with both models in it, in half precision, and with tables: random
numbers, the ids of a prompt's pieces, held-out questions. It computes Qwen3 in the shape of tiny/.
"""

import argparse
import base64
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import countdown
from engine import ROOT
from engine.core.files import read_lines
from engine.core.types import SamplingParams, SeedWord
from engine.questions.prompts import encode_prompts
from engine.questions.tasks import schema
from engine.run.mistakes import mistakes_cost_one_line
from engine.sampling.draw import draw_uniforms
from tools.page import to_json

TEMPLATE = ROOT / "docs/play/page.html"  # the data replace its {{data}}
NUM_DRAWS, NUM_QUESTIONS, MAX_TOKENS = 16, 100, 320


def half(weights: np.ndarray) -> str:
    return base64.b64encode(weights.astype("<f2").tobytes()).decode()


def model_data(folder: str | Path, name: str, pass_at_1: float) -> dict:
    """A model's weights by the names of its parameters, without what they have in common."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype="float32")
    weights = {
        key.removeprefix("model.").removesuffix(".weight"): half(tensor.detach().numpy())
        for key, tensor in model.named_parameters()  # the head is the embeddings again
    }
    score = f"solves {100 * pass_at_1:.0f}% of held-out questions"
    return {"name": name, "score": score, "weights": weights}


def tables(tokenizer: PreTrainedTokenizerFast, config: Qwen3Config) -> dict:
    """What the page knows beside the weights."""
    task = schema(countdown)().task
    rows = {"options": task, "num_examples": NUM_QUESTIONS, "seed": 0, "exclude": []}
    questions = countdown.generate_questions("validation", **rows)
    numbers = [tokenizer.encode(str(number)) for number in range(100)]
    first, second, target = numbers[77][0], numbers[88][0], numbers[99][0]
    example = {"nums": [77, 88], "target": 99}
    (ids,) = encode_prompts([example], task=countdown, options=task, tokenizer=tokenizer)
    a, b, c = map(ids.index, (first, second, target))
    params = SamplingParams(MAX_TOKENS, 1.0, 1.0, 0, (), 0, group_size=NUM_DRAWS)
    uniforms = draw_uniforms([(SeedWord.TYPED, 0, 0)], params).numpy()  # (NUM_DRAWS, MAX_TOKENS)
    shape = {"hidden": config.hidden_size, "layers": config.num_hidden_layers}
    shape |= {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads}
    shape |= {"head_size": config.head_dim, "eps": config.rms_norm_eps}
    return {
        "shape": shape | {"theta": config.rope_parameters["rope_theta"]},
        "tokens": [tokenizer.decode([i]) for i in range(len(tokenizer))],
        "end": tokenizer.eos_token_id,
        "prompt": [ids[:a], ids[a + 1 : b], ids[b + 1 : c], ids[c + 1 :]],
        "numbers": [number for (number,) in numbers],
        "questions": [[row["nums"], row["target"]] for row in questions],
        "reward_weights": task.reward_weights,
        "draws": NUM_DRAWS,
        "max_tokens": MAX_TOKENS,
        "uniforms": base64.b64encode(uniforms.tobytes()).decode(),
    }


def main() -> None:
    parser = argparse.ArgumentParser("python -m tools.play", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the run's folder, of the default")
    parser.add_argument("--out", type=Path, default=TEMPLATE.with_name("index.html"))
    options = parser.parse_args()
    with mistakes_cost_one_line():
        rows = read_lines(options.folder / "metrics.jsonl")
        scores = {r["step"]: r["eval/pass@1"] for r in rows if "eval/pass@1" in r}
        if 0 not in scores:
            raise ValueError(f"{options.folder}: no run whose pass@1 was measured at its start")
        best = max(scores, key=scores.get)
        after = model_data(options.folder / "best", f"after {best} steps", scores[best])
        before = model_data(ROOT / "tiny", "before training", scores[0])
        tokenizer = PreTrainedTokenizerFast.from_pretrained(ROOT / "tiny")
        data = tables(tokenizer, Qwen3Config.from_pretrained(ROOT / "tiny"))
        page = TEMPLATE.read_text(encoding="utf-8")
        page = page.replace("{{data}}", to_json(data | {"models": [before, after]}))
        options.out.write_text(page, encoding="utf-8")
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
