"""Extends the memory ledger (a history of allocations) with a log of all work that the host issues in a traced run."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from itertools import chain
from typing import Any

from torch import Tensor, UntypedStorage
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup, get_process_group_ranks

from meshrunner.runner.ledger.allocations import END, START, Allocation
from meshrunner.runner.ledger.memory_ledger import MemoryLedger, plain_tensors, tensors_in
from meshrunner.runner.ledger.phases import Phases
from meshrunner.runner.predict.record.operators import collective, cost, nbytes_of, traits
from meshrunner.runner.predict.record.trace_events import (
    Allocated,
    Collective,
    EventLog,
    Freed,
    Operator,
    TracedDevice,
    TraceEvent,
    UsedByStream,
)

RETURN_THEIR_ARGUMENT = {"_c10d_functional::_wrap_tensor_autograd", "_c10d_functional::wait_tensor"}
"""Operators that return their argument on a real device, but a new tensor on meta."""
CUBLAS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::_scaled_mm"}
"""Operators that use a cuBLAS workspace."""


class Fusion(Enum):
    """Role of an operator in a fused kernel."""

    NONE = "runs as a separate kernel, as without the compiler"
    RESULT = "last operator of a fused kernel; the result is allocated"
    INSIDE = "earlier operator of a fused kernel; the result is never allocated"


class Recorder(MemoryLedger):  # type: ignore[no-untyped-call]
    """Memory ledger that counts meta tensors as device memory and logs the events of a trace."""

    def __init__(self, device: TracedDevice, phases: Phases, *, on_host: bool, rounding: int) -> None:
        """Record the events of `device`. `on_host`: whether the device is a CPU, where step counts take memory, too."""
        super().__init__(phases)
        self.device, self.on_host, self.rounding = device, on_host, rounding
        """Each allocation is rounded up to a multiple of `rounding` bytes."""
        self.workspaces: dict[bool, int] = {}
        """Bytes of the cuBLAS workspace that a thread allocates on first use, keyed by whether the thread runs backward."""
        self.events: EventLog = []
        self.paused = 0
        """Number of active pauses. Nothing is recorded during a pause."""
        self.fusion = Fusion.NONE
        self.saving = False
        """Whether compiled forward code is running. Tensors created in such code count as kept for backward."""
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
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def used_by_stream(self, tensor: Tensor, stream: Any) -> None:
        """Record that `stream` uses a tensor (`record_stream`)."""
        allocation = self.allocation_of(tensor)
        if allocation is not None and allocation.nbytes:
            self._write(UsedByStream(allocation, stream.number))

    def fused_kernel(self, name: str, dtype: str, nbytes: int) -> None:
        """Record a fused kernel that reads and writes `nbytes` bytes in total."""
        self._write(Operator(name, "memory", self._stream(), self.phases.now, 0, dtype, nbytes))

    def _write(self, event: TraceEvent) -> None:
        if not self.paused:
            self.events.append(event)

    def _block_ended(self, output: Any) -> None:
        for part in chain.from_iterable(map(plain_tensors, tensors_in((output,)))):
            if (allocation := self.allocation_of(part)) is not None:
                allocation.is_block_output = True

    def _log_collective(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        name = collective(func._schema.name.partition("::")[2])
        assert name is not None
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
        # The arguments of a coalesced collective are lists of tensors.
        nbytes = max((nbytes_of((each,)) for each in (*given.values(), result)), default=0)
        boxed = given.get("process_group")
        group = _resolve_process_group(given["group_name"]) if boxed is None else ProcessGroup.unbox(boxed)
        ranks = tuple(get_process_group_ranks(group))
        self._write(Collective(name, self._stream(), self.phases.now, ranks, nbytes))

    def _stream(self) -> int:
        return self.device.current_stream().number

    # Overrides of `MemoryLedger`'s methods

    def _saves_for_backward(self) -> bool:
        return self.saving or super()._saves_for_backward()

    def _allocate(self, nbytes: int, category: str, preexisting: bool) -> Allocation:
        allocation = super()._allocate(-(-nbytes // self.rounding) * self.rounding, category, preexisting)
        allocation.stream = self._stream()
        if allocation.nbytes:
            self.events.append(Allocated(allocation))
        return allocation

    def _free(self, allocation: Allocation) -> None:
        super()._free(allocation)
        if allocation.nbytes:
            self.events.append(Freed(allocation))

    def _after_operator(self, func: Any, args: Any, kwargs: dict[str, Any], inputs: list[Tensor], result: Any) -> None:
        if self.fusion is not Fusion.NONE:
            return
        operator = traits(func)
        if operator.kind == "collective":
            self._log_collective(func, args, kwargs, result)
        elif operator.kind is not None and (inputs or operator.kind == "memory"):
            work = cost(operator, args, kwargs, inputs, result)
            in_backward = self.phases.now.part in ("backward", END)
            if operator.name in CUBLAS and (nbytes := self.workspaces.pop(in_backward, 0)):
                self._allocate(nbytes, "temporary", preexisting=False)
            self._write(Operator(operator.name, operator.kind, self._stream(), self.phases.now, *work))

    def _counts(self, storage: UntypedStorage) -> bool:
        if storage.device.type == "meta":
            return True
        return self.on_host and self.phases.now.part != START  # during start-up, torch creates CPU tensors of its own

    def _track_results(self, func: Any, inputs: list[Tensor], result: Any) -> None:
        if func._schema.name in RETURN_THEIR_ARGUMENT:
            self._follow_without_memory(result, keeps=inputs[0].untyped_storage())
        elif self.fusion is Fusion.INSIDE:
            for each in tensors_in((result,)):
                self._follow_without_memory(each)
        else:
            super()._track_results(func, inputs, result)

    def _follow_without_memory(self, result: Tensor, keeps: UntypedStorage | None = None) -> None:
        storage = result.untyped_storage()
        if storage._cdata not in self._by_storage and (keeps is None or storage._cdata != keeps._cdata):
            self._follow(storage, 0, "temporary", keeps=keeps)

    def _track_tensor(self, value: Tensor, category: str, *, created_here: bool) -> None:
        if created_here and not isinstance(value, FakeTensor):  # DTensor's sharding propagation makes fake tensors
            super()._track_tensor(value, category, created_here=True)

    def _track_storage(self, storage: UntypedStorage, category: str, *, created_here: bool) -> Allocation | None:
        if created_here or storage._cdata in self._by_storage:
            return super()._track_storage(storage, category, created_here=created_here)
        return None  # a storage of the network that is not materialised yet
