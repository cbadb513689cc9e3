"""Sizes of FSDP units on one device, computed before FSDP wraps anything. A unit is a module that FSDP gathers as a whole."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from meshrunner.recipes.parallelism.wrap_policy import WrapPlan, unit_parameters

if TYPE_CHECKING:
    from meshrunner.recipes.model.network import Network


class LocalParameter(NamedTuple):
    """One device's part of a parameter after tensor and expert parallelism, before FSDP. The largest part, if sizes differ."""

    shape: tuple[int, ...]
    trained: bool
    is_stack: bool = False
    """Whether the parameter is a stack of one matrix per expert. `shape[0]` of a stack is the number of experts on one device."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def padded(self, ranks: int) -> int:
        """Return the number of elements after FSDP2 has padded the sharded dimension to a multiple of `ranks`."""
        dim = stack_shard_dim(self.shape, ranks) if self.is_stack else 0
        return -(-self.shape[dim] // ranks) * ranks * self.numel // self.shape[dim]


class UnitParameters(NamedTuple):
    """The parameters of a unit on one device, before FSDP shards them, and the unit's settings in the wrap plan."""

    parameters: tuple[LocalParameter, ...]
    reshard_after_forward: bool | int
    lookup: bool
    calls: int = 1
    """Number of times that the unit is called per forward pass."""

    def of(self, *, is_stack: bool) -> UnitParameters:
        """Return a copy with only the stacks of expert matrices if `is_stack` is true, else with only the other parameters."""
        return self._replace(parameters=tuple(each for each in self.parameters if each.is_stack == is_stack))

    @property
    def trained(self) -> int:
        """Number of trained elements."""
        return sum(parameter.numel for parameter in self.parameters if parameter.trained)

    @property
    def frozen(self) -> int:
        return sum(parameter.numel for parameter in self.parameters if not parameter.trained)


Units = Mapping[str, UnitParameters]
"""Units, keyed by name, in the order in which forward gathers them."""


class Traffic(NamedTuple):
    """Bytes communicated for one unit in one step. Each collective adds the size of the whole unit, not of a shard."""

    gathered: int
    reduced: int


class Stored(NamedTuple):
    """Numbers of fp32 elements that the device with the largest shards stores for one unit between steps."""

    weights: int
    gradients: int
    trained: int
    """Elements that have optimizer state."""
    unsharded_gradient_bytes: int = 0
    """Bytes of unsharded gradients that a device keeps between micro batches if `accumulate` is hold."""


def stack_shard_dim(shape: Sequence[int], ranks: int) -> int:
    """Return the sharded dimension of a stack [experts, rows, columns]: 1 if `ranks` divides `rows` but not `experts`, else 0."""
    return int(shape[0] % ranks > 0 and shape[1] % ranks == 0)


def local_parameters(
    network: Network, plan: WrapPlan, tensor: int, expert: int = 1, modules: Collection[str] | None = None
) -> dict[str, UnitParameters]:
    """Return each unit's parameters on one device before FSDP shards them, keyed by unit name. tensor, expert: degrees. modules:
    names of the modules that the device holds; None: all."""
    split = _split_dims(network) if tensor > 1 else {}
    found = {}
    for name, parameters in unit_parameters(network, plan).items():
        local = []
        for parameter_name, parameter in parameters.items():
            if modules is not None and not any(parameter_name.startswith(f"{each}.") for each in modules):
                continue
            shape = list(parameter.shape)
            if (dim := split.get(parameter_name)) is not None:
                shape[dim] = -(-shape[dim] // tensor)
            if is_stack := network.is_stack(parameter_name):
                shape[0] //= expert
            local.append(LocalParameter(tuple(shape), parameter.requires_grad, is_stack))
        unit = plan[name]
        found[name] = UnitParameters(tuple(local), unit.reshard_after_forward, unit.lookup, network.calls(name))
    return found


def _split_dims(network: Network) -> dict[str, int]:
    """Return the dimension that tensor parallelism splits in each parameter. Embeddings are [rows, width], weights [out, in]."""
    from torch import nn
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    from meshrunner.recipes.model.tensor_plan import SplitParameters

    found: dict[str, int] = {}
    for module, style in network.tensor_plan(sequence_parallel=True, loss_parallel=False).items():
        if isinstance(style, SplitParameters):
            found |= {f"{module}.{name}": dim for name, dim in style.dims.items()}
        if not isinstance(style, ColwiseParallel | RowwiseParallel):
            continue
        dim = int(isinstance(style, RowwiseParallel) != isinstance(network.get_submodule(module), nn.Embedding))
        for name, parameter in network.get_submodule(module).named_parameters(module, recurse=False):
            if dim < parameter.dim():  # the bias of a row-wise linear layer is replicated
                found[name] = dim
    return found
