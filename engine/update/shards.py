"""Models larger than one GPU: each rank keeps a part of the weights, gradients and averages.

`model.shard: true` replaces DDP by PyTorch's FSDP2 (`fully_shard`), which cuts each tensor along
its first dimension. A forward or backward pass gathers a block's weights from all ranks just before
it needs them, and frees them afterwards. So every rank must make the same number of passes.

The arithmetic is that of DDP: weights are gathered in fp32, and each micro-batch's gradient is
averaged over the ranks at once and added to fp32 parts, so no rank ever holds all of it. Since
sampling would gather all weights for every token, a full copy in the compute dtype samples.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from engine.core.distributed import World
from engine.core.files import sync
from engine.core.tensors import local, whole
from engine.core.types import MicroBatch

PART = "part-{:05d}.safetensors"  # a rank's file in a checkpoint


def shard_scorer(scorer: nn.Module, world: World, *, reshard_after_forward: bool) -> nn.Module:
    """Cut a CompletionScorer's weights in place, and put this rank's parts on its device.

    Each block gathers its own weights, the scorer all others: embeddings, last norm and head. These
    stay gathered until the backward pass has ended, or, for a reference, the forward pass.
    """
    if not dist.is_initialized():  # there is one rank, which gathers from itself
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(world.device.type, (world.size,))
    lists = [module for module in scorer.modules() if isinstance(module, nn.ModuleList)]
    # The blocks are the list with the most weights.
    for block in max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters())):
        fully_shard(block, mesh=mesh)
    return fully_shard(scorer, mesh=mesh, reshard_after_forward=reshard_after_forward)


def equal_passes(micro_batches: list[MicroBatch], world: World) -> list[MicroBatch]:
    """Add micro-batches of weight 0 until this rank has as many as the rank with the most."""
    first = micro_batches[0]
    num_missing = max(world.gather(len(micro_batches))) - len(micro_batches)
    return micro_batches + [
        replace(first, trajectories=[], token_weights=torch.zeros_like(first.token_weights))
        for _ in range(num_missing)
    ]


@torch.no_grad()
def gather_weights(model: nn.Module, world: World) -> dict[str, torch.Tensor]:
    """All of a model's weights and buffers by name, in rank 0's host memory; {} on other ranks."""
    tensors = model.state_dict(keep_vars=True)
    gathered = {}
    for tensor in tensors.values():  # one at a time, so that a GPU holds at most one
        if id(tensor) not in gathered:  # tied weights stay tied
            on_device = whole(tensor, tensor.dtype)
            gathered[id(tensor)] = on_device.detach().cpu() if world.is_main else None
    return {name: gathered[id(tensor)] for name, tensor in tensors.items()} if world.is_main else {}


def save_parts(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, world: World
) -> int:
    """Write this rank's part of weights and averages to disk; returns how many ranks failed."""
    part = {}
    has_failed = False
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        part |= {name: parameter} | {f"{name}/{key}": value for key, value in state.items()}
    file = folder / PART.format(world.rank)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: local(tensor).cpu().contiguous() for name, tensor in part.items()}, file)
        sync(file)
    except (OSError, SafetensorError):  # such as a full disk
        has_failed = True
    return int(world.sum([has_failed]))


def move_parts(checkpoint: Path, *, written: Path, num_parts: int, num_failed: int) -> None:
    """Move all ranks' parts into the checkpoint; if a rank has failed, drop them: OSError."""
    if num_failed > 0:
        shutil.rmtree(written, ignore_errors=True)
        raise OSError(f"{num_failed} of {num_parts} ranks could not write their part")
    for rank in range(num_parts):
        (written / PART.format(rank)).rename(checkpoint / "training_state" / PART.format(rank))


@torch.no_grad()
def load_parts(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, num_parts: int, rank: int
) -> None:
    """Read this rank's part of weights and averages, from a checkpoint of `num_parts` ranks."""
    paths = [folder / "training_state" / PART.format(part) for part in range(num_parts)]
    parts = [safe_open(path, framework="pt") for path in paths]
    names = parts[0].keys()
    for name, parameter in model.named_parameters():
        local(parameter).copy_(read_rows(parts, name, parameter, rank))
        for entry in (entry for entry in names if entry.startswith(f"{name}/")):
            if parts[0].get_slice(entry).get_shape():
                value = torch.zeros_like(parameter)
                local(value).copy_(read_rows(parts, entry, parameter, rank))
            else:  # the number of steps taken
                device = parameter.device if optimizer.defaults["fused"] else "cpu"
                value = parts[0].get_tensor(entry).to(device)
            optimizer.state[parameter][entry.removeprefix(f"{name}/")] = value


def read_rows(parts: list, name: str, like: DTensor, rank: int) -> torch.Tensor:
    """The rows of a tensor that this rank keeps of `like`, from whichever parts hold them."""
    # FSDP cuts like torch.chunk: each rank has ceil(rows / ranks), the last ranks fewer or none.
    first = rank * -(-like.shape[0] // like.device_mesh.size())
    end = first + len(local(like))
    found = []
    for part in parts:
        rows = part.get_slice(name)
        found.append(rows[max(first, 0) : max(end, 0)])  # fewer or none where it has no more
        first -= rows.get_shape()[0]
        end -= rows.get_shape()[0]
    return torch.cat(found)


def check_shared_disk(folder: Path, world: World) -> None:
    """Raises ValueError on all ranks if one of them does not see rank 0's lock in `folder`."""
    lock = folder / "lock"
    holder = world.on_main(lock.read_text)  # a process and its machine
    num_blind = int(world.sum([not lock.is_file() or lock.read_text() != holder]))
    if num_blind > 0:
        raise ValueError(
            f"model.shard = true: {num_blind} of {world.size} ranks do not see {folder} as rank 0 "
            "does, and each rank saves its part there: set run.dir to a disk that all nodes share"
        )
