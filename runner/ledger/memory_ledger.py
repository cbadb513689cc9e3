"""Track every tensor storage from allocation to release, with its category and the part of the step that allocated it.

    with MemoryLedger() as ledger:
        ...
    ledger.peak

`profiler=memory` uses a ledger on a CPU, because the CPU's allocator keeps no statistics. On CUDA, `profiler=memory` uses the
allocator's own history, which has more detail than a ledger. Predictions use a ledger on meta tensors.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from meshrunner.runner.ledger.allocations import PERSISTENT, START, UNKNOWN, Allocation, AllocationHistory
from meshrunner.runner.ledger.phases import Phases

SPLIT = torch.ops.aten.split.Tensor
"""Operator that reveals the copies that gloo makes: gloo's reduce-scatter copies its input and passes the copy to `split`."""
BUFFERS = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "fsdp::all_gather_copy_in", "fsdp::chunk_cat")
"""Operators of FSDP whose arguments and results are buffers for communication."""


class MemoryLedger(AllocationHistory, TorchDispatchMode):
    """A dispatch mode that records the memory of tensors over time, in these categories:

    `parameters`: storages of all `nn.Parameter`s.
    `gradients`: the `.grad` of parameters. Gradients that FSDP has not yet reduced are `temporary`.
    `optimizer`: optimizer state, from the end of the step that creates the state.
    `unsharded`: parameters that FSDP has all-gathered. FSDP frees unsharded parameters by resizing their storages.
    `communication`: outputs of FSDP's all-gathers and inputs of FSDP's reductions.
    `logits`: memory allocated by the loss function.
    `activations`: memory allocated in forward or recomputation while autograd records. In the forward of a custom autograd
    function, autograd does not record. Memory allocated there counts as `activations` if backward frees it.
    `temporary`: the batch, intermediate results of backward and of the optimizer, and (in predictions) cuBLAS workspaces.

    Memory that an operator or a collective allocates internally is not tracked. A tensor created in another thread is tracked
    from its first use in the ledger's thread. The ledger ignores the copies that gloo's reduce-scatter makes of its inputs,
    because gloo frees the copies at unpredictable times. If the first operator that uses an untracked storage is `split`, the
    storage counts as such a copy.

    **Compiled code is not tracked**: inductor's allocations bypass dispatch modes, and dynamo does not compile while a
    dispatch mode is active.

    A ledger can be used in several `with` statements. Between these statements, the ledger tracks only releases. Parameters,
    gradients and optimizer state that existed before the ledger are tracked from the ledger's beginning. Any other storage that
    existed before the ledger is tracked from its first use.
    """

    def __init__(self, phases: Phases | None = None) -> None:
        super().__init__()
        self.phases = phases or Phases()
        # FSDP2's frozen parameters are neither arguments of operators nor parameters of the optimizer, so track them here.
        self.phases.network_found = lambda network: self.track_parameters(network.parameters())
        self._by_storage: dict[int, tuple[Allocation, weakref.ref[UntypedStorage]]] = {}
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        resize_before = UntypedStorage.resize_

        # FSDP frees parameters by resizing their storages, which no dispatch mode intercepts.
        def resize(storage: UntypedStorage, size: int) -> Any:
            result = resize_before(storage, size)
            self._resized(storage)
            return result

        UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        self._undo.enter_context(register_optimizer_step_post_hook(self._after_optimizer_step))
        self._undo.callback(setattr, UntypedStorage, "resize_", resize_before)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._undo.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = list(tensors_in((*args, *kwargs.values())))
        self.track_parameters(inputs)
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # a tensor subclass, such as DTensor, dispatches its parts to this mode
        result = func(*args, **kwargs)
        if func is SPLIT and inputs and self.allocation_of(inputs[0]) is None:
            copied = inputs[0].untyped_storage()
            if self._counts(copied):
                self._follow(copied, 0, "temporary")
        for value in inputs:
            self._track_tensor(value, "temporary", created_here=False)
        self._track_results(func, inputs, result)
        self._after_operator(func, args, kwargs, inputs, result)
        return result

    def track_parameters(self, tensors: Iterable[Any]) -> None:
        """Track the parameters among `tensors`, such as an operator's arguments, and the gradients of these parameters."""
        for value in tensors:
            if type(value) is not Tensor and isinstance(value, nn.Parameter):
                self._set_category(value, "parameters")
                if value.is_leaf:
                    self._set_category(value.grad, "gradients")

    def allocation_of(self, tensor: Tensor) -> Allocation | None:
        """Return the allocation of a plain tensor's storage, or None if the storage is not tracked."""
        known = self._by_storage.get(tensor.untyped_storage()._cdata)
        return known[0] if known is not None else None

    # Subclasses override these methods.

    def _saves_for_backward(self) -> bool:
        """Return whether a tensor that is created now counts as saved for backward."""
        return torch.is_grad_enabled()

    def _after_operator(self, func: Any, args: Any, kwargs: dict[str, Any], inputs: list[Tensor], result: Any) -> None:
        """Do nothing. A subclass can override `_after_operator` to log an operator after its results are tracked."""

    def _counts(self, storage: UntypedStorage) -> bool:
        """Return whether to track a storage. A storage inside another tracked storage (a memory pool) is not tracked again."""
        return storage.device.type == "cpu" and self._pool_of(storage) is None  # ignore DTensor's meta tensors

    def _pool_of(self, storage: UntypedStorage) -> Allocation | None:
        """Return the allocation of the tracked storage that contains `storage`, or None if there is none."""
        if storage.device.type != "cpu" or storage.resizable():
            return None
        address = storage.data_ptr()
        for allocation, reference in self._by_storage.values():
            other = reference()
            if other is not None and 0 <= address - other.data_ptr() < other.nbytes():
                return allocation
        return None

    # Tracking

    def _track_results(self, func: Any, inputs: list[Tensor], result: Any) -> None:
        part = self.phases.now.part
        saved = self._saves_for_backward() and part != START
        category = "logits" if part == "loss" else "activations" if saved else "temporary"
        results, before = list(tensors_in((result,))), len(self.allocations)
        for value in results[:1] if len(results) > 1 and func.is_view else results:  # chunks share one storage
            self._track_tensor(value, category, created_here=True)
        for new in self.allocations[before:]:
            new.operator = func._schema.name
        if func._schema.name in BUFFERS:
            for buffer in (*inputs, *results):
                allocation = self.allocation_of(buffer) or self._pool_of(buffer.untyped_storage())
                if allocation is not None and allocation.category in UNKNOWN:
                    allocation.category = "communication"

    def _track_tensor(self, value: Tensor, category: str, *, created_here: bool) -> None:
        for part in plain_tensors(value):
            self._track_storage(part.untyped_storage(), category, created_here=created_here)

    def _track_storage(self, storage: UntypedStorage, category: str, *, created_here: bool) -> Allocation | None:
        known = self._by_storage.get(storage._cdata)
        if known is not None:
            return known[0]
        if not self._counts(storage):
            return None
        return self._follow(storage, storage.nbytes(), category, preexisting=not created_here)

    def _follow(
        self, storage: UntypedStorage, nbytes: int, category: str, *, keeps: Any = None, preexisting: bool = False
    ) -> Allocation:
        """Start to track a storage. Keep the object `keeps` alive until the storage is released."""
        identity, allocation = storage._cdata, self._allocate(nbytes, category, preexisting)

        def released(_: Any, keeps: Any = keeps) -> None:
            self._free(self._by_storage.pop(identity)[0])

        self._by_storage[identity] = allocation, weakref.ref(storage, released)
        return allocation

    def _allocate(self, nbytes: int, category: str, preexisting: bool) -> Allocation:
        self.now += 1
        allocation = Allocation(nbytes, category, self.phases.now, self.now, preexisting=preexisting)
        self.allocations.append(allocation)
        return allocation

    def _free(self, allocation: Allocation) -> None:
        made_in_forward = allocation.category == "temporary" and allocation.phase.part == "forward"
        if made_in_forward and self.phases.now.part == "backward":
            allocation.category = "activations"
        self.now += 1
        allocation.freed_at = self.now

    def _resized(self, storage: UntypedStorage) -> None:
        identity, nbytes = storage._cdata, storage.nbytes()
        known = self._by_storage.get(identity)
        if known is None:
            self._track_storage(storage, "unsharded", created_here=True)
            return
        allocation, reference = known
        if allocation.category not in PERSISTENT or not nbytes:
            allocation.category = "unsharded"
        self._free(allocation)
        self._by_storage[identity] = self._allocate(nbytes, "unsharded", preexisting=False), reference

    def _set_category(self, value: Any, category: str) -> None:
        if isinstance(value, Tensor):
            for part in plain_tensors(value):
                allocation = self._track_storage(part.untyped_storage(), category, created_here=False)
                if allocation is not None and allocation.category != "unsharded":
                    allocation.category = category

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            self.track_parameters(group["params"])
        for state in optimizer.state.values():
            for value in state.values():
                self._set_category(value, "optimizer")


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments or results, including tensors in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that hold a tensor's memory, such as the local tensor of a DTensor."""
    if type(tensor) is Tensor or not is_traceable_wrapper_subclass(tensor):
        if tensor.layout == torch.strided:
            yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):  # torch 2.13 also lists a DTensor's mesh
            yield from plain_tensors(part)
