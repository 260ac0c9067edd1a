"""Decode steps that are replayed from CUDA graphs.

With one token per row, Python takes longer to launch the kernels than the GPU takes to run them; a
graph launches all of them at once, on the same tensors: it serves one shape only.
"""

import functools
import warnings
from collections.abc import Callable

import torch

from engine.sampling.cache import grown_length
from engine.sampling.grouped import DecodeBatch, decode_grouped

warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")  # at each start


class CapturedSteps:
    """The `step` of a DecodeBatch, replayed. Its shapes are few: columns come in leaps."""

    def __init__(self, batch: DecodeBatch) -> None:
        if not batch.reserved.is_possible:
            raise ValueError("the tensors of this cache move, so a step cannot be replayed")
        self.batch = batch
        self.shape: tuple[int, int] | None = None  # rows and visible columns of the last step
        self.replay: Callable[[], None] | None = None  # runs the graph of this shape, once captured

    def __call__(self, num_columns: int) -> None:
        num_rows, *_, limit = self.batch.mask.shape
        shape = (num_rows, grown_length(num_columns, limit=limit))
        if self.shape != shape:
            self.shape = shape
            self.replay = None
            # The first step of a shape runs as usual: the GPU's libraries set up what they need. A
            # capture would fail where Python waits for the GPU, and leave torch's allocator in its
            # capture mode, until memory runs out. So the first step raises RuntimeError there.
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


decode_captured = functools.partial(decode_grouped, replayed=CapturedSteps)
