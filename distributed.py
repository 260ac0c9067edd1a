"""Several processes as one: who is there, sums over all, and what rank 0 tells the others."""

import contextlib
import os
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from config import Config


@dataclass(frozen=True)
class World:
    """This process among those that torchrun started; alone if it started none."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: list[float] | np.ndarray | torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in float64 on the CPU."""
        total = torch.as_tensor(values, dtype=torch.float64, device="cpu").clone()
        if self.size > 1:
            dist.all_reduce(total)
        return total

    def gather_rows(self, mine: list, *, shape: tuple[int, int]) -> np.ndarray:
        """A table of numbers on every rank; this one has the rows rank, rank + size and so on."""
        table = np.zeros(shape)
        table[self.rank :: self.size] = np.reshape(mine, (-1, shape[1]))  # there may be none
        return self.sum(table).numpy()

    def tell(self, value: object) -> object:
        """Rank 0's value, on every rank."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def tell_tensor(self, tensor: torch.Tensor) -> None:
        """Overwrite the tensor by rank 0's."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)


def questions_per_rank(config: Config, num_ranks: int) -> int:
    """Training questions of a step on each rank."""
    training = config.training
    if training.num_samples_per_step_global is None:
        return training.num_samples_per_step
    return training.num_samples_per_step_global // num_ranks  # `check_world`: it is a multiple


def init_world() -> tuple[World, list[str]]:
    """Join the process group and choose the device; also what the user should know about it."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device, notes = torch.device("cpu"), []
    num_gpus = torch.cuda.device_count()
    if num_gpus >= local_size:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    elif num_gpus > 0:
        notes.append(f"{local_size} processes but {num_gpus} GPUs: running on the CPU")
    elif torch.backends.mps.is_available():
        if local_size == 1:
            device = torch.device("mps")
        else:
            notes.append("several processes cannot share Apple's GPU: running on the CPU")
    if size > 1:  # numbers and texts travel by gloo, gradients on GPUs by NCCL
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(minutes=30)
        store, *_ = next(dist.rendezvous("env://", timeout=timeout))
        store = dist.PrefixStore(agree_on_start(store, rank, size), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return World(rank, size, device), notes


def agree_on_start(store: dist.Store, rank: int, size: int) -> str:
    """A name that the ranks of this start share, and no earlier start had.

    `torchrun --max-restarts` gives every start the same store (pytorch issue 135712). Under the
    same name gloo and NCCL would find in it the addresses of ranks that are gone, and hang. Its
    count of restarts is no such name: it can differ between nodes.
    """
    name = uuid.uuid4().hex  # rank 0's is the start's, another's tells it from its predecessors
    if rank > 0:
        store.set(f"rank-{rank}", name)
        start = store.get(f"start-of-{name}").decode()
        store.set(f"{start}-has-{rank}", "")
        return start
    for other in range(1, size):
        while not store.check([f"{name}-has-{other}"]):  # until it is not its predecessor's
            store.set(f"start-of-{store.get(f'rank-{other}').decode()}", name)
            time.sleep(0.01)
    return name


def tell_optimizer(world: World, optimizer: torch.optim.Optimizer) -> None:
    """Rank 0's averages on every rank, where there may be no file to read them from."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    layout = [
        {name: describe(value) for name, value in optimizer.state[p].items()} for p in parameters
    ]
    for parameter, described in zip(parameters, world.tell(layout), strict=True):
        state = optimizer.state[parameter]
        for name, what in described.items():
            if isinstance(what, tuple):
                shape, dtype, kind = what
                device = "cpu" if kind == "cpu" else parameter.device
                state.setdefault(name, torch.empty(shape, dtype=dtype, device=device))
                world.tell_tensor(state[name])
            else:
                state[name] = what


def describe(value: object) -> object:
    """What it takes to make room for a tensor; any other value is itself."""
    is_tensor = isinstance(value, torch.Tensor)
    return (value.shape, value.dtype, value.device.type) if is_tensor else value


def no_sync(scorer: nn.Module):
    """Gradients add up on this rank only, where DDP would average them over the ranks."""
    is_ddp = isinstance(scorer, DistributedDataParallel)
    return scorer.no_sync() if is_ddp else contextlib.nullcontext()


def settle_buckets(scorer: nn.Module, device: torch.device) -> None:
    """One backward pass without effect: DDP orders its buckets by the first one it sees.

    Gradients are summed in that order, so that from 3 ranks on a resumed run would differ from the
    unbroken one in its first step.
    """
    ids = torch.zeros((1, 2), dtype=torch.long, device=device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    log_probs = scorer(ids, mask, num_tokens=1, temperature=1.0)
    (0.0 * log_probs.sum()).backward()
    scorer.zero_grad()
