"""A stand-in for CUDA graphs on a CPU.

A capture records every operator that a step executes, and refuses the operators that a GPU cannot capture. A replay executes the
recorded operators again, on the same tensors and with the same numbers. As on a GPU, a capture itself changes no values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, UntypedStorage
from torch.distributed import Work
from torch.distributed._functional_collectives import wait_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshrunner.runner.ledger.memory_ledger import SPLIT

WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operators whose value the host reads, such as `Tensor.item`, or whose shape depends on values."""
INDEXING = ("aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
"""Operators whose shapes depend on values only if an index is a mask."""


class NotCapturable(RuntimeError):
    """A GPU cannot capture this operator."""


class Capture(TorchDispatchMode):
    """A record of the operators of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        """Each operator with its arguments. A tensor is described by its dtype, shape and storage. The storage existed before the
        step, or was the n-th that the step created."""
        self._work: list[Callable[[], None]] = []
        self._names: dict[int, tuple[str, float]] = {}
        self._held: list[Any] = []
        """Storages that are kept, so that no other storage gets the same identity."""
        self._before: list[tuple[UntypedStorage, UntypedStorage]] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # dynamo compiles, and executes graphs, as it does without this mode

    def __enter__(self) -> Any:
        self._resize = UntypedStorage.resize_

        def resize(storage: UntypedStorage, size: int) -> Any:
            self._work.append(lambda: self._resize(storage, size))
            return self._resize(storage, size)

        UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        for storage, value in self._before:
            if storage.nbytes() == value.nbytes():
                storage.copy_(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # e.g. a DTensor: it dispatches its parts to this mode
        inputs = tensors_in((args, kwargs))
        if any(each.is_meta for each in inputs):
            return func(*args, **kwargs)
        if self._of_gloo(func, inputs):
            return func(*args, **kwargs)
        refuse(func, inputs)
        if func.name() == "aten::lift_fresh":  # a number of the host, as a tensor
            self._names[storage_of(inputs[0])._cdata] = "number", inputs[0].item()
            self._held.append(storage_of(inputs[0]))
        self.calls.append((str(func), [self._described(each) for each in tree_leaves((args, kwargs))]))
        result = func(*args, **kwargs)
        own = {storage_of(each)._cdata for each in inputs}
        made = [each for each in tensors_in(result) if storage_of(each)._cdata not in own]
        for each in made:
            self._names.setdefault(storage_of(each)._cdata, ("created", len(self._names)))
            self._held.append(storage_of(each))
        if made or func._schema.is_mutable or func.namespace in ("c10d", "fsdp"):  # and no view
            sizes = [storage_of(each).nbytes() for each in made]
            self._work.append(lambda: self._again(func, args, kwargs, made, sizes, own))
        return result

    def _of_gloo(self, func: Any, inputs: list[Tensor]) -> bool:
        """Return whether an operator belongs to gloo's reduce-scatter. It reads a flat copy that `split` uses first."""
        storages = [storage_of(each) for each in inputs]
        if func is SPLIT and inputs[0].dim() == 1 and storages[0]._cdata not in self._names:
            self._names[storages[0]._cdata] = "gloo", 0
            self._held.append(storages[0])
        return any(self._names.get(each._cdata) == ("gloo", 0) for each in storages)

    def replay(self) -> None:
        with torch.no_grad():
            for work in self._work:
                work()

    def _again(self, func: Any, args: Any, kwargs: Any, made: list[Tensor], sizes: list[int], own: set[int]) -> None:
        again = func(*args, **kwargs)
        for each in tree_leaves(again):
            if isinstance(each, torch.ScriptObject):
                Work.unbox(each).wait()  # type: ignore[attr-defined]
        if func.namespace == "_c10d_functional":
            for each in tensors_in(again):
                wait_tensor(each)
        new = [each for each in tensors_in(again) if storage_of(each)._cdata not in own]
        for old, size, value in zip(made, sizes, new, strict=True):
            if storage_of(old).nbytes() != size:
                self._resize(storage_of(old), size)
            old.detach().copy_(value)

    def _described(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            storage = storage_of(value)
            if storage._cdata not in self._names:
                self._names[storage._cdata] = "existed", storage._cdata
                self._held.append(storage)
                self._before.append((storage, storage.clone()))
            return self._names[storage._cdata], value.dtype, tuple(value.shape), value.stride(), value.storage_offset()
        if isinstance(value, bool | int | float | str | torch.dtype | torch.device | None):
            return value
        return type(value).__name__


def tensors_in(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def storage_of(tensor: Tensor) -> UntypedStorage:
    return tensor.untyped_storage()


def refuse(func: Any, inputs: list[Tensor]) -> None:
    """Raise NotCapturable if a GPU cannot capture an operator."""
    name = func.name()
    # With one value, such as `x[mask] = 0`, torch fills by the mask.
    masked = name in INDEXING and inputs[-1].numel() > 1 and any(each.dtype is torch.bool for each in inputs[1:])
    if masked or torch.Tag.cudagraph_unsafe in func.tags or (name not in INDEXING and WAITS & {*func.tags}):
        raise NotCapturable(f"{name}: the host waits for a value")


class Graph:
    """Stand-in for `torch.cuda.CUDAGraph`."""

    captures: list[Capture] = []
    """All captures of this process, oldest first."""

    def replay(self) -> None:
        self.capture.replay()

    @classmethod
    @contextmanager
    def capturing(cls, graph: Graph, **_: Any) -> Iterator[None]:
        """Stand-in for `torch.cuda.graph`."""
        with Capture() as graph.capture:
            yield
        cls.captures.append(graph.capture)


@contextmanager
def graphs_on_cpu() -> Iterator[None]:
    """Replace the parts of `torch.cuda` that the capture of a step uses."""
    nothing = mock.Mock()
    with mock.patch.multiple(
        torch.cuda, CUDAGraph=Graph, graph=Graph.capturing, Stream=nothing, set_stream=nothing, current_stream=nothing
    ):
        yield
