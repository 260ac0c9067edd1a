"""Does a run fit into memory and onto the disk? Checked before anything big is loaded.

A run that would fit must never be refused. So we count only what it cannot do without: activations
are left out, and so is a cache whose shape the model's config does not tell. 1 GB is 10^9 bytes.
"""

import math
import os
import shutil
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from engine.batches import cache_bytes_per_token, cached_layers
from engine.config import Config
from engine.lora import adapted_layers, linear_layers
from engine.sharding import blocks_of, count_weights

FP32, BF16, NF4 = 4, 2, 0.5  # bytes per weight; the scales that NF4 adds are not counted
GRADIENTS, GATHERED = "their gradients", "what a pass gathers"  # freed before sampling, not DDP's
AVERAGES = {"adamw": 8, "adamw_8bit": 2, "muon": 4}  # bytes per weight that an optimizer keeps


def check_memory(
    model_config: PretrainedConfig,
    config: Config,
    *,
    device: torch.device,
    samples_copy: bool,
    weight_dtype: torch.dtype,
) -> None:
    """Raises ValueError, saying what would fit, if this rank's device is too small for the run.

    `weight_dtype` is that of the model's own weights (an adapter's are fp32). `samples_copy` says
    whether a copy of the weights does the sampling; it is counted as bf16.
    """
    weights = {"samples_copy": samples_copy, "weight_dtype": weight_dtype}
    parts, num_weights = memory_parts(model_config, config, **weights)
    without_cache = sum(parts.values())
    itemsize = BF16 if samples_copy else weight_dtype.itemsize
    cache = cache_bytes(model_config, config, bytes_per_number=itemsize)
    available, place = memory_for_a_rank(device)
    # DDP, on several ranks, keeps the gradients in its buckets; all others free them after a step.
    in_ddp = not config.model.shard and int(os.environ.get("WORLD_SIZE", 1)) > 1
    beside_cache = without_cache - parts[GATHERED] - (0 if in_ddp else parts[GRADIENTS])
    if config.model.shard:
        host, whose = memory_for_a_rank(torch.device("cpu"))
        if FP32 * num_weights > host:
            raise ValueError(
                f"it does not fit: with model.shard each rank loads {size(FP32 * num_weights)} "
                f"into host memory, of which {whose} has {size(host)}: start fewer ranks on a node"
            )
    if max(without_cache, beside_cache + cache) <= available:
        return
    would_fit = num_weights * available / without_cache
    fix = f"a model of at most {would_fit / 1e9:.1f} billion weights would fit"
    if without_cache <= available:
        key = "training.k_best_of_n" if config.mode == "train" else "validation.best_of_n"
        fix = f"lower sampling.max_batch_tokens, {key} or training.max_new_gen_tokens"
    parts["the cache while sampling"] = cache
    listed = ", ".join(f"{what} {size(part)}" for what, part in parts.items() if part)
    raise ValueError(f"it does not fit: {listed}; {place} has {size(available)}: {fix}")


def memory_parts(
    model_config: PretrainedConfig, config: Config, *, samples_copy: bool, weight_dtype: torch.dtype
) -> tuple[dict[str, float], int]:
    """What a rank's device must hold beside the cache, in bytes by name; the number of weights."""
    is_training, shard = config.mode == "train", config.model.shard
    lora = config.model.lora if is_training else None
    num_parts = int(os.environ.get("WORLD_SIZE", 1)) if shard else 1
    code = {"trust_remote_code": config.model.trust_remote_code}
    with torch.device("meta"):  # shapes alone, which take no memory
        model = AutoModelForCausalLM.from_config(model_config, **code)
    num_weights = num_trained = model.num_parameters()  # tied embeddings count once
    weights = num_weights * weight_dtype.itemsize
    if config.model.load_in_4bit:
        in_4bit = sum(layer.weight.numel() for layer in linear_layers(model).values())
        weights -= (weight_dtype.itemsize - NF4) * in_4bit
    if lora:  # two matrices for each layer: r times its inputs, and r times its outputs
        num_trained = lora.r * sum(sum(layer.weight.shape) for layer in adapted_layers(model, lora))
        weights += FP32 * num_trained
    if shard and not is_training:
        weights = 0  # they stay in host memory, and only the copy is on the device
    has_reference = is_training and config.training.kl_coef > 0 and not lora
    averages = AVERAGES[config.training.optimizer] * num_trained * is_training
    parts = {
        f"{num_weights / 1e9:.2f} billion weights": weights / num_parts,
        GRADIENTS: FP32 * num_trained * is_training / num_parts,
        "the optimizer": averages / num_parts,
        "the copy that samples": BF16 * num_weights * samples_copy,
        "the reference": (BF16 if samples_copy else FP32) * num_weights * has_reference / num_parts,
        GATHERED: gathered_bytes(model) if shard and is_training else 0,
    }
    return parts, num_weights


def gathered_bytes(model: nn.Module) -> int:
    """Peak of FSDP's backward pass, in which embeddings and head are gathered the whole time."""
    blocks = [count_weights(block) for block in blocks_of(model)]
    outside = count_weights(model) - sum(blocks)
    # Beside them: a block's weights and gradient or, at the end, their own gradient.
    return FP32 * (outside + max(outside, 2 * max(blocks)))


def cache_bytes(model_config: PretrainedConfig, config: Config, *, bytes_per_number: int) -> int:
    """Bytes of keys and values for the completions decoded together; prompts are not counted."""
    num_ranks = int(os.environ.get("WORLD_SIZE", 1))
    num_questions = config.questions_per_rank(num_ranks)
    group = config.training.group_size * config.training.max_new_gen_tokens
    if config.mode == "evaluate":
        num_questions = config.validation.num_examples // num_ranks
        group = config.validation.best_of_n * config.max_validation_tokens
    num_tokens = min(group * num_questions, config.sampling.max_batch_tokens or group)
    layers = cached_layers(model_config.get_text_config())
    # A question's group is always decoded together, even if it is more than max_batch_tokens.
    return max(group, num_tokens) * cache_bytes_per_token(layers, bytes_per_number=bytes_per_number)


def memory_for_a_rank(device: torch.device) -> tuple[float, str]:
    """Free bytes of this rank's GPU, or its share of the machine's memory; and whose, in words."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0], "the GPU"
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total / num_ranks, f"each of {num_ranks} processes" if num_ranks > 1 else "the machine"


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
