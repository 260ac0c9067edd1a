"""Compare the six functions of a folder's plain.py with this repository's: see tools.exercise.

Each gets the situations of docs/exercises/answers/situations.yaml, in two processes of the
folder's, the ranks of a run. They are ended when a situation takes ten seconds.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Timer
from types import ModuleType

import numpy as np
import torch
import torch._dynamo  # which DDP imports: here, once and before the clock starts
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.multiprocessing import ProcessExitedException, start_processes
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

import plain
from engine import ROOT

SITUATIONS = yaml.safe_load((ROOT / "docs/exercises/answers/situations.yaml").read_text())
TIME_S = 10
CLOSE = 1e-5  # another order of summation differs by less, relatively
SETTINGS = """training.num_samples_per_step=4 training.k_best_of_n=[8,8] training.warmup_steps=1
training.max_new_gen_tokens=64 training.micro_batch_tokens=700"""


def check(folder: Path, number: int | None) -> bool:
    """Print whether each function is right, or one; if all six are, also how they train."""
    if not (folder / "plain.py").is_file() or number not in (None, 1, 2, 3, 4, 5, 6):
        raise ValueError(f"--test {folder}: give a folder that --write has made, and 1 to 6")
    is_right = on_two_ranks(check_functions, folder, number)
    return is_right and (number is not None or on_two_ranks(train_alike, folder))


def on_two_ranks(function: Callable[..., bool], folder: Path, *arguments: object) -> bool:
    """Whether it is true of the folder's module on both ranks, which say what they find."""
    logging.getLogger("torch.multiprocessing").setLevel("ERROR")  # one rank's end ends the other
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        given = (free.getsockname()[1], function, folder.resolve(), *arguments)
    try:
        start_processes(call_on_rank, given, 2, start_method="fork")
    except ProcessExitedException:
        return False
    return True


def call_on_rank(rank: int, port: int, function: Callable, folder: Path, *given: object) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2}
    where |= {"LOCAL_WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank}
    os.environ |= {name: str(value) for name, value in where.items()}
    torch.set_num_threads(1)
    torch.set_printoptions(precision=7)
    del sys.modules["plain"]
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    try:
        theirs = import_module("plain")
    except Exception as error:
        give_up(f"{folder}/plain.py: {error!r}")
    os._exit(not function(theirs, *given))


def check_functions(theirs: ModuleType, number: int | None) -> bool:
    is_right = True
    for i, name in enumerate(SITUATIONS, start=1):
        rank = int(os.environ["RANK"])
        if number in (None, i) and (rank == 0 or name == "accumulate_gradients"):
            problem = find_problem(theirs, name)
            is_right &= problem == ""
            if rank == 0 or problem:
                time.sleep(3 * rank)  # if rank 0 says it too, its end ends this one before
                right = f"right in {len(SITUATIONS[name])} situations"
                print(f"{i}. {name}: {problem or right}", flush=True)
    return is_right


def find_problem(theirs: ModuleType, name: str) -> str:
    """The first situation in which the function is wrong, and what both make of it, or ""."""
    for situation, given in SITUATIONS[name].items():
        text = f"wrong: {situation}\n     given     {given}\n     yours     "
        clock = Timer(TIME_S, give_up, [f"{name}: {text}nothing within {TIME_S} s"])
        clock.start()
        expected = outcome(plain, name, given)
        got = None
        try:
            got = outcome(theirs, name, given)
            assert_close(got, expected, rtol=CLOSE, atol=1e-30, check_dtype=False)
        except NotImplementedError:
            return "not written yet"
        except Exception as error:
            return f"{text}{repr(error) if got is None else got}\n     plain.py  {expected}"
        finally:
            clock.cancel()
    return ""


def give_up(text: str) -> None:
    time.sleep(3 * int(os.environ["RANK"]))
    print(text, flush=True)
    os._exit(1)


def outcome(module: ModuleType, name: str, given: dict) -> object:
    """What the function returns, and what else it does: the gradient."""
    arguments = make_arguments(module, name, **given)
    before = repr(arguments)
    output = getattr(module, name)(**arguments)
    if repr(arguments) != before:
        return "it has changed what it was given"
    if name == "trained_tokens":  # which token stands in a row's padding is free, if it is one
        ids, mask, columns = output
        lengths = torch.tensor([[len(t.token_ids)] for t in arguments["trajectories"]])
        is_padding = torch.arange(ids.shape[1]) >= lengths
        ids = ids.where(~is_padding | (ids.clamp(0, 553) != ids), 0)
        return {"ids": ids, "mask": mask, "columns": columns}
    if name == "token_log_probs":
        (gradient,) = torch.autograd.grad(output.sum(), arguments["logits"])
        return {"log-probabilities": output.detach(), "gradient of their sum": gradient}
    if name == "accumulate_gradients":
        return {"loss": output, "gradient": arguments["policy"].module.weight.grad}
    return output


def make_arguments(
    module: ModuleType, name: str, *, dtype: str = "float32", **given: object
) -> dict:
    if name == "trained_tokens":
        return {"trajectories": [module.Trajectory(*row) for row in given["trajectories"]]}
    if name == "accumulate_gradients":
        dist.is_initialized() or dist.init_process_group()
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 2.0)
        policy = nn.parallel.DistributedDataParallel(model, forward_sync_buffers=False)
        mine = given["micro_batches"][dist.get_rank()]
        return {"policy": policy, "micro_batches": mine, "loss_of": partial(loss_of, policy)}
    for key, value in given.items():
        if isinstance(value, list):
            given[key] = torch.from_numpy(np.array(value))
    if "logits" in given:  # of a model that is trained
        given["logits"] = given["logits"].to(getattr(torch, dtype)).requires_grad_() * 1
    return given


def loss_of(policy: nn.Module, micro_batch: list) -> Tensor:
    return policy(torch.tensor(micro_batch)[:, None]).sum()


def train_alike(theirs: ModuleType) -> bool:
    """Whether three steps give the same weights, or the same update on the same completions."""
    run = plain.build_run(plain.read_config(SETTINGS.split()))
    start = parameters_to_vector(run.model.parameters()).detach()
    drawn: dict = {}
    expected, weights = three_steps(plain, run, start, drawn)
    rows, own_weights = three_steps(theirs, run, start, {})
    text, distance = "after three steps the weights equal plain.py's bit for bit", 0.0
    if not torch.equal(weights, own_weights):
        step = next((i for i in range(3) if rows[i] != expected[i]), 2)
        again, _ = three_steps(theirs, run, start, drawn)
        norm, own_norm = (steps[step]["train/grad_norm"] for steps in (expected, again))
        distance = abs(own_norm / norm - 1)
        text = f"plain.py's run parts from yours in step {step + 1}; on the same completions "
        text += f"the gradient's norm differs by {distance:.1e} (up to {CLOSE} is right)"
    plain.say(text)
    return distance <= CLOSE


def three_steps(module: ModuleType, run: plain.Run, start: Tensor, drawn: dict) -> tuple:
    """What each step measures, and the weights behind them; `drawn`: completions by their seed."""
    nn.utils.vector_to_parameters(start.clone(), run.model.parameters())
    run.optimizer.state.clear()
    sample = module.sample_trajectories
    module.sample_trajectories = partial(draw_once, sample, drawn)
    make = plain.countdown.generate_questions
    questions = make("train", options=run.options, num_examples=99, seed=0, exclude=[])
    rows = [module.train_step(run, questions, step) for step in (1, 2, 3)]
    module.sample_trajectories = sample
    return rows, parameters_to_vector(run.model.parameters()).detach()


def draw_once(sample: Callable, drawn: dict, run: plain.Run, asked: list, *how: object) -> list:
    seed, _ = asked[0]
    if seed not in drawn:
        drawn[seed] = sample(run, asked, *how)
    return drawn[seed]
