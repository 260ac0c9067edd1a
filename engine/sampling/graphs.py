"""Decode steps that are replayed from CUDA graphs.

With one token per row, Python takes longer to launch the model's kernels than the GPU takes to run
them; a graph launches all of them at once. It repeats the same kernels on the same tensors, so a
graph serves one shape only.
"""

import warnings
from collections.abc import Callable

import torch
from torch import nn

from engine.core.types import Completion, SamplingParams, Seed
from engine.sampling.cache import grown_length
from engine.sampling.draw import draw_uniforms
from engine.sampling.grouped import DecodeBatch, decode

warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")  # at each start
STEPS_PER_CHECK = 16  # until ended rows are dropped again: each time makes another shape


@torch.no_grad()
def decode_captured(
    model: nn.Module,
    prompts: list[list[int]],
    seeds: list[Seed],
    params: SamplingParams,
    *,
    on_progress: Callable[[int], None],
) -> list[Completion]:
    """What `decode_grouped` does, with its steps replayed."""
    batch = DecodeBatch(model, prompts, draw_uniforms(seeds, params), params)
    steps = CapturedSteps(batch)
    return decode(batch, steps, steps_per_check=STEPS_PER_CHECK, on_progress=on_progress)


class CapturedSteps:
    """The `step` of a DecodeBatch, replayed. Its shapes are few: columns come in leaps."""

    def __init__(self, batch: DecodeBatch) -> None:
        if not batch.reserved.is_possible:
            raise ValueError("the tensors of this cache move, so a step cannot be replayed")
        self.batch = batch
        self.shape: tuple[int, int] | None = None  # rows and visible columns of the last step
        self.replay: Callable[[], None] | None = None  # runs the graph of this shape, once captured

    def __call__(self, num_columns: int) -> None:
        num_rows, limit = self.batch.mask.shape
        shape = (num_rows, grown_length(num_columns, limit=limit))
        if self.shape != shape:
            self.shape, self.replay = shape, None
            # The first step of a shape runs as usual: the GPU's libraries set up what they need.
            # A capture fails where Python waits for the GPU, as it does for a tensor's value. After
            # that torch's allocator stays in its capture mode, and memory soon runs out. So the
            # first step must find such a place: here it raises RuntimeError.
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                self.batch.step(shape[1])
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        else:
            self.replay = self.replay or self.capture(shape[1])
            self.replay()

    def capture(self, num_columns: int) -> Callable[[], None]:
        """A function that replays one step, which must have run before without waiting."""
        graph = torch.cuda.CUDAGraph()
        # By default a capture forbids other threads to query the GPU, but one of NCCL's does. If it
        # fails, torch stays on the stream of the capture: the outer `with` goes back.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            self.batch.step(num_columns)
        return graph.replay
