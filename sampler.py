"""How completions are generated: the one hot loop apart from the update.

Every completion is drawn by inverse transform sampling from its own row of uniform random numbers,
which depend only on the question's seed. So a question gets the same completions whatever the batch
it is in, the number of ranks, or what was sampled before; nothing has to be saved to resume.

Shapes: N questions, G completions each, B rows in the batch, P longest prompt, T new tokens, V
vocabulary.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PretrainedConfig,
)
from transformers.cache_utils import Cache, DynamicLayer
from transformers.generation.streamers import BaseStreamer

from calculator import Calculator

logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)  # warns of what is off

Seed = Sequence[int]  # integers that name a question's random numbers, such as (seed, position)


@dataclass(frozen=True)
class SamplingParams:
    """What a completion is drawn from, and when it ends."""

    max_new_tokens: int
    temperature: float  # 0 is greedy: always the likeliest token, scored at temperature 1
    top_p: float  # 1 is off
    top_k: int  # 0 is off
    eos_ids: tuple[int, ...]
    pad_id: int
    calculator: Calculator | None = None  # writes the result where a completion asks for it


@dataclass(frozen=True)
class Completion:
    """What was sampled after one prompt."""

    token_ids: list[int]  # up to and including the first EOS
    log_probs: np.ndarray  # (T,), of each token under softmax(logits / temperature), untruncated
    entropies: np.ndarray  # (T,), of that distribution, in nats
    truncated: bool  # ended by the length limit instead of an EOS
    is_inserted: np.ndarray  # (T,), True for the calculator's tokens, whose two numbers are 0

    @property
    def num_sampled(self) -> int:
        """Tokens that the model chose itself."""
        return len(self.token_ids) - int(self.is_inserted.sum())

    @property
    def is_broken(self) -> bool:
        """Drawn from logits that were not finite: what came is noise (see `repair`)."""
        return not np.isfinite(self.log_probs).all()


def sample_completions(
    model: torch.nn.Module,
    prompts: list[list[int]],
    seeds: list[Seed],
    *,
    num_samples: int,
    params: SamplingParams,
    backend: str,
    max_batch_tokens: int | None,
    on_progress: Callable[[int], None],
) -> list[list[Completion]]:
    """`num_samples` completions of each prompt, in the prompts' order.

    Questions are decoded together, longest prompts first, as long as rows x (longest prompt + new
    tokens) stays within `max_batch_tokens`; None is what fits into the GPU's memory. `on_progress`
    gets the number of completions done.
    """
    decode = BACKENDS[backend]
    groups: list[list[Completion]] = [[] for _ in prompts]
    by_length = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    while by_length:
        row_tokens = len(prompts[by_length[0]]) + params.max_new_tokens
        num_rows = (max_batch_tokens or tokens_that_fit(model, row_tokens)) // row_tokens
        num_questions = max(1, num_rows // num_samples)
        batch, by_length = by_length[:num_questions], by_length[num_questions:]
        rows = decode(
            model,
            [prompts[i] for i in batch],
            [seeds[i] for i in batch],
            num_samples=num_samples,
            params=params,
            on_progress=on_progress,
        )
        for j, i in enumerate(batch):
            groups[i] = rows[j * num_samples : (j + 1) * num_samples]
    return groups


def tokens_that_fit(model: torch.nn.Module, row_tokens: int) -> int:
    """How many tokens can be decoded at once in rows of `row_tokens`: measured on a GPU."""
    device = model.device
    if device.type != "cuda":
        return 131_072
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + reserved
    config = model.config.get_text_config()
    cache = row_tokens * cache_bytes_per_token(config, bytes_per_number=model.dtype.itemsize)
    drawing = 6 * 4 * config.vocab_size  # fp32 logits and what `sample_tokens` makes of them
    return int(0.8 * free / (cache + drawing)) * row_tokens


def cache_bytes_per_token(config: PretrainedConfig, *, bytes_per_number: int) -> int:
    """Keys and values of one token in all layers; 0 where a text model's config does not tell."""
    heads = getattr(config, "num_attention_heads", 0)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    return 2 * getattr(config, "num_hidden_layers", 0) * key_heads * head_size * bytes_per_number


# Drawing one token


def sample_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, *, temperature: float, top_p: float, top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens drawn from softmax(logits / temperature), their log-probabilities and the entropies.

    logits (B, V), uniforms (B,) in [0, 1); returns three tensors (B,). Top-k and top-p restrict
    what is drawn; log-probability and entropy (in nats) stay those of the whole distribution.
    Temperature 0 takes the likeliest token, the first of equals, and scores it at temperature 1.
    """
    logits, is_broken = repair(logits.float() / (temperature or 1.0))
    log_probs = F.log_softmax(logits, dim=-1)  # (B, V)
    probs = log_probs.exp()
    entropies = -torch.special.xlogy(probs, probs).sum(dim=-1)  # 0 log 0 is 0
    if temperature == 0:
        tokens = logits.argmax(dim=-1, keepdim=True)  # (B, 1)
    else:
        cdf = keep_likeliest(probs, top_p=top_p, top_k=top_k).cumsum(dim=-1)
        # the sum is not exactly 1; uniforms are at most 1 - 2**-24: the threshold stays below it
        threshold = uniforms * cdf[:, -1]
        tokens = torch.searchsorted(cdf, threshold[:, None], right=True)  # never one of mass 0
    chosen = log_probs.gather(-1, tokens)[:, 0].masked_fill(is_broken, torch.nan)
    return tokens[:, 0], chosen, entropies


def repair(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (B, V) with rows that hold NaN or infinity made 0, and which ones (B,) they were.

    Drawing from them would raise in the middle of a batch; the log-probabilities of such a row are
    set to NaN instead, and the update skips the step.
    """
    is_broken = ~torch.isfinite(logits.amax(dim=-1))  # a masked-out token's -inf is no defect
    return logits.masked_fill(is_broken[:, None], 0.0), is_broken


def keep_likeliest(probs: torch.Tensor, *, top_p: float, top_k: int) -> torch.Tensor:
    """Probabilities (B, V) with those outside the top k, then outside the top p, set to 0.

    The top p are the fewest likeliest tokens whose sum, after top-k, reaches the share p
    (nucleus sampling, arXiv:1904.09751).
    """
    if 0 < top_k < probs.shape[-1]:
        kth = probs.topk(top_k, dim=-1).values[:, -1:]
        probs = probs.masked_fill(probs < kth, 0.0)
    if top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered  # mass of the likelier tokens
        ordered = ordered.masked_fill(before >= top_p * ordered.sum(dim=-1, keepdim=True), 0.0)
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
    return probs


# Backend `grouped`: each prompt is read once, and its cache is shared by its completions


@torch.no_grad()
def decode_grouped(
    model: torch.nn.Module,
    prompts: list[list[int]],
    seeds: list[Seed],
    *,
    num_samples: int,
    params: SamplingParams,
    on_progress: Callable[[int], None],
    capture: bool = False,
) -> list[Completion]:
    """Completions (N * G, question by question) by a decode loop over the model's own forward.

    With `capture` the steps are replayed from CUDA graphs: to launch one takes longer than to
    compute it. A graph holds for one shape, so the batch changes its shape in leaps.
    """
    uniforms = draw_uniforms(seeds, num_samples, params.max_new_tokens).to(model.device)  # (B, T)
    prompt_ids, prompt_mask = left_pad(prompts, params.pad_id, model.device)  # (N, P)
    output = read_prompts(model, prompt_ids, prompt_mask)
    batch = Batch(model, output.past_key_values, prompt_mask, uniforms, params)
    batch.draw(output.logits[:, -1].repeat_interleave(num_samples, dim=0))
    every, leap = (16, 256) if capture else (1, 1)
    step, last_shape = batch.step, None
    num_unfinished = len(batch.rows)
    for t in range(1, params.max_new_tokens):
        if t % every == 0 or t == 1:
            num_active = int(batch.active.sum())
            on_progress(num_unfinished - num_active)
            num_unfinished = num_active
            if num_active == 0:
                break
            if num_active <= 0.85 * len(batch.rows):  # fewer cost less, dropping copies the cache
                batch.keep(batch.active.nonzero()[:, 0])
        shape = (len(batch.rows), batch.make_visible(prompt_ids.shape[1] + t + 1, leap))
        if capture and shape == last_shape and step == batch.step:
            step = captured(batch.step)  # its first step, taken plainly, has warmed it up
        elif shape != last_shape:
            step, last_shape = batch.step, shape
        step()
    on_progress(num_unfinished)
    return batch.record.completions()


def read_prompts(model: torch.nn.Module, prompt_ids: torch.Tensor, prompt_mask: torch.Tensor):
    """The model's output for prompts (N, P): a cache, and the logits of what comes next."""
    return model(
        input_ids=prompt_ids,
        attention_mask=prompt_mask,
        position_ids=position_ids(prompt_mask),
        use_cache=True,
        logits_to_keep=1,
    )


class Batch:
    """Rows that are decoded together. A step changes tensors in place, none of them in shape."""

    def __init__(
        self,
        model: torch.nn.Module,
        cache: Cache,
        prompt_mask: torch.Tensor,
        uniforms: torch.Tensor,
        params: SamplingParams,
    ):
        """`cache` and `prompt_mask` (N, P) are the prompts', `uniforms` (B, T) the rows'."""
        device, num_rows = model.device, len(uniforms)
        self.model, self.cache, self.uniforms, self.params = model, cache, uniforms, params
        num_samples, num_columns = num_rows // len(prompt_mask), prompt_mask.shape[1]
        cache.batch_repeat_interleave(num_samples)
        mask = F.pad(prompt_mask, (0, uniforms.shape[1]), value=False)
        self.mask = mask.repeat_interleave(num_samples, dim=0)  # (B, P + T)
        self.positions = self.mask.sum(dim=1, keepdim=True) - 1  # (B, 1)
        self.tokens = torch.zeros_like(self.positions)  # (B, 1), the last ones
        self.rows = torch.arange(num_rows, device=device)  # which completion each row is
        self.active = torch.ones(num_rows, dtype=torch.bool, device=device)
        self.t = torch.full((1,), -1, device=device)
        self.column = torch.full((1,), num_columns - 1, device=device)  # the last one in use
        self.eos_ids = torch.tensor(params.eos_ids, device=device)
        self.record = Record(num_rows, params, device)
        # sliding windows and the like keep their own layers, which move, and make their own masks
        self.is_plain = all(type(layer) is DynamicLayer for layer in cache.layers)
        if self.is_plain:
            cache.layers[:] = [RoomyLayer(layer, self.mask, self.column) for layer in cache.layers]

    def draw(self, logits: torch.Tensor) -> None:
        """Draw and note the next token of each row from logits (B, V)."""
        self.t += 1
        tokens, log_probs, entropies = sample_tokens(
            logits,
            self.uniforms.index_select(1, self.t)[:, 0],
            temperature=self.params.temperature,
            top_p=self.params.top_p,
            top_k=self.params.top_k,
        )
        tokens = self.record.write(self.rows, self.t, self.active, tokens, log_probs, entropies)
        self.active &= (tokens[:, None] != self.eos_ids).all(dim=1)
        self.tokens.copy_(tokens[:, None])

    def step(self) -> None:
        """One more token for each row."""
        self.column += 1
        self.positions += 1
        self.mask.index_fill_(1, self.column, True)
        mask = self.mask[:, : self.num_visible]
        output = self.model(
            input_ids=self.tokens,
            attention_mask=mask[:, None, None] if self.is_plain else mask,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.draw(output.logits[:, -1])

    def make_visible(self, num_columns: int, leap: int) -> int:
        """Let attention see so many columns or, in leaps, some more that are masked out."""
        if self.is_plain:
            num_columns = min(-(-num_columns // leap) * leap, self.mask.shape[1])
            for layer in self.cache.layers:
                layer.num_visible = num_columns
        self.num_visible = num_columns
        return num_columns

    def keep(self, indices: torch.Tensor) -> None:
        """Go on with some of the rows."""
        self.cache.batch_select_indices(indices)
        for name in ("mask", "positions", "tokens", "rows", "active", "uniforms"):
            setattr(self, name, getattr(self, name)[indices])


class RoomyLayer(DynamicLayer):
    """A cache layer with room ahead: DynamicLayer copies all keys and values at every token."""

    def __init__(self, layer: DynamicLayer, mask: torch.Tensor, column: torch.Tensor):
        """Room for the columns of mask (B, P + T); `column` (1,) says where the next token goes."""
        super().__init__()
        self.is_initialized, self.dtype, self.device = True, layer.dtype, layer.device
        self.column, self.num_visible = column, mask.shape[1]
        room = (0, 0, 0, mask.shape[1] - layer.keys.shape[2])
        self.keys = F.pad(layer.keys, room)  # (B, heads, P + T, head size)
        self.values = F.pad(layer.values, room)

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args, **kwargs):
        self.keys.index_copy_(2, self.column, keys)
        self.values.index_copy_(2, self.column, values)
        return self.keys[:, :, : self.num_visible], self.values[:, :, : self.num_visible]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.keys, self.values = self.keys[indices], self.values[indices]


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph. Raises RuntimeError where it asks the GPU for a result."""
    graph = torch.cuda.CUDAGraph()
    # NCCL has a thread that asks for results while this one captures
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


def position_ids(mask: torch.Tensor) -> torch.Tensor:
    """Positions (B, T) that count kept tokens only, so that padding on the left shifts nothing."""
    return (mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def left_pad(
    sequences: list[list[int]], pad_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask (True = a token), both (B, longest), padded on the left."""
    longest = max(len(ids) for ids in sequences)
    ids = torch.tensor([[pad_id] * (longest - len(s)) + s for s in sequences])
    mask = torch.tensor([[False] * (longest - len(s)) + [True] * len(s) for s in sequences])
    return ids.to(device), mask.to(device)


def right_pad(sequences: list, value: float) -> torch.Tensor:
    """Sequences as one tensor (B, longest), padded on the right."""
    tensors = [torch.as_tensor(sequence) for sequence in sequences]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


def draw_uniforms(seeds: list[Seed], num_samples: int, length: int) -> torch.Tensor:
    """Uniform random numbers in [0, 1), (N * G, T), each question's from its own seed."""
    shape = (num_samples, length)
    blocks = [np.random.default_rng(list(seed)).random(shape, dtype=np.float32) for seed in seeds]
    return torch.from_numpy(np.concatenate(blocks))


class Record:
    """Sampled tokens with their log-probabilities and entropies, written column by column."""

    def __init__(self, num_rows: int, params: SamplingParams, device: torch.device):
        shape = (num_rows, params.max_new_tokens)
        self.params = params
        self.tokens = torch.full(shape, params.pad_id, device=device)  # (B, T)
        self.log_probs = torch.zeros(shape, device=device)
        self.entropies = torch.zeros(shape, device=device)
        self.lengths = torch.zeros(num_rows, dtype=torch.long, device=device)
        # what the calculator has written ahead; -1 where the model writes
        self.inserts = torch.full(shape, -1, device=device)  # (B, T)
        asking_ids = params.calculator.asking_ids if params.calculator else []
        self.asking_ids = torch.tensor(asking_ids, device=device)

    def write(self, rows, t, active, tokens, log_probs, entropies) -> torch.Tensor:
        """Column t (1,) of the given rows (B,); what is not active gets nothing new.

        Returns the tokens (B,) that stand there: the calculator's go before the sampled ones.
        """
        index = (rows, t.expand_as(rows))
        is_kept = active
        if self.params.calculator is not None:
            inserts = self.inserts[index]
            tokens, is_kept = tokens.where(inserts < 0, inserts), active & (inserts < 0)
        self.tokens.index_put_(index, tokens.where(active, self.params.pad_id))
        self.log_probs.index_put_(index, log_probs.where(is_kept, 0.0))
        self.entropies.index_put_(index, entropies.where(is_kept, 0.0))
        self.lengths.index_add_(0, rows, active.long())
        if self.params.calculator is not None:
            self.calculate(rows[active & torch.isin(tokens, self.asking_ids)].tolist())
        return tokens

    def calculate(self, rows: list[int]) -> None:
        """Write ahead the results that these rows ask for, as far as there is room for them."""
        for row in rows:
            length = int(self.lengths[row])
            result_ids = self.params.calculator.complete(self.tokens[row, :length].tolist())
            room = self.inserts[row, length : length + len(result_ids)]
            room.copy_(torch.tensor(result_ids[: len(room)], dtype=torch.long))

    def completions(self) -> list[Completion]:
        tokens, lengths = self.tokens.tolist(), self.lengths.tolist()
        log_probs, entropies = self.log_probs.cpu().numpy(), self.entropies.cpu().numpy()
        is_inserted = (self.inserts >= 0).cpu().numpy()
        return [
            Completion(
                token_ids=ids[:length],
                log_probs=log_probs[row, :length],
                entropies=entropies[row, :length],
                truncated=ids[length - 1] not in self.params.eos_ids,
                is_inserted=is_inserted[row, :length],
            )
            for row, (ids, length) in enumerate(zip(tokens, lengths, strict=True))
        ]


@torch.no_grad()
def supports_grouped(model: torch.nn.Module, *, capture: bool = False) -> bool:
    """Whether the model's cache can be repeated and selected without changing what it computes.

    A few tokens are decoded after a short made-up prompt, and their log-probabilities compared with
    one plain forward; models with a recurrent state fail in one way or another.
    """
    prompt_ids = torch.arange(1, 5, device=model.device)[None] % model.config.vocab_size  # (1, 4)
    mask = torch.ones_like(prompt_ids, dtype=torch.bool)
    params = SamplingParams(5, temperature=1.0, top_p=1.0, top_k=0, eos_ids=(), pad_id=0)
    uniforms = draw_uniforms([(0,)], 3, params.max_new_tokens).to(model.device)
    try:
        output = read_prompts(model, prompt_ids, mask)
        batch = Batch(model, output.past_key_values, mask, uniforms, params)
        batch.draw(output.logits[:, -1].expand(3, -1))
        batch.make_visible(6, leap=1)
        batch.step()
        batch.keep(torch.tensor([0, 2], device=model.device))
        batch.make_visible(7, leap=256 if capture else 1)
        batch.step()
        step = captured(batch.step) if capture else batch.step
        for num_columns in (8, 9):
            batch.make_visible(num_columns, leap=256 if capture else 1)
            step()
    except (AttributeError, NotImplementedError, TypeError, ValueError, RuntimeError):
        return False
    tokens = batch.record.tokens[2:]  # (1, 5)
    logits = model(input_ids=torch.cat([prompt_ids, tokens], dim=1), use_cache=False).logits
    logits = logits[0, -6:-1].float()  # (5, V)
    expected = logits.log_softmax(dim=-1).gather(-1, tokens[0, :, None])[:, 0]
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
    difference = (batch.record.log_probs[2] - expected).abs().max()
    return bool(difference <= tolerance * logits.abs().max().clamp(min=1.0))


# Backend `generate`: the plain reference, works for every model


def get_generation_config(params: SamplingParams, *, num_samples: int) -> GenerationConfig:
    """A fresh generation config: nothing of the hub's leaks into sampling.

    Every field that could change the distribution is set, since transformers fills a field left
    None from the model's own generation config.
    """
    return GenerationConfig(
        do_sample=params.temperature > 0,
        max_new_tokens=params.max_new_tokens,
        temperature=params.temperature or 1.0,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=0.0,
        typical_p=1.0,
        epsilon_cutoff=0.0,
        eta_cutoff=0.0,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        num_beams=1,
        num_return_sequences=num_samples,
        eos_token_id=list(params.eos_ids),
        pad_token_id=params.pad_id,
    )


@torch.no_grad()
def decode_with_generate(
    model: torch.nn.Module,
    prompts: list[list[int]],
    seeds: list[Seed],
    *,
    num_samples: int,
    params: SamplingParams,
    on_progress: Callable[[int], None],
    streamer: BaseStreamer | None = None,
) -> list[Completion]:
    """Completions (N * G, question by question) by `model.generate`.

    `streamer` gets the tokens of the one completion as they come.
    """
    device, num_rows = model.device, len(prompts) * num_samples
    prompt_ids, prompt_mask = left_pad(prompts, params.pad_id, device)  # (N, P)
    recorder = RecordingProcessor(Record(num_rows, params, device), prompt_ids.shape[1])
    with seeded(seeds, device):
        sequences = model.generate(
            prompt_ids,
            attention_mask=prompt_mask,
            generation_config=get_generation_config(params, num_samples=num_samples),
            logits_processor=LogitsProcessorList([recorder]),
            streamer=streamer,
        )
    recorder.take(sequences)
    on_progress(num_rows)
    return recorder.record.completions()


@contextlib.contextmanager
def seeded(seeds: list[Seed], device: torch.device) -> Iterator[int]:
    """Torch's random numbers follow from the questions' seeds, and are put back afterwards."""
    words = [word for seed in seeds for word in seed]
    batch_seed = int(np.random.SeedSequence(words).generate_state(1)[0])
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(batch_seed)
        yield batch_seed


class RecordingProcessor(LogitsProcessor):
    """Notes what `generate` draws from the logits, and leaves it only what the calculator wrote."""

    def __init__(self, record: Record, prompt_length: int):
        self.record = record
        self.prompt_length = prompt_length
        self.active = torch.ones_like(record.lengths, dtype=torch.bool)  # (B,)
        self.rows = torch.arange(len(record.lengths), device=record.lengths.device)
        self.log_probs: torch.Tensor | None = None  # (B, V), of the token that comes next
        self.eos_ids = torch.tensor(record.params.eos_ids, device=record.tokens.device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.take(input_ids)
        logits, is_broken = repair(scores.float() / (self.record.params.temperature or 1.0))
        log_probs = F.log_softmax(logits, dim=-1)
        self.log_probs = log_probs.masked_fill(is_broken[:, None], torch.nan)
        scores = scores.masked_fill(is_broken[:, None], 0.0)
        if self.record.params.calculator is None:
            return scores
        inserts = self.record.inserts[:, input_ids.shape[1] - self.prompt_length, None]  # (B, 1)
        only = torch.full_like(scores, -torch.inf).scatter(1, inserts.clamp(min=0), 0.0)
        return scores.where(inserts < 0, only)

    def take(self, input_ids: torch.Tensor) -> None:
        """Note the last tokens of input_ids (B, P + t), drawn from the log_probs kept before."""
        t = input_ids.shape[1] - self.prompt_length - 1
        if t < 0 or self.log_probs is None:
            return
        tokens = input_ids[:, -1]
        entropies = -(self.log_probs.exp() * self.log_probs).nan_to_num().sum(dim=-1)
        chosen = self.log_probs.gather(-1, tokens[:, None])[:, 0]
        rows, t = (
            torch.arange(len(tokens), device=tokens.device),
            torch.tensor([t], device=tokens.device),
        )
        self.record.write(rows, t, self.active, tokens, chosen, entropies)
        self.active &= ~torch.isin(tokens, self.eos_ids)


# Backend `continuous`: transformers' own continuous batching, made for GPUs


@torch.no_grad()
def decode_continuous(
    model: torch.nn.Module,
    prompts: list[list[int]],
    seeds: list[Seed],
    *,
    num_samples: int,
    params: SamplingParams,
    on_progress: Callable[[int], None],
) -> list[Completion]:
    """Completions (N * G, question by question) by `model.generate_batch`.

    The entropy of a token is estimated by minus its log-probability, whose mean it is. Raises
    RuntimeError where transformers gives up on a request.
    """
    settings = ContinuousBatchingConfig(return_logprobs=True)
    if model.device.type == "cpu":  # else the cache takes most of the machine's memory
        row_tokens = max(map(len, prompts)) + params.max_new_tokens
        settings.page_size, settings.max_batch_tokens = 16, 4096
        settings.num_blocks = len(prompts) * num_samples * (row_tokens // 16 + 1)
    with seeded(seeds, model.device) as settings.seed:
        outputs = model.generate_batch(
            prompts,
            generation_config=get_generation_config(params, num_samples=num_samples),
            continuous_batching_config=settings,
        ).values()
    problems = {output.error for output in outputs} - {None}
    if problems or len(outputs) < len(prompts) * num_samples:
        raise RuntimeError(
            f"generate_batch failed: {', '.join(problems) or 'requests are missing'}"
        )
    on_progress(len(outputs))
    return [
        Completion(
            token_ids=output.generated_tokens,
            log_probs=np.array(output.logprobs, dtype=np.float32),
            entropies=-np.array(output.logprobs, dtype=np.float32),
            truncated=output.generated_tokens[-1] not in params.eos_ids,
            is_inserted=np.zeros(len(output.generated_tokens), dtype=bool),
        )
        for output in outputs
    ]


BACKENDS = {
    "grouped": decode_grouped,
    "captured": functools.partial(decode_grouped, capture=True),  # grouped, on a GPU
    "generate": decode_with_generate,
    "continuous": decode_continuous,
}
