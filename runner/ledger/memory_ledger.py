"""
The account of memory: every storage from birth to death, with what it is for and the phase of the step that made it.

    with Account() as account:
        ...
    account.peak

For a CPU, whose allocator keeps no statistics, and for a rehearsal without a device; on CUDA profiler=memory uses the allocator's
own history, which has more detail.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from meshrunner.runner.ledger.categories import CATEGORIES
from meshrunner.runner.ledger.phases import START, Phase, Phases

PERSISTENT = ("parameters", "gradients", "optimizer")
UNKNOWN = ("activations", "temporary")
"""Categories that say when something was made; what is done with it may tell more."""
SPLIT = torch.ops.aten.split.Tensor
"""Gloo reduces a copy of a reduce-scatter's input, which it takes apart so: all that shows of the copy."""
BUFFERS = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "fsdp::all_gather_copy_in", "fsdp::chunk_cat")
"""Operators of FSDP whose arguments and results are communication buffers."""


class Allocation:
    """The memory of a storage for as long as it keeps its size."""

    __slots__ = (
        "allocated_at",
        "category",
        "freed_at",
        "is_block_output",
        "nbytes",
        "operator",
        "phase",
        "preexisting",
        "stream",
    )

    def __init__(
        self, nbytes: int, category: str, phase: Phase, allocated_at: int, stream: int, preexisting: bool = False
    ) -> None:
        self.nbytes = nbytes
        self.category = category
        """One of CATEGORIES, of its whole lifetime; what it is may show only later."""
        self.phase = phase
        """That it was born in."""
        self.allocated_at = allocated_at
        """Moment of birth, or of its first use under the account."""
        self.preexisting = preexisting
        """Whether it was there before that."""
        self.freed_at: int | None = None
        self.stream = stream
        """Stream of the device that it was allocated on."""
        self.operator = ""
        """Name of the operator whose result it is, as in its schema: `aten::mm`; empty: of none."""
        self.is_block_output = False
        """Whether it is an output of a block."""


class PeakMemory(NamedTuple):
    """Bytes of memory at their maximum."""

    total: int
    by_category: dict[str, int]
    phase: Phase | None
    """None: nothing was allocated."""


class MemoryLedger(TorchDispatchMode):
    """
    Bytes of memory over time, by category.

    - *parameters*: storages of every `nn.Parameter`.
    - *gradients*: the `.grad` of parameters. Those that FSDP has not yet reduced are *temporary*.
    - *optimizer*: state after an optimizer's step.
    - *unsharded*: FSDP's all-gathered parameters, which it frees by resizing.
    - *communication*: outputs of FSDP's all-gathers and inputs of its reductions.
    - *logits*: created in the loss.
    - *activations*: created while autograd records, in forward and in recomputation, and not yet freed; and what a function with
      a backward of its own, inside which autograd does not record, makes in forward and backward frees.
    - *temporary*: backward's intermediate results, the batch, temporaries of the optimizer.

    Not tracked: memory allocated inside an operator or a collective (gloo copies its input and frees the copy some time after the
    collective, so allocated memory varies from run to run; these figures do not: what is older than the account and split before
    any other use is taken for such a copy), and tensors created by other threads, until
    they are an operator's input here. **Compiled code is not tracked at all**: inductor allocates below any dispatch mode, and
    under a mode dynamo does not even compile. So do not use it for a compiled model.

    The mode may be re-entered; in between, only releases are tracked. Parameters, gradients and optimizer state older than the
    mode count from the beginning; any other storage from its first use.
    """

    def __init__(self, device_type: str = "cpu", phases: Phases | None = None, rounding: int = 1) -> None:
        """
        Args:
            device_type: of the tensors that count.
            phases: the phase of a step that a life is born in; None: they are not followed.
            rounding: bytes that an allocation is rounded up to.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type, self.phases, self.rounding = device_type, phases or Phases(), rounding
        self.now = 0
        """The present moment: a count of births and deaths."""
        self.allocations: list[Allocation] = []
        self._by_storage: dict[int, tuple[Allocation, weakref.ref[UntypedStorage]]] = {}
        self._hook: RemovableHandle | None = None
        self._resize: Callable[..., Any] = UntypedStorage.resize_

    def __enter__(self) -> MemoryLedger:
        self._hook = register_optimizer_step_post_hook(lambda optimizer, *_: self._after_optimizer_step(optimizer))
        self._resize = UntypedStorage.resize_

        def resize(storage: UntypedStorage, size: int) -> Any:  # FSDP frees parameters so; no mode intercepts it
            result = self._resize(storage, size)
            self._resized(storage)
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
        kwargs = kwargs or {}
        inputs = list(tensors_in(args))
        if kwargs:
            inputs.extend(tensors_in(kwargs.values()))
        for value in inputs:
            if type(value) is not Tensor and isinstance(value, nn.Parameter):
                self._track_parameter(value)
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # e.g. a DTensor, which dispatches its parts to this mode
        result = func(*args, **kwargs)
        if func is SPLIT and inputs and self._life(inputs[0]) is None and self._counts(inputs[0].untyped_storage()):
            self._follow(inputs[0].untyped_storage(), 0, None)
        for value in inputs:
            self._track_tensor(value, "temporary", created_here=False)
        self._made(func, inputs, result)
        self._ran(func, args, kwargs, inputs, result)
        return result

    def _made(self, func: Any, inputs: list[Tensor], result: Any) -> None:
        """An operator has run: its result may be new."""
        part = self.phases.now.part
        recorded = self._records() and part != START
        category = "logits" if part == "loss" else "activations" if recorded else "temporary"
        results, begun = list(tensors_in((result,))), len(self.allocations)
        for value in results[:1] if len(results) > 1 and func.is_view else results:  # chunks share one storage
            self._track_tensor(value, category, created_here=True)
        for new in self.allocations[begun:]:
            new.operator = func._schema.name
        if func._schema.name in BUFFERS:
            for value in (*inputs, *results):
                allocation = self._life(value)
                if allocation is not None and allocation.category in UNKNOWN:
                    allocation.category = "communication"

    def peaks(self) -> dict[Phase, int]:
        """The highest total in every phase in which something was born."""
        found: dict[Phase, int] = {}
        for allocation, total in self._births():
            if total > found.get(allocation.phase, -1):
                found[allocation.phase] = total
        return found

    @property
    def peak(self) -> PeakMemory:
        """The peak so far."""
        return self.peak_of(lambda _: True)

    def peak_of(self, counts: Callable[[Phase], bool]) -> PeakMemory:
        """The peak in those phases that count."""
        most, when = 0, None
        for allocation, total in self._births():
            if total > most and counts(allocation.phase):
                most, when = total, allocation
        if when is None:
            return PeakMemory(0, dict.fromkeys(CATEGORIES, 0), None)
        return PeakMemory(most, self.by_category(self._since(when)), when.phase)

    def by_category(self, moment: int) -> dict[str, int]:
        """Bytes of each category at a moment."""
        found = dict.fromkeys(CATEGORIES, 0)
        for allocation in self.allocations:
            if self._since(allocation) <= moment and (allocation.freed_at is None or allocation.freed_at > moment):
                found[allocation.category] += allocation.nbytes
        return found

    def _births(self) -> Iterator[tuple[Allocation, int]]:
        """Every life in the order of birth, with the bytes that are alive then."""
        change = [0] * (self.now + 1)
        for allocation in self.allocations:
            change[self._since(allocation)] += allocation.nbytes
            if allocation.freed_at is not None:
                change[allocation.freed_at] -= allocation.nbytes
        totals = list(accumulate(change))
        for allocation in self.allocations:
            yield allocation, totals[self._since(allocation)]

    @staticmethod
    def _since(allocation: Allocation) -> int:
        return 0 if allocation.preexisting and allocation.category in PERSISTENT else allocation.allocated_at

    def _records(self) -> bool:
        """Whether what lives on is for backward."""
        return torch.is_grad_enabled()

    def _stream(self) -> int:
        """The stream of the device that memory is allocated on."""
        return 0

    def _ran(self, func: Any, args: Any, kwargs: dict[str, Any], inputs: list[Tensor], result: Any) -> None:
        """An operator has run, and what it made is tracked."""

    def _was_born(self, allocation: Allocation) -> None:
        """A life begins."""

    def _has_died(self, allocation: Allocation) -> None:
        """A life ends."""

    def _counts(self, storage: UntypedStorage) -> bool:
        """Whether a storage has memory of its own on the device."""
        if storage.device.type != self.device_type:  # meta in DTensor's sharding propagation
            return False
        return storage.resizable() or self.device_type == "meta" or not self._lies_in_another(storage)

    def _lies_in_another(self, storage: UntypedStorage) -> bool:
        """Whether it was made from an address in another storage, as buffers are that have a place in a pool."""
        address = storage.data_ptr()
        others = (reference() for _, reference in self._by_storage.values())
        return any(each is not None and 0 <= address - each.data_ptr() < each.nbytes() for each in others)

    def _begin(self, nbytes: int, category: str, preexisting: bool) -> Allocation:
        self.now += 1
        rounded = -(-nbytes // self.rounding) * self.rounding
        allocation = Allocation(rounded, category, self.phases.now, self.now, self._stream(), preexisting)
        self.allocations.append(allocation)
        if rounded:
            self._was_born(allocation)
        return allocation

    def _end(self, allocation: Allocation) -> None:
        if (
            allocation.category == "temporary"
            and allocation.phase.part == "forward"
            and self.phases.now.part == "backward"
        ):
            allocation.category = "activations"
        self.now += 1
        allocation.freed_at = self.now
        if allocation.nbytes:
            self._has_died(allocation)

    def _track(self, storage: UntypedStorage, category: str, *, created_here: bool) -> Allocation | None:
        identity = storage._cdata
        known = self._by_storage.get(identity)
        if known is not None:
            return known[0]
        if not self._counts(storage):
            return None
        return self._follow(storage, storage.nbytes(), None, category, preexisting=not created_here)

    def _follow(
        self,
        storage: UntypedStorage,
        nbytes: int,
        keeps: Any,
        category: str = "temporary",
        *,
        preexisting: bool = False,
    ) -> Allocation:
        """Begin the life of an unknown storage. keeps: what is kept alive as long."""
        identity, allocation = storage._cdata, self._begin(nbytes, category, preexisting)

        def released(_: Any, keeps: Any = keeps) -> None:
            self._end(self._by_storage.pop(identity)[0])

        self._by_storage[identity] = allocation, weakref.ref(storage, released)
        return allocation

    def _resized(self, storage: UntypedStorage) -> None:
        """A storage has another size, and so begins another life."""
        identity, nbytes = storage._cdata, storage.nbytes()
        known = self._by_storage.get(identity)
        if known is None:
            self._track(storage, "unsharded", created_here=True)
            return
        allocation, reference = known
        if allocation.category not in PERSISTENT or not nbytes:
            allocation.category = "unsharded"
        self._end(allocation)
        self._by_storage[identity] = self._begin(nbytes, "unsharded", preexisting=False), reference

    def _life(self, tensor: Tensor) -> Allocation | None:
        known = self._by_storage.get(tensor.untyped_storage()._cdata)
        return known[0] if known is not None else None

    def _track_tensor(self, value: Tensor, category: str, *, created_here: bool) -> None:
        for part in parts(value):
            self._track(part.untyped_storage(), category, created_here=created_here)

    def set_category(self, value: Any, category: str) -> None:
        """Set the category of a tensor's storages."""
        if isinstance(value, Tensor):
            for part in parts(value):
                allocation = self._track(part.untyped_storage(), category, created_here=False)
                if allocation is not None and allocation.category != "unsharded":
                    allocation.category = category

    def _track_parameter(self, parameter: nn.Parameter) -> None:
        self.set_category(parameter, "parameters")
        if parameter.is_leaf:
            self.set_category(parameter.grad, "gradients")

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._track_parameter(parameter)
        for state in optimizer.state.values():
            for value in state.values():
                self.set_category(value, "optimizer")


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operator's arguments or results, those in lists included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor consists of: a DTensor itself has no memory."""
    if type(tensor) is Tensor or not is_traceable_wrapper_subclass(tensor):
        if tensor.layout == torch.strided:
            yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):  # torch 2.13 lists a DTensor's mesh, too
            yield from parts(part)
