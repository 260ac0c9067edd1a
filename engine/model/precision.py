"""In which dtype a run computes: its weights are multiplied in bf16, in float16 or in fp32."""

import torch
from torch import nn

from engine.core.config import ModelSettings
from engine.model.probes import supports_dtype

BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")  # by which a CPU multiplies bf16
MIN_SIZE = 512  # of the hidden states, from which on it gains by that
# float16's loss scale at the start: SmolLM2's gradients do not overflow at it. It doubles after so
# many updates in a row that did not overflow; one that does throws a step away.
INIT_SCALE = 2.0**14
GROWTH_INTERVAL = 100


def choose_compute_dtype(settings: ModelSettings, device: torch.device) -> torch.dtype:
    """bf16 on a GPU that has it, else float16, and fp32 elsewhere, unless the config names one."""
    if settings.compute_dtype != "auto":
        return getattr(torch, settings.compute_dtype)
    if device.type != "cuda":
        return torch.float32
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bf16 else torch.float16


def multiplies_bf16() -> bool:
    """Whether this CPU does, in hardware."""
    return any(torch.cpu.get_capabilities().get(name) for name in BF16_INSTRUCTIONS)


def gains_by_bf16(model: nn.Module) -> bool:
    """Whether a model in fp32 is faster in bf16 on this CPU, at logits near those in fp32."""
    is_large = getattr(model.config, "hidden_size", 0) >= MIN_SIZE
    return multiplies_bf16() and is_large and supports_dtype(model, torch.bfloat16)
