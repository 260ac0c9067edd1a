"""Does a model fit into the host's memory, and its run onto the disk? 1 GB is 10^9 bytes.

A run that would fit must never be refused, so only what it cannot do without is counted.
"""

import math
import os
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from engine.config import Config

FP32, BF16 = 4, 2  # bytes per weight
AVERAGES = {"adamw": 8, "adamw_8bit": 2, "muon": 4}  # bytes per weight that an optimizer keeps


def check_host_memory(model_config: PretrainedConfig, config: Config, dtype: torch.dtype) -> None:
    """Raises ValueError if this process's share of the host's memory is too small for the model.

    Beyond that the system kills the process without a word. Each rank of model.shard loads all
    weights in fp32; what is trained on a CPU has gradients and averages too.
    """
    settings, num_bytes = config.model, dtype.itemsize
    if config.mode == "train" and settings.lora is None and not settings.shard:
        num_bytes += FP32 + AVERAGES[config.training.optimizer]
    how = {"attn_implementation": settings.attn_implementation}
    with torch.device("meta"):  # shapes alone, which take no memory
        model = AutoModelForCausalLM.from_config(
            model_config, trust_remote_code=settings.trust_remote_code, **how
        )
    needed = num_bytes * model.num_parameters()  # tied embeddings count once
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    share = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / num_processes
    if needed > share:
        problem = f"it takes {size(needed)}, and each of {num_processes} processes has"
        fix = "take a smaller model or start fewer processes on a node"
        raise ValueError(f"it does not fit: {problem} {size(share)} of the host's memory: {fix}")


def check_disk(folder: Path, config: Config, *, num_weights: int, num_merged: int = 0) -> None:
    """Raises ValueError, saying what would fit, if the disk is too small for the run's `folder`.

    `num_weights` counts the trained weights, `num_merged` those of the model that export.merge
    makes. What the run has saved already counts as room, since a resumed run overwrites it.
    """
    checkpoint = (FP32 + AVERAGES[config.training.optimizer]) * num_weights
    best, merged = FP32 * num_weights, BF16 * num_merged
    num_checkpoints = math.ceil(config.training.num_steps / config.checkpoint.every)
    if config.checkpoint.keep is not None:
        num_checkpoints = config.checkpoint.keep + 1  # one more while it is written
    rest = 2 * (best + merged)  # the new one is written before the old one is removed
    needed = num_checkpoints * checkpoint + rest
    saved = sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    room = shutil.disk_usage(there).free + saved
    if needed <= room:
        return
    keep = math.floor((room - rest) / checkpoint) - 1
    fix = f"checkpoint.keep={keep} would fit" if keep > 0 else "give run.dir a larger disk"
    and_merged = f" and merged/ of {size(merged)}" if merged else ""
    raise ValueError(
        f"run.dir = {config.run.dir}: the disk is too small: {num_checkpoints} checkpoints of "
        f"{size(checkpoint)} (one while it is written) and twice best/ of {size(best)}{and_merged} "
        f"need {size(needed)}, there is room for {size(room)}: {fix}"
    )


def size(num_bytes: float) -> str:
    """Text in the largest unit that makes at least 1: 12.0 GB, 3.4 MB, 5 bytes."""
    for unit, factor in {"GB": 1e9, "MB": 1e6, "KB": 1e3}.items():
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"
