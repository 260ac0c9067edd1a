"""vLLM as the sampler: it computes logits, and draw.py draws from them, as for every backend.

Untried on a GPU. There, from 0.31 on, vLLM would take its second model runner, which refuses our
logits processor: VLLM_USE_V2_MODEL_RUNNER=0 keeps the first. When vLLM drops that one, derive
`Drawing` from the second's class of logits processors and take the variable away.
"""

import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from engine.core.config import ModelSettings
from engine.core.distributed import World
from engine.core.packages import import_package
from engine.core.signals import leave_if_signalled
from engine.core.tensors import autocast, whole
from engine.core.types import Completion, Progress, Prompts, SamplingParams, Seed
from engine.sampling.draw import TokenBuffer, draw_uniforms
from engine.sampling.sampler import scores_alike

KEY = "sampling.backend = vllm"


class VllmEngine:
    """Samples completions of the policy's weights: what a LoopSampler does, by vLLM."""

    def __init__(
        self,
        settings: ModelSettings,
        model: nn.Module,
        world: World,
        dtype: torch.dtype,
        memory_gb: float | None,
    ) -> None:
        """It computes in `dtype` with the weights of `model`; `settings` name its base."""
        vllm = import_vllm(world.device)
        self.device = world.device
        self.dtype = dtype
        self.trained = model
        from vllm.v1.sample.logits_processor import LogitsProcessor

        if memory_gb is None:
            memory_gb = 1.0
            if self.device.type == "cuda":
                memory_gb = 0.2e-9 * torch.cuda.mem_get_info(self.device)[0]
        self.make_request = vllm.SamplingParams
        try:
            self.llm = vllm.LLM(
                model=settings.name,
                revision=settings.revision,
                code_revision=settings.revision,
                trust_remote_code=settings.trust_remote_code,
                dtype=str(dtype).removeprefix("torch."),
                load_format="dummy",
                skip_tokenizer_init=True,
                generation_config="vllm",  # not the hub's
                max_model_len=-1,  # the model's own, or as much as the cache holds
                kv_cache_memory_bytes=int(1e9 * memory_gb),
                gpu_memory_utilization=0.01,  # without effect beside the above, but checked
                enforce_eager=self.device.type != "cuda",  # only CUDA has graphs to capture
                async_scheduling=False,  # it would draw a token more after a row's end
                logits_processors=[type("Drawing", (Drawing, LogitsProcessor), {"of": self})],
                distributed_executor_backend="external_launcher" if world.size > 1 else None,
            )
        except Exception as error:  # whatever vLLM raises for a model that it does not know
            raise ValueError(
                f"{KEY}: vLLM cannot sample {settings.name}: {' '.join(str(error).split())}; write "
                "grouped"
            ) from error
        self.refresh()

    def tokens_at_once(self, longest: int, params: SamplingParams) -> int:
        """vLLM lets rows wait by itself."""
        return sys.maxsize

    @torch.no_grad()
    def refresh(self) -> None:
        """Give vLLM the trained weights, in place; what it has cached was made of older ones."""
        self.llm.collective_rpc(
            "reload_weights",
            kwargs={"weights_iterator": checkpoint_weights(self.trained, self.dtype)},
        )
        self.llm.reset_prefix_cache()

    def score(self, token_ids: list[int]) -> Tensor:
        """vLLM's own log-probabilities of tokens (T,) but the first: (T - 1,)."""
        request = self.make_request(max_tokens=1, prompt_logprobs=0, detokenize=False)
        (output,) = self.llm.generate([{"prompt_token_ids": token_ids}], request, use_tqdm=False)
        pairs = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return torch.tensor([log_probs[token].logprob for token, log_probs in pairs])

    @torch.no_grad()
    def decode(
        self,
        prompts: Prompts,
        seeds: list[Seed],
        params: SamplingParams,
        *,
        on_progress: Progress,
        generate: object,  # not used
    ) -> list[Completion]:
        self.prompts = prompts
        self.uniforms = draw_uniforms(seeds, params).to(self.device)
        self.drawn = drawn = TokenBuffer(len(self.uniforms), params, self.device)
        self.active = drawn.active.clone()  # (B,), False once a row has ended
        longest = max(map(len, prompts))
        room = self.llm.model_config.max_model_len
        if longest + params.max_new_tokens > room:
            raise ValueError(f"{KEY}: its cache holds {room} tokens: raise sampling.vllm_memory_gb")
        with autocast(self.device, torch.float32):  # off: vLLM has its own dtype
            for row in range(len(self.active)):
                self.add_request(row)
            while self.llm.llm_engine.has_unfinished_requests():
                rows = [
                    int(output.request_id)
                    for output in self.llm.llm_engine.step()
                    if output.finished
                ]
                leave_if_signalled()
                on_progress(sum(not self.go_on(row) for row in rows))
        drawn.rows = torch.arange(len(self.active), device=self.device)
        drawn.active = self.active
        return drawn.completions()

    def add_request(self, row: int) -> None:
        """Let vLLM go on with a row, up to its end or to where it asks its tool."""
        params = self.drawn.params
        length = int(self.drawn.lengths[row])
        request = self.make_request(
            temperature=0,  # of the logits that `draw` leaves, one is finite
            max_tokens=params.max_new_tokens - length,
            stop_token_ids=sorted({*params.eos_ids, *self.drawn.asking_ids.tolist()}),
            ignore_eos=True,  # the model's own; ours are among those
            detokenize=False,
            extra_args={"row": row, "start": length},
        )
        ids = self.prompts[row // params.group_size] + self.drawn.tokens[row, :length].tolist()
        self.llm.llm_engine.add_request(str(row), {"prompt_token_ids": ids}, request)

    def go_on(self, row: int) -> bool:
        """After a row's request: whether it goes on, behind what its tool may have written."""
        drawn = self.drawn
        nothing = torch.zeros(1, device=self.device)
        self.select([row], [int(drawn.lengths[row])])
        drawn.ask_tools(drawn.tokens[row, drawn.t - 1])
        written = drawn.tool_tokens[row].tolist()
        while (t := int(drawn.t)) < len(written) and written[t] >= 0:
            drawn.append(nothing.long(), nothing, nothing)
        self.active[row] = drawn.active[0]
        if goes_on := bool(drawn.active[0]) and t < len(written):
            self.add_request(row)
        return goes_on

    def select(self, rows: list[int], columns: list[int]) -> None:
        """Let what is drawn next be the tokens of these rows at these columns."""
        drawn = self.drawn
        index = torch.tensor(rows, device=self.device)
        drawn.rows = index
        drawn.t = torch.tensor(columns, device=self.device)
        drawn.active = self.active[index]
        drawn.lengths[index] = drawn.t

    def draw(self, logits: Tensor, rows: list[int], columns: list[int]) -> Tensor:
        """Draw and record a token of each row; of the logits (b, V) all others become -inf."""
        self.active[rows] = True  # also if vLLM dropped what it had drawn for a prompt's part
        self.select(rows, columns)
        tokens = self.drawn.draw(logits, self.uniforms[self.drawn.rows, self.drawn.t])
        self.active[rows] = self.drawn.active
        return torch.full_like(logits, -torch.inf).scatter_(1, tokens[:, None], 0.0)


class Drawing:
    """vLLM's logits processor: it knows which row of vLLM's batch is which of ours."""

    of: VllmEngine

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.requests: dict[int, tuple[dict | None, list[int]]] = {}  # by row of vLLM's batch

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, update: Any) -> None:
        from vllm.v1.sample.logits_processor.builtin import process_dict_updates

        # The list of tokens is vLLM's own: it grows.
        process_dict_updates(self.requests, update, lambda p, _, tokens: (p.extra_args, tokens))

    def apply(self, logits: Tensor) -> Tensor:
        requests = [self.requests.get(i, (None, [])) for i in range(len(logits))]
        if any(ours is None for ours, _ in requests):  # not of `decode`, such as to warm up
            return logits
        columns = [ours["start"] + len(tokens) for ours, tokens in requests]
        return self.of.draw(logits, [ours["row"] for ours, _ in requests], columns)


@torch.no_grad()
def check_vllm(model: nn.Module, engine: Any, token_ids: list[int]) -> None:
    """Raise ValueError if vLLM, a VllmEngine, scores a text otherwise than the model does."""
    # It must be text: on random tokens a chat model in bf16 rounds by half a nat.
    tokens = torch.tensor(token_ids[1:], device=model.device)
    log_probs = engine.score(token_ids).to(model.device)
    with autocast(model.device, engine.dtype):
        if not scores_alike(model, token_ids[:1], tokens, log_probs, engine.dtype):
            raise ValueError(f"{KEY}: it computes another model than ours: write grouped")


def import_vllm(device: torch.device) -> ModuleType:
    """vLLM, or ValueError with the fix if it is missing, of another version, or for no device."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    vllm = import_package("vllm", key=KEY)
    from vllm.platforms import current_platform
    from vllm.v1.engine import core

    if not (0, 30) <= tuple(map(int, vllm.__version__.split(".")[:2])) < (0, 33):
        raise ValueError(f"{KEY}: vLLM {vllm.__version__} was not tried: pip install '.[vllm]'")
    if (found := current_platform.device_type) != device.type:
        raise ValueError(
            f"{KEY}: vLLM has {found or 'no device'}, a rank here {device.type}: start one rank "
            "for each GPU, or write grouped"
        )
    core.cleanup_dist_env_and_memory = lambda: None  # at exit: World.leave ends the process group
    return vllm


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
