"""Whether a run fits, told before anything big is loaded or written.

What is counted is the least that a run needs: activations come on top, what cannot be known counts
0. So no run is refused that would fit. 1 GB is 10^9 bytes.
"""

import math
import os
import shutil
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from config import Config
from distributed import questions_per_rank
from sampler import cache_bytes_per_token

WEIGHT, GRADIENT, COPY = 4, 4, 2  # bytes for each weight; copies are in bf16
IN_4BIT = 0.5  # the scales come on top
AVERAGES = {"adamw": 8, "adamw_8bit": 2, "muon": 4}  # muon has a second one of some weights


def count_weights(model_config: PretrainedConfig, *, trust_remote_code: bool) -> int:
    """How many weights a model has, without making them."""
    model = model_without_weights(model_config, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters())


def linear_layers(model_config: PretrainedConfig, *, trust_remote_code: bool) -> list[torch.Size]:
    """Shapes of the matrices that an adapter is for, and 4 bits: all but the head's."""
    model = model_without_weights(model_config, trust_remote_code=trust_remote_code)
    head = model.get_output_embeddings()
    layers = [layer for layer in model.modules() if isinstance(layer, (nn.Linear, Conv1D))]
    return [layer.weight.shape for layer in layers if layer is not head]


def model_without_weights(model_config: PretrainedConfig, *, trust_remote_code: bool) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            model_config, trust_remote_code=trust_remote_code, dtype=torch.float32
        )


def cache_bytes(model_config: PretrainedConfig, config: Config, *, bytes_per_number: int) -> int:
    """Keys and values of the completions that are decoded together, without their prompts'."""
    text, training = model_config.get_text_config(), config.training
    token = cache_bytes_per_token(text, bytes_per_number=bytes_per_number)
    num_ranks = int(os.environ.get("WORLD_SIZE", 1))
    num_samples, num_questions = training.k_best_of_n[1], questions_per_rank(config, num_ranks)
    if config.mode == "evaluate":
        num_samples = config.validation.best_of_n
        num_questions = config.validation.num_examples // num_ranks
    elif config.mode == "sample":
        num_samples = num_questions = 1
    group = num_samples * training.max_new_gen_tokens  # decoded together in any case
    most = config.sampling.max_batch_tokens or group
    return token * max(group, min(group * num_questions, most))


def check_memory(
    model_config: PretrainedConfig,
    config: Config,
    *,
    device: torch.device,
    samples_copy: bool,
    weight_dtype: torch.dtype = torch.float32,
) -> None:
    """Raises ValueError, with what would fit, where this rank's device is too small for the run.

    `weight_dtype` is that of the model's own weights; an adapter's are fp32.
    """
    settings, is_training = config.model, config.mode == "train"
    trust = {"trust_remote_code": settings.trust_remote_code}
    num_weights = num_trained = count_weights(model_config, **trust)
    weights = num_weights * weight_dtype.itemsize
    has_adapter = is_training and settings.lora is not None
    adapted = linear_layers(model_config, **trust) if has_adapter or settings.load_in_4bit else []
    if settings.load_in_4bit:
        num_in_4bit = sum(shape.numel() for shape in adapted)
        weights -= num_in_4bit * (weight_dtype.itemsize - IN_4BIT)
    if has_adapter:
        num_trained = settings.lora.r * sum(map(sum, adapted))
        weights += WEIGHT * num_trained
    has_reference = is_training and config.training.kl_coef > 0 and not has_adapter
    parts = {
        f"{num_weights / 1e9:.2f} billion weights": weights,
        "their gradients": GRADIENT * num_trained * is_training,
        "the optimizer": AVERAGES[config.training.optimizer] * num_trained * is_training,
        "the copy that samples": COPY * num_weights * samples_copy,
        "the reference": (COPY if samples_copy else WEIGHT) * num_weights * has_reference,
    }
    cache = cache_bytes(
        model_config, config, bytes_per_number=COPY if samples_copy else weight_dtype.itemsize
    )
    without_cache = sum(parts.values())
    gradients = parts["their gradients"]  # never there at the same time as the cache
    needed = without_cache - gradients + max(gradients, cache)
    available, place = memory_for_a_rank(device)
    if needed <= available:
        return
    would_fit = num_weights * available / without_cache
    fits = f"a model of at most {would_fit / 1e9:.1f} billion weights would fit"
    if without_cache <= available:
        num_samples = "training.k_best_of_n" if is_training else "validation.best_of_n"
        fits = f"lower sampling.max_batch_tokens, {num_samples} or training.max_new_gen_tokens"
    parts["the cache while sampling"] = cache
    listed = ", ".join(f"{what} {gb(size)}" for what, size in parts.items() if size)
    raise ValueError(f"it does not fit: {listed}; {place} has {gb(available)}: {fits}")


def memory_for_a_rank(device: torch.device) -> tuple[float, str]:
    """Bytes that are free on this rank's GPU, or its share of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0], "the GPU"
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total / num_ranks, f"each of {num_ranks} processes" if num_ranks > 1 else "the machine"


def check_disk(folder: Path, config: Config, *, num_weights: int, num_merged: int = 0) -> None:
    """Raises ValueError, with what would fit, where the disk is too small for the run's folder.

    `num_weights` are those that are trained, `num_merged` those of a merged model.
    """
    averages = AVERAGES[config.training.optimizer]
    one, best = num_weights * (WEIGHT + averages), num_weights * WEIGHT
    here = sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())
    room = shutil.disk_usage(existing_parent(folder)).free + here
    # the new one of each is written before an old one is removed
    rest = 2 * best + 2 * num_merged * COPY
    needed = (config.checkpoint.keep + 1) * one + rest
    if needed <= room:
        return
    keep = math.floor((room - rest) / one) - 1
    fits = f"checkpoint.keep={keep} would fit" if keep > 0 else "give run.dir a larger disk"
    merged = f" and merged/ of {gb(num_merged * COPY)}" if num_merged else ""
    raise ValueError(
        f"run.dir = {config.run.dir}: the disk is too small: {config.checkpoint.keep + 1} "
        f"checkpoints of {gb(one)} (one while it is written) and twice best/ of {gb(best)}{merged} "
        f"need {gb(needed)}, there is room for {gb(room)}: {fits}"
    )


def existing_parent(folder: Path) -> Path:
    """The nearest folder that is there already."""
    folder = folder.absolute()
    return next(path for path in [folder, *folder.parents] if path.exists())


def gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
