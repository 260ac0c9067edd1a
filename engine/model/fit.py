"""Does a model fit into the host's memory, and its run onto the disk? 1 MB is 10^6 bytes.

A run that would fit must never be refused, so only what it cannot do without is counted.
"""

import math
import os
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from engine.core.config import Config

FP32 = 4  # bytes per weight
AVERAGES = {"adamw": 8, "adamw_8bit": 2, "muon": 4}  # bytes per weight that an optimizer keeps


def check_host_memory(model_config: PretrainedConfig, config: Config, dtype: torch.dtype) -> None:
    """Raises ValueError if this process's share of the host's memory is too small for the model.

    Beyond that the system kills the process without a word. Each rank of model.shard loads all
    weights in fp32; what is trained on a CPU has gradients and averages too.
    """
    settings, num_bytes = config.model, dtype.itemsize  # of each weight
    if config.mode == "train" and settings.lora is None and not settings.shard:
        num_bytes += FP32 + AVERAGES[config.training.optimizer]
    with torch.device("meta"):  # shapes alone, which take no memory
        model = AutoModelForCausalLM.from_config(
            model_config,
            attn_implementation=settings.attn_implementation,
            trust_remote_code=settings.trust_remote_code,
        )
    needed = num_bytes * model.num_parameters()  # tied embeddings count once
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    share = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / num_processes
    if needed > share:
        has = f"each of {num_processes} processes has {share / 1e6:,.0f} MB"
        fix = "take a smaller model, or start fewer processes on a node"
        raise ValueError(f"it needs {needed / 1e6:,.0f} MB of memory, and {has}: {fix}")


def check_disk(folder: Path, config: Config, *, num_weights: int) -> None:
    """Raises ValueError, saying what would fit, if the disk is too small for the run's `folder`."""
    checkpoint = (FP32 + AVERAGES[config.training.optimizer]) * num_weights  # its bytes
    twice_best = 2 * FP32 * num_weights  # the new one is written before the old one goes
    num_checkpoints = math.ceil(config.training.num_steps / config.checkpoint.every)
    if config.checkpoint.keep is not None:
        num_checkpoints = config.checkpoint.keep + 1  # one more while it is written
    needed = num_checkpoints * checkpoint + twice_best
    # What is saved already counts as room: a resumed run overwrites it.
    saved = sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    room = shutil.disk_usage(there).free + saved
    if needed > room:
        keep = math.floor((room - twice_best) / checkpoint) - 1
        fix = f"checkpoint.keep={keep} would fit" if keep > 0 else "give run.dir a larger disk"
        what = f"{num_checkpoints} checkpoints and best/ twice need {needed / 1e6:,.0f} MB"
        problem = f"the disk is too small: {what}, there is room for {room / 1e6:,.0f} MB"
        raise ValueError(f"run.dir = {config.run.dir}: {problem}: {fix}")
