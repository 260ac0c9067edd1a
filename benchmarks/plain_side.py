"""plain.py and main.py on the same settings, in one process; for `gpu.py plain`.

Both run whole. Of each one's first step the completions are kept, with the log-probabilities that
it gives them, and of its metrics.jsonl the norm of the first gradient.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import common  # first: it finds the script's modules
import torch
from torch import Tensor

import main
import plain
from engine.core.files import read_lines
from engine.core.tensors import right_pad

Scored = tuple[list[int], Tensor]  # ids of prompt and completion, log-probabilities


def compare(folder: Path, arguments: list[str]) -> dict[str, float]:
    """What is equal of the first step's completions, and how far apart the two are in that."""
    arguments = [*arguments, f"run.dir={folder}"]
    has_bf16 = "model.compute_dtype=float32" not in arguments  # else plain.py would refuse float32
    on_card = mock.patch.object(torch.cuda, "is_bf16_supported", lambda **_: has_bf16)
    with on_card, mock.patch.dict(os.environ):  # main.py would read the rank that plain.py names
        ours = first_step(main, score_by_main, run_main, [*arguments, "run.name=main"])
        theirs = first_step(plain, score_by_plain, plain.main, [*arguments, "run.name=plain"])
    pairs = zip(ours, theirs, strict=True)
    equal = [(a - b).abs().max().item() for (row, a), (other, b) in pairs if row == other]
    norms = []
    for name in ("main", "plain"):
        rows = read_lines(folder / name / "metrics.jsonl")
        norms.append(next(row["train/grad_norm"] for row in rows if "train/grad_norm" in row))
    return {
        "completions": len(ours),
        "share of these that is equal": len(equal) / len(ours),
        "log-probabilities of the equal ones, apart": max(equal, default=0.0),
        "norms of the gradient, apart": abs(norms[1] / norms[0] - 1),
    }


def first_step(program, score: Callable, run: Callable, arguments: list[str]) -> list[Scored]:
    """Run the program; its first batch, scored before the update."""
    kept: list[Scored] = []
    spy = functools.partial(keep_first, kept, score, program.update_policy)
    with mock.patch.object(program, "update_policy", spy):
        run(arguments)
    return kept


def keep_first(kept: list[Scored], score: Callable, update: Callable, run, batch: list, *more):
    if not kept:
        kept.extend(score(run, batch))
    return update(run, batch, *more)


def run_main(arguments: list[str]) -> None:
    run = common.load_run(arguments)
    main.run_training(run)
    run.world.signals.stop()


@torch.no_grad()
def score_by_main(run, groups: list) -> list[Scored]:
    rows = [(t.prompt_ids, t.completion.token_ids) for group in groups for t in group]
    device = run.world.device
    ids = right_pad([prompt + completion for prompt, completion in rows], 0).to(device)
    mask = right_pad([[False] * len(p) + [True] * len(c) for p, c in rows], False).to(device)
    log_probs = run.policy.scorer(ids, mask, temperature=run.policy.params.temperature)
    return [(p + c, log_probs[i][mask[i]]) for i, (p, c) in enumerate(rows)]


@torch.no_grad()
def score_by_plain(run: plain.Run, trajectories: list) -> list[Scored]:
    ids, mask, columns = (x.to(run.model.device) for x in plain.trained_tokens(trajectories))
    with run.autocast():
        logits = run.model(input_ids=ids, use_cache=False, logits_to_keep=columns).logits
    temperature, mask = run.config["sampling.temperature"], mask[:, columns + 1]
    log_probs = plain.token_log_probs(logits, ids[:, columns + 1], temperature)
    return [(t.token_ids, log_probs[i][mask[i]]) for i, t in enumerate(trajectories)]
