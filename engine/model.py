"""Models and tokenizers from Hugging Face, loaded with care: nothing of the hub's settings leaks.

dtype       trained weights are fp32: in bf16 a small update would be rounded away
dropout     is set to 0: otherwise the policy that scores would not be the policy that sampled
generation  the model's own generation config is emptied; only end and pad ids stay
tokenizer   gives the ids of its tokenizer.json, for which the model must have embeddings
"""

import contextlib
import copy
import difflib
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from engine import lora
from engine.calculator import Calculator
from engine.config import Config, LoraSettings, ModelSettings
from engine.fit import check_host_memory
from engine.lora import score_without_adapter
from engine.optimizer import LossScale
from engine.probe import supports_float16, supports_grouped
from engine.prompts import end_of_turn, render_prompt
from engine.sharding import whole
from engine.tensors import autocast
from engine.types import Log, SamplingParams


@dataclass
class Policy:
    """The model that is trained, as it scores completions and as it samples them."""

    model: nn.Module  # what the optimizer steps is fp32; else in the dtype that it computes in
    sampler: nn.Module  # the model itself or, in bf16 or with model.shard, a copy of it
    tokenizer: PreTrainedTokenizerFast
    params: SamplingParams  # for the samples that are trained on
    compute_dtype: torch.dtype  # of the scorer, and of the sampler where that is a copy
    scorer: nn.Module | None = None  # main.py's CompletionScorer, perhaps in DDP, for training
    reference: Callable[..., torch.Tensor] | None = None  # None without a KL penalty
    backend: str = "generate"  # how completions are sampled: generate, grouped or captured

    @functools.cached_property
    def loss_scale(self) -> LossScale:
        """For float16, which the sampler's weights then are too; else it is off, a factor of 1."""
        is_on = self.sampler.dtype == torch.float16
        return LossScale(self.model.device.type, growth_interval=100, enabled=is_on)

    @property
    def context_length(self) -> int | None:
        """The most tokens that the model can see; None for no limit."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def end_tokens(self) -> str:
        """The tokens at which a completion ends, in words; None is an id without a token."""
        return " or ".join(map(str, self.tokenizer.convert_ids_to_tokens(self.params.eos_ids)))

    def autocast(self) -> torch.autocast:
        """For sampling: a bf16 model's fp32 adapter then computes in bf16, as when it scores."""
        is_mixed = any(p.dtype != self.model.dtype for p in self.model.parameters())
        return autocast(self.model.device, self.model.dtype if is_mixed else torch.float32)

    @torch.no_grad()
    def refresh_sampler(self) -> None:
        """Copy the trained weights into the sampler, in place."""
        if self.sampler is self.model:
            return
        copies = [*self.sampler.parameters(), *self.sampler.buffers()]
        trained = [*self.model.parameters(), *self.model.buffers()]
        for copied, weights in zip(copies, trained, strict=True):
            copied.copy_(whole(weights, copied.dtype))


# The model


def load_model_and_tokenizer(
    config: Config, *, device: torch.device, compute_dtype: torch.dtype, log: Log
) -> tuple[nn.Module, PreTrainedTokenizerFast, tuple[int, ...], torch.dtype]:
    """The model, with any adapter; its tokenizer; the ids that end a completion; the compute dtype.

    Raises ValueError of one line if the model cannot be used.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    settings, is_training = config.model, config.mode == "train"
    adapter = lora.adapter_config(settings) if is_training and settings.lora is not None else None
    in_4bit = lora.quantization_config(device, compute_dtype) if settings.load_in_4bit else None
    with one_line_errors(settings.name):
        check_folder(settings.name)
        base = lora.find_base(settings)
        if base is not None and is_training:
            raise ValueError(
                "it is an adapter: to train it further, start its run again with a larger "
                "training.num_steps; to train on from it, merge it (python -m tools.export)"
            )
        base_settings = base or settings
        tokenizer = load_tokenizer(config.model_copy(update={"model": base_settings}), log)
        model_config = load_model_config(base_settings)
        is_quantized = bool(model_config.to_dict().get("quantization_config"))
        if is_quantized and is_training:
            raise ValueError("its weights are quantised; give the model that it was made from")
        is_frozen = adapter is not None or base is not None or in_4bit is not None
        dtype = compute_dtype if is_frozen or not is_training else torch.float32
        in_host = (device.type != "cuda" or settings.shard) and in_4bit is None
        if in_host and not is_quantized:
            check_host_memory(model_config, config, dtype)
        model = load_model(
            model_config, base_settings, dtype=dtype, quantization=in_4bit, device=device, log=log
        )
        eos_ids = find_eos_ids(model, tokenizer, stop=config.sampling.stop)
        # transformers fills the open fields of a generation config from the model's own: empty it
        model.generation_config = GenerationConfig(
            eos_token_id=list(eos_ids), pad_token_id=tokenizer.pad_token_id
        )
        check_vocabulary(model, tokenizer)
        check_causal(model)
        if base is not None:
            lora.load_adapter(model, settings)
    is_auto = settings.compute_dtype == "auto" and compute_dtype == torch.float16
    if is_auto and not supports_float16(model):
        log("in float16 this model's logits are not finite, or far off: float32 is used")
        del model  # there may be no room for two
        return load_model_and_tokenizer(config, device=device, compute_dtype=torch.float32, log=log)
    if adapter is not None:
        lora.add_adapter(model, adapter, seed=config.training.seed)
        num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        log(f"LoRA: {num_trained:,} weights are trained, all others stay as they are")
    return model, tokenizer, eos_ids, compute_dtype


@contextlib.contextmanager
def one_line_errors(name: str) -> Iterator[None]:
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
        raise ValueError(f"model.name = {name}: cannot be used: {problem}") from error


def check_folder(name: str) -> None:
    """Raise ValueError if `name` is a path, not a hub id, and there is no model at it."""
    path, pointer = Path(name), b"version https://git-lfs"  # in place of a file git has not fetched
    if not path.exists():
        is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
        if is_path or ("/" in name and path.parent.is_dir()):
            raise ValueError(no_such_folder(name))
        return
    if not any((path / file).exists() for file in ("config.json", "adapter_config.json")):
        if (path / "best").is_dir():
            raise ValueError(f"it is the folder of a run; its best model is {path / 'best'}")
        raise ValueError("it is no folder with a config.json, so no model")
    for file in path.iterdir():
        if file.is_file() and file.open("rb").read(len(pointer)) == pointer:
            raise ValueError(f"{file.name} is only a pointer; fetch the file with `git lfs pull`")


def no_such_folder(name: str) -> str:
    """The error for a path where there is nothing; it names the existing folder nearest to it."""
    path = Path(name).absolute()
    there = next(folder for folder in path.parents if folder.is_dir())
    names = [folder.name for folder in there.iterdir() if folder.is_dir()]
    close = difflib.get_close_matches(path.relative_to(there).parts[0], names, n=1)
    return f"no such folder in {there}" + (f", the nearest is {there / close[0]}" if close else "")


def load_model_config(settings: ModelSettings) -> PretrainedConfig:
    """The model's own config, with every dropout set to 0."""
    model_config = AutoConfig.from_pretrained(
        settings.name, revision=settings.revision, trust_remote_code=settings.trust_remote_code
    )
    for key, value in model_config.to_dict().items():
        if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
            setattr(model_config, key, 0.0)
    return model_config


def load_model(
    model_config: PretrainedConfig,
    settings: ModelSettings,
    *,
    dtype: torch.dtype,
    quantization: BitsAndBytesConfig | None,
    device: torch.device,
    log: Log,
) -> nn.Module:
    """The model with all its weights, on the device; with model.shard, on the CPU."""
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
        some = f"{len(unused)} weights in the files, such as {unused[0]}, are ignored"
        log(f"warning: {some}: its config.json describes a model without them")
    if quantization is None:
        model.to("cpu" if settings.shard else device)  # each shard goes to the device later
    else:
        lora.keep_4bit_layout(model)
    if settings.gradient_checkpointing:
        # transformers 5.23 has a new name for it, 5.17 only this one
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def find_eos_ids(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast, *, stop: list[str]
) -> tuple[int, ...]:
    """The ids that end a completion, from tokenizer, generation config, model config and `stop`.

    The chat template adds its end of a turn: base models such as Qwen2.5's write it but do not name
    it. Raises ValueError for a text in `stop` that is not one token.
    """
    declared = [tokenizer.eos_token_id, model.generation_config.eos_token_id]
    declared += [model.config.get_text_config().eos_token_id, end_of_turn(tokenizer)]
    for text in stop:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(f"sampling.stop: {text!r} is not one token of its tokenizer: {ids}")
        declared += ids
    eos_ids = {i for ids in declared for i in (ids if isinstance(ids, list) else [ids])} - {None}
    if not eos_ids:
        raise ValueError("neither tokenizer nor model says which token ends text")
    return tuple(sorted(eos_ids))


@torch.no_grad()
def check_causal(model: nn.Module) -> None:
    """Raise ValueError if the model sees later tokens, as BERT and other encoders do."""
    ids = torch.tensor([[0, 1, 2, 3], [0, 1, 3, 2]], device=model.device)
    with autocast(model.device, model.dtype):
        one, other = model.eval()(input_ids=ids).logits[:, :2].float()
    if not torch.allclose(one, other, rtol=1e-3, atol=1e-3, equal_nan=True):
        raise ValueError("it sees the tokens that come later, so it cannot write text: an encoder")


# Precision, and copies of the model


def choose_compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """bf16 on a GPU that has it, else float16, and fp32 elsewhere, unless the config names one."""
    if config.model.compute_dtype != "auto":
        return getattr(torch, config.model.compute_dtype)
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float16 if device.type == "cuda" else torch.float32


def make_sampler(
    model: nn.Module, compute_dtype: torch.dtype, device: torch.device, *, shard: bool
) -> nn.Module:
    """The model that samples: the model itself or a copy, on the device, in the compute dtype.

    Without the copy all weights would be cast, or gathered from shards, again for every token. Call
    it before the model is cut into shards: after that no rank has all weights.
    """
    if shard or model.dtype != compute_dtype:
        return copy_in(compute_dtype, model, device)
    return model.eval()


def copy_in(dtype: torch.dtype, model: nn.Module, device: torch.device) -> nn.Module:
    """A frozen copy on the device: weights in the dtype, buffers as they are.

    Rotary frequencies, which are buffers, would turn far positions by the wrong angle in bf16. Each
    weight is cast while it is copied, so that there is never a second copy in fp32.
    """
    copies = {}
    for p in model.parameters():
        weights = p.detach().to(device, dtype, copy=True)
        copies[id(p)] = nn.Parameter(weights, requires_grad=False)
    return copy.deepcopy(model, copies).to(device).eval()


def make_reference(
    scorer: nn.Module, dtype: torch.dtype, *, lora: LoraSettings | None
) -> Callable[..., torch.Tensor]:
    """A scorer for the model that the run starts from: the adapter is off, or a copy is frozen."""
    if lora is not None:
        return functools.partial(score_without_adapter, scorer)
    copied = copy_in(dtype, scorer.model, scorer.model.device)
    return type(scorer)(copied, scorer.compute_dtype, in_blocks=scorer.in_blocks)


def sampling_params(
    config: Config, tokenizer: PreTrainedTokenizerFast, eos_ids: tuple[int, ...], log: Log
) -> SamplingParams:
    """How the completions that are trained on are sampled."""
    training, sampling = config.training, config.sampling
    if config.mode == "train" and (sampling.top_p < 1 or sampling.top_k > 0):
        log("sampling.top_p or top_k draws from less than what is scored: the gradient is biased")
    return SamplingParams(
        max_new_tokens=training.max_new_gen_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        eos_ids=eos_ids,
        pad_id=tokenizer.pad_token_id,
        group_size=training.group_size,
        calculator=Calculator(tokenizer, sampling.calculator) if sampling.calculator else None,
    )


def choose_backend(
    config: Config, sampler: nn.Module, make_batch: Callable[..., object], log: Log
) -> str:
    """The backend that the config asks for or, if this model does not support it, a slower one.

    On a GPU `grouped` becomes `captured`: its decode step is replayed as a CUDA graph.
    """
    if config.sampling.backend == "generate":
        return "generate"
    if not supports_grouped(sampler, make_batch):
        log("this model's cache cannot be shared by a group: sampling.backend=generate")
        return "generate"
    if sampler.device.type == "cuda":
        if supports_grouped(sampler, make_batch, capture=True):
            return "captured"
        log("this model's decode step cannot be captured in a CUDA graph: sampling is slower")
    return "grouped"


# The tokenizer

TOKENIZER_PROBE = "Use [3, 17, 255] to make 46.\n<think>12 * 3 = 36, don't</think>\n\n  été"


def load_tokenizer(config: Config, log: Log) -> PreTrainedTokenizerFast:
    """The model's tokenizer, checked against its own tokenizer.json."""
    name, revision = config.model.name, config.model.revision
    tokenizer = AutoTokenizer.from_pretrained(
        name, revision=revision, trust_remote_code=config.model.trust_remote_code
    )
    ids = tokenizer.encode(TOKENIZER_PROBE, add_special_tokens=False)
    if not ids:
        raise ValueError("it has no tokenizer files, such as tokenizer.json")
    file = cached_file(
        name, "tokenizer.json", revision=revision, _raise_exceptions_for_missing_entries=False
    )
    if file is not None:
        expected = Tokenizer.from_file(file).encode(TOKENIZER_PROBE, add_special_tokens=False)
        if ids != expected.ids:  # its pre-tokenizer was replaced by that of the model's family
            log("AutoTokenizer changes this model's tokens: PreTrainedTokenizerFast is used")
            tokenizer = PreTrainedTokenizerFast.from_pretrained(name, revision=revision)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError("its tokenizer has neither a pad nor an eos token")
        log("the tokenizer has no pad token: its eos token is used")
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.chat_template is None:
        log("the tokenizer has no chat template: the prompt is plain text")
    options = config.task.template_options
    if unread := [name for name in options if name not in str(tokenizer.chat_template)]:
        raise ValueError(f"task.template_options: its chat template has no {unread[0]}")
    if tokenizer.chat_template is not None and config.task.template_date is not None:
        template = dated(tokenizer.get_chat_template(), config.task.template_date)
        options = options | {"chat_template": template}  # best/ keeps the template as it was
    # Every call of it gets them: for prompts, for checks, for the token that ends a turn.
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **options)
    return tokenizer


def dated(template: str, day: str) -> str:
    """The template, with the date of a day such as "2026-11-23" where it writes today's."""
    call = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
    return call.sub(lambda match: repr(datetime.fromisoformat(day).strftime(match[2])), template)


def check_vocabulary(model: nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise ValueError if the tokenizer can give an id that the model has no embedding for.

    More embeddings than tokens do no harm: Qwen2.5 has 271 embeddings without a token. A special
    token that no prompt contains, such as Gemma 3's for images, may have no embedding.
    """
    chat = [{"role": "user", "content": TOKENIZER_PROBE}]
    used = set(tokenizer.encode(render_prompt(chat, tokenizer), add_special_tokens=True))
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    unused = special - used - {tokenizer.pad_token_id}
    largest = max(set(tokenizer.get_vocab().values()) - unused)
    num_embeddings = len(model.get_input_embeddings().weight)
    if largest >= num_embeddings:
        problem = f"gives ids up to {largest}, but it has {num_embeddings} embeddings"
        raise ValueError(f"its tokenizer {problem}; give a tokenizer that belongs to it")
