"""The account of a rehearsal, which also writes down what the host issues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from torch import Tensor, UntypedStorage
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup, get_process_group_ranks

from meshrunner.runner.ledger.memory_ledger import Allocation, MemoryLedger, parts, tensors_in
from meshrunner.runner.ledger.phases import START, Phases
from meshrunner.runner.predict.record.device_streams import TracedDevice
from meshrunner.runner.predict.record.operators import COLLECTIVES, Traits, cost, nbytes, traits
from meshrunner.runner.predict.record.trace_events import (
    Allocated,
    Collective,
    EventLog,
    Freed,
    Operator,
    TraceEvent,
    UsedByStream,
)

SAME = {"_c10d_functional::_wrap_tensor_autograd", "_c10d_functional::wait_tensor"}
"""On a device they return their argument; their kernels for meta make another tensor."""


class Compiled(Enum):
    """What an operator of compiled code is."""

    NO = "it runs by itself, as without the compiler"
    RESULT = "the end of a fused kernel: its result gets memory"
    FUSED = "fused into a kernel: its result never is in memory"


class Recorder(MemoryLedger):  # type: ignore[no-untyped-call]
    """An account of tensors on meta, as if they were on the device, and a log."""

    def __init__(self, device: TracedDevice, phases: Phases, *, on_host: bool, rounding: int, operators: bool) -> None:
        """
        Args:
            on_host: the device is the CPU, so that tensors of the host count, too, such as an optimizer's counts of steps.
            rounding: as of `Account`.
            operators: whether operators are logged, and not only memory.
        """
        super().__init__("meta", phases, rounding)
        self.device, self.on_host, self.operators = device, on_host, operators
        self.events: EventLog = []
        self.paused = 0
        """Above 0, nothing is seen."""
        self.compiled = Compiled.NO
        """What an operator is part of."""
        self.saves = False
        """Whether what is made now is for backward, though autograd does not record: compiled code is one operator to it."""
        device.write, phases.block_ended = self._write, self._block_ended

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.paused:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What is made meanwhile has no memory on the device."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def unseen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function during which nothing is seen."""

        def called(*args: Any, **kwargs: Any) -> Any:
            with self.pause():
                return function(*args, **kwargs)

        return called

    def _block_ended(self, output: Any) -> None:
        for each in tensors_in((output,)):
            for part in parts(each):
                if (allocation := self._life(part)) is not None:
                    allocation.is_block_output = True

    def used(self, tensor: Tensor, stream: Any) -> None:
        """Another stream uses a tensor."""
        allocation = self._life(tensor)
        if allocation is not None and allocation.nbytes:
            self._write(UsedByStream(allocation, stream.number))

    def _made(self, func: Any, inputs: list[Tensor], result: Any) -> None:
        if func._schema.name in SAME:
            self._alias(result, inputs[0])
            return
        if self.compiled is Compiled.FUSED:
            for each in tensors_in((result,)):
                storage = each.untyped_storage()
                if storage._cdata not in self._by_storage:
                    self._follow(storage, 0, None)
            return
        super()._made(func, inputs, result)

    def _records(self) -> bool:
        return self.saves or super()._records()

    @contextmanager
    def within(self, compiled: Compiled) -> Iterator[None]:
        """What runs is part of compiled code."""
        before, self.compiled = self.compiled, compiled
        try:
            yield
        finally:
            self.compiled = before

    @contextmanager
    def for_backward(self) -> Iterator[None]:
        """What is made and lives on is for backward."""
        before, self.saves = self.saves, True
        try:
            yield
        finally:
            self.saves = before

    def kernel(self, name: str, dtype: str, nbytes: int) -> None:
        """A fused kernel has been issued."""
        if self.operators:
            self._write(Operator(name, "memory", self._stream(), self.phases.now, 0, dtype, nbytes))

    def _ran(self, func: Any, args: Any, kwargs: dict[str, Any], inputs: list[Tensor], result: Any) -> None:
        if not self.operators or self.compiled is not Compiled.NO:
            return
        what = traits(func)
        if what.kind == "collective":
            self._log_collective(func, what, args, kwargs, result)
        elif what.kind is not None and (inputs or what.kind == "memory"):
            work = cost(what, args, kwargs, inputs, result)
            stream, phase = self._stream(), self.phases.now
            self._write(Operator(what.name, what.kind, stream, phase, work.flops, work.dtype, work.nbytes))

    def _log_collective(self, func: Any, what: Traits, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
        name = COLLECTIVES[what.name.partition("::")[2]]
        # A coalesced one has lists of tensors.
        sizes = [sum(map(nbytes, tensors_in((each,)))) for each in (*given.values(), result)]
        ranks = tuple(get_process_group_ranks(_group(given)))
        self._write(Collective(name, self._stream(), self.phases.now, ranks, max(sizes, default=0)))

    def _alias(self, result: Tensor, argument: Tensor) -> None:
        """The result has no memory of its own, and keeps that of the argument."""
        storage, held = result.untyped_storage(), argument.untyped_storage()
        if storage._cdata in self._by_storage or storage._cdata == held._cdata:
            return
        self._follow(storage, 0, held)

    def _stream(self) -> int:
        return self.device.current[-1].number

    def _was_born(self, allocation: Allocation) -> None:
        self.events.append(Allocated(allocation))

    def _has_died(self, allocation: Allocation) -> None:
        self.events.append(Freed(allocation))

    def _write(self, entry: TraceEvent) -> None:
        if not self.paused:
            self.events.append(entry)

    def _counts(self, storage: UntypedStorage) -> bool:
        if storage.device.type == "meta":
            return True
        return self.on_host and self.phases.now.part != START  # torch's own, of which an account of steps sees nothing

    def _track_tensor(self, value: Tensor, category: str, *, created_here: bool) -> None:
        if created_here and not isinstance(value, FakeTensor):  # of DTensor's sharding propagation
            super()._track_tensor(value, category, created_here=True)

    def _track(self, storage: UntypedStorage, category: str, *, created_here: bool) -> Allocation | None:
        if created_here or storage._cdata in self._by_storage:
            return super()._track(storage, category, created_here=created_here)
        return None  # of the network before it has memory


def _group(given: dict[str, Any]) -> ProcessGroup:
    """The group of a collective, of whose arguments it is one, itself or by its name."""
    if "process_group" in given:
        return ProcessGroup.unbox(given["process_group"])
    return _resolve_process_group(given["group_name"])
