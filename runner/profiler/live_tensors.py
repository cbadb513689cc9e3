"""Memory of live tensors on a CPU, whose allocator keeps no statistics: every storage is tracked from creation to release.

    with LiveTensors() as live:
        ...
    live.peak

It works on any device, but on CUDA profiler=memory uses the allocator's own history, which has more detail.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from meshrunner.runner.profiler.base import CATEGORIES

PERSISTENT = ("parameters", "gradients", "optimizer")


class Peak(NamedTuple):
    """Bytes of live tensors at their maximum."""

    total: int
    by_category: dict[str, int]


@dataclass
class _Category:
    name: str


@dataclass
class _Lifetime:
    """The lifetime of a storage, as long as it keeps its size."""

    nbytes: int
    born: int
    created_here: bool
    """Whether it was created under the mode; else it is older than its first use."""
    category: _Category
    died: int | None = None


class LiveTensors(TorchDispatchMode):
    """
    Bytes of live tensors over time, by category.

    - *parameters*: storages of every `nn.Parameter` that is an operator's input, FSDP's all-gathered ones included.
    - *gradients*: the `.grad` of parameters. FSDP's unreduced gradients are *other*.
    - *optimizer*: state after an optimizer's step.
    - *activations*: created while autograd records, in forward and in recomputation, and not yet freed.
    - *other*: backward's intermediate results, communication buffers, the batch, temporaries of the optimizer.

    A storage has one category for its whole lifetime: a gradient counts as one from its creation in backward.

    Not tracked: memory allocated inside an operator or a collective (gloo copies its input and frees the copy some time after the
    collective, so allocated memory varies from run to run; these figures do not), and tensors created by other threads, until
    they are an operator's input here. **Compiled code is not tracked at all**: inductor allocates below any dispatch mode, and
    under a mode dynamo does not even compile. So do not use it for a compiled model.

    The mode may be re-entered; in between, only releases are tracked. Parameters, gradients and optimizer state older than the
    mode count from the beginning; any other storage from its first use.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._now = 0
        self._lives: list[_Lifetime] = []
        self._by_storage: dict[int, tuple[_Lifetime, weakref.ref[UntypedStorage]]] = {}
        self._hook: RemovableHandle | None = None
        self._resize: Callable[..., Any] = UntypedStorage.resize_

    def __enter__(self) -> LiveTensors:
        self._hook = register_optimizer_step_post_hook(lambda optimizer, *_: self._after_optimizer_step(optimizer))
        self._resize = UntypedStorage.resize_

        def resize(storage: UntypedStorage, size: int) -> Any:  # FSDP frees parameters so; no mode intercepts it
            result = self._resize(storage, size)
            self._track(storage, "other", created_here=True)
            return result

        UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        if self._hook is not None:
            self._hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = tree_leaves((args, kwargs))
        for value in inputs:
            if isinstance(value, nn.Parameter):
                self._track_parameter(value)
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # e.g. a DTensor, which dispatches its parts to this mode
        result = func(*args, **(kwargs or {}))
        for value in inputs:
            self._track_tensor(value, "other", created_here=False)
        category = "activations" if torch.is_grad_enabled() else "other"
        for value in tree_leaves(result):
            self._track_tensor(value, category, created_here=True)
        return result

    @property
    def peak(self) -> Peak:
        """The peak so far."""
        changes: list[tuple[int, int]] = []
        for life in self._lives:
            changes.append((self._since(life), life.nbytes))
            if life.died is not None:
                changes.append((life.died, -life.nbytes))
        total, most, when = 0, 0, 0
        for moment, change in sorted(changes):
            total += change
            if total > most:
                most, when = total, moment
        by_category = dict.fromkeys(CATEGORIES, 0)
        for life in self._lives:
            if self._since(life) <= when and (life.died is None or life.died > when):
                by_category[life.category.name] += life.nbytes
        return Peak(most, by_category)

    @staticmethod
    def _since(life: _Lifetime) -> int:
        return 0 if not life.created_here and life.category.name in PERSISTENT else life.born

    def _track(self, storage: UntypedStorage, category: str, *, created_here: bool) -> _Lifetime | None:
        """Track a storage, or its new size; its category stays."""
        if storage.device.type == "meta":  # no memory, e.g. in DTensor's sharding propagation
            return None
        identity, nbytes = storage._cdata, storage.nbytes()
        known = self._by_storage.get(identity)
        if known is not None and known[0].nbytes == nbytes:
            return known[0]
        self._now += 1
        if known is not None:
            known[0].died = self._now
            life, reference = _Lifetime(nbytes, self._now, True, known[0].category), known[1]
        else:
            life = _Lifetime(nbytes, self._now, created_here, _Category(category))
            reference = weakref.ref(storage, lambda _: self._died(identity))
        self._lives.append(life)
        self._by_storage[identity] = life, reference
        return life

    def _died(self, identity: int) -> None:
        self._now += 1
        self._by_storage.pop(identity)[0].died = self._now

    def _track_tensor(self, value: Any, category: str, *, created_here: bool) -> None:
        if isinstance(value, Tensor):
            for part in _parts(value):
                self._track(part.untyped_storage(), category, created_here=created_here)

    def _set_category(self, value: Any, category: str) -> None:
        """Set the category of a tensor's storages."""
        if isinstance(value, Tensor):
            for part in _parts(value):
                life = self._track(part.untyped_storage(), category, created_here=False)
                if life is not None:
                    life.category.name = category

    def _track_parameter(self, parameter: nn.Parameter) -> None:
        self._set_category(parameter, "parameters")
        if parameter.is_leaf:
            self._set_category(parameter.grad, "gradients")

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._track_parameter(parameter)
        for state in optimizer.state.values():
            for value in state.values():
                self._set_category(value, "optimizer")


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor consists of: a DTensor itself has no memory."""
    if not is_traceable_wrapper_subclass(tensor):
        if tensor.layout == torch.strided:
            yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):  # torch 2.13 lists a DTensor's mesh, too
            yield from _parts(part)
