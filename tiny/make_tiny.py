"""Make the embedded model: `OMP_NUM_THREADS=2 python tiny/make_tiny.py` (about 55 minutes).

A Qwen3-shaped model of 0.9 million parameters is trained from random weights, by ordinary
supervised next-token prediction, on searches that a small program writes. A search tries
operations line by line until a try makes the target. The last operation of a try is the one that
comes nearest to it, the one before often too, the others are random. Some tries end at an operation
that cannot be done, so that the model learns to say so instead of making up a value. At first
searches are patient; in the last part of the training most give up after one try. So the model
learns to calculate, to compare with the target and to search; what is left for reinforcement
learning is to search on, and to choose better. No validation question is ever in the training data
(`task_module.is_in_split`).
"""

import argparse
import math
import random
import sys
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import countdown

EOS, PAD = "<|endoftext|>", "<|pad|>"
LARGEST = 99  # intermediate values stay below 100, so that each number is one token
MAX_TRIES = 10  # a patient search gives up after this many
DRILL_EVERY = 4  # every so many rows are equations alone
DRILL_LENGTH = 28  # equations in such a row
BATCH_SIZE = 64  # rows in a step
BATCHES_AT_ONCE = 16  # rows of so many batches are sorted by length together


@dataclass(frozen=True)
class Phase:
    """A part of the training: its searches, and its learning rate, which falls along a cosine."""

    num_steps: int
    hasty_share: float  # share of searches that give up after one try, without care
    careful_share: float  # share of the other tries whose last operation but one is well chosen
    slip_share: float  # share of operations that cannot be done, where there is such a one
    rate: float  # the learning rate at the start, as a share of the largest
    horizon: int  # steps in which it would fall to 2% of that


PHASES = (
    Phase(5200, hasty_share=0.0, careful_share=0.5, slip_share=0.1, rate=1.0, horizon=6500),
    Phase(1408, hasty_share=0.0, careful_share=0.75, slip_share=0.03, rate=0.4, horizon=1900),
    Phase(496, hasty_share=0.85, careful_share=0.75, slip_share=0.03, rate=0.1, horizon=496),
)

Step = tuple[str, int, int, int]  # operator, larger number, smaller number, value


@cache
def operations(a: int, b: int) -> tuple[list[Step], list[Step]]:
    """What can be done with two numbers, the larger first, and what has no value in 1..LARGEST."""
    high, low = max(a, b), min(a, b)
    values = {"+": high + low, "-": high - low, "*": high * low}
    values["/"] = high // low if high % low == 0 else 0
    steps = [(operator, high, low, value) for operator, value in values.items()]
    possible = [step for step in steps if 1 <= step[3] <= LARGEST]
    return possible, [step for step in steps if step not in possible]


@cache
def all_operations() -> dict[str, tuple[list[Step], list[Step]]]:
    """By operator, what can be done with any two numbers, and what cannot."""
    known: dict[str, tuple[list[Step], list[Step]]] = {operator: ([], []) for operator in "+-*/"}
    for high in range(1, LARGEST + 1):
        for low in range(1, high + 1):
            for steps, is_impossible in zip(operations(high, low), (0, 1), strict=True):
                for step in steps:
                    known[step[0]][is_impossible].append(step)
    return known


@cache
def distance(a: int, b: int, target: int) -> int:
    """How near to the target one operation comes."""
    return min(abs(value - target) for *_, value in operations(a, b)[0])


def choose_step(numbers: list[int], target: int, is_careful: bool, rng: random.Random) -> Step:
    """The next operation of a try: well chosen, if that can be seen at most two steps ahead."""
    a, b = rng.sample(numbers, 2)
    if len(numbers) == 2:
        return min(operations(a, b)[0], key=lambda step: abs(step[3] - target))
    if len(numbers) > 3 or not is_careful:
        return rng.choice(operations(a, b)[0])
    choices = []
    for i in rng.sample(range(3), 3):
        pair = numbers[:i] + numbers[i + 1 :]
        choices += [(distance(s[3], numbers[i], target), s) for s in operations(*pair)[0]]
    return min(choices, key=lambda choice: choice[0])[1]


def write_try(
    nums: list[int], target: int, is_careful: bool, slip_share: float, rng: random.Random
) -> tuple[str, str | None, int]:
    """One try: its line such as "7 * 3 = 21, 25 + 21 = 46", its expression and its value.

    Without an expression, and with value 0, if it ends at an operation that cannot be done.
    """
    numbers, texts = list(nums), [str(number) for number in nums]
    line = []
    while len(numbers) > 1:
        if rng.random() < slip_share:
            impossible = operations(*rng.sample(numbers, 2))[1]
            if impossible:
                operator, high, low, _ = rng.choice(impossible)
                return ", ".join([*line, f"{high} {operator} {low}"]), None, 0
        operator, high, low, value = choose_step(numbers, target, is_careful, rng)
        line.append(f"{high} {operator} {low} = {value}")
        parts = []
        for number in (high, low):
            i = numbers.index(number)
            numbers.pop(i)
            text = texts.pop(i)
            parts.append(f"({text})" if " " in text else text)
        numbers.append(value)
        texts.append(f"{parts[0]} {operator} {parts[1]}")
    return ", ".join(line), texts[0], numbers[0]


def write_search(nums: list[int], target: int, phase: Phase, rng: random.Random) -> str:
    """A completion: tries until one makes the target or the search gives up, then the answer."""
    lines, expression, value = [], None, 0  # lines without their verdicts
    is_hasty = phase.hasty_share > 0 and rng.random() < phase.hasty_share
    patience, num_drawn = 1 if is_hasty else MAX_TRIES, 0
    while value != target and (expression is None or (len(lines) < patience and num_drawn < 30)):
        is_careful = not is_hasty and rng.random() < phase.careful_share
        line, made, value = write_try(nums, target, is_careful, phase.slip_share, rng)
        num_drawn += 1  # a question may have fewer different tries than there is patience
        expression = made or expression
        if line not in lines:
            lines.append(line)
    verdicts = [" no\n"] * (len(lines) - 1) + [" yes\n" if value == target else " no\n"]
    search = "".join(line + verdict for line, verdict in zip(lines, verdicts, strict=True))
    return f"\n{search}</think>\n<answer>{expression}</answer>"


def prompt_text(example: dict) -> str:
    """The prompt as text: this model has no chat template."""
    messages = countdown.generate_prompt(example, options=countdown.Options())
    return "\n".join(message["content"] for message in messages)


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


def search_rows(tokenizer, questions: list[dict], phase: Phase, rng: random.Random):
    """A new search for each question, as (token ids, loss mask): every token after the prompt."""
    prompts = tokenizer([prompt_text(question) for question in questions])["input_ids"]
    searches = [write_search(**question, phase=phase, rng=rng) for question in questions]
    for prompt, search in zip(prompts, tokenizer(searches)["input_ids"], strict=True):
        completion = [*search, tokenizer.eos_token_id]
        yield prompt + completion, [False] * len(prompt) + [True] * len(completion)


def drill_rows(tokenizer, num_rows: int, rng: random.Random):
    """Rows of random operations, as (token ids, loss mask); only what follows an operation counts.

    The four operators are equally frequent; every third operation cannot be done.
    """
    known = all_operations()
    for _ in range(num_rows):
        row, mask = [], []
        for _ in range(DRILL_LENGTH):
            is_impossible = rng.random() < 1 / 3
            operator, high, low, value = rng.choice(known[rng.choice("+-*/")][is_impossible])
            result = " no\n" if is_impossible else f" = {value}"
            pieces = [f"{high} {operator} {low}", result, "" if is_impossible else ", "]
            for piece, counts in zip(pieces, (False, True, False), strict=True):
                ids = tokenizer(piece)["input_ids"]
                row += ids
                mask += [counts] * len(ids)
        yield row, mask


def training_batches(tokenizer, questions: list[dict], phase: Phase, rng: random.Random):
    """The phase's batches (input_ids, loss_mask), both (B, T)."""
    num_rows = BATCHES_AT_ONCE * BATCH_SIZE
    num_drills = num_rows // DRILL_EVERY
    for _ in range(0, phase.num_steps, BATCHES_AT_ONCE):
        chosen = rng.sample(questions, num_rows - num_drills)
        rows = list(search_rows(tokenizer, chosen, phase, rng))
        rows += drill_rows(tokenizer, num_drills, rng)
        rows.sort(key=lambda row: len(row[0]))  # little padding in a batch
        batches = [rows[k : k + BATCH_SIZE] for k in range(0, num_rows, BATCH_SIZE)]
        rng.shuffle(batches)
        for batch in batches:
            longest = max(len(row) for row, _ in batch)
            input_ids = torch.full((BATCH_SIZE, longest), tokenizer.pad_token_id)
            loss_mask = torch.zeros(BATCH_SIZE, longest, dtype=torch.bool)
            for i, (row, mask) in enumerate(batch):
                input_ids[i, : len(row)] = torch.tensor(row)
                loss_mask[i, : len(row)] = torch.tensor(mask)
            yield input_ids, loss_mask


def train(model, batches, phase: Phase) -> None:
    """Muon for the matrices, AdamW for all else; linear warm-up and cosine decay.

    The loss is the mean over the tokens that count.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01),
        torch.optim.AdamW(others, lr=2e-3, weight_decay=0.01, betas=(0.9, 0.98)),
    ]
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    start = time.perf_counter()
    for step, (input_ids, loss_mask) in enumerate(batches):
        decay = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / phase.horizon))
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = phase.rate * rate * min(1.0, (step + 1) / 100) * decay
        counts = loss_mask[:, 1:]
        hidden = model.model(input_ids=input_ids[:, :-1]).last_hidden_state
        loss = F.cross_entropy(model.lm_head(hidden[counts]), input_ids[:, 1:][counts])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 100 == 0 or step == phase.num_steps - 1:
            elapsed_s = time.perf_counter() - start
            print(f"step {step:5d}  loss {loss.item():.4f}  {elapsed_s:6.0f} s", flush=True)


def shortened(phase: Phase, share: float) -> Phase:
    """The same with about this share of its steps, whole times BATCHES_AT_ONCE."""
    num_steps = BATCHES_AT_ONCE * max(1, round(share * phase.num_steps / BATCHES_AT_ONCE))
    horizon = round(phase.horizon * num_steps / phase.num_steps)
    return replace(phase, num_steps=num_steps, horizon=horizon)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--share", type=float, default=1.0, help="of the steps: below 1 it is weak")
    options = parser.parse_args()
    out, phases = options.out, [shortened(phase, options.share) for phase in PHASES]

    torch.manual_seed(0)
    rng = random.Random(0)
    questions = countdown.generate_questions(
        "train", options=countdown.Options(), num_examples=100_000, seed=1, exclude=[]
    )
    texts = [prompt_text(question) for question in questions[:2000]]
    texts += [write_search(**row, phase=PHASES[0], rng=rng) for row in questions[:2000]]
    tokenizer = make_tokenizer(texts, vocab_size=2000)
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    for number, phase in enumerate(phases, 1):
        train(model, training_batches(tokenizer, questions, phase, rng), phase)
        rng.seed(number)  # a phase can be repeated alone, from the model before it
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
