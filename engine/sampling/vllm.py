"""vLLM as the sampler: it computes logits, main.py's `sample_tokens` draws from them.

So a completion has the random numbers, the log-probabilities and the end that `decode_grouped`
would give it, up to rounding. Each rank has an engine of its own, in its own process and on its own
device, and gives it the trained weights after each update.

Untried on a GPU. There, from 0.31 on, vLLM would take its second model runner, which refuses our
logits processor; VLLM_USE_V2_MODEL_RUNNER=0 keeps the first. When vLLM drops that one, subclass
vllm.v1.worker.gpu.sample.logits_processor.LogitsProcessor, whose `apply` gets each row's request
and position with the logits, call `VllmEngine.draw` from it, and take the variable out of ENV.
"""

import os
import tomllib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from packaging.requirements import Requirement
from torch import Tensor, nn

from engine import ROOT
from engine.core.config import Config
from engine.core.distributed import World
from engine.core.tensors import autocast, seeded
from engine.core.types import Completion, Log, SamplingParams, Seed
from engine.model.adapters import find_base
from engine.sampling.record import Record
from engine.update.shards import whole

ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, so that weights are handed over
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
}
SHARE = 0.4  # of a GPU's free memory, for the cache


class VllmEngine:
    """Samples completions of the policy's weights, as main.py's decode functions do."""

    def __init__(
        self, model: nn.Module, config: Config, world: World, dtype: torch.dtype, log: Log
    ) -> None:
        """An engine that computes in `dtype`; ValueError of one line if there can be none."""
        self.device, self.dtype = world.device, dtype
        os.environ.update(ENV)
        vllm = import_vllm(world.device)
        settings = find_base(config.model) or config.model  # of an adapter, its base
        self.make_request, bases = vllm.SamplingParams, (Drawing, logits_processor())
        num_bytes = cache_bytes(model, config, world, dtype)
        try:
            with seeded([[0]], world.device):  # vLLM seeds all generators
                self.llm = vllm.LLM(
                    model=settings.name,
                    revision=settings.revision,
                    trust_remote_code=settings.trust_remote_code,
                    dtype=str(dtype).removeprefix("torch."),
                    load_format="dummy",  # random weights, until `load_weights`
                    skip_tokenizer_init=True,
                    generation_config="vllm",  # not the hub's
                    max_model_len=-1,  # the model's own, or as much as the cache holds
                    kv_cache_memory_bytes=num_bytes,
                    gpu_memory_utilization=0.01,  # without effect beside the above, but checked
                    enforce_eager=world.device.type != "cuda",  # a CPU has no graphs to capture
                    async_scheduling=False,  # would draw a token more after a row's end
                    logits_processors=[type("Drawing", bases, {"engine": self})],
                    distributed_executor_backend="external_launcher" if world.size > 1 else None,
                    disable_log_stats=True,
                )
            self.load_weights(model)
            difference = self.mismatch_with(model)
            if not difference <= (1e-3 if dtype == torch.float32 else 2**-6):
                raise ValueError(f"its log-probabilities differ by {difference:.3f} from ours")
        except Exception as error:  # whatever vLLM raises for a model that it does not know
            problem = f"vLLM cannot sample {settings.name}: {' '.join(str(error).split())}"
            raise ValueError(f"sampling.backend = vllm: {problem}; write grouped") from error
        log(f"vLLM {vllm.__version__} samples in {dtype}, with a cache of {num_bytes / 1e9:.2f} GB")

    def eval(self) -> "VllmEngine":
        """As for a model: here there is nothing to switch."""
        return self

    @torch.no_grad()
    def load_weights(self, model: nn.Module) -> None:
        """Give vLLM the model's weights, in place; what it has cached was made of older ones."""
        weights = checkpoint_weights(model, self.dtype)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.reset_prefix_cache()

    @torch.no_grad()
    def mismatch_with(self, model: nn.Module) -> float:
        """How far vLLM's log-probabilities of made-up tokens are from the model's, on average.

        In multiples of the largest logit, as in engine/model/probes.py; that is where they round.
        """
        ids = [i % model.config.get_text_config().vocab_size for i in range(1, 33)]
        request = self.make_request(max_tokens=1, prompt_logprobs=0, detokenize=False)
        (output,) = self.llm.generate([{"prompt_token_ids": ids}], request, use_tqdm=False)
        pairs = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
        theirs = torch.tensor([log_probs[token].logprob for token, log_probs in pairs])
        tokens = torch.tensor([ids], device=model.device)
        with autocast(model.device, self.dtype):
            logits = model.eval()(input_ids=tokens).logits[0, :-1].float()
        ours = logits.log_softmax(dim=-1).gather(-1, tokens[0, 1:, None])[:, 0].cpu()
        return float((ours - theirs).abs().mean() / logits.abs().max().clamp(min=1.0))

    @torch.no_grad()
    def decode(
        self,
        prompts: list[list[int]],
        seeds: list[Seed],
        params: SamplingParams,
        *,
        on_progress: Callable[[int], None],
        rules: tuple[Callable[..., Any], ...],
    ) -> list[Completion]:
        """Sample a group of completions of each prompt; called as main.py's decode functions are.

        `rules` are main.py's draw_uniforms, sample_tokens and write.
        """
        draw_uniforms, self.sample_tokens, self.write = rules
        self.prompts, self.uniforms = prompts, draw_uniforms(seeds, params).to(self.device)
        self.record = Record(len(self.uniforms), params, self.device)
        self.active = torch.ones_like(self.record.active)  # (B,), False once a row has ended
        core, context = self.llm.llm_engine, self.llm.model_config.max_model_len
        if (longest := max(map(len, prompts)) + params.max_new_tokens) > context:
            problem = f"a prompt and its completion may take {longest} tokens, vLLM has {context}"
            raise ValueError(f"{problem}: raise sampling.vllm_memory_gb")
        with autocast(self.device, torch.float32):  # off: vLLM has its own dtype
            for row in range(len(self.uniforms)):
                self.add_request(row)
            while core.has_unfinished_requests():
                ended = [int(output.request_id) for output in core.step() if output.finished]
                on_progress(sum(not self.go_on(row) for row in ended))
        self.record.rows, self.record.active = torch.arange(len(self.active)), self.active
        return self.record.completions()

    def add_request(self, row: int) -> None:
        """Let vLLM go on with a row, up to its end or to where it asks its tool."""
        record, length = self.record, int(self.record.lengths[row])
        params = record.params
        request = self.make_request(
            temperature=0,  # of the logits that `draw` leaves, one is finite
            max_tokens=params.max_new_tokens - length,
            stop_token_ids=sorted({*params.eos_ids, *record.asking_ids.tolist()}),
            ignore_eos=True,  # the model's own; ours are among those
            detokenize=False,
            extra_args={"row": row, "start": length},
        )
        ids = self.prompts[row // params.group_size] + record.tokens[row, :length].tolist()
        self.llm.llm_engine.add_request(str(row), {"prompt_token_ids": ids}, request)

    def go_on(self, row: int) -> bool:
        """After a row's request: whether it goes on, behind what its tool may have written."""
        record, length = self.record, int(self.record.lengths[row])
        self.select([row], [length])
        record.insert_replies(record.tokens[row, length - 1 : length])
        nothing = torch.zeros(1, device=self.device)
        while (t := int(record.t)) < record.inserts.shape[1] and record.inserts[row, t] >= 0:
            self.write(record, nothing.long(), nothing, nothing)
        self.active[row] = record.active[0]
        goes_on = bool(record.active[0]) and t < record.inserts.shape[1]
        if goes_on:
            self.add_request(row)
        return goes_on

    def select(self, rows: list[int], columns: list[int]) -> None:
        """Let the record's next tokens be those of these rows, at these columns."""
        record, index = self.record, torch.tensor(rows, device=self.device)
        record.rows, record.t = index, torch.tensor(columns, device=self.device)
        record.active, record.lengths[index] = self.active[index], record.t

    def draw(self, logits: Tensor, rows: list[int], columns: list[int]) -> Tensor:
        """Draw and record a token of each row; of the logits (b, V) all others become -inf.

        vLLM drops what follows a part of a prompt: the row is then drawn again at that column.
        """
        self.active[rows] = True
        self.select(rows, columns)
        uniforms, params = self.uniforms[self.record.rows, self.record.t], self.record.params
        tokens = self.write(self.record, *self.sample_tokens(logits, uniforms, params))
        self.active[rows] = self.record.active
        return torch.full_like(logits, -torch.inf).scatter_(1, tokens[:, None], 0.0)


class Drawing:
    """vLLM's logits processor: it knows which row of its batch is which of ours."""

    engine: VllmEngine

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.requests: dict[int, tuple[dict | None, list[int]]] = {}  # by index in vLLM's batch

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, update: Any) -> None:
        """vLLM's batch has changed; in this order, as vLLM asks."""
        for i in update.removed if update else ():
            self.requests.pop(i, None)
        for i, params, _, token_ids in update.added if update else ():
            self.requests[i] = params.extra_args, token_ids  # the list grows with each token
        for a, b, how in update.moved if update else ():
            at_a, at_b = self.requests.pop(a, None), self.requests.pop(b, None)
            if at_a is not None:
                self.requests[b] = at_a
            if at_b is not None and how.name == "SWAP":
                self.requests[a] = at_b

    def apply(self, logits: Tensor) -> Tensor:
        requests = [self.requests.get(i, (None, [])) for i in range(len(logits))]
        if any(ours is None for ours, _ in requests):  # vLLM's own, such as to warm up
            return logits
        columns = [ours["start"] + len(token_ids) for ours, token_ids in requests]
        return self.engine.draw(logits, [ours["row"] for ours, _ in requests], columns)


def logits_processor() -> type:
    """The class that vLLM wants a logits processor to be of."""
    from vllm.v1.sample.logits_processor import LogitsProcessor

    return LogitsProcessor


def import_vllm(device: torch.device) -> ModuleType:
    """vLLM, or ValueError with the fix: it is missing, or of another version, or for no device."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = Requirement(project["optional-dependencies"]["vllm"][0])
    try:
        import vllm
        from vllm.platforms import current_platform
        from vllm.v1.engine import core
    except ImportError as error:
        problem = "it is not installed" if error.name == "vllm" else str(error)
        raise ValueError(f"sampling.backend = vllm: {problem}: pip install '{wanted}'") from error
    if not wanted.specifier.contains(vllm.__version__):
        problem = f"vLLM {vllm.__version__} is not one of those that were tried"
        raise ValueError(f"sampling.backend = vllm: {problem}: pip install '{wanted}'")
    if current_platform.device_type != device.type:
        problem = f"this vLLM computes on {current_platform.device_type or 'no device here'}, a "
        problem += f"rank of this run on {device.type}: start one rank for each GPU, or write"
        raise ValueError(f"sampling.backend = vllm: {problem} grouped")
    core.cleanup_dist_env_and_memory = lambda: None  # at exit: World.leave ends the process group
    return vllm


def cache_bytes(model: nn.Module, config: Config, world: World, dtype: torch.dtype) -> int:
    """The size of vLLM's cache: as the key says or, on a GPU, a share of what will be free."""
    if config.sampling.vllm_memory_gb is not None:
        return int(1e9 * config.sampling.vllm_memory_gb)
    if world.device.type != "cuda":
        return 10**9
    numels = [(p.numel(), p.requires_grad) for p in model.parameters()]
    coming = dtype.itemsize * sum(numel for numel, _ in numels)  # vLLM's weights
    if config.mode == "train":  # gradients and averages, with model.shard the weights too
        num_bytes = 16 / world.size if config.model.shard else 12
        coming += num_bytes * sum(numel for numel, is_trained in numels if is_trained)
    return int(SHARE * (torch.cuda.mem_get_info(world.device)[0] - coming))


def checkpoint_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Each weight in turn by its name in a checkpoint: whole, with any adapter added to it."""
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in model.state_dict(keep_vars=True).items():
        if ".lora_" in name:
            continue
        weight = whole(tensor.detach(), dtype)
        if name.endswith(".base_layer.weight"):  # peft's layer around it knows the adapter
            layer = model.get_submodule(name.removesuffix(".base_layer.weight"))
            weight = weight.float() + layer.get_delta_weight("default")
        weights = {name.replace(".base_layer.", "."): weight.to(dtype)}
        yield from revert_weight_conversion(model, weights).items()
