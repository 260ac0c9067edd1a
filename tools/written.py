"""Compare the six functions of a folder's plain.py with this repository's: see tools.exercise.

Each gets the situations of docs/exercises/answers/situations.yaml, in processes of its own, the
ranks of a run. They are ended when a situation takes ten seconds.
"""

import logging
import os
import socket
import sys
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

TIME_S = 10
CLOSE = 1e-5  # another order of summation differs by less, relatively
SETTINGS = """training.num_samples_per_step=4 training.k_best_of_n=[8,8] training.warmup_steps=1
training.max_new_gen_tokens=64 training.micro_batch_tokens=700"""


def check(folder: Path, number: int | None) -> bool:
    """Print whether each function is right, or one; if all six are, also how they train."""
    situations = yaml.safe_load((ROOT / "docs/exercises/answers/situations.yaml").read_text())
    if not (folder / "plain.py").is_file() or number not in (None, *range(1, 1 + len(situations))):
        raise ValueError(f"--test {folder}: give a folder that --write has made, and 1 to 6")
    are_right = []
    for i, (name, own) in enumerate(situations.items(), start=1):
        if number in (None, i):
            print(f"{i}. {name}: ", end="", flush=True)
            num_ranks = 1 + (name == "accumulate_gradients")
            are_right.append(on_ranks(num_ranks, compare, folder, name, own))
            if are_right[-1]:
                print(f"right in {len(own)} situations")
    if not all(are_right) or number:
        return all(are_right)
    print("now both train for three steps, on two ranks", flush=True)
    return on_ranks(2, compare_training, folder)


def on_ranks(num_ranks: int, function: Callable, folder: Path, *arguments: object) -> bool:
    """Call it with the folder's module on each rank; whether none has ended with an error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
    where |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    logging.getLogger("torch.multiprocessing").setLevel("ERROR")  # one rank's end ends the other
    given = (where, function, folder.resolve(), *arguments)
    try:
        start_processes(begin, given, num_ranks, start_method="fork")
    except ProcessExitedException:  # it has said why
        return False
    return True


def begin(rank: int, where: dict, function: Callable, folder: Path, *arguments: object) -> None:
    where |= {"RANK": rank, "LOCAL_RANK": rank}
    os.environ |= {name: str(value) for name, value in where.items()}
    torch.set_num_threads(1)
    torch.set_printoptions(precision=7)
    del sys.modules["plain"]
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    function(import_module("plain"), *arguments)


def compare(theirs: ModuleType, name: str, situations: dict) -> None:
    """Print the first situation in which the function is wrong, and what both make of it."""
    for situation, given in situations.items():
        clock = Timer(TIME_S, end, [f"wrong, it does not end: {situation}\n     given     {given}"])
        clock.start()
        expected = outcome(plain, name, given)
        try:
            got = outcome(theirs, name, given)
            assert_close(got, expected, rtol=CLOSE, atol=1e-30, check_dtype=False)
        except NotImplementedError:
            end("not written yet")
        except Exception as error:
            got = got if isinstance(error, AssertionError) else repr(error)
            lines = {"given": given, "yours": got, "plain.py": expected}
            texts = [f"\n     {key:10}{value}" for key, value in lines.items()]
            end(f"wrong: {situation}{''.join(texts)}")
        clock.cancel()


def end(text: str) -> None:
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
        ids = ids.where(~is_padding, ids.clamp(max=0))
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


def compare_training(theirs: ModuleType) -> None:
    """On rank 0 print whether three steps give the same weights, else where they part."""
    run = plain.build_run(plain.read_config(SETTINGS.split()))
    start = parameters_to_vector(run.model.parameters()).detach()
    drawn: dict = {}
    ours = three_steps(plain, run, start, drawn)
    own = three_steps(theirs, run, start, {})
    same = [torch.equal(a, b) for (a, _), (b, _) in zip(ours, own, strict=True)]
    text, distance = "after three steps the weights equal plain.py's bit for bit", 0.0
    if not all(same):
        step = same.index(False)
        _, expected = ours[step]
        _, gradient = three_steps(theirs, run, start, drawn)[step]
        distance = ((gradient - expected).norm() / expected.norm()).item()
        text = f"the weights part from plain.py's in step {step + 1}; on the same completions the "
        text += f"gradient differs by {distance:.1e}, where {CLOSE} is right"
    if dist.get_rank() == 0:
        print(text, flush=True)
    os._exit(distance > CLOSE)


def three_steps(module: ModuleType, run: plain.Run, start: Tensor, drawn: dict) -> list[tuple]:
    """The weights after each step, and AdamW's mean gradient; `drawn`: completions by seed."""
    nn.utils.vector_to_parameters(start.clone(), run.model.parameters())
    run.optimizer.state.clear()
    sample = module.sample_trajectories
    module.sample_trajectories = partial(draw_once, sample, drawn)
    make = plain.countdown.generate_questions
    questions = make("train", options=run.options, num_examples=None, seed=0, exclude=[])
    steps = []
    for step in (1, 2, 3):
        module.train_step(run, questions, step)
        parameters = [*run.model.parameters()]
        means = [run.optimizer.state[parameter]["exp_avg"] for parameter in parameters]
        steps.append((parameters_to_vector(parameters).detach(), parameters_to_vector(means)))
    module.sample_trajectories = sample
    return steps


def draw_once(sample: Callable, drawn: dict, run: plain.Run, asked: list, *how: object) -> list:
    seed, _ = asked[0]
    if seed not in drawn:
        drawn[seed] = sample(run, asked, *how)
    return drawn[seed]
