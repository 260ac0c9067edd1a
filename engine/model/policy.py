"""The policy: the model that is trained, what samples from it, what scores it, a reference."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedTokenizerFast

from engine.core.config import Config
from engine.core.distributed import World
from engine.core.tensors import context_of
from engine.core.types import Log, SamplingParams
from engine.model.load import find_base, load_model_and_tokenizer, of_teacher
from engine.model.precision import GROWTH_INTERVAL, INIT_SCALE
from engine.model.probes import supports_chunked_head
from engine.sampling.sampler import LoopSampler, choose_loop, copy_in, sample_by_loop

# Up to so many bytes the fp32 logits of a whole micro-batch are made at once; larger ones would be
# most of a GPU's memory (8,192 tokens x 151,936 make 5 GB), so they are made block by block.
MAX_LOGITS_BYTES = 2**28
# A micro-batch's tokens where the config says null: on a GPU it has as many as fit, up to these.
CPU_TOKENS = 2_048
MOST_TOKENS = 32_768


@dataclass
class Policy:
    """The model that is trained, as it scores completions and as it samples them."""

    model: nn.Module  # what the optimizer steps is fp32; else in the dtype that it computes in
    sampler: LoopSampler  # or a VllmEngine, which has the same methods
    tokenizer: PreTrainedTokenizerFast
    params: SamplingParams  # for the samples that are trained on
    compute_dtype: torch.dtype  # of the scorer, and of the sampler where that is a copy
    scorer: nn.Module | None = None  # main.py's CompletionScorer, perhaps in DDP, for training
    reference: nn.Module | None = None  # a scorer of the first model, or of the teacher
    teacher: nn.Module | None = None
    is_in_training: bool = False  # then a row's numbers must not depend on those beside it

    @functools.cached_property
    def grad_scaler(self) -> torch.amp.GradScaler:
        """For arithmetic in float16; else it is off, a factor of 1."""
        return torch.amp.GradScaler(
            self.model.device.type,
            init_scale=INIT_SCALE,
            growth_interval=GROWTH_INTERVAL,
            enabled=self.compute_dtype == torch.float16,
        )

    @property
    def is_in_ddp(self) -> bool:
        return isinstance(self.scorer, DistributedDataParallel)

    @property
    def inner_scorer(self) -> nn.Module:
        """Below DDP, where no rank waits for another."""
        return self.scorer.module if self.is_in_ddp else self.scorer

    @property
    def context_length(self) -> int | None:
        """The most tokens that the model, and its teacher, can see; None for no limit."""
        limits = [
            context_of(model, is_steady=self.is_in_training)
            for model in filter(None, (self.model, self.teacher))
        ]
        return min(filter(None, limits), default=None)

    @property
    def end_tokens(self) -> str:
        """The tokens at which a completion ends, in words; None is an id without a token."""
        tokens = map(str, self.tokenizer.convert_ids_to_tokens(self.params.eos_ids))
        texts = self.params.stop.texts if self.params.stop else []
        return " or ".join([*tokens, *map(repr, texts)])

    def has_large_logits(self, config: Config, device: torch.device, log: Log) -> bool:
        """Whether those of a whole micro-batch are large, and can be made block by block."""
        vocab_size = self.model.config.get_text_config().vocab_size
        most = MOST_TOKENS if device.type == "cuda" else CPU_TOKENS
        num_bytes = 4 * (config.training.micro_batch_tokens or most) * vocab_size
        scored = filter(None, (self.model, self.teacher))
        in_blocks = num_bytes > MAX_LOGITS_BYTES
        in_blocks = in_blocks and all(supports_chunked_head(model, log) for model in scored)
        how = "in blocks of the vocabulary" if in_blocks else "at once"
        log(f"logits of a micro-batch: {num_bytes / 1e6:,.1f} MB, made {how}")
        return in_blocks

    def reference_model(self, config: Config) -> nn.Module:
        """The teacher, else the model that the run starts from: a frozen copy, but with LoRA."""
        if self.teacher:
            return self.teacher
        if config.model.lora:
            return self.model
        return copy_in(self.compute_dtype, self.model, self.model.device)

    def compute_in_bf16(self) -> None:
        """Where the scorer and the sampler have computed in fp32, with the same weights."""
        self.compute_dtype = torch.bfloat16
        self.sampler.model = copy_in(torch.bfloat16, self.sampler.model, self.model.device)
        for scorer in filter(None, (self.inner_scorer, self.reference)):
            scorer.compute_dtype = torch.bfloat16

    def shard(self, world: World) -> None:
        """Cut the weights that are trained, and those of a reference, into a part for each rank."""
        from engine.update.shards import shard_scorer

        self.scorer = shard_scorer(self.scorer, world, reshard_after_forward=False)
        if self.reference:
            self.reference = shard_scorer(self.reference, world, reshard_after_forward=True)

    @torch.no_grad()
    def score_by_reference(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        """The log-probabilities (B, S) that the reference gives to the tokens, as the scorer's."""
        temperature = self.params.temperature
        if self.reference.model is not self.model:
            return self.reference(input_ids, mask, temperature=temperature)
        self.model.disable_adapters()  # LoRA: its base is the model that the run started from
        try:
            return self.reference(input_ids, mask, temperature=temperature)
        finally:
            self.model.enable_adapters()


def load_policy(config: Config, world: World, log: Log) -> Policy:
    """The model that the config names, what samples from it, and with distill its teacher."""
    settings = config.sampling
    model, tokenizer, dtype = load_model_and_tokenizer(config, world.device, log)
    params = sampling_params(config, model, tokenizer, log)
    if settings.backend == "vllm":
        from engine.sampling.vllm import VllmEngine, check_vllm

        base = find_base(config.model.source) or config.model.source
        sampler = VllmEngine(base, model, world, dtype, settings.vllm_memory_gb)
        check_vllm(model, sampler, tokenizer.encode("12 plus 30 is 42, and Rome is in Italy."))
    else:
        sampler = sample_by_loop(config, model, dtype, world)
        if settings.backend == "grouped":
            choose_loop(sampler, log)
    is_training = config.is_training
    policy = Policy(model, sampler, tokenizer, params, dtype, is_in_training=is_training)
    steady = context_of(model, is_steady=True)
    if steady != context_of(model):
        means = "beyond it a text depends on the rows beside it"
        if is_training:
            means = "that is its context in training"
        log(f"warning: this model's positions turn otherwise from {steady:,} tokens on: {means}")
    if is_training and config.model.teacher:
        load_teacher(policy, config, world, log)
    return policy


def load_teacher(policy: Policy, config: Config, world: World, log: Log) -> None:
    """Give the policy its frozen teacher; warn of what that leaves out."""
    own_context = policy.context_length
    teacher, *_ = load_model_and_tokenizer(
        of_teacher(config),
        world.device,
        lambda line: log(f"teacher: {line}"),
        compute_dtype=policy.compute_dtype,
        key="model.teacher",
    )
    policy.teacher = teacher.eval().requires_grad_(False)
    if {*policy.teacher.generation_config.eos_token_id} != {*policy.params.eos_ids}:
        log("warning: the teacher's texts end at other tokens than the trained model's")
    if policy.context_length != own_context:
        log(
            f"warning: the teacher sees {policy.context_length:,} tokens, fewer than the trained "
            "model: questions without room for a completion there are left out"
        )


def sampling_params(
    config: Config, model: nn.Module, tokenizer: PreTrainedTokenizerFast, log: Log
) -> SamplingParams:
    """How the completions that are trained on are sampled."""
    training = config.training
    sampling = config.sampling
    calculator = None
    stop = None
    eos_ids = tuple(model.generation_config.eos_token_id)  # with those tokens of sampling.stop
    if texts := [text for text in sampling.stop if text not in tokenizer.get_added_vocab()]:
        from engine.sampling.stop_texts import StopTexts

        stop = StopTexts(tokenizer, texts, eos_ids)
    if config.is_training and (sampling.top_p < 1 or sampling.top_k > 0):
        log("sampling.top_p or top_k draws from less than what is scored: the gradient is biased")
    if sampling.calculator:
        from engine.sampling.calculator import Calculator

        calculator = Calculator(tokenizer, sampling.calculator)
    return SamplingParams(
        max_new_tokens=training.max_new_gen_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        eos_ids=eos_ids,
        pad_id=tokenizer.pad_token_id,
        group_size=training.group_size,
        calculator=calculator,
        max_turns=sampling.max_turns,
        stop=stop,
    )
