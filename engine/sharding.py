"""Models larger than one GPU: weights, gradients and averages are cut into one part for each rank.

`model.shard: true` replaces DDP by PyTorch's FSDP2 (`fully_shard`). Rank r of N keeps the r-th of N
parts of each tensor, cut along its first dimension; in numbers of rows all parts are equal, but for
the last ones. A forward or backward pass gathers the weights of one block from all ranks just
before it needs them, and frees them afterwards. So every rank must make the same number of passes.

Arithmetic is that of DDP: weights are gathered in fp32, and each micro-batch's gradient is averaged
over the ranks at once and added up in fp32 parts, so no rank ever holds all of it.

With bf16 arithmetic, set model.gradient_checkpointing too. Without it, autograd keeps the bf16 copy
of every weight from the forward pass for the backward pass, as it does in DDP: 2 bytes a weight.

Sampling is one token at a time and would gather all weights for each. So a full copy samples, in
the compute dtype, into which each step's weights are gathered tensor by tensor.

Host memory: at the start each rank loads the whole model in fp32, 4 bytes a weight. Rank 0 needs
as much again whenever it saves best/, and each rank its part of a checkpoint, 12 bytes a weight
divided by N.
"""

import shutil
import time
import uuid
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from engine.checkpoint import sync
from engine.distributed import World

Batch = TypeVar("Batch")  # main.MicroBatch
SHARED_DISK_TIMEOUT_S = 30  # a network disk may show another node's new file late


# Training


def shard_scorer(scorer: nn.Module, world: World, *, keeps_root: bool) -> nn.Module:
    """Cut a CompletionScorer's weights into parts, in place, and put this rank's on its device.

    Each block gathers its own weights, the scorer all others: embeddings, last norm and head. With
    `keeps_root` these stay gathered from a forward pass to the end of its backward pass; without,
    as for a reference, whose passes are forward alone, they are freed at once.
    """
    if not dist.is_initialized():  # a rank alone gathers from itself
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    scorer.keeps_casts = False  # they would be a whole model in bf16, 2 bytes a weight
    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in blocks_of(scorer):
        fully_shard(block, mesh=mesh)
    return fully_shard(scorer, mesh=mesh, reshard_after_forward=not keeps_root)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The model's transformer blocks: the members of its list of modules with the most weights."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=count_weights))


def count_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def equal_passes(micro_batches: list[Batch], world: World) -> list[Batch]:
    """As many micro-batches as the rank with the most has: others are filled up with weight 0.

    A pass gathers weights, so a rank with fewer passes would let the others wait for ever.
    """
    counts = world.gather_rows([[len(micro_batches)]], shape=(world.size, 1))
    first = micro_batches[0]
    nothing = {
        "completion_mask": torch.zeros_like(first.completion_mask),
        "weights": torch.zeros_like(first.weights),
    }
    num_missing = int(counts.max()) - len(micro_batches)
    return micro_batches + [replace(first, **nothing) for _ in range(num_missing)]


# Whole tensors


def whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in the dtype, gathered from all ranks if it is cut into parts."""
    return tensor.to(dtype).full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gather_weights(model: nn.Module, world: World) -> dict[str, torch.Tensor]:
    """All of a model's weights and buffers by name, in rank 0's host memory; {} on other ranks.

    They are gathered one at a time, so that a GPU holds one of them at most. Names that share a
    tensor share the gathered one.
    """
    tensors, gathered = model.state_dict(keep_vars=True), {}
    for tensor in tensors.values():
        if id(tensor) not in gathered:
            on_device = whole(tensor, tensor.dtype)
            gathered[id(tensor)] = on_device.detach().cpu() if world.is_main else None
    return {name: gathered[id(tensor)] for name, tensor in tensors.items()} if world.is_main else {}


# Checkpoints: a part for each rank


def part_name(rank: int) -> str:
    return f"part-{rank:05d}.safetensors"


def save_parts(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, world: World
) -> int:
    """Write this rank's part of weights and averages into `folder`; returns how many ranks failed.

    The parts are on the disk itself when this returns. Rank 0 then moves them into the checkpoint,
    or drops them all if one failed, as on a full disk.
    """
    part, has_failed = {}, False
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        part |= {name: parameter} | {f"{name}/{key}": value for key, value in state.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / part_name(world.rank)
        save_file({name: local(tensor).cpu().contiguous() for name, tensor in part.items()}, file)
        sync(file)
    except (OSError, SafetensorError):
        has_failed = True
    return int(world.sum([has_failed]))


def move_parts(checkpoint: Path, *, written: Path, num_parts: int, num_failed: int) -> None:
    """Move what all ranks have written into the checkpoint; OSError if a rank has failed."""
    if num_failed > 0:
        shutil.rmtree(written, ignore_errors=True)
        raise OSError(f"{num_failed} of {num_parts} ranks could not write their part")
    for rank in range(num_parts):
        (written / part_name(rank)).rename(checkpoint / "training_state" / part_name(rank))


@torch.no_grad()
def load_parts(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, num_parts: int, rank: int
) -> None:
    """Overwrite this rank's part of weights and averages with a checkpoint's.

    The checkpoint may be of another number of ranks: a rank reads the rows that are its own now
    from wherever they are.
    """
    with ExitStack() as stack:
        paths = [folder / "training_state" / part_name(part) for part in range(num_parts)]
        parts = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        names = parts[0].keys()
        for name, parameter in model.named_parameters():
            local(parameter).copy_(read_rows(parts, name, parameter, rank))
            for entry in (entry for entry in names if entry.startswith(f"{name}/")):
                key = entry.removeprefix(f"{name}/")
                if not parts[0].get_slice(entry).get_shape():  # the number of steps taken
                    is_fused = optimizer.defaults["fused"]
                    device = parameter.device if is_fused else "cpu"
                    optimizer.state[parameter][key] = parts[0].get_tensor(entry).to(device)
                    continue
                average = torch.zeros_like(parameter)
                local(average).copy_(read_rows(parts, entry, parameter, rank))
                optimizer.state[parameter][key] = average


def read_rows(parts: list, name: str, like: DTensor, rank: int) -> torch.Tensor:
    """The rows of a tensor that belong to this rank's part of `like`, from those of all parts."""
    num_rows = len(local(like))
    # as torch.chunk cuts: ceil(rows / ranks) each, fewer or none for the last ranks
    start = min(rank * -(-like.shape[0] // like.device_mesh.size()), like.shape[0])
    found, offset = [torch.empty(0, *like.shape[1:], dtype=like.dtype)], 0
    for part in parts:
        rows = part.get_slice(name)
        length = rows.get_shape()[0]
        first, end = max(start - offset, 0), min(start + num_rows - offset, length)
        if first < end:
            found.append(rows[first:end])
        offset += length
    return torch.cat(found)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that is cut into parts; any other tensor as it is."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


def check_shared_disk(folder: Path, world: World) -> None:
    """Raises ValueError on all ranks if one of them does not see what rank 0 writes to `folder`."""
    token = folder / world.broadcast(f"token-{uuid.uuid4().hex}")
    if world.is_main:
        for left_by_a_kill in folder.glob("token-*"):
            left_by_a_kill.unlink()
        token.touch()
    world.sum([0.0])  # it is there from here on
    deadline = time.monotonic() + SHARED_DISK_TIMEOUT_S
    while not token.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    num_blind = int(world.sum([not token.exists()]))
    if world.is_main:
        token.unlink()
    if num_blind > 0:
        raise ValueError(
            f"model.shard = true: {num_blind} of {world.size} ranks do not see {folder} as rank 0 "
            "does, and each rank saves its part there: set run.dir to a disk that all nodes share"
        )
