"""A run from an adapter, which any trainer with peft may have made."""

import shutil
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engine.core.config import Config, ConfigError, LoraSettings, ModelSettings
from engine.core.distributed import World
from engine.core.packages import import_package
from engine.core.types import no_log
from engine.model.load import find_base, one_line_errors
from engine.model.tokenizer import load_tokenizer


def start_from_adapter(config: Config, folder: Path, world: World) -> Config:
    """The config of a run from the adapter that model.name is; ConfigError if that cannot be.

    The run starts from `folder`, which then holds the adapter's sum with its base in float32. In 4
    bits nothing can be merged: there the adapter itself trains on.
    """
    settings = config.model
    with one_line_errors(settings.name):
        peft = import_package("peft", key="it is an adapter")
        described = peft.PeftConfig.from_pretrained(settings.name, revision=settings.revision)
        if described.peft_type != "LORA":
            raise ValueError(f"it is an adapter of the kind {described.peft_type}, not LORA")
        if settings.load_in_4bit:
            model = settings.model_copy(update={"lora": trained_on(described, config)})
            return config.model_copy(update={"model": model})
        world.on_main(write_merged, folder, config)
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} is not on this node: give a run.dir that all nodes share")
    model = settings.model_copy(update={"name": str(folder), "revision": None})
    run = config.run.model_copy(update={"name": folder.parent.name})
    return config.model_copy(update={"model": model, "run": run})


def trained_on(described: object, config: Config) -> LoraSettings:
    """The shape of the adapter, which model.lora must have if it is given."""
    given, targets = config.model.lora, described.target_modules
    targets = targets if isinstance(targets, str) else sorted(targets)
    lora = LoraSettings.model_construct(
        r=described.r,
        alpha=described.lora_alpha,
        dropout=described.lora_dropout if given is None else given.dropout,
        target_modules=targets,
    )
    if given is not None and (given.r, given.alpha) != (lora.r, lora.alpha):
        problem = f"the adapter has r: {lora.r}, alpha: {lora.alpha}, and in 4 bits it trains on"
        raise ConfigError([f"model.lora = {given.model_dump()}: {problem}; write these, or null"])
    if config.training.kl_coef > 0:
        problem = "its reference would be the base without the adapter, which in 4 bits cannot be"
        raise ConfigError([f"training.kl_coef = {config.training.kl_coef}: {problem} merged"])
    for name in ("modules_to_save", "use_dora"):
        if getattr(described, name, None):
            raise ConfigError([f"model.name: an adapter with {name} cannot train on in 4 bits"])
    return lora


def write_merged(folder: Path, config: Config) -> None:
    """Write the plain model, unless a start before this one has."""
    if folder.is_dir():
        return
    base, unfinished = find_base(config.model), folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    model = merged(config.model, base, dtype=torch.float32)
    model.save_pretrained(unfinished)
    tokenizer = load_tokenizer(config.model_copy(update={"model": base}), no_log)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)


def merged(adapter: ModelSettings, base: ModelSettings, *, dtype: torch.dtype) -> nn.Module:
    """The adapter's sum with its base, by peft."""
    peft = import_package("peft", key="it is an adapter")
    model = AutoModelForCausalLM.from_pretrained(
        base.name,
        revision=base.revision,
        attn_implementation="eager",  # nothing is computed, and every model has it
        trust_remote_code=adapter.trust_remote_code,
        dtype=dtype,
    )
    peft_model = peft.PeftModel.from_pretrained(model, adapter.name, revision=adapter.revision)
    return peft_model.merge_and_unload()
