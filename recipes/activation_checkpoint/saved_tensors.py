"""What a block keeps for backward and what it recomputes, found out by one forward pass on fake tensors: no memory, no data."""

from __future__ import annotations

import weakref
from collections import Counter
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
    """What is alive between a block's forward and its backward, the block's own input and output aside."""

    nbytes: int
    operators: dict[str, tuple[int, int]]
    """Operator -> (results that are kept, results that there are), for those of which some are kept."""


def saved_by_block(
    option: ActivationCheckpoint, build: Callable[[], Network], shape: tuple[int, int], dtype: torch.dtype | None
) -> tuple[SavedTensors, SavedTensors]:
    """
    (without recomputing, as the option has it) for a micro batch on one device, before tensor parallelism.

    The second is of the first block that recomputes anything. Computed as a CPU would, eagerly: a compiler may keep less.

    Args:
        build: makes the network, on fake tensors.
        shape: of a micro batch of tokens, (batch, seq).
        dtype: the parameters' in compute; None: as they are built.
    """
    with FakeTensorMode():
        network = build()
        names = network.block_names()
        chosen = next((name for number, name in enumerate(names) if option.recomputes(number)), names[0])
        if dtype is not None:
            for module in network.modules():
                for name, parameter in list(module.named_parameters(recurse=False)):
                    setattr(module, name, nn.Parameter(parameter.to(dtype)))
        block = network.get_submodule(chosen)
        given = _input_of(block, network, torch.zeros(shape, dtype=torch.long))
        return _forward(block, given), _forward(option.wrap(block, draws=network.draws), given)


class _Reached(Exception):
    """The forward pass has come to the block."""


def _input_of(block: nn.Module, network: nn.Module, tokens: Tensor) -> tuple[Any, ...]:
    found: list[tuple[Any, ...]] = []

    def stop(_: nn.Module, given: tuple[Any, ...]) -> None:
        found.append(given)
        raise _Reached

    handle = block.register_forward_pre_hook(stop)
    try:
        network(tokens)
    except _Reached:
        pass
    finally:
        handle.remove()
    return found[0]


class _Results(TorchDispatchMode):
    """Remembers every operator's result without keeping it alive."""

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


def _forward(block: nn.Module, given: tuple[Any, ...]) -> SavedTensors:
    with _Results() as results:
        output = block(*given)
    ends = {each.untyped_storage()._cdata for each in tree_leaves((given, output)) if isinstance(each, Tensor)}
    made: dict[int, str] = {}
    alive: dict[int, int] = {}
    there: Counter[str] = Counter()
    for name, reference in results.seen:
        there[name] += 1
        storage = reference()
        if storage is not None and storage._cdata not in ends and storage._cdata not in alive:
            alive[storage._cdata], made[storage._cdata] = storage.nbytes(), name
    kept = Counter(made.values())
    return SavedTensors(sum(alive.values()), {name: (kept[name], there[name]) for name in sorted(kept)})
