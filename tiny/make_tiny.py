"""Make the embedded model: `OMP_NUM_THREADS=2 python tiny/make_tiny.py` (about 20 minutes).

A Qwen3-shaped model of 0.9 million parameters is trained from random weights, by ordinary
supervised next-token prediction, on searches that a small program writes. A search tries
operations line by line, the last one of a try often well chosen, the others at random, until a try
makes the target. Most searches give up after one try and answer with that. So the model learns to
calculate, to compare with the target and to write a well-formed answer; what is left for
reinforcement learning is to search on and to choose better. No validation question is ever in the
training data (`data.is_in_split`).
"""

import argparse
import math
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import countdown
from engine.prompts import plain_text

EOS, PAD = "<|endoftext|>", "<|pad|>"
LARGEST = 99  # intermediate values stay below 100, so that each number is one token
IMPATIENT_SHARE = 0.8  # share of searches that give up after one try
MAX_TRIES = 6  # the others give up after this many
FINISH_SHARE = 0.5  # share of tries whose last operation is the one that comes nearest


def possible_operations(a: int, b: int) -> list[tuple[str, int, int, int]]:
    """(operator, left, right, value) for each way to combine two numbers into 1..LARGEST."""
    high, low = max(a, b), min(a, b)
    found = [("+", a, b, a + b), ("*", a, b, a * b)]
    if high > low:
        found.append(("-", high, low, high - low))
    if high % low == 0:
        found.append(("/", high, low, high // low))
    return [operation for operation in found if operation[3] <= LARGEST]


def write_try(nums: list[int], target: int, rng: random.Random) -> tuple[str, str, int] | None:
    """One try: its line such as "3 * 7 = 21, 21 + 25 = 46", its expression and its value."""
    left = [(value, str(value)) for value in nums]  # the numbers still to use, with how they came
    finish = rng.random() < FINISH_SHARE
    steps = []
    while len(left) > 1:
        rng.shuffle(left)
        (a, a_text), (b, b_text) = left.pop(), left.pop()
        operations = possible_operations(a, b)
        if not operations:
            return None
        if finish and not left:
            choice = min(operations, key=lambda operation: abs(operation[3] - target))
        else:
            choice = rng.choice(operations)
        operator, first, second, value = choice
        if (first, second) != (a, b):
            a_text, b_text = b_text, a_text
        steps.append(f"{first} {operator} {second} = {value}")
        parts = [f"({text})" if " " in text else text for text in (a_text, b_text)]
        left.append((value, f"{parts[0]} {operator} {parts[1]}"))
    return ", ".join(steps), left[0][1], left[0][0]


def write_search(nums: list[int], target: int, rng: random.Random) -> str:
    """A completion: tries until one makes the target or the search gives up, then the answer."""
    lines, expression, value = [], "", None  # lines without their verdicts
    patience = 1 if rng.random() < IMPATIENT_SHARE else MAX_TRIES
    while len(lines) < patience and value != target:
        attempt = write_try(nums, target, rng)
        if attempt is None or attempt[0] in lines:
            continue
        line, expression, value = attempt
        lines.append(line)
    verdicts = [" no\n"] * (len(lines) - 1) + [" yes\n" if value == target else " no\n"]
    search = "".join(line + verdict for line, verdict in zip(lines, verdicts, strict=True))
    return f"\n{search}</think>\n<answer>{expression}</answer>"


def prompt_text(example: dict) -> str:
    """The prompt as text: this model has no chat template."""
    return plain_text(countdown.generate_prompt(example, options=countdown.Options()))


def make_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose merges run across spaces; numbers and verdicts stay by themselves."""
    tokenizer = Tokenizer(models.BPE())
    apart = pre_tokenizers.Split(Regex(r"\d{1,2}| yes\n| no\n"), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([apart, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Random weights in the shape of a very small Qwen3."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def training_batches(tokenizer, questions: list[dict], *, batch_size: int, rng: random.Random):
    """Endless batches (input_ids, loss_mask), both (B, T): a new search for each question."""
    prompts = tokenizer([prompt_text(question) for question in questions])["input_ids"]
    while True:
        order = rng.sample(range(len(questions)), 32 * batch_size)
        searches = [write_search(**questions[i], rng=rng) for i in order]
        encoded = tokenizer(searches)["input_ids"]
        rows = [
            (prompts[i], [*ids, tokenizer.eos_token_id])
            for i, ids in zip(order, encoded, strict=True)
        ]
        rows.sort(key=lambda row: len(row[0]) + len(row[1]))  # little padding in a batch
        batches = [rows[k : k + batch_size] for k in range(0, len(rows), batch_size)]
        rng.shuffle(batches)
        for batch in batches:
            longest = max(len(p) + len(c) for p, c in batch)
            input_ids = torch.full((batch_size, longest), tokenizer.pad_token_id)
            loss_mask = torch.zeros(batch_size, longest, dtype=torch.bool)
            for row, (p, c) in enumerate(batch):
                input_ids[row, : len(p) + len(c)] = torch.tensor(p + c)
                loss_mask[row, len(p) : len(p) + len(c)] = True
            yield input_ids, loss_mask


def train(model, batches, *, num_steps: int, learning_rate: float) -> None:
    """AdamW with linear warm-up and cosine decay; loss on the completion tokens."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, weight_decay=0.01, betas=(0.9, 0.98)
    )
    start = time.perf_counter()
    for step in range(num_steps):
        decay = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / num_steps))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 100) * decay
        input_ids, loss_mask = next(batches)
        logits = model(input_ids=input_ids[:, :-1]).logits
        loss = F.cross_entropy(logits[loss_mask[:, 1:]], input_ids[:, 1:][loss_mask[:, 1:]])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == num_steps - 1:
            elapsed_s = time.perf_counter() - start
            print(f"step {step:5d}  loss {loss.item():.4f}  {elapsed_s:6.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--num-steps", type=int, default=4500)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--num-questions", type=int, default=20_000)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    rng = random.Random(0)
    questions = countdown.load_examples(
        "generated",
        "train",
        options=countdown.Options(),
        num_examples=arguments.num_questions,
        seed=1,
        held_out=True,
        exclude=[],
    )
    texts = [prompt_text(question) for question in questions[:2000]]
    texts += [write_search(**question, rng=rng) for question in questions[:2000]]
    tokenizer = make_tokenizer(texts, vocab_size=2000)
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    batches = training_batches(tokenizer, questions, batch_size=arguments.batch_size, rng=rng)
    train(model, batches, num_steps=arguments.num_steps, learning_rate=arguments.learning_rate)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
