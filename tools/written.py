"""Compare the six functions of a folder's plain.py with this repository's: see tools.exercise.

Each function gets the situations of docs/exercises/answers/situations.yaml, in two processes of the
folder's own, the ranks of a run, which are ended ten seconds after their imports.
"""

import json
import multiprocessing
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib import import_module
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # which DDP imports
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import plain  # noqa: F401 - what it imports, before the ranks' clocks start
from engine import ROOT

TIME_S, TRAINING_S = 10, 600  # of a function's situations, of three steps
CLOSE = 1e-5  # another order of summation differs by less, relatively
SETTINGS = """training.num_samples_per_step=4 training.k_best_of_n=[8,8] training.warmup_steps=1
training.max_new_gen_tokens=64 training.micro_batch_tokens=700"""


def check(folder: Path, number: int | None) -> bool:
    """Print whether each function is right, or one; if all six are, also how they train."""
    situations = yaml.safe_load((ROOT / "docs/exercises/answers/situations.yaml").read_text())
    if not (folder / "plain.py").is_file() or number not in (None, *range(1, len(situations) + 1)):
        raise ValueError(f"--test {folder} {number or ''}: give a folder of --write, and 1 to 6")
    is_right = True
    with two_ranks(ROOT, TRAINING_S) as ours:
        for i, (name, own) in enumerate(situations.items(), start=1):
            if number in (None, i):
                with two_ranks(folder, TIME_S) as theirs:
                    problem = find_problem(name, own, ours, theirs)
                print(f"{i}. {name}: {problem or f'right in {len(own)} situations'}", flush=True)
                is_right &= problem == ""
    if not is_right or number is not None:
        return is_right
    print("all six are right; now three steps of both, on two ranks", flush=True)
    distance, sentence = compare_training(folder)
    print(sentence)
    return distance <= CLOSE


@contextmanager
def two_ranks(folder: Path, seconds: float) -> Iterator[Callable]:
    """Two processes for the folder's plain.py; yields what calls a function in both."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # a free one
    fork = multiprocessing.get_context("fork")  # the packages are imported already
    pools = [fork.Pool(1, begin_rank, (folder.resolve(), rank, port)) for rank in (0, 1)]
    try:
        yield partial(call_both, pools, time.monotonic() + seconds)
    finally:
        for pool in pools:
            pool.terminate()


def begin_rank(folder: Path, rank: int, port: int) -> None:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    ranks |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    for name in ("plain", "countdown"):
        sys.modules.pop(name, None)
    torch.set_num_threads(1)


def call_both(pools: list[Pool], deadline: float, function: Callable, *arguments: object) -> list:
    """What the function returns on each rank, or why it did not."""
    calls = [pool.apply_async(function, arguments) for pool in pools]
    return [result_of(call, deadline) for call in calls]


def result_of(call: multiprocessing.pool.AsyncResult, deadline: float) -> object:
    try:
        return call.get(max(0, deadline - time.monotonic()))
    except multiprocessing.TimeoutError:
        return "nothing: its time is over, or it has ended the process"
    except Exception as error:
        return repr(error)


def find_problem(name: str, situations: dict, ours: Callable, theirs: Callable) -> str:
    """The first situation in which the function is wrong, and what both make of it, or ""."""
    for situation, given in situations.items():
        pairs = zip(theirs(outcome, name, given), ours(outcome, name, given), strict=True)
        for rank, (got, expected) in enumerate(pairs):
            if got == "NotImplementedError()":
                return "not written yet"
            if not agrees(got, expected):
                lines = {"given": given, "yours": got, "plain.py": expected}
                texts = [f"\n     {key:10}{rounded(value)}" for key, value in lines.items()]
                return f"wrong{' on rank 1' * rank}: {situation}" + "".join(texts)
    return ""


def rounded(value: object) -> str:
    return re.sub(r"\d+\.\d{6,}", lambda digits: f"{float(digits[0]):.6g}", str(value))


def agrees(got: object, expected: object) -> bool:
    if isinstance(expected, list):
        is_long = isinstance(got, list) and len(got) == len(expected)
        return is_long and all(map(agrees, got, expected))
    if type(expected) is int:  # a token's id, a column
        return type(got) is int and got == expected
    is_number = isinstance(got, (int, float))
    return is_number and abs(got - expected) <= CLOSE * abs(expected)


# On a rank of the folder's


def outcome(name: str, given: dict) -> list | str:
    """What the function makes of a situation, in lists."""
    arguments = MAKE.get(name, make_tensors)(**given)
    before = repr(arguments)
    output = getattr(import_module("plain"), name)(**arguments)
    if repr(arguments) != before:
        return "it has changed what it was given"
    return in_lists(SEE[name](output, **arguments) if name in SEE else output)


def in_lists(value: object) -> object:
    if isinstance(value, Tensor):
        return value.tolist()
    return [in_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def make_tensors(dtype: str = "float32", **given: object) -> dict:
    """Rewards are float64, logits come from a model that is trained."""
    dtypes = {"rewards": torch.float64, "logits": getattr(torch, dtype)}
    for key, value in given.items():
        if isinstance(value, list):
            given[key] = torch.tensor(value, dtype=dtypes.get(key))
    if "logits" in given:
        given["logits"] = given["logits"].requires_grad_() * 1
    return given


def make_trajectories(trajectories: list) -> dict:
    make = import_module("plain").Trajectory
    made = [make(ids, num, {"truncated_frac": bool(cut)}) for ids, num, *cut in trajectories]
    return {"trajectories": made}


def make_micro_batches(micro_batches: list) -> dict:
    """Of this rank, with a model that has one weight, 2."""
    dist.is_initialized() or dist.init_process_group()
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    policy = nn.parallel.DistributedDataParallel(model, forward_sync_buffers=False)
    mine = micro_batches[dist.get_rank()]
    return {"policy": policy, "micro_batches": mine, "loss_of": partial(loss_of, policy)}


def loss_of(policy: nn.Module, micro_batch: list) -> Tensor:
    return policy(torch.tensor(micro_batch)[:, None]).sum()


def see_tokens(output: tuple, trajectories: list) -> list:
    """Which token stands in a row's padding is free, if it is one."""
    ids, mask, columns = output
    lengths = torch.tensor([len(t.token_ids) for t in trajectories])
    is_padding = torch.arange(ids.shape[1]) >= lengths[:, None]
    return [ids.where(~is_padding, ids.clamp(max=0)), mask, columns]


def see_gradient(log_probs: Tensor, logits: Tensor, **arguments: object) -> list:
    return [log_probs, *torch.autograd.grad(log_probs.sum(), logits)]


def see_model(loss: float, policy: nn.Module, **arguments: object) -> list:
    json.dumps(loss)  # it is logged
    return [loss, policy.module.weight.grad]


MAKE = {"trained_tokens": make_trajectories, "accumulate_gradients": make_micro_batches}
SEE = {"trained_tokens": see_tokens, "token_log_probs": see_gradient}
SEE["accumulate_gradients"] = see_model


# Three steps


def compare_training(folder: Path) -> tuple[float, str]:
    """How far the folder's update is from ours on the same completions, and that in words."""
    expected = train_both(ROOT, None)
    got = train_both(folder, None)
    same = [np.array_equal(a["weights"], b["weights"]) for a, b in zip(got, expected, strict=True)]
    if all(same):
        return 0.0, "after three steps the weights equal plain.py's bit for bit"
    parted = same.index(False)
    replayed = train_both(folder, [step["drawn"] for step in expected])[parted]
    ours = expected[parted]["gradient"]
    distance = np.linalg.norm(replayed["gradient"] - ours) / np.linalg.norm(ours)
    parting = f"the weights part from plain.py's in step {parted + 1}; on the same completions"
    return distance, f"{parting} the gradient differs by {distance:.1e} (right: {CLOSE} at most)"


def train_both(folder: Path, drawn: list | None) -> list[dict]:
    """Each step as rank 0 has seen it, with what both ranks have drawn; raises ValueError."""
    with two_ranks(folder, TRAINING_S) as call:
        ranks = call(train, drawn)
    if not all(isinstance(steps, list) for steps in ranks):
        raise ValueError(f"{folder}: the training gave {ranks}")
    return [a | {"drawn": [a["drawn"], b["drawn"]]} for a, b in zip(*ranks, strict=True)]


def train(drawn: list | None) -> list[dict]:
    """What each of three steps draws, AdamW's mean gradient and the weights after it.

    `drawn`: for each step and rank, the completions to take in place of sampled ones.
    """
    own, steps = import_module("plain"), []
    own.sample_trajectories = partial(sample, own.sample_trajectories, drawn, steps)
    with redirect_stdout(None):
        run = own.build_run(own.read_config(SETTINGS.split()))
    make = own.countdown.generate_questions
    questions = make("train", options=run.options, num_examples=None, seed=0, exclude=[])
    parameters = [*run.model.parameters()]
    for step in (1, 2, 3):
        own.train_step(run, questions, step)
        means = [run.optimizer.state[parameter]["exp_avg"] for parameter in parameters]
        for name, tensors in (("weights", parameters), ("gradient", means)):
            steps[-1][name] = parameters_to_vector(tensors).detach().cpu().numpy()
    return steps


def sample(own_sample: Callable, drawn: list | None, steps: list, *arguments: object) -> list:
    given = drawn[len(steps)][dist.get_rank()] if drawn else own_sample(*arguments)
    steps.append({"drawn": given})
    return given
