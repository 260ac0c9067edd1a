"""What the processes of a run do together: sum numbers, broadcast rank 0's, and stop at signals."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import dotenv
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from engine.core.signals import LEAVABLE, Left, SignalWatch


@dataclass
class World:
    """This process among those that torchrun started; alone if it started none."""

    rank: int
    size: int
    device: torch.device
    stop_signal: int = 0  # SIGTERM, SIGINT or SIGHUP: one that a rank had got when all were asked

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @functools.cached_property
    def signals(self) -> SignalWatch:
        return SignalWatch(is_main=self.is_main)

    def sum(self, values: list[float] | np.ndarray | torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in float64 on the CPU."""
        total = torch.as_tensor(values, dtype=torch.float64, device="cpu").clone()
        if self.size > 1:
            dist.all_reduce(total)
        return total

    def ask_whether_to_stop(self) -> None:
        """Let all ranks learn of a signal to one of them, so that they stop together."""
        self.stop_signal = max(self.gather(self.signals.first))

    @contextlib.contextmanager
    def left_by_all(self) -> Iterator[None]:
        """A block without collectives, which a signal ends at the next token, on all ranks by Left.

        Each rank looks at its own signals there. Behind the block they ask each other once.
        """
        LEAVABLE.watch = self.signals
        try:
            with contextlib.suppress(Left):
                yield
        finally:
            LEAVABLE.watch = None
        self.ask_whether_to_stop()
        if self.stop_signal:
            raise Left

    def share(self, items: Sequence[Any]) -> Sequence[Any]:
        """This rank's share of what all ranks divide: the items rank, rank + size and so on."""
        return items[self.rank :: self.size]

    def gather_rows(self, mine: list, shape: tuple[int, int]) -> np.ndarray:
        """A table's rows from all ranks; `mine` are this rank's `share` of them."""
        table = np.zeros(shape)
        table[self.rank :: self.size] = np.reshape(mine, (-1, shape[1]))  # `mine` may be empty
        return self.sum(table).numpy()

    def gather(self, value: object) -> list[Any]:
        """The values of all ranks, on every rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: object) -> object:
        """Rank 0's value, on every rank."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def on_main(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call it on rank 0; every rank returns its value, or raises its error as a ValueError."""
        value = problem = None
        if self.is_main:
            try:
                value = function(*arguments)
            except (ValueError, OSError) as error:  # a user's mistake, a full disk
                problem = str(error)
        value, problem = self.broadcast((value, problem))
        if problem is not None:
            raise ValueError(problem)
        return value

    def broadcast_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Give every rank the weights and averages of rank 0, which alone may see checkpoints."""
        if self.size == 1:
            return
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            state = optimizer.state[parameter]
            shapes = {k: v.to("meta") if torch.is_tensor(v) else v for k, v in state.items()}
            for name, value in self.broadcast(shapes).items():
                if not torch.is_tensor(value):
                    state[name] = value
                elif name not in state:  # all are on the parameter's device
                    state[name] = torch.empty_like(value, device=parameter.device)
            for tensor in (parameter.data, *filter(torch.is_tensor, state.values())):
                dist.broadcast(tensor, src=0)

    def leave(self) -> None:
        """Wait for the other ranks and leave the process group; signals then end the process again.

        Delete the DDP wrapper before this: its destructor tears down gloo while it holds Python's
        lock, and a gloo thread that needs the lock would deadlock.
        """
        self.sum([0.0])  # rank 0 may be saving: where a rank exits, torchrun ends the others
        if dist.is_initialized():  # by one rank too, with model.shard
            dist.destroy_process_group()
        self.signals.stop()


def init_world() -> World:
    """Choose the device and join the process group, by torchrun's variables if it set them.

    Raises ValueError if torchrun has restarted this process: it gives all starts one store (pytorch
    issue 135712), in which gloo and NCCL would find the addresses of killed ranks, and hang.
    """
    dotenv.load_dotenv(".env")  # sets what the environment leaves unset, such as HF_TOKEN
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        raise ValueError(
            "torchrun has restarted the run (--max-restarts), which is not supported: start the "
            "command again, it resumes"
        )
    defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    values = {name: int(os.environ.get(name, default)) for name, default in defaults.items()}
    rank, size, local_rank, local_size = values.values()
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise ValueError(f"{values}: start with torchrun, which sets these, or unset them all")
    device = torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if num_gpus >= local_size:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        # On new GPUs torch prefers cuDNN's attention, which plans anew for each shape: about 1 s
        # for a micro-batch on a B200, as github.com/modelscope/FunASR, issue 3704, reports.
        torch.backends.cuda.enable_cudnn_sdp(False)
    elif num_gpus > 0 and rank == 0:
        print(f"{local_size} processes but {num_gpus} GPUs: running on the CPU", flush=True)
    elif torch.backends.mps.is_available() and local_size == 1:  # Apple's GPU, for one process
        device = torch.device("mps")
    if size > 1:  # numbers and texts travel by gloo, gradients on GPUs by NCCL
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(minutes=30),
        )
    return World(rank, size, device)


def order_ddp_buckets(scorer: nn.Module, device: torch.device) -> None:
    """Run two backward passes without effect, so that DDP's buckets are as they will stay.

    DDP orders its buckets of gradients by the first backward pass, and makes them anew at the next
    forward pass. The order changes how averages over 3 ranks or more are rounded, so a resumed run
    would differ in its first step. After the second pass the gradients are inside the new buckets.
    Set to None in place of 0, they would be made beside the buckets, and held twice.
    """
    if not isinstance(scorer, DistributedDataParallel):
        return
    ids = torch.zeros((1, 2), dtype=torch.long, device=device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    for is_ordered in (False, True):
        (0.0 * scorer(ids, mask, temperature=1.0).sum()).backward()
        scorer.zero_grad(set_to_none=not is_ordered)
