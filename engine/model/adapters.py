"""LoRA: train a small adapter on a model whose own weights stay as they are, maybe in 4 bits.

Who comes here for an adapter has asked for peft, in load.py, and been told if it is missing.
"""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from engine.core.config import ModelSettings
from engine.core.hub import commit_of
from engine.core.packages import import_package
from engine.model.folders import version_of

# A kernel passes by what is added to out_proj: peft refuses
MAMBA = {"falcon_h1": ["out_proj"], "nemotron_h": ["out_proj"]}


def quantization_config(device: torch.device, compute_dtype: torch.dtype) -> BitsAndBytesConfig:
    """How to keep linear layers in 4 bits (QLoRA, arXiv:2305.14314); ValueError if impossible."""
    key = "model.load_in_4bit = true"
    bitsandbytes = import_package("bitsandbytes", key=key)
    if device.type not in bitsandbytes.supported_torch_devices:
        raise ValueError(f"{key}: bitsandbytes does not support {device.type}; write false")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )


def keep_4bit_layout(model: nn.Module) -> None:
    """Stop bitsandbytes from packing 4-bit weights on some CPUs: packed, they pass no gradient."""
    from bitsandbytes.nn import Linear4bit  # `quantization_config` has asked for it

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def add_adapter(model: nn.Module, settings: ModelSettings, *, seed: int) -> None:
    """Freeze the model and add an adapter B A, of fp32 weights; ValueError for a layer it lacks."""
    from peft import LoraConfig

    lora = settings.lora
    is_everywhere = lora.target_modules == "all-linear"
    head = model.get_output_embeddings()
    modules = model.named_modules()
    layers = [f".{n}" for n, m in modules if isinstance(m, (nn.Linear, Conv1D)) and m is not head]
    for target in () if is_everywhere else lora.target_modules:  # each the end of a layer's path
        if not any(name.endswith(f".{target}") for name in layers):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise ValueError(f"model.lora.target_modules: no layer is named {target}, but {known}")
    described = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        exclude_modules=MAMBA.get(model.config.model_type) if is_everywhere else None,
        task_type="CAUSAL_LM",
        revision=settings.revision,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # A is drawn; B starts at zero, so the model is unchanged
        model.add_adapter(described)
    name_base(model, described)
    if isinstance(described.target_modules, set):  # its order, in the saved file, would be chance
        described.target_modules = sorted(described.target_modules)
    cast_adapter_to_fp32(model)


def name_base(model: nn.Module, described: Any) -> None:
    """Let an adapter name its base's folder, wherever it may be loaded, and what lies in it."""
    if os.path.isdir(model.name_or_path):
        described.base_model_name_or_path = os.path.abspath(model.name_or_path)
        described.revision = described.revision or version_of(Path(model.name_or_path))


def load_adapter(model: nn.Module, settings: ModelSettings, *, is_trainable: bool) -> None:
    """Put a saved adapter into its base model, which then saves and disables it as its own."""
    peft_model = load_by_peft(model, settings, is_trainable=is_trainable)
    name_base(model, peft_model.peft_config["default"])
    model._hf_peft_config_loaded = True  # as transformers' load_adapter sets it
    cast_adapter_to_fp32(model)


def load_by_peft(model: nn.Module, settings: ModelSettings, *, is_trainable: bool = False) -> Any:
    """The PeftModel of a base model and a saved adapter; ValueError if that does not fit.

    transformers' own load_adapter does not know the weights of DoRA or of single tokens.
    """
    import peft

    described = peft.PeftConfig.from_pretrained(settings.name, revision=settings.revision)
    # An adapter that is trained on is saved with its base's commit.
    described.revision = commit_of(described.base_model_name_or_path, described.revision)
    described.inference_mode = not is_trainable
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        peft_model = peft.PeftModel(model, described)  # reads what transformers has renamed
    try:
        loading = peft_model.load_adapter(
            settings.name,
            "default",
            is_trainable,
            revision=settings.revision,
            torch_device=str(model.device),
        )
    except (KeyError, RuntimeError) as error:  # of a layer that is saved whole: absent, or larger
        raise ValueError(f"the adapter does not fit its base model: {error}") from error
    check_fit(loading)
    return peft_model


def check_fit(loading: Any) -> None:
    """Raise ValueError for the first weight without a layer, or layer of the adapter without one.

    peft loads what matches and is silent about the rest: a prefix that differs adds nothing.
    """
    missing = [key for key in loading.missing_keys if ".default" in key]  # others are the base's
    if wrong := sorted({*missing, *loading.unexpected_keys}):
        raise ValueError(f"the adapter does not fit its base model, as at {wrong[0]}")


def cast_adapter_to_fp32(model: nn.Module) -> None:
    """Give the adapter fp32 weights, whatever the dtype of the layers that it is added to."""
    from peft.tuners import tuners_utils as tuners

    tuners.cast_adapter_dtype(model, "default")
    for module in model.modules():
        # Else peft casts inputs to fp32, and our autocast those of bf16 layers back.
        if isinstance(module, tuners.BaseTunerLayer):
            module.cast_input_dtype_enabled = False


def load_adapter_weights(model: nn.Module, folder: Path) -> None:
    """Overwrite the weights of the model's adapter with saved ones."""
    from peft import set_peft_model_state_dict

    weights = {
        key.removeprefix("base_model.model."): value
        for key, value in load_file(folder / "adapter_model.safetensors").items()
    }
    check_fit(set_peft_model_state_dict(model, weights))
