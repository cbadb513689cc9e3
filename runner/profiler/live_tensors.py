"""What tensors hold on a CPU, whose allocator keeps no books: every storage is accounted for from birth to death.

    with LiveTensors() as live:
        ...
    live.peak

The same for every device, but on CUDA the allocator's own history knows more (profiler=memory uses that).
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
    """Bytes of live tensors at the moment when there were most."""

    total: int
    by_category: dict[str, int]


@dataclass
class _Category:
    name: str


@dataclass
class _Life:
    """A storage, as long as it keeps its size."""

    nbytes: int
    born: int
    made: bool
    """It was made under the mode; otherwise it is older than its first use."""
    category: _Category
    died: int | None = None


class LiveTensors(TorchDispatchMode):
    """
    Live tensor bytes over time, by what the tensors are for.

    - *parameters*: storages of every `nn.Parameter` that an operator was given. FSDP's gathered ones are among them.
    - *gradients*: the `.grad` of those. FSDP's gradients before they are reduced are *other*.
    - *optimizer*: state after an optimizer's step.
    - *activations*: made while autograd records, in forward and when forward is recomputed, and not yet freed.
    - *other*: backward's intermediate results, communication buffers, the batch, what the optimizer's step needs on the way.

    A category holds for a storage's whole life: a gradient counts as one from where backward makes it.

    Not seen: what an operator or a collective allocates inside (gloo copies what it reduces and holds the copy until the work is
    done: allocated memory then varies from run to run, these figures do not), and tensors that other threads make, until
    an operator here is given them. **Compiled code is not seen at all**: inductor's allocates behind every dispatch mode, and
    under a mode dynamo does not compile in the first place. So do not account for a compiled model.

    It may be entered again and continues; between, only deaths are noticed. A parameter, gradient or optimizer state older
    than the mode has been there since the beginning; any other storage counts from its first use on.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._now = 0
        self._lives: list[_Life] = []
        self._of_storage: dict[int, tuple[_Life, weakref.ref[UntypedStorage]]] = {}
        self._hook: RemovableHandle | None = None
        self._resize: Callable[..., Any] = UntypedStorage.resize_

    def __enter__(self) -> LiveTensors:
        self._hook = register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer))
        self._resize = UntypedStorage.resize_

        def resize(storage: UntypedStorage, size: int) -> Any:  # how FSDP frees parameters, unseen by any mode
            done = self._resize(storage, size)
            self._see(storage, "other", made=True)
            return done

        UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        if self._hook is not None:
            self._hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs))
        for value in given:
            if isinstance(value, nn.Parameter):
                self._see_parameter(value)
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # a DTensor, say, takes itself apart, and its parts come here
        result = func(*args, **(kwargs or {}))
        for value in given:
            self._see_tensor(value, "other", made=False)
        category = "activations" if torch.is_grad_enabled() else "other"
        for value in tree_leaves(result):
            self._see_tensor(value, category, made=True)
        return result

    @property
    def peak(self) -> Peak:
        """The peak of all that has been seen so far."""
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
    def _since(life: _Life) -> int:
        return 0 if not life.made and life.category.name in PERSISTENT else life.born

    def _see(self, storage: UntypedStorage, category: str, *, made: bool) -> _Life | None:
        """Account for a storage, or for its new size; its category stays."""
        if storage.device.type == "meta":  # a shape without memory, e.g. in DTensor's sharding propagation
            return None
        identity, nbytes = storage._cdata, storage.nbytes()
        known = self._of_storage.get(identity)
        if known is not None and known[0].nbytes == nbytes:
            return known[0]
        self._now += 1
        if known is not None:
            known[0].died = self._now
            life, reference = _Life(nbytes, self._now, True, known[0].category), known[1]
        else:
            life = _Life(nbytes, self._now, made, _Category(category))
            reference = weakref.ref(storage, lambda _: self._died(identity))
        self._lives.append(life)
        self._of_storage[identity] = life, reference
        return life

    def _died(self, identity: int) -> None:
        self._now += 1
        self._of_storage.pop(identity)[0].died = self._now

    def _see_tensor(self, value: Any, category: str, *, made: bool) -> None:
        if isinstance(value, Tensor):
            for part in _parts(value):
                self._see(part.untyped_storage(), category, made=made)

    def _is(self, value: Any, category: str) -> None:
        """Note what a tensor is for, from now on."""
        if isinstance(value, Tensor):
            for part in _parts(value):
                life = self._see(part.untyped_storage(), category, made=False)
                if life is not None:
                    life.category.name = category

    def _see_parameter(self, parameter: nn.Parameter) -> None:
        self._is(parameter, "parameters")
        if parameter.is_leaf:
            self._is(parameter.grad, "gradients")

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._see_parameter(parameter)
        for state in optimizer.state.values():
            for value in state.values():
                self._is(value, "optimizer")


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor consists of: a DTensor has no memory of its own."""
    if not is_traceable_wrapper_subclass(tensor):
        if tensor.layout == torch.strided:
            yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):  # torch 2.13 lists a DTensor's mesh, too
            yield from _parts(part)
