"""Models and tokenizers from Hugging Face, loaded with care: nothing of the hub's settings leaks.

dtype       trained weights are fp32: in bf16 a small update would be rounded away
dropout     is set to 0: otherwise the policy that scores would not be the policy that sampled
generation  the model's own generation config is emptied; only end and pad ids stay
tokenizer   gives the ids of its tokenizer.json, for which the model must have embeddings
"""

import contextlib
import errno
import json
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.configuration_utils import PretrainedConfig
from transformers.generation import GenerationConfig
from transformers.utils import cached_file, find_adapter_config_file
from transformers.utils import logging as transformers_logging

from engine.core.config import Config, ModelSettings
from engine.core.hub import commit_of, fetch_weights
from engine.core.packages import import_package
from engine.core.signals import leave_if_signalled
from engine.core.types import Log, no_log
from engine.model.folders import FILES_OF_BASE, check_folder, is_path, no_such_folder, version_of
from engine.model.precision import choose_compute_dtype
from engine.model.probes import check_causal, supports_dtype
from engine.model.tokenizer import check_vocabulary, find_eos_ids, load_tokenizer
from engine.update.optimizer import AVERAGES, FP32

# One of these makes a tokenizer, tokenizer_config.json alone does not
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_model_and_tokenizer(
    config: Config,
    device: torch.device,
    log: Log,
    *,
    compute_dtype: torch.dtype | None = None,
    key: str = "model.name",  # which names it
) -> tuple[nn.Module, PreTrainedTokenizerFast, torch.dtype]:
    """The model on the device, with any adapter; its tokenizer; the dtype that it computes in.

    Its weights are in fp32 if all of them are trained, else in that dtype.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    settings = config.model.source
    is_training = config.is_training
    dtype = compute_dtype or choose_compute_dtype(settings, device)
    if is_training and settings.teacher:
        check_teacher(config, log)  # its tokens, before any weights are loaded
    if is_training and settings.lora:
        import_package("peft", key="model.lora")
    with one_line_errors(config.model.name, key=key):
        check_folder(settings.name)
        config = config.replace(model=at_commit(config.model, log))
        settings = config.model.source
        base, tokenizer = load_base_tokenizer(config, log)
        is_whole = is_training and not base and not settings.lora
        own = torch.float32 if is_whole and not settings.load_in_4bit else dtype
        model = load_model(base or settings, config, dtype=own, device=device, log=log)
        eos_ids = find_eos_ids(model, tokenizer, stop=config.sampling.stop)
        check_vocabulary(model, tokenizer, log)
        # transformers fills the open fields of a generation config from the model's own: empty it
        model.generation_config = GenerationConfig(
            eos_token_id=eos_ids, pad_token_id=tokenizer.pad_token_id
        )
        check_causal(model)
        if base:
            from engine.model.adapters import load_adapter  # off by default

            load_adapter(model, settings, is_trainable=is_training)
    is_auto = settings.compute_dtype == "auto" and dtype == torch.float16
    if is_auto and not supports_dtype(model, torch.float16):
        log("in float16 this model's logits are not finite, or far off: float32 is used")
        del model  # there may be no room for two
        # What remains has been said.
        return load_model_and_tokenizer(
            config, device, no_log, compute_dtype=torch.float32, key=key
        )
    if is_training and settings.lora and not base:
        from engine.model import adapters

        adapters.add_adapter(model, settings, seed=config.training.seed)
    return model, tokenizer, dtype


def load_base_tokenizer(
    config: Config, log: Log
) -> tuple[ModelSettings | None, PreTrainedTokenizerFast]:
    """The settings of the base if the model is an adapter, else None; and its tokenizer.

    An adapter may have one of its own, with the chat template that it was trained with.
    """
    settings = config.model.source
    base = find_base(settings, log)
    if base:
        check_base(base, log)
        has_own = any(
            cached_file(
                settings.name,
                file,
                revision=settings.revision,
                _raise_exceptions_for_missing_entries=False,
            )
            for file in VOCABULARIES
        )
        if not has_own:
            settings = base
    return base, load_tokenizer(config.replace(model=settings), log)


def at_commit(settings: ModelSettings, log: Log) -> ModelSettings:
    """The settings with what their revision means now: code and weights must be of one commit."""
    return settings.replace(revision=commit_of(settings.name, settings.revision, log=log))


def find_base(settings: ModelSettings, log: Log = no_log) -> ModelSettings | None:
    """The base model's settings if model.name is an adapter, else None; ValueError without peft."""
    file = find_adapter_config_file(settings.name, revision=settings.revision)
    if file is None:
        return None
    import_package("peft", key="it is an adapter")
    base, revision = base_of(Path(file).parent)
    folder = Path(base)
    is_gone = not base or (is_path(base) and not folder.is_dir())
    if is_gone or (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"its base is {base or 'not named'}, but must be a whole model: put it there, or name "
            "it in adapter_config.json (tools.export merges an adapter into its base)"
        )
    return at_commit(settings.replace(name=base, revision=revision), log)


def base_of(adapter: Path) -> tuple[str, str | None]:
    """Name and revision of the base model of a saved adapter, if it gives them.

    A run from an adapter has its base in its own folder, which may have been moved since.
    """
    saved = json.loads((adapter / "adapter_config.json").read_bytes())
    name = saved.get("base_model_name_or_path") or ""
    if os.path.isabs(name) and Path(name).name == "base":
        for folder in adapter.absolute().parents[:2]:  # of best/, of checkpoints/step-000010/
            if (folder / "base/config.json").is_file():
                name = str(folder / "base")
    return name, saved.get("revision")


def check_base(base: ModelSettings, log: Log) -> None:
    """Raise ValueError if a base's folder does not hold what an adapter was trained on."""
    folder = Path(base.name)
    known = str(base.revision)
    if not folder.is_dir():  # on the hub: there the revision is a commit
        return
    if not known.startswith(FILES_OF_BASE):
        log(f"warning: the adapter does not say what its base {folder} was: used as it is")
    elif known != version_of(folder):
        raise ValueError(
            f"its base {folder} is not the model that it was trained on: put that one there, or "
            "its path into adapter_config.json"
        )


def check_teacher(config: Config, log: Log) -> None:
    """Raise ValueError unless model.teacher has each token of model.name at the same id."""
    tokenizers = []
    sizes = []
    for settings, key in ((config, "model.name"), (of_teacher(config), "model.teacher")):
        with one_line_errors(settings.model.name, key=key):
            base, tokenizer = load_base_tokenizer(settings, no_log)
            model_config = load_model_config(base or settings.model).get_text_config()
        tokenizers.append(tokenizer)
        sizes.append(model_config.vocab_size)
    ids, others = (tokenizer.get_vocab() for tokenizer in tokenizers)
    if missing := [token for token in ids if others.get(token) != ids[token]]:
        raise ValueError(
            f"model.teacher = {config.model.teacher}: its tokenizer lacks {len(missing):,} of "
            f"{len(ids):,} tokens of the trained model, or has other ids: {missing[0]!r}"
        )
    if sizes[1] < sizes[0]:
        raise ValueError(
            f"model.teacher = {config.model.teacher}: it can read {sizes[1]:,} tokens, and the "
            f"trained model writes {sizes[0]:,}; give another one"
        )
    if len({str(tokenizer.chat_template) for tokenizer in tokenizers}) > 1:
        log(
            "warning: the teacher has another chat template: it reads what the trained model "
            "gets, which it may not have been trained on"
        )


def of_teacher(config: Config) -> Config:
    """The config that loads the teacher: as a model that is evaluated, whole and frozen."""
    model = config.model.source.replace(
        name=config.model.teacher,
        revision=config.model.teacher_revision,
        load_in_4bit=False,
        gradient_checkpointing=False,
        lora=None,
        shard=False,
    )
    return config.replace(mode="evaluate", model=model)


@contextlib.contextmanager
def one_line_errors(name: str, *, key: str = "model.name") -> Iterator[None]:
    """Turn any error in loading a model, whatever its type, into a ValueError of one line."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        problem = " ".join(str(error).split())
        if not isinstance(error, (OSError, ValueError, ImportError)):
            problem = f"{type(error).__name__}: {problem}"
        if isinstance(error, OSError) and not Path(name).exists():
            problem = f"{no_such_folder(name)}; and from the hub: {problem}"
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            problem += ": the disk is full: set HF_HOME to a folder on a larger one"
        if "FlashAttention" in problem:
            problem += " Write model.attn_implementation=sdpa, which needs no package"
        raise ValueError(f"{key} = {name}: cannot be used: {problem}") from error


def load_model_config(settings: ModelSettings) -> PretrainedConfig:
    """The model's own config, with every dropout set to 0."""
    model_config = AutoConfig.from_pretrained(
        settings.name, revision=settings.revision, trust_remote_code=settings.trust_remote_code
    )
    others = {*re.findall(r"[\w.-]+/[\w.-]+(?=--)", str(getattr(model_config, "auto_map", "")))}
    others -= {settings.name}
    if others and settings.trust_remote_code:
        raise ValueError(
            f"its code is in {min(others)}, whose commit no run keeps: copy model and code into "
            "one folder, and take that name out of auto_map"
        )
    for key, value in model_config.to_dict().items():
        if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
            setattr(model_config, key, 0.0)
    return model_config


def check_host_memory(
    model_config: PretrainedConfig, settings: ModelSettings, config: Config, dtype: torch.dtype
) -> None:
    """Raises ValueError if this process's share of the host's memory is too small for the model.

    Then the system would kill it without a word. Only what it cannot do without is counted: each
    rank of model.shard loads all weights; what a CPU trains has gradients and averages too.
    """
    num_bytes = dtype.itemsize  # of each weight
    if config.is_training and not settings.lora and not settings.shard:
        num_bytes += FP32 + AVERAGES[config.training.optimizer]
    how = {"attn_implementation": settings.attn_implementation}
    own_code = getattr(model_config, "auto_map", ())
    if settings.trust_remote_code and "AutoModelForCausalLM" in own_code:
        # Else it takes the code of main, and registers it for the weights too.
        how |= {"trust_remote_code": True, "code_revision": settings.revision}
    with torch.device("meta"):  # shapes alone, which take no memory
        model = AutoModelForCausalLM.from_config(model_config, **how)
    needed = num_bytes * model.num_parameters()  # tied embeddings count once
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    share = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / num_processes
    if needed > share:
        raise ValueError(
            f"it needs {needed / 1e6:,.0f} MB of memory, and each of {num_processes} processes has "
            f"{share / 1e6:,.0f} MB: take a smaller model, or start fewer processes on a node"
        )


def load_model(
    settings: ModelSettings, config: Config, *, dtype: torch.dtype, device: torch.device, log: Log
) -> nn.Module:
    """The model with all its weights, on the device; with model.shard, on the CPU."""
    model_config = load_model_config(settings)
    is_quantized = model_config.to_dict().get("quantization_config")
    if is_quantized and config.is_training:
        raise ValueError("its weights are quantised; give the model that it was made from")
    quantization = None
    if settings.load_in_4bit:
        from engine.model import adapters  # off by default

        quantization = adapters.quantization_config(device, dtype)
    elif not is_quantized and (device.type != "cuda" or settings.shard):
        check_host_memory(model_config, settings, config, dtype)
    fetch_weights(settings.name, settings.revision, log)
    model, loading = AutoModelForCausalLM.from_pretrained(
        settings.name,
        config=model_config,
        dtype=dtype,  # always given: the default "auto" is the dtype of the files
        attn_implementation=settings.attn_implementation,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below, by name
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
        quantization_config=quantization,
        device_map=None if quantization is None else {"": device},
    )
    if model.config is not model.config.get_text_config():
        raise ValueError("it sees pictures too: save its language part as docs/models.md says")
    if mismatched := sorted(loading["mismatched_keys"]):
        raise ValueError(f"weights do not fit its config.json, such as {mismatched[0]}")
    if missing := sorted(loading["missing_keys"]):  # transformers draws them at random
        raise ValueError(f"{len(missing)} weights are missing, such as {missing[0]}")
    if unused := sorted(loading["unexpected_keys"]):
        log(
            f"warning: {len(unused)} weights in the files, such as {unused[0]}, are ignored: its "
            "config.json describes a model without them"
        )
    if settings.load_in_4bit:
        adapters.keep_4bit_layout(model)
    else:
        model.to("cpu" if settings.shard else device)  # each shard goes to the device later
    if settings.gradient_checkpointing:
        recompute(model)
    for layers in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        for layer in layers:  # reading the prompts of a batch may take a CPU a minute
            layer.register_forward_pre_hook(lambda *_: leave_if_signalled())
    return model


def recompute(model: nn.Module) -> None:
    """Let the backward pass compute activations again, instead of keeping them for it."""
    # transformers 5.23 has a new name for it, 5.17 only this one
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        model.gradient_checkpointing_enable({"use_reentrant": False})
