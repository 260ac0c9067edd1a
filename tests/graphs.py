"""What stands for CUDA graphs on a machine without a GPU, and behaves as they do.

What a capture writes is taken back; a replay repeats its operations, with its Python numbers.
To wait for a tensor's value raises in a capture, and under `set_sync_debug_mode("error")`.
"""

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "equal")  # operations of aten
WAIT_IF_BOOL = ("index", "index_put", "index_put_")  # they count what a bool index keeps


def refuse_to_wait(function: Callable, args: tuple) -> None:
    name = function._schema.name.removeprefix("aten::")
    indices = args[1] if name in WAIT_IF_BOOL else []
    if name in WAITS or any(i is not None and i.dtype == torch.bool for i in indices):
        raise RuntimeError(f"{name} waits for the GPU")


def storages(values: object) -> set[int]:
    tensors = [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class Graph:
    """In the place of torch.cuda.CUDAGraph."""

    num_captures = 0  # of this process

    def __init__(self) -> None:
        self.operations: list[tuple] = []

    def replay(self) -> None:
        for function, args, kwargs, outputs in self.operations:
            results = tree_leaves(function(*args, **kwargs))
            for output, result in zip(outputs, results, strict=True):
                if isinstance(output, torch.Tensor):
                    output.copy_(result)


class Capture(TorchDispatchMode):
    """In the place of torch.cuda.graph: notes each operation, and takes back what it wrote."""

    def __init__(self, graph: Graph, capture_error_mode: str) -> None:
        super().__init__()
        self.graph = graph
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> "Capture":
        Graph.num_captures += 1
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        refuse_to_wait(function, args)
        kwargs, schema = kwargs or {}, function._schema
        named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        for argument in schema.arguments:
            if argument.is_write and argument.name in named:
                written = named[argument.name]
                self.before.append((written, written.clone()))
        outputs = function(*args, **kwargs)
        aliases = [returned.alias_info for returned in schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        # In inference mode `to` and `reshape` arrive whole: said to be views, but copies at times.
        if not is_view or storages((args, kwargs)).isdisjoint(storages(outputs)):
            self.graph.operations.append((function, args, kwargs, tree_leaves(outputs)))
        return outputs

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        for tensor, before in reversed(self.before):
            tensor.copy_(before)


class SyncDebug(TorchDispatchMode):
    """In the place of torch.cuda's mode in which waiting is an error."""

    mode: int | str = 0

    def set(self, mode: int | str) -> None:
        if (mode == "error") != (self.mode == "error"):
            self.__enter__() if mode == "error" else self.__exit__(None, None, None)
        self.mode = mode

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        refuse_to_wait(function, args)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def graphs(monkeypatch) -> None:
    debug = SyncDebug()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", debug.set)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: debug.mode)
    monkeypatch.setattr(Graph, "num_captures", 0)
