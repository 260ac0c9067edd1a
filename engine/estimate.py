"""Whether a run fits into memory and onto the disk, checked before anything big is loaded.

Only what a run cannot do without is counted, so that no run that would fit is refused: activations
are left out, and so is a cache whose shape the model's config does not tell. 1 GB is 10^9 bytes.
"""

import math
import os
import shutil
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from engine.config import Config
from engine.lora import adapted_layers
from engine.sampler import cache_bytes_per_token
from engine.sharding import blocks_of, count_weights

FP32, BF16, NF4 = 4, 2, 0.5  # bytes per weight; the scales that NF4 adds are not counted
GRADIENTS, GATHERED = "their gradients", "what a pass gathers"  # parts that come and go
AVERAGES = {"adamw": 8, "adamw_8bit": 2, "muon": 4}  # bytes per weight that an optimizer keeps


def check_memory(
    model_config: PretrainedConfig,
    config: Config,
    *,
    device: torch.device,
    samples_copy: bool,
    weight_dtype: torch.dtype = torch.float32,
) -> None:
    """Raises ValueError, saying what would fit, if this rank's device is too small for the run.

    `weight_dtype` is that of the model's own weights (an adapter's are fp32); `samples_copy` says
    whether a bf16 copy of the weights does the sampling.
    """
    is_training, shard = config.mode == "train", config.model.shard
    parts, num_weights = memory_parts(
        model_config, config, samples_copy=samples_copy, weight_dtype=weight_dtype
    )
    without_cache = sum(parts.values())
    itemsize = BF16 if samples_copy else weight_dtype.itemsize
    cache = cache_bytes(model_config, config, bytes_per_number=itemsize)
    available, place = memory_for_a_rank(device)
    # Only DDP, which runs on several ranks, keeps the gradients while completions are sampled.
    in_ddp = is_training and not shard and int(os.environ.get("WORLD_SIZE", 1)) > 1
    beside_cache = without_cache - parts[GATHERED] - (0 if in_ddp else parts[GRADIENTS])
    if shard:
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
        num_samples = "training.k_best_of_n" if is_training else "validation.best_of_n"
        fix = f"lower sampling.max_batch_tokens, {num_samples} or training.max_new_gen_tokens"
    parts["the cache while sampling"] = cache
    listed = ", ".join(f"{what} {size(part)}" for what, part in parts.items() if part)
    raise ValueError(f"it does not fit: {listed}; {place} has {size(available)}: {fix}")


def memory_parts(
    model_config: PretrainedConfig,
    config: Config,
    *,
    samples_copy: bool,
    weight_dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, float], int]:
    """Bytes of all that a rank's device must hold but the cache, in words; the model's weights."""
    is_training = config.mode == "train"
    lora = config.model.lora if is_training else None
    num_parts = int(os.environ.get("WORLD_SIZE", 1)) if config.model.shard else 1
    code = {"trust_remote_code": config.model.trust_remote_code}
    with torch.device("meta"):  # shapes alone, which take no memory
        model = AutoModelForCausalLM.from_config(model_config, **code)
    head = model.get_output_embeddings()  # neither adapted by LoRA nor kept in 4 bits
    layers = [layer for layer in model.modules() if isinstance(layer, (nn.Linear, Conv1D))]
    shapes = [layer.weight.shape for layer in layers if layer is not head]
    num_weights = num_trained = model.num_parameters()  # tied embeddings count once
    weights = num_weights * weight_dtype.itemsize
    if config.model.load_in_4bit:
        weights -= (weight_dtype.itemsize - NF4) * sum(map(math.prod, shapes))
    if lora:  # two matrices for each layer: r times its inputs, and r times its outputs
        adapted = [layer.weight.shape for layer in adapted_layers(model, lora)]
        num_trained = lora.r * sum(map(sum, adapted))
        weights += FP32 * num_trained
    if config.model.shard and not is_training:
        weights = 0  # they stay in host memory, and only the copy is on the device
    has_reference = is_training and config.training.kl_coef > 0 and not lora
    reference = (BF16 if samples_copy else FP32) * num_weights * has_reference
    averages = AVERAGES[config.training.optimizer] * num_trained * is_training
    parts = {
        f"{num_weights / 1e9:.2f} billion weights": weights / num_parts,
        GRADIENTS: FP32 * num_trained * is_training / num_parts,
        "the optimizer": averages / num_parts,
        "the copy that samples": BF16 * num_weights * samples_copy,
        "the reference": reference / num_parts,
        GATHERED: gathered_bytes(model) if config.model.shard and is_training else 0,
    }
    return parts, num_weights


def gathered_bytes(model: nn.Module) -> int:
    """The least that a sharded model's backward pass gathers: weights and gradients, whole.

    What is outside of the blocks stays gathered, while a block has its gradient made; at the end
    the gradient of what is outside of them is whole.
    """
    blocks = [count_weights(block) for block in blocks_of(model)]
    outside = count_weights(model) - sum(blocks)
    return FP32 * (outside + max(outside, 2 * max(blocks)))


def cache_bytes(model_config: PretrainedConfig, config: Config, *, bytes_per_number: int) -> int:
    """Bytes of keys and values for the completions that are decoded together, without prompts."""
    num_ranks = int(os.environ.get("WORLD_SIZE", 1))
    num_questions, num_samples = config.questions_per_rank(num_ranks), config.training.group_size
    max_new_tokens = config.training.max_new_gen_tokens
    if config.mode == "evaluate":
        num_questions = config.validation.num_examples // num_ranks
        num_samples = config.validation.best_of_n
        max_new_tokens = config.max_validation_tokens
    group = num_samples * max_new_tokens  # the least that is decoded together
    num_tokens = min(group * num_questions, config.sampling.max_batch_tokens or group)
    text = model_config.get_text_config()
    return max(group, num_tokens) * cache_bytes_per_token(text, bytes_per_number=bytes_per_number)


def memory_for_a_rank(device: torch.device) -> tuple[float, str]:
    """Bytes that are free on this rank's GPU, or this rank's share of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0], "the GPU"
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total / num_ranks, f"each of {num_ranks} processes" if num_ranks > 1 else "the machine"


def check_disk(folder: Path, config: Config, *, num_weights: int, num_merged: int = 0) -> None:
    """Raises ValueError, saying what would fit, if the disk is too small for the run's `folder`.

    `num_weights` counts the trained weights, `num_merged` those of the model that export.merge
    makes. What the run has saved already counts as room: a resumed run overwrites it.
    """
    checkpoint = (FP32 + AVERAGES[config.training.optimizer]) * num_weights
    best, merged = FP32 * num_weights, BF16 * num_merged
    if config.checkpoint.keep is None:
        num_checkpoints = math.ceil(config.training.num_steps / config.checkpoint.every)
    else:
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
    """In a unit of which there is at least one: 12.0 GB, 3.4 MB, 5 bytes."""
    for unit, factor in {"GB": 1e9, "MB": 1e6, "KB": 1e3}.items():
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"
