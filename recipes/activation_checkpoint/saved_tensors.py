"""The tensors that a block saves for backward, found by one forward pass on fake tensors: no memory, no data."""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshrunner.recipes.activation_checkpoint.base import ActivationCheckpoint
    from meshrunner.recipes.model.network import Network


class SavedTensors(NamedTuple):
    """Tensors alive between a block's forward and backward, except the block's own input and output."""

    nbytes: int
    operators: dict[str, tuple[int, int]]
    """Operator -> (results saved, results in total), for operators with any saved result."""


def saved_by_block(
    option: ActivationCheckpoint,
    block_name: str,
    build: Callable[[], Network],
    shape: tuple[int, int],
    dtype: torch.dtype | None,
    computing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[SavedTensors, SavedTensors]:
    """
    Tensors saved by one block (without recomputation, with `option`), for a micro batch before tensor parallelism.

    It runs eagerly on CPU tensors: compiled code may save less.

    Args:
        build: builds the network; called under fake tensors.
        shape: (batch, seq) of a micro batch.
        dtype: dtype of the parameters in compute; None: unchanged.
        computing: context managers around forward, such as autocast.
    """
    with FakeTensorMode():
        network = build()
        if dtype is not None:
            for module in network.modules():
                for name, parameter in list(module.named_parameters(recurse=False)):
                    setattr(module, name, nn.Parameter(parameter.to(dtype)))
        block = network.get_submodule(block_name)
        inputs = _block_inputs(block, network, torch.zeros(shape, dtype=torch.long))
        without = _saved_by_forward(block, inputs, computing)
        return without, _saved_by_forward(option.wrap(block, preserve_rng_state=network.uses_rng), inputs, computing)


class _BlockReached(Exception):
    """The forward pass has reached the block."""


def _block_inputs(block: nn.Module, network: Network, tokens: Tensor) -> tuple[Any, ...]:
    found: list[tuple[Any, ...]] = []

    def stop(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        found.append(inputs)
        raise _BlockReached

    handle = block.register_forward_pre_hook(stop)
    network.loss = lambda output, hidden, targets: hidden.mean()  # there may be blocks behind the first loss
    try:
        network(tokens, tokens)
    except _BlockReached:
        pass
    finally:
        handle.remove()
    return found[0]


class _OperatorResults(TorchDispatchMode):
    """Records every operator's results without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, weakref.ref[UntypedStorage]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        own = {id(each.untyped_storage()) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and id(each.untyped_storage()) not in own:
                name = str(func.overloadpacket).removeprefix("aten.")
                self.seen.append((name, weakref.ref(each.untyped_storage())))
        return result


def _saved_by_forward(
    block: nn.Module, inputs: tuple[Any, ...], computing: Callable[[], AbstractContextManager[None]]
) -> SavedTensors:
    with _OperatorResults() as results, computing():
        output = block(*inputs)
    ends = {each.untyped_storage()._cdata for each in tree_leaves((inputs, output)) if isinstance(each, Tensor)}
    alive: dict[int, tuple[str, int]] = {}
    for name, reference in results.seen:
        storage = reference()
        if storage is not None and storage._cdata not in ends:
            alive.setdefault(storage._cdata, (name, storage.nbytes()))
    total, kept = Counter(name for name, _ in results.seen), Counter(name for name, _ in alive.values())
    nbytes = sum(size for _, size in alive.values())
    return SavedTensors(nbytes, {name: (kept[name], total[name]) for name in sorted(kept)})
