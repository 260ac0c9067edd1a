"""Compare the six functions of a folder's plain.py with this repository's: see tools.exercise.

Each gets the situations of docs/exercises/answers/situations.yaml, in two processes of the
folder's, the ranks of a run. They are ended when a situation takes ten seconds.
"""

import logging
import os
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
    if not (folder / "plain.py").is_file() or number not in (None, *range(1, 7)):
        raise ValueError(f"--test {folder}: give a folder that --write has made, and 1 to 6")
    is_right = on_two_ranks(check_functions, folder, number)
    return is_right and (number is not None or on_two_ranks(train_alike, folder))


def on_two_ranks(function: Callable[..., bool], folder: Path, *arguments: object) -> bool:
    """Whether it is true of the folder's module on both ranks, which say what they find."""
    logging.getLogger("torch.multiprocessing").setLevel("ERROR")  # one rank's end ends the other
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = (store.port, function, folder, *arguments)
    try:
        start_processes(call_on_rank, given, 2, start_method="fork")
    except ProcessExitedException as error:
        if error.signal_name:  # gloo aborts where two ranks meet in different calls
            print("6. accumulate_gradients: wrong: the ranks do not make the same calls")
        return False
    return True


def call_on_rank(rank: int, port: int, function: Callable, folder: Path, *given: object) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is the parent's
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
    dist.init_process_group("gloo")
    problems = ""
    for i, name in enumerate(SITUATIONS, start=1):
        if number in (None, i):
            problem = find_problem(theirs, name, f"{i}. {name}: ")
            plain.say(problem or f"{i}. {name}: right in {len(SITUATIONS[name])} situations")
            problems += problem
    if problems and dist.get_rank() == 1:  # if rank 0 says so too, its end ends this one before
        give_up(problems)
    return not problems


def find_problem(theirs: ModuleType, name: str, label: str) -> str:
    """The first situation in which the function is wrong, and what both make of it, or ""."""
    for situation, given in SITUATIONS[name].items():
        text = f"{label}wrong: {situation}\n     given     {given}\n     yours     "
        clock = Timer(TIME_S, give_up, [f"{text}nothing within {TIME_S} s"])
        clock.start()
        expected = outcome(plain, name, given)
        got = None
        try:
            got = outcome(theirs, name, given)
            is_index = name in ("draw_tokens", "trained_tokens")
            assert_close(got, expected, rtol=CLOSE, atol=1e-30, check_dtype=is_index)
        except NotImplementedError:
            return f"{label}not written yet"
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
    function = getattr(module, name)
    arguments = make_arguments(module, name, **given)
    before = repr(arguments)
    output = function(**arguments)
    if repr(arguments) != before:
        return "it has changed what it was given"
    if name == "trained_tokens":  # which token stands in a row's padding is free, if it is one
        ids, mask, columns = output
        lengths = torch.tensor([[len(t.token_ids)] for t in arguments["trajectories"]])
        is_padding = torch.arange(ids.shape[1]) >= lengths
        ids = ids.where(~is_padding | (ids < 0), 0)
        return {"ids": ids, "mask": mask, "columns": columns}
    if name == "token_log_probs":
        (gradient,) = torch.autograd.grad(output.sum(), arguments["logits"])
        return {"log-probabilities": output.detach(), "gradient of their sum": gradient}
    if name == "accumulate_gradients":
        arguments["policy"].zero_grad()
        output = function(**arguments)  # as in a second step
        gradients = [parameter.grad for parameter in arguments["policy"].parameters()]
        return {"loss": output, "gradients of weight and bias": gradients}
    return output


def make_arguments(
    module: ModuleType, name: str, *, dtype: str = "float32", **given: object
) -> dict:
    if name == "trained_tokens":
        return {"trajectories": [module.Trajectory(*row) for row in given["trajectories"]]}
    if name == "accumulate_gradients":
        batches = given["micro_batches"]
        if len(batches) < dist.get_world_size():  # each rank alone
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = nn.Linear(1, 1)
        nn.utils.vector_to_parameters(torch.tensor([2.0, -4.0]), model.parameters())
        policy = nn.parallel.DistributedDataParallel(model, forward_sync_buffers=False)
        mine = batches[dist.get_rank()]
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
    """Whether three steps give the same weights, or the same gradient on the same completions."""
    run = plain.build_run(plain.read_config(SETTINGS.split()))
    make = plain.countdown.generate_questions
    questions = make("train", options=run.options, num_examples=99, seed=0, exclude=[])
    start = parameters_to_vector(run.model.parameters()).detach()
    expected, norms = train(plain, run, questions, start)
    weights, _ = train(theirs, run, questions, start)
    parted = [step for step in (1, 2, 3) if not torch.equal(weights[step], expected[step])]
    if not parted:
        plain.say("after three steps the weights equal plain.py's bit for bit")
        return True
    theirs.sample_trajectories = plain.sample_trajectories  # by the same weights: the same
    _, (norm,) = train(theirs, run, questions, expected[parted[0] - 1], parted[:1])
    distance = abs(norm / norms[parted[0] - 1] - 1)
    plain.say(f"plain.py's run parts from yours in step {parted[0]}; on the same completions")
    plain.say(f"the gradient's norm differs by {distance:.1e} (up to {CLOSE} is right)")
    return distance <= CLOSE


def train(
    module: ModuleType, run: plain.Run, questions: list, start: Tensor, steps: tuple = (1, 2, 3)
) -> tuple[list[Tensor], list[float]]:
    """The weights before and after each step, and the norm of each step's gradient."""
    nn.utils.vector_to_parameters(start.clone(), run.model.parameters())
    run.optimizer.state.clear()
    weights = [start]
    norms = []
    for step in steps:
        norms.append(module.train_step(run, questions, step)["train/grad_norm"])
        weights.append(parameters_to_vector(run.model.parameters()).detach())
    return weights, norms
