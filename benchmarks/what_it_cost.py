"""What training on one task costs elsewhere: twenty general questions, answered before and after.

    python benchmarks/what_it_cost.py HuggingFaceTB/SmolLM2-135M-Instruct \\
        runs/arithmetic-SmolLM2-135M-Instruct-grpo-s0/best > results/arithmetic-smollm2-questions.md

Prints a table in Markdown. Answers are greedy and in fp32, so they are the same each time; what is
longer than MAX_NEW_TOKENS is cut off. The questions were fixed before any model was trained.
"""

import argparse
import os
import statistics
from dataclasses import replace

import common  # noqa: F401  # first: it finds the script's modules
import torch

from engine.core.distributed import World
from engine.questions.prompts import completion_text, render_prompt
from engine.run.config_file import load_config
from logger import Logger
from tools.chat import load_policy

MAX_NEW_TOKENS = 64
QUESTIONS = (
    "What is the capital of France?",
    "Who wrote Romeo and Juliet?",
    "Name the three primary colours.",
    "What do bees make?",
    "How many legs does a spider have?",
    "What is the opposite of hot?",
    "Which planet is closest to the sun?",
    "Why is the sky blue?",
    "What is photosynthesis?",
    "Explain in one sentence what gravity is.",
    "Translate into French: Good morning, my friend.",
    "Correct the spelling: I recieved teh letter.",
    "Write a haiku about the sea.",
    "Give me three tips for better sleep.",
    "Write a Python function that reverses a string.",
    "Summarise: The cat sat on the mat because it was warm and quiet there.",
    "I feel sad today. What can I do?",
    "What is the difference between a lake and a river?",
    "Name an animal that lives in the desert, and say how it finds water.",
    "Hello! Who are you?",
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", help="a folder or a hub id with a chat model")
    parser.add_argument("after", help="the same model after its training")
    options = parser.parse_args(arguments)
    before, tokens_before = answer_all(options.before)
    after, tokens_after = answer_all(options.after)
    num_equal = sum(one == other for one, other in zip(before, after, strict=True))
    print(f"{num_equal} of {len(QUESTIONS)} answers stay the same word for word. An answer has")
    print(
        f"{tokens_before:.0f} tokens on average before and {tokens_after:.0f} after the training;"
    )
    print(f"{MAX_NEW_TOKENS} is the limit.\n")
    print("| question | before | after |\n|---|---|---|")
    for row in zip(QUESTIONS, before, after, strict=True):
        print(f"| {' | '.join(map(as_cell, row))} |")


def answer_all(model: str) -> tuple[list[str], float]:
    """The model's answers, and their mean length in tokens."""
    overrides = [f"model.name={model}", "model.compute_dtype=float32", "mode=evaluate"]
    config = load_config(["--config", os.devnull, *overrides])
    world = World(rank=0, size=1, device=torch.device("cpu"))
    policy = load_policy(config, world, Logger(rank=1).info)
    params = replace(policy.params, max_new_tokens=MAX_NEW_TOKENS, temperature=0.0, group_size=1)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = [render_prompt(chat, policy.tokenizer) for chat in chats]
    answers = policy.sampler.decode(
        policy.tokenizer(texts, add_special_tokens=False)["input_ids"],
        [(0, number) for number in range(len(texts))],
        params,
        on_progress=lambda num_ended: None,
    )
    num_tokens = statistics.mean(len(answer.token_ids) for answer in answers)
    return [completion_text(answer, policy.tokenizer).strip() for answer in answers], num_tokens


def as_cell(text: str) -> str:
    """The text in one cell of a table."""
    return "<br>".join(text.replace("|", "\\|").replace("<", "&lt;").splitlines())


if __name__ == "__main__":
    main()
