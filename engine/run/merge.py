"""A run from an adapter, which any trainer with peft may have made."""

import json
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from engine.core.config import Config, ConfigError, LoraSettings, dotted_values
from engine.core.distributed import World
from engine.core.hub import fetch_weights
from engine.core.types import Log, no_log
from engine.model.adapters import load_by_peft
from engine.model.load import load_base_tokenizer, one_line_errors
from engine.model.tokenizer import check_vocabulary
from engine.run.checkpoint import MARKER, list_checkpoints, save_folder
from engine.run.config_file import read_file
from engine.run.fingerprint import check_same_files, check_same_run, of_files
from engine.run.folder import MADE_OF, run_folder
from engine.run.resume import lock_folder


def start_from_adapter(config: Config, world: World, log: Log) -> Config:
    """The config of a run from the adapter that model.name is; ConfigError if that cannot be.

    The run starts from base/, the adapter added to its base in float32; in 4 bits from the adapter.
    """
    settings = config.model
    with one_line_errors(settings.name):
        from peft import PeftConfig  # `find_base` has asked for it

        described = PeftConfig.from_pretrained(settings.name, revision=settings.revision)
        if described.peft_type != "LORA":
            raise ValueError(f"it is an adapter of the kind {described.peft_type}, not LORA")
    if settings.load_in_4bit:
        model = settings.replace(lora=trained_on(described, config))
        return config.replace(model=model)
    folder = run_folder(config) / "base"
    world.on_main(write_merged, folder, config, log)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not on this node: give a run.dir that all nodes share")
    model = settings.replace()
    model._merged = settings.replace(name=str(folder), revision=None)
    config = config.replace(model=model)
    check_same_files(config, world)  # a node may have kept a sum of its own
    return config


def trained_on(described: object, config: Config) -> LoraSettings:
    """The shape of the adapter, which model.lora must have if it is given."""
    given = config.model.lora
    targets = described.target_modules
    targets = targets if isinstance(targets, str) else sorted(targets)
    lora = LoraSettings.model_construct(
        r=described.r,
        alpha=described.lora_alpha,
        dropout=described.lora_dropout if given is None else given.dropout,
        target_modules=targets,
    )
    if given and (given.r, given.alpha) != (lora.r, lora.alpha):
        raise ConfigError(
            f"model.lora = {given.model_dump()}: the adapter has r: {lora.r}, alpha: {lora.alpha}, "
            "and in 4 bits it trains on; write these, or null"
        )
    if config.training.kl_coef > 0:
        raise ConfigError(
            f"training.kl_coef = {config.training.kl_coef}: its reference would be the base "
            "without the adapter, which in 4 bits cannot be merged"
        )
    for name in ("modules_to_save", "use_dora"):
        if getattr(described, name, None):
            raise ConfigError(f"model.name: an adapter with {name} cannot train on in 4 bits")
    return lora


def write_merged(folder: Path, config: Config, log: Log) -> None:
    """Write the plain model, unless a start before this one has; ConfigError if it was another.

    That is, if the run has saved something since: before, it begins again with this one.
    """
    run = folder.parent
    files = of_files(config, with_weights=True)
    with lock_folder(run, log):  # another first start would write there too
        if folder.is_dir():
            made_of = read_file(folder / MADE_OF)
            if made_of.items() <= files.items():
                return
            if (run / MARKER).exists() or list_checkpoints(run / "checkpoints"):
                check_same_run(dotted_values(config) | made_of, config, files)
            log(f"{folder} was made of other files: it is written anew")
        with one_line_errors(config.model.name):
            model, tokenizer = merged(config, log, dtype=torch.float32)
        with save_folder(folder) as unfinished:
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            (unfinished / MADE_OF).write_text(json.dumps(files), "utf-8")


def merged(
    config: Config, log: Log, *, dtype: torch.dtype
) -> tuple[nn.Module, PreTrainedTokenizerFast]:
    """The adapter's sum with its base, by peft, and its tokenizer."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    base, tokenizer = load_base_tokenizer(config, log)
    fetch_weights(base.name, base.revision, log)
    model = AutoModelForCausalLM.from_pretrained(
        base.name,
        revision=base.revision,
        attn_implementation="eager",  # nothing is computed, and every model has it
        trust_remote_code=base.trust_remote_code,
        dtype=dtype,
    )
    check_vocabulary(model, tokenizer, no_log)
    peft_model = load_by_peft(model, config.model)
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    if ends[0].weight is ends[1].weight and any(isinstance(end, BaseTunerLayer) for end in ends):
        raise ValueError("it adapts one of embeddings and head, and a sum would change both")
    return peft_model.merge_and_unload(), tokenizer
