"""How completions are sampled: the hot loop of a run.

A token is drawn by inverse transform sampling: a uniform random number in [0, 1) picks the first
token at which the cumulative probability exceeds it. These numbers come from the question's own
seed alone. So a question gets the same completions in any batch and on any number of ranks, and a
resumed run needs no saved random state.

Shapes: N questions, G completions of each, B rows (N * G, fewer once some have ended), P longest
prompt, T new tokens, V vocabulary. Masks are bool, True = keep.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LogitsProcessor, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from engine.calculator import Calculator

Seed = Sequence[int]  # integers that name a question's random numbers, such as (seed, position)


@dataclass(frozen=True)
class SamplingParams:
    """The distribution that completions are drawn from, and when a completion ends."""

    max_new_tokens: int
    temperature: float  # 0 is greedy: always the likeliest token, scored at temperature 1
    top_p: float  # 1 is off
    top_k: int  # 0 is off
    eos_ids: tuple[int, ...]
    pad_id: int
    calculator: Calculator | None = None  # writes the result where a completion asks for it


@dataclass(frozen=True)
class Completion:
    """One completion as it was sampled, of T tokens."""

    token_ids: list[int]  # up to and including the first EOS
    log_probs: np.ndarray  # (T,), of each token under softmax(logits / temperature), untruncated
    entropies: np.ndarray  # (T,), of that distribution, in nats
    truncated: bool  # ended by the length limit instead of an EOS
    is_inserted: np.ndarray  # (T,), True for the calculator's tokens, whose two numbers are 0

    @property
    def num_sampled(self) -> int:
        """The number of tokens that the model chose itself."""
        return len(self.token_ids) - int(self.is_inserted.sum())

    @property
    def is_broken(self) -> bool:
        """True if some logits were not finite: the tokens drawn from them are noise."""
        return not np.isfinite(self.log_probs).all()


def draw_uniforms(seeds: list[Seed], *, num_samples: int, length: int) -> Tensor:
    """Uniform random numbers in [0, 1), (N * G, length), each question's from its own seed."""
    shape = (num_samples, length)
    blocks = [np.random.default_rng(list(seed)).random(shape, dtype=np.float32) for seed in seeds]
    return torch.from_numpy(np.concatenate(blocks))


def sample_tokens(
    logits: Tensor, uniforms: Tensor, *, temperature: float, top_p: float, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row from softmax(logits / temperature).

    logits (B, V) and uniforms (B,) give tokens, log-probabilities and entropies in nats, (B,) each.
    Top-k and top-p only restrict what is drawn: the two numbers are those of the whole
    distribution. Temperature 0 takes the first of the likeliest tokens and scores it at 1.
    """
    logits = logits.float()
    if temperature not in (0, 1):  # a division by 1 would be one more pass over all logits
        logits = logits / temperature
    log_probs = F.log_softmax(logits, dim=-1)  # (B, V)
    is_broken = log_probs[:, 0].isnan()  # (B,), since then the whole row is NaN
    probs = log_probs.exp()
    entropies = -torch.special.xlogy(probs, probs).sum(dim=-1)  # xlogy, since 0 log 0 is 0
    if temperature == 0:
        tokens = logits.argmax(dim=-1)
    else:
        kept = keep_likeliest(probs, top_p=top_p, top_k=top_k)
        tokens = find_tokens(kept.cumsum(dim=-1), kept, uniforms)
    # A row with NaN or infinity draws from all tokens alike, at a log-probability of NaN, because
    # of which the update skips the step. An index out of range would end the process.
    noise = (uniforms * probs.shape[1]).long().clamp(max=probs.shape[1] - 1)
    tokens = tokens.where(~is_broken, noise)
    chosen = log_probs.gather(-1, tokens[:, None])[:, 0]
    return tokens, chosen, entropies.masked_fill(is_broken, math.log(probs.shape[1]))


def find_tokens(cdf: Tensor, probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token (B,) whose cumulative probability exceeds the uniform's share of the last.

    cdf and probs are (B, V), uniforms (B,); the cdf does not end at exactly 1, and uniforms of at
    most 1 - 2**-24 stay below its end. A GPU adds in blocks, so that its sums may fall a little
    from one token to the next. Then a token of mass 0 can be found; the likeliest replaces it.
    """
    threshold = uniforms[:, None] * cdf[:, -1:]  # (B, 1)
    tokens = torch.searchsorted(cdf, threshold, right=True).clamp(max=cdf.shape[1] - 1)
    has_mass = probs.gather(-1, tokens) > 0
    return tokens.where(has_mass, probs.argmax(dim=-1, keepdim=True))[:, 0]


def repair(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Set rows of logits (B, V) that hold NaN or infinity to 0; return a mask of them too (B,).

    Drawing from such a row would raise. Its token gets a log-probability of NaN instead, because of
    which the update skips the step.
    """
    is_broken = ~torch.isfinite(logits.amax(dim=-1))  # -inf is no defect: it masks a token out
    return logits.masked_fill(is_broken[:, None], 0.0), is_broken


def keep_likeliest(probs: Tensor, *, top_p: float, top_k: int) -> Tensor:
    """Set the probabilities (B, V) outside the top k, then those outside the top p, to 0."""
    if 0 < top_k < probs.shape[-1]:
        kth = probs.topk(top_k, dim=-1).values[:, -1:]  # (B, 1)
        probs = probs.masked_fill(probs < kth, 0.0)
    if top_p < 1:  # nucleus sampling, arXiv:1904.09751: the fewest tokens with a share p of the sum
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered  # the mass of all likelier tokens
        ordered = ordered.masked_fill(before >= top_p * ordered.sum(dim=-1, keepdim=True), 0.0)
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
    return probs


@torch.no_grad()
def decode_grouped(
    model: nn.Module,
    prompts: list[list[int]],
    seeds: list[Seed],
    *,
    num_samples: int,
    params: SamplingParams,
    on_progress: Callable[[int], None],
    capture: bool = False,
) -> list[Completion]:
    """Sample `num_samples` completions of each prompt: N * G of them, question by question.

    Each prompt is read once, and its completions continue from copies of its cache. `on_progress`
    is told how many more completions have ended. For `capture` see `CapturedBatch`.
    """
    uniforms = draw_uniforms(seeds, num_samples=num_samples, length=params.max_new_tokens)  # (B, T)
    batch_class = CapturedBatch if capture else DecodeBatch
    batch = batch_class(model, prompts, uniforms, params)
    num_unfinished, longest = len(uniforms), max(map(len, prompts))
    for t in range(1, params.max_new_tokens):
        batch.record.calculate(batch.tokens[:, 0])
        if t == 1 or t % batch.steps_per_check == 0:
            active = batch.record.active
            num_active = int(active.sum())
            on_progress(num_unfinished - num_active)
            num_unfinished = num_active
            if num_active == 0:
                break
            if num_active <= 0.85 * len(active):  # not at every end, since it copies the cache
                batch.keep(active.nonzero()[:, 0])
        batch.step(longest + t + 1)  # the prompts and all tokens up to the one that is drawn now
    on_progress(num_unfinished)
    return batch.record.completions()


class DecodeBatch:
    """Rows that are decoded together: each step draws one more token of every row.

    The prompts fill the first P columns, padded on the left; each step fills the next column. It
    changes tensors in place and none of them in shape; only `keep` makes new ones.
    """

    steps_per_check = 1  # steps from one look at which rows have ended to the next

    def __init__(
        self, model: nn.Module, prompts: list[list[int]], uniforms: Tensor, params: SamplingParams
    ):
        """Read the prompts and draw the first token of each row; `uniforms` are (B, T)."""
        self.model, self.cache, self.uniforms = model, None, uniforms.to(model.device)
        self.record = Record(len(uniforms), params, model.device)
        # An index, since the number 1 makes a slice, for whose rows torch copies the head anew.
        self.last_column = torch.full((1,), -1, device=model.device)
        prompt_ids, prompt_mask = left_pad(prompts, params.pad_id, model.device)  # (N, P)
        logits = self.read(prompt_ids, prompt_mask, position_ids(prompt_mask))  # (N, V)
        num_samples, longest = len(uniforms) // len(prompts), prompt_ids.shape[1]
        self.cache.batch_repeat_interleave(num_samples)
        mask = F.pad(prompt_mask, (0, params.max_new_tokens), value=False)
        self.mask = mask.repeat_interleave(num_samples, dim=0)  # (B, P + T)
        self.positions = self.mask.sum(dim=1, keepdim=True) - 1  # (B, 1), of the last token read
        self.tokens = torch.zeros_like(self.positions)  # (B, 1), the last ones drawn
        self.column = torch.full((1,), longest - 1, device=model.device)  # the last one filled
        # Other layers, such as those of sliding windows, move their tensors: they get no room. Nor
        # do those of other attention, such as flash_attention_2, which masks no columns ahead.
        self.attention = model.config.get_text_config()._attn_implementation
        is_plain = all(type(layer) is DynamicLayer for layer in self.cache.layers)
        self.has_roomy_layers = is_plain and self.attention in ("sdpa", "eager")
        if self.has_roomy_layers:
            layers = self.cache.layers
            layers[:] = [RoomyLayer(layer, self.column) for layer in layers]
        self.draw(logits.repeat_interleave(num_samples, dim=0))

    def step(self, num_columns: int) -> None:
        """Read the last tokens and draw the next; attention sees the first `num_columns`."""
        self.column += 1
        self.positions += 1
        self.mask.index_fill_(1, self.column, True)
        mask = self.mask[:, : num_columns - 1]  # the last column is that of the token drawn now
        if self.has_roomy_layers:
            mask = self.mask[:, None, None, :num_columns]  # which the model takes as it is
            if self.attention == "eager":  # it adds the mask (B, 1, 1, columns) to its scores
                zeros = torch.zeros_like(mask, dtype=self.model.dtype)
                mask = zeros.masked_fill(~mask, torch.finfo(zeros.dtype).min)
            for layer in self.cache.layers:
                layer.show(num_columns, limit=self.mask.shape[1])
        self.draw(self.read(self.tokens, mask, self.positions))

    def read(self, token_ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Let the model read tokens into its cache; return the logits of what follows (B, V)."""
        output = self.model(
            input_ids=token_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=self.last_column,
        )
        self.cache = output.past_key_values
        return output.logits[:, -1]

    def draw(self, logits: Tensor) -> None:
        """Draw and record the next token of each row from logits (B, V)."""
        params, uniforms = self.record.params, self.uniforms.index_select(1, self.record.t)[:, 0]
        drawn = sample_tokens(
            logits, uniforms, temperature=params.temperature, top_p=params.top_p, top_k=params.top_k
        )
        self.tokens.copy_(self.record.write(*drawn)[:, None])

    def keep(self, indices: Tensor) -> None:
        """Go on with these rows only."""
        record = self.record
        record.rows, record.active = record.rows[indices], record.active[indices]
        self.mask, self.positions = self.mask[indices], self.positions[indices]
        self.tokens, self.uniforms = self.tokens[indices], self.uniforms[indices]
        self.cache.batch_select_indices(indices)


class RoomyLayer(DynamicLayer):
    """A cache layer with empty columns ahead: DynamicLayer copies everything to append a token.

    It grows by LEAP columns, when most rows may have left, and is copied then. To have room for the
    longest completion from the start would take more than twice the memory.
    """

    def __init__(self, layer: DynamicLayer, column: Tensor):
        """Without room yet; the tensor `column` (1,) says where a token is written."""
        super().__init__()
        self.is_initialized, self.dtype, self.device = True, layer.dtype, layer.device
        self.column, self.num_visible = column, layer.keys.shape[2]
        self.keys, self.values = layer.keys, layer.values

    def show(self, num_columns: int, *, limit: int) -> None:
        """Let attention see the first `num_columns`, with room for them and at most for `limit`."""
        self.num_visible = num_columns
        if num_columns > self.keys.shape[2]:
            padding = (0, 0, 0, whole_leaps(num_columns, limit=limit) - self.keys.shape[2])
            self.keys = F.pad(self.keys, padding)
            self.values = F.pad(self.values, padding)

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write one token's keys and values (B, heads, 1, head size); return all visible ones."""
        self.keys.index_copy_(2, self.column, keys)
        self.values.index_copy_(2, self.column, values)
        return self.keys[:, :, : self.num_visible], self.values[:, :, : self.num_visible]


LEAP = 256  # columns


def whole_leaps(num_columns: int, *, limit: int) -> int:
    """The next multiple of LEAP, but at most the limit."""
    return min(-(-num_columns // LEAP) * LEAP, limit)


class CapturedBatch(DecodeBatch):
    """A batch whose steps are replayed from CUDA graphs.

    With one token per row, Python takes longer to launch the model's kernels than the GPU takes to
    run them; a graph launches all of them at once. It repeats the same kernels on the same tensors,
    so it serves one shape only, and shapes change rarely here: attention sees columns in
    leaps, and rows are dropped at every 16th step at most. The first step of a shape runs as usual,
    so that the GPU's libraries set up what they need; the second one is captured.
    """

    steps_per_check = 16
    shape: tuple[int, int] | None = None  # rows and visible columns of the last step
    replay: Callable[[], None] | None = None  # runs the graph of this shape, if there is one yet

    def step(self, num_columns: int) -> None:
        if not self.has_roomy_layers:
            raise ValueError("the tensors of this cache move, so a step cannot be replayed")
        num_columns = whole_leaps(num_columns, limit=self.mask.shape[1])
        if self.shape != (len(self.tokens), num_columns):
            self.shape, self.replay = (len(self.tokens), num_columns), None
            with waiting_forbidden():
                super().step(num_columns)
        else:
            self.replay = self.replay or self.capture(num_columns)
            self.replay()

    def capture(self, num_columns: int) -> Callable[[], None]:
        """A function that replays one step, which must have run before without waiting."""
        graph = torch.cuda.CUDAGraph()
        # By default a capture forbids other threads to query the GPU, but one of NCCL's does.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            super().step(num_columns)
        return graph.replay


@contextlib.contextmanager
def waiting_forbidden() -> Iterator[None]:
    """Raise RuntimeError where Python waits for the GPU, as it does for a tensor's value.

    No capture can do that either. But an error within one leaves torch's allocator in its capture
    mode, so that the process soon runs out of memory: it has to be found before.
    """
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@torch.no_grad()
def supports_grouped(model: nn.Module, *, capture: bool = False) -> bool:
    """Whether `decode_grouped` computes the same log-probabilities as one plain forward.

    A few tokens are decoded after two short made-up prompts, one of them padded, and a row is
    dropped on the way. Models with a recurrent state fail by an exception or by other numbers.
    Raises ValueError if the GPU's memory does not suffice even for that.
    """
    prompts = [[i % model.config.vocab_size for i in ids] for ids in (range(1, 25), (25, 26))]
    params = SamplingParams(5, temperature=1.0, top_p=1.0, top_k=0, eos_ids=(), pad_id=0)
    uniforms = draw_uniforms([(0,), (1,)], num_samples=2, length=params.max_new_tokens)
    try:
        batch_class = CapturedBatch if capture else DecodeBatch
        batch = batch_class(model, prompts, uniforms, params)
        batch.step(26)
        batch.keep(torch.tensor([0, 2, 3], device=model.device))
        for num_columns in (27, 28, 29):  # with `capture` as usual, captured, replayed once more
            batch.step(num_columns)
        mismatches = [mismatch_of(model, batch.record, prompts[row // 2], row) for row in (0, 2)]
    except torch.OutOfMemoryError as error:
        raise ValueError(
            "the GPU's memory is full before anything is sampled: end other programs on it, or "
            "take a smaller model"
        ) from error
    except (AttributeError, NotImplementedError, TypeError, ValueError, RuntimeError):
        return False
    tolerance = 1e-3 if model.dtype == torch.float32 else 2**-6  # a few roundings of bf16
    return all(mismatch <= tolerance for mismatch in mismatches)  # NaN is none


def mismatch_of(model: nn.Module, record: "Record", prompt: list[int], row: int) -> float:
    """How far a row's recorded log-probabilities are from one plain forward's, on average.

    In multiples of the largest logit, whose rounding they have, or in nats if that is below 1.
    """
    tokens = record.tokens[row]  # (T,)
    ids = torch.cat([torch.tensor(prompt, device=model.device), tokens])
    logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    expected = logits.log_softmax(dim=-1).gather(-1, tokens[:, None])[:, 0]
    difference = (record.log_probs[row] - expected).abs().mean()
    return float(difference / logits.abs().max().clamp(min=1.0))


def sample_in_batches(
    model: nn.Module,
    prompts: list[list[int]],
    seeds: list[Seed],
    *,
    decode: Callable[..., list[Completion]],
    num_samples: int,
    params: SamplingParams,
    max_batch_tokens: int | None,
    on_progress: Callable[[int], None],
) -> list[list[Completion]]:
    """Sample `num_samples` completions of each prompt: one list per prompt, in their order.

    `decode` is `decode_grouped` or the like. It gets questions together, longest prompts first, as
    long as rows * (longest prompt + new tokens) <= `max_batch_tokens`; None is what the GPU holds.
    """
    decode_batch = functools.partial(
        decode, model, num_samples=num_samples, params=params, on_progress=on_progress
    )
    groups: list[list[Completion]] = [[] for _ in prompts]
    by_length = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    while by_length:
        row_tokens = len(prompts[by_length[0]]) + params.max_new_tokens
        num_rows = (max_batch_tokens or tokens_that_fit(model, row_tokens)) // row_tokens
        num_questions = max(1, num_rows // num_samples)
        batch, by_length = by_length[:num_questions], by_length[num_questions:]
        completions = decode_batch([prompts[i] for i in batch], [seeds[i] for i in batch])
        for j, i in enumerate(batch):
            groups[i] = completions[j * num_samples : (j + 1) * num_samples]
    return groups


def tokens_that_fit(model: nn.Module, row_tokens: int) -> int:
    """How many tokens can be decoded at once, in rows of `row_tokens`, with the memory now free.

    It suffices if all rows are as long as they may be. A tenth is left to what falls between.
    """
    device = model.device
    if device.type != "cuda":
        return 131_072
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + reserved
    config, itemsize = model.config.get_text_config(), model.dtype.itemsize
    row_bytes = decode_bytes_per_row(config, row_tokens, bytes_per_number=itemsize)
    return int(0.9 * free / row_bytes) * row_tokens


def decode_bytes_per_row(
    config: PretrainedConfig, row_tokens: int, *, bytes_per_number: int
) -> float:
    """The most bytes that a row of so many tokens takes while it is decoded."""
    cache = row_tokens * cache_bytes_per_token(config, bytes_per_number=bytes_per_number)
    growing = cache / getattr(config, "num_hidden_layers", 1)  # layer by layer: one is there twice
    drawing = 6 * 4 * config.vocab_size  # fp32 logits and what `sample_tokens` makes of them
    return cache + growing + drawing


def cache_bytes_per_token(config: PretrainedConfig, *, bytes_per_number: int) -> int:
    """Bytes of one token's keys and values in all layers; 0 if the config does not tell."""
    heads = getattr(config, "num_attention_heads", 0)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    return 2 * getattr(config, "num_hidden_layers", 0) * key_heads * head_size * bytes_per_number


class Record:
    """The tokens of all B rows with log-probabilities and entropies; b rows are still decoded."""

    def __init__(self, num_rows: int, params: SamplingParams, device: torch.device):
        shape, calculator = (num_rows, params.max_new_tokens), params.calculator
        self.params = params
        self.tokens = torch.full(shape, params.pad_id, device=device)  # (B, T)
        self.log_probs, self.entropies = torch.zeros((2, *shape), device=device)  # (B, T) each
        # What the calculator has written ahead of the model; -1 where the model writes itself.
        self.inserts = torch.full(shape, -1, device=device)  # (B, T)
        self.lengths = torch.zeros(num_rows, dtype=torch.long, device=device)  # (B,)
        self.t = torch.zeros(1, dtype=torch.long, device=device)  # the column to be written next
        self.rows = torch.arange(num_rows, device=device)  # (b,), those that are still decoded
        self.active = torch.ones_like(self.rows, dtype=torch.bool)  # (b,), False once ended
        self.eos_ids = torch.tensor(params.eos_ids, device=device)
        self.asking_ids = torch.tensor(calculator.asking_ids if calculator else [], device=device)

    def write(self, tokens: Tensor, log_probs: Tensor, entropies: Tensor) -> Tensor:
        """Write drawn tokens (b,), or the calculator's in their place; return what is written."""
        index, is_drawn = (self.rows, self.t.expand_as(self.rows)), self.active
        if self.params.calculator is not None:
            inserts = self.inserts[index]
            tokens, is_drawn = tokens.where(inserts < 0, inserts), is_drawn & (inserts < 0)
        self.tokens.index_put_(index, tokens.where(self.active, self.params.pad_id))
        self.log_probs.index_put_(index, log_probs.where(is_drawn, 0.0))
        self.entropies.index_put_(index, entropies.where(is_drawn, 0.0))
        self.lengths.index_add_(0, self.rows, self.active.long())
        self.active &= (tokens[:, None] != self.eos_ids).all(dim=1)
        self.t += 1
        return tokens

    def calculate(self, tokens: Tensor) -> None:
        """Where a row's last token (b,) asks for a result, set the tokens that are written next.

        This waits for the GPU, so it is no part of a step, which may be captured.
        """
        if self.params.calculator is None:
            return
        for row in self.rows[self.active & torch.isin(tokens, self.asking_ids)].tolist():
            length = int(self.lengths[row])
            result_ids = self.params.calculator.complete(self.tokens[row, :length].tolist())
            room = self.inserts[row, length : length + len(result_ids)]
            room.copy_(torch.tensor(result_ids[: len(room)], dtype=torch.long))

    def completions(self) -> list[Completion]:
        """The completions of all rows, each cut to its own length."""
        numbers = [x.cpu().numpy() for x in (self.log_probs, self.entropies, self.inserts >= 0)]
        tokens, completions = self.tokens.tolist(), []
        for row, length in enumerate(self.lengths.tolist()):
            log_probs, entropies, is_inserted = (x[row, :length] for x in numbers)
            ids = tokens[row][:length]
            truncated = ids[-1] not in self.params.eos_ids
            completions.append(Completion(ids, log_probs, entropies, truncated, is_inserted))
        return completions


class RecordingProcessor(Record, LogitsProcessor):
    """Records what `model.generate` draws, and makes it draw the calculator's tokens.

    `generate` calls it before each draw; only then does it see what was drawn before. After the
    last draw, call `take` with the finished sequences.
    """

    next_log_probs: Tensor | None = None  # (B, V), of the tokens that are drawn next

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The logits (B, V) to draw from, for tokens (B, P + t) and the model's logits (B, V)."""
        self.take(input_ids)
        logits, is_broken = repair(scores.float() / (self.params.temperature or 1.0))
        log_probs = F.log_softmax(logits, dim=-1)
        self.next_log_probs = log_probs.masked_fill(is_broken[:, None], torch.nan)
        scores = scores.masked_fill(is_broken[:, None], 0.0)
        if self.params.calculator is None:
            return scores
        inserts = self.inserts.index_select(1, self.t)  # (B, 1)
        only = torch.full_like(scores, -torch.inf).scatter(1, inserts.clamp(min=0), 0.0)
        return scores.where(inserts < 0, only)

    def take(self, input_ids: Tensor) -> None:
        """Write the last tokens of input_ids (B, P + t), which were drawn since the last call."""
        if self.next_log_probs is None:
            return
        log_probs, tokens = self.next_log_probs, input_ids[:, -1]
        entropies = -(log_probs.exp() * log_probs).nan_to_num().sum(dim=-1)
        self.write(tokens, log_probs.gather(-1, tokens[:, None])[:, 0], entropies)
        self.calculate(tokens)


@contextlib.contextmanager
def seeded(seeds: list[Seed], device: torch.device) -> Iterator[None]:
    """Let torch's random numbers follow from the seeds, and put their state back afterwards."""
    words = [word for seed in seeds for word in seed]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(np.random.SeedSequence(words).generate_state(1)[0]))
        yield


def position_ids(mask: Tensor) -> Tensor:
    """Positions (B, T) that count kept tokens only, so that padding on the left shifts nothing."""
    return (mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def left_pad(rows: list[list[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask (True = a token), both (B, longest), padded on the left."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[pad_id] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows])
    return ids.to(device), mask.to(device)


def right_pad(sequences: list, value: float) -> Tensor:
    """Sequences as one tensor (B, longest), padded on the right."""
    tensors = [torch.as_tensor(sequence) for sequence in sequences]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)
