"""The policy: a Hugging Face model and tokenizer, loaded with care, that samples and that scores.

Shapes: B rows, P longest prompt, T completion tokens, V vocabulary. Masks are bool, True = keep.
"""

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
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

from adapter import (
    add_adapter,
    find_base,
    in_4bit,
    keep_layout,
    load_adapter,
    lora_config,
    score_without_adapter,
)
from calculator import Calculator
from config import Config, truncates
from estimate import check_memory
from head import head_log_probs
from sampler import SamplingParams, position_ids, supports_grouped


@dataclass
class Policy:
    """The model that is trained, as it scores completions and as it samples them."""

    model: nn.Module  # the weights that the optimizer steps are fp32
    scorer: nn.Module | None  # CompletionScorer of it, in DDP on several ranks; None: no training
    sampler: nn.Module  # the model itself, or on CUDA a bf16 copy of it
    tokenizer: PreTrainedTokenizerFast
    params: SamplingParams  # of training samples
    backend: str
    max_batch_tokens: int | None  # None is what fits
    reference: Callable[..., torch.Tensor] | None = None  # scores as `scorer`, for the KL penalty

    def autocast(self) -> torch.autocast:
        """For sampling: an adapter on bf16 weights then computes what it does in the scorer."""
        return autocast(self.model.device, self.model.dtype)

    def refresh_sampler(self) -> None:
        """Copy the trained weights into the sampler, in place."""
        if self.sampler is self.model:
            return
        with torch.no_grad():
            copies = [*self.sampler.parameters(), *self.sampler.buffers()]
            for copied, trained in zip(
                copies, [*self.model.parameters(), *self.model.buffers()], strict=True
            ):
                copied.copy_(trained)


class CompletionScorer(nn.Module):
    """log pi of completions. A module, since DDP synchronises what goes through its forward."""

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype, *, lean: bool):
        super().__init__()
        self.model = model
        self.compute_dtype = compute_dtype
        self.lean = lean  # never hold all logits: for the models of `supports_lean`

    def forward(
        self, input_ids: torch.Tensor, mask: torch.Tensor, *, num_tokens: int, temperature: float
    ) -> torch.Tensor:
        """Log-probabilities (B, T) of the last T = num_tokens columns of input_ids (B, P + T).

        `mask` (B, P + T) is False on padding, which may be on both sides; it scores 0.
        """
        inputs = model_inputs(input_ids, mask)
        token_ids, is_kept = input_ids[:, -num_tokens:], mask[:, -num_tokens:]  # (B, T)
        with autocast(input_ids.device, self.compute_dtype):
            # what the model gives at a position predicts the token after it
            if self.lean:
                hidden = self.model.base_model(**inputs).last_hidden_state
                hidden = hidden[:, -num_tokens - 1 : -1]  # (B, T, H)
            else:
                logits = self.model(**inputs, logits_to_keep=num_tokens + 1).logits[:, :-1]
        if not self.lean:
            log_probs = token_log_probs(logits, token_ids, temperature=temperature)
            return log_probs.masked_fill(~is_kept, 0.0)
        log_probs = head_log_probs(
            hidden[is_kept].to(self.compute_dtype),
            self.model.get_output_embeddings(),
            token_ids[is_kept],
            temperature=temperature,
        )
        return log_probs.new_zeros(is_kept.shape).masked_scatter(is_kept, log_probs)


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Matrices are multiplied in bf16, whatever the weights are; fp32 leaves all as it is."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)


def model_inputs(input_ids: torch.Tensor, mask: torch.Tensor) -> dict:
    """What a model is called with, for a forward over whole rows."""
    return {
        "input_ids": input_ids,
        "attention_mask": mask,
        "position_ids": position_ids(mask),
        "use_cache": False,
    }


def token_log_probs(
    logits: torch.Tensor, token_ids: torch.Tensor, *, temperature: float
) -> torch.Tensor:
    """log softmax(logits / temperature) of the given tokens; (B, T, V) and (B, T) to (B, T)."""
    logits = logits.float() / temperature
    chosen = logits.gather(-1, token_ids[..., None])[..., 0]
    return chosen - logits.logsumexp(dim=-1)


@torch.no_grad()
def supports_lean(model: nn.Module) -> bool:
    """Whether the logits are exactly those of a plain linear head on the last hidden states.

    They are not where a model caps or scales them, or adapts its head. A cap hardly changes small
    logits, such as those of a model not trained yet, so that nothing but rounding may differ on a
    short made-up input.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:  # a quantised or adapted one computes something else
        return False
    ids = torch.arange(1, 7, device=model.device)[None] % head.out_features  # (1, 6)
    inputs = model_inputs(ids, torch.ones_like(ids, dtype=torch.bool))
    expected = model(**inputs).logits
    try:
        logits = head(model.base_model(**inputs).last_hidden_state)
    except (AttributeError, NotImplementedError, TypeError, ValueError, RuntimeError):
        return False
    if logits.shape != expected.shape:
        return False
    return bool((logits - expected).abs().max() <= 1e-6 * expected.abs().max())


def load_policy(
    config: Config, *, device: torch.device, num_ranks: int, say: Callable[[str], None]
) -> Policy:
    """The policy on this rank's device; `say` is told what a user should know about it.

    Raises ValueError, one line, where the model cannot be used.
    """
    sampling, training, is_training = config.sampling, config.training, config.mode == "train"
    compute_dtype = choose_compute_dtype(config.model.compute_dtype, device)
    model, tokenizer, eos_ids = load_model_and_tokenizer(
        config, device=device, compute_dtype=compute_dtype, say=say
    )
    samples_copy = samples_a_copy(device, weight_dtype=model.dtype, compute_dtype=compute_dtype)
    scorer = reference = None
    if is_training:
        lean = supports_lean(model)
        if not lean:
            say("this model's logits are more than head(hidden): the update holds all at once")
        scorer = CompletionScorer(model, compute_dtype, lean=lean)
        if training.kl_coef > 0:  # before a checkpoint's weights are loaded: it stays model.name
            reference = make_reference(config, scorer, in_bf16=samples_copy)
        if num_ranks > 1:
            scorer = with_averaged_gradients(scorer, device)
    if truncates(sampling) and is_training:
        say(
            "sampling.top_p or top_k is on: completions are drawn from a truncated distribution, "
            "but scored under the whole one, so the gradient is biased"
        )
    calculator = Calculator(tokenizer) if sampling.calculator else None
    params = SamplingParams(
        max_new_tokens=training.max_new_gen_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        eos_ids=eos_ids,
        pad_id=tokenizer.pad_token_id,
        calculator=calculator,
    )
    sampler = bf16_copy(model) if samples_copy else model
    with autocast(device, model.dtype):
        can_capture = calculator is None
        backend = choose_backend(sampling.backend, sampler.eval(), say, can_capture=can_capture)
    return Policy(
        model, scorer, sampler, tokenizer, params, backend, sampling.max_batch_tokens, reference
    )


def load_model_and_tokenizer(
    config: Config,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    say: Callable[[str], None],
) -> tuple[nn.Module, PreTrainedTokenizerFast, tuple[int, ...]]:
    """The model on the device, with its adapter if it has one; tokenizer; ids that end a text."""
    settings, is_training = config.model, config.mode == "train"
    is_path = settings.name.startswith((".", "/", "~")) or settings.name.count("/") > 1
    if is_path and not Path(settings.name).is_dir():
        raise ValueError(
            f"model.name = {settings.name}: no such folder; give a folder with a model in it, or "
            "a hub id (owner/name)"
        )
    lora = lora_config(config) if is_training and settings.lora is not None else None
    quantization = in_4bit(device, compute_dtype) if settings.load_in_4bit else None
    with one_line_errors(settings.name):
        base = find_base(settings)
        if base is not None and is_training:
            raise ValueError(
                "it is an adapter: to train it further, start its run again with a larger "
                "training.num_steps; to train on from it, merge it (export.merge=true)"
            )
        config = config.model_copy(update={"model": base or settings})
        tokenizer = load_tokenizer(config, say)
        model_config = load_model_config(config)
        is_frozen = lora is not None or base is not None or quantization is not None
        dtype = compute_dtype if is_frozen else torch.float32  # small updates are lost in bf16
        samples_copy = samples_a_copy(device, weight_dtype=dtype, compute_dtype=compute_dtype)
        check_memory(
            model_config, config, device=device, samples_copy=samples_copy, weight_dtype=dtype
        )
        model, eos_ids = load_model(
            model_config, config, tokenizer, dtype=dtype, quantization=quantization, device=device
        )
        check_vocabulary(model, tokenizer)
        if base is not None:
            load_adapter(model, settings)
    if lora is not None:
        add_adapter(model, lora, seed=config.training.seed)
        num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        say(f"LoRA: {num_trained:,} weights are trained, all others stay as they are")
    return model, tokenizer, eos_ids


@contextlib.contextmanager
def one_line_errors(name: str) -> Iterator[None]:
    """What loading a model raises, as a ValueError of one line that names the model."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"model.name = {name}: cannot be used: {problem}") from error


def samples_a_copy(
    device: torch.device, *, weight_dtype: torch.dtype, compute_dtype: torch.dtype
) -> bool:
    """Whether a copy of the weights in the compute dtype samples: one that is cast only once."""
    return device.type == "cuda" and weight_dtype != compute_dtype


def make_reference(
    config: Config, scorer: CompletionScorer, *, in_bf16: bool
) -> Callable[..., torch.Tensor]:
    """Scores as the model does that the run starts from: with the adapter off, or a frozen copy."""
    if config.model.lora is not None:
        return functools.partial(score_without_adapter, scorer)
    copied = bf16_copy(scorer.model) if in_bf16 else frozen_copy(scorer.model)
    return CompletionScorer(copied, scorer.compute_dtype, lean=scorer.lean)


def with_averaged_gradients(scorer: CompletionScorer, device: torch.device) -> nn.Module:
    """The scorer in DDP, for several ranks."""
    device_ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(scorer, device_ids, gradient_as_bucket_view=True)


def choose_backend(
    name: str, sampler: nn.Module, say: Callable[[str], None], *, can_capture: bool = True
) -> str:
    """The backend asked for, or what this model supports in its place.

    Steps that a calculator looks at cannot be captured.
    """
    if name != "grouped":
        return name
    if not supports_grouped(sampler):
        say("this model's cache cannot be shared by a group: sampling.backend=generate")
        return "generate"
    if next(sampler.parameters()).device.type == "cuda" and can_capture:
        if supports_grouped(sampler, capture=True):
            return "captured"
        say("this model's decode step cannot be captured in a CUDA graph: sampling is slower")
    return name


def frozen_copy(model: nn.Module) -> nn.Module:
    """A copy that is not trained."""
    return copy.deepcopy(model).requires_grad_(False).eval()


def bf16_copy(model: nn.Module) -> nn.Module:
    """A frozen copy with bf16 weights and the buffers as they are.

    Rotary frequencies rounded to bf16 would turn far positions by the wrong angle.
    """
    copied = frozen_copy(model)
    for parameter in copied.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return copied


def load_model_config(config: Config) -> PretrainedConfig:
    """The model's own config, without dropout: else the scored policy is not the sampled one."""
    settings = config.model
    model_config = AutoConfig.from_pretrained(
        settings.name, revision=settings.revision, trust_remote_code=settings.trust_remote_code
    )
    saved = model_config.to_dict()
    if config.mode == "train" and saved.get("quantization_config"):
        raise ValueError(
            "its weights are quantised; give the model that it was made from, with "
            "model.load_in_4bit=true if you like"
        )
    for key, value in saved.items():
        if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
            setattr(model_config, key, 0.0)
    return model_config


def load_model(
    model_config: PretrainedConfig,
    config: Config,
    tokenizer: PreTrainedTokenizerFast,
    *,
    dtype: torch.dtype,
    quantization: BitsAndBytesConfig | None,
    device: torch.device,
) -> tuple[nn.Module, tuple[int, ...]]:
    """The model on the device, and the ids that end a completion."""
    settings = config.model
    quantized = {"quantization_config": quantization, "device_map": {"": device}}
    model, loading = AutoModelForCausalLM.from_pretrained(
        settings.name,
        config=model_config,
        dtype=dtype,
        attn_implementation=settings.attn_implementation,
        output_loading_info=True,
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
        **(quantized if quantization is not None else {}),
    )
    if missing := sorted(loading["missing_keys"]):  # they were drawn at random
        raise ValueError(f"{len(missing)} weights are missing, such as {missing[0]}")
    if quantization is None:
        model.to(device)
    else:
        keep_layout(model)
    declared = [tokenizer.eos_token_id, model.generation_config.eos_token_id]
    declared.append(model_config.get_text_config().eos_token_id)
    eos_ids = {i for ids in declared for i in (ids if isinstance(ids, list) else [ids])} - {None}
    if not eos_ids:
        raise ValueError("neither tokenizer nor model says which token ends text")
    # transformers fills what a generation config leaves open from the model's own: empty it
    model.generation_config = GenerationConfig(
        eos_token_id=sorted(eos_ids), pad_token_id=tokenizer.pad_token_id
    )
    if settings.gradient_checkpointing:
        with warnings.catch_warnings():  # transformers 5.23 renames it, 5.17 knows this name alone
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, tuple(sorted(eos_ids))


def choose_compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """bf16 where it is fast, else fp32, unless the config names one."""
    if name == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if fast else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


TOKENIZER_PROBE = "Use [3, 17, 255] to make 46.\n<think>12 * 3 = 36, don't</think>\n\n  été"


def load_tokenizer(config: Config, say: Callable[[str], None]) -> PreTrainedTokenizerFast:
    """The model's tokenizer, checked against its own tokenizer.json.

    AutoTokenizer can silently replace the pre-tokenizer by that of the model's family.
    """
    settings = config.model
    tokenizer = AutoTokenizer.from_pretrained(
        settings.name, revision=settings.revision, trust_remote_code=settings.trust_remote_code
    )
    if not tokenizer.encode(TOKENIZER_PROBE, add_special_tokens=False):
        raise ValueError("it has no tokenizer files, such as tokenizer.json")
    file = cached_file(
        settings.name,
        "tokenizer.json",
        revision=settings.revision,
        _raise_exceptions_for_missing_entries=False,
    )
    if file is not None:
        expected = Tokenizer.from_file(file).encode(TOKENIZER_PROBE, add_special_tokens=False).ids
        if tokenizer.encode(TOKENIZER_PROBE, add_special_tokens=False) != expected:
            say("AutoTokenizer changes this model's tokens: PreTrainedTokenizerFast is used")
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                settings.name, revision=settings.revision
            )
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError("its tokenizer has neither a pad nor an eos token")
        say("the tokenizer has no pad token: its eos token is used")
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.chat_template is None:
        say("the tokenizer has no chat template: the prompt is plain text")
    return tokenizer


def check_vocabulary(model: nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise ValueError if the tokenizer can give an id that the model has no embedding for.

    The other way round is common and does no harm: Qwen2.5 has 271 embeddings without a token.
    Special tokens that no prompt has may lie beyond too, as Gemma 3's for images does.
    """
    chat = [{"role": "user", "content": TOKENIZER_PROBE}]
    used = set(tokenizer.encode(render_prompt(chat, tokenizer), add_special_tokens=True))
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    unused = special - used - {tokenizer.pad_token_id}
    largest = max(set(tokenizer.get_vocab().values()) - unused)
    num_embeddings = len(model.get_input_embeddings().weight)
    if largest >= num_embeddings:
        raise ValueError(
            f"its tokenizer gives ids up to {largest}, but it has {num_embeddings} embeddings; "
            "give a tokenizer that belongs to it"
        )


# From a chat to text


def render_prompt(messages: list[dict] | str, tokenizer: PreTrainedTokenizerFast) -> str:
    """The chat as text; a last assistant message is the beginning of the completion.

    A plain text stays as it is: base models have a chat template too, which they were not taught.
    """
    if isinstance(messages, str):
        return messages
    if tokenizer.chat_template is None:
        return plain_text(messages)
    prefix = beginning(messages)
    chat = messages[:-1] if prefix else messages
    # the prefix is appended here, since some templates rewrite what an assistant says
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + prefix


def beginning(messages: list[dict] | str) -> str:
    """How the completion begins, where the prompt says it already."""
    if isinstance(messages, str) or messages[-1]["role"] != "assistant":
        return ""
    return messages[-1]["content"]


def plain_text(messages: list[dict]) -> str:
    """The chat for a model without a chat template."""
    return "\n".join(message["content"] for message in messages)
