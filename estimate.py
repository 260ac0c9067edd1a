"""Whether a run fits, told before anything big is loaded or written.

What is counted is the least that a run needs: activations come on top, what cannot be known counts
0. So no run is refused that would fit. 1 GB is 10^9 bytes.
"""

import math
import os
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from config import Config
from distributed import questions_per_rank
from sampler import cache_bytes_per_token

WEIGHT, GRADIENT, COPY = 4, 4, 2  # bytes for each weight; copies are in bf16
AVERAGES = {"adamw": 8, "adamw_8bit": 2, "muon": 4}  # muon has a second one of some weights


def count_weights(model_config: PretrainedConfig, *, trust_remote_code: bool) -> int:
    """How many weights a model has, without making them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config, trust_remote_code=trust_remote_code, dtype=torch.float32
        )
    return sum(parameter.numel() for parameter in model.parameters())


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
    model_config: PretrainedConfig, config: Config, *, device: torch.device, samples_copy: bool
) -> None:
    """Raises ValueError, with what would fit, where this rank's device is too small for the run."""
    num_weights = count_weights(model_config, trust_remote_code=config.model.trust_remote_code)
    is_training = config.mode == "train"
    averages = AVERAGES[config.training.optimizer] * is_training
    gradient = GRADIENT * is_training
    has_reference = is_training and config.training.kl_coef > 0
    reference = (COPY if samples_copy else WEIGHT) * has_reference
    per_weight = WEIGHT + averages + gradient + COPY * samples_copy + reference
    cache = cache_bytes(model_config, config, bytes_per_number=2 if samples_copy else 4)
    needed = num_weights * (per_weight - gradient) + max(num_weights * gradient, cache)
    available, place = memory_for_a_rank(device)
    if needed <= available:
        return
    fits = f"a model of at most {available / per_weight / 1e9:.1f} billion weights would fit"
    if num_weights * per_weight <= available:
        num_samples = "training.k_best_of_n" if is_training else "validation.best_of_n"
        fits = f"lower sampling.max_batch_tokens, {num_samples} or training.max_new_gen_tokens"
    parts = {
        f"{num_weights / 1e9:.2f} billion weights": WEIGHT * num_weights,
        "their gradients": gradient * num_weights,
        "the optimizer": averages * num_weights,
        "the copy that samples": COPY * num_weights * samples_copy,
        "the reference": reference * num_weights,
        "the cache while sampling": cache,
    }
    listed = ", ".join(f"{what} {gb(size)}" for what, size in parts.items() if size)
    raise ValueError(f"it does not fit: {listed}; {place} has {gb(available)}: {fits}")


def memory_for_a_rank(device: torch.device) -> tuple[float, str]:
    """Bytes that are free on this rank's GPU, or its share of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0], "the GPU"
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total / num_ranks, f"each of {num_ranks} processes" if num_ranks > 1 else "the machine"


def check_disk(folder: Path, config: Config, *, num_weights: int) -> None:
    """Raises ValueError, with what would fit, where the disk is too small for the run's folder."""
    averages = AVERAGES[config.training.optimizer]
    one, best = num_weights * (WEIGHT + averages), num_weights * WEIGHT
    here = sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())
    room = shutil.disk_usage(existing_parent(folder)).free + here
    # the new one of each is written before an old one is removed
    needed = (config.checkpoint.keep + 1) * one + 2 * best
    if needed <= room:
        return
    keep = math.floor((room - 2 * best) / one) - 1
    fits = f"checkpoint.keep={keep} would fit" if keep > 0 else "give run.dir a larger disk"
    raise ValueError(
        f"run.dir = {config.run.dir}: the disk is too small: {config.checkpoint.keep + 1} "
        f"checkpoints of {gb(one)} (one while it is written) and twice best/ of {gb(best)} need "
        f"{gb(needed)}, there is room for {gb(room)}: {fits}"
    )


def existing_parent(folder: Path) -> Path:
    """The nearest folder that is there already."""
    folder = folder.absolute()
    return next(path for path in [folder, *folder.parents] if path.exists())


def gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
