"""The wrap plan: which modules become units, and what follows from it before anything is wrapped."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from torch import nn

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.network import Network


@dataclass(frozen=True)
class Unit:
    """The wrapping of one module."""

    reshard_after_forward: bool | int
    """Whether to free the gathered parameters after forward; a number: keep them sharded over that many devices."""
    lookup: bool = False
    """Whether it is an embedding, which backward neither calls again nor needs the table of."""


WrapPlan = dict[str, Unit]
"""Module name -> how it is wrapped; children before their parents, the root ("") last."""


def check_units(network: Network, names: Iterable[str]) -> None:
    """Raise ConfigError for a unit that is never called or that shares a parameter with a module outside it."""
    shared = parameters_shared_outside(network)
    for name in names:
        if not has_forward(network.get_submodule(name)):
            raise ConfigError(
                f"wrap: '{name}' cannot be a unit: it is a container that is never called; match its children"
            )
        if parameters := shared.get(name):
            raise ConfigError(
                f"wrap: '{name}' cannot be a unit: {parameters[0]} is shared with a module outside it and belongs to "
                "the unit around both"
            )


def has_forward(module: nn.Module) -> bool:
    """Whether a module has its own forward: FSDP gathers a unit when it is called."""
    return type(module).forward is not nn.Module.forward


def parameters_shared_outside(network: Network) -> dict[str, list[str]]:
    """Module name -> its parameters that a module outside it also uses, such as a tied embedding table."""
    users: dict[nn.Parameter, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        users.setdefault(parameter, []).append(name)
    found: dict[str, list[str]] = {}
    for names in users.values():
        for name in names:
            for module in accumulate(name.split(".")[:-1], "{}.{}".format):
                if not all(other.startswith(f"{module}.") for other in names):
                    found.setdefault(module, []).append(name)
    return found


def top_modules(network: Network) -> list[str]:
    """
    The blocks, and the outermost modules with a matrix outside them, in `named_modules` order: embedding, output projection.

    Not among them is what shares a parameter with a module outside it, such as a tied embedding, and what has only vectors,
    such as the final norm: too small to be communicated by itself.
    """
    blocks, shared = set(network.block_names()), parameters_shared_outside(network)
    around = {prefix for name in blocks for prefix in accumulate(name.split(".")[:-1], "{}.{}".format)}
    found: list[str] = []
    for name, module in network.named_modules():
        if not name or name in around or (found and name.startswith(f"{found[-1]}.")):
            continue
        usable = has_forward(module) and name not in shared
        if name in blocks or (usable and any(parameter.dim() > 1 for parameter in module.parameters())):
            found.append(name)
    return found


def is_lookup(network: Network, name: str) -> bool:
    """Whether a module is an embedding outside the blocks, which are called again in backward when they are recomputed."""
    in_block = any(name.startswith(f"{block}.") for block in network.block_names())
    return type(network.get_submodule(name)) is nn.Embedding and not in_block


def units_in_blocks(network: Network, plan: WrapPlan) -> list[str]:
    """Units inside a block."""
    blocks = tuple(f"{name}." for name in network.block_names())
    return [unit for unit in plan if unit.startswith(blocks)]


def frozen_gradient_bytes(network: Network, plan: WrapPlan) -> dict[str, int]:
    """Unit -> bytes of fp32 gradients that FSDP1 allocates for frozen parameters in units with trained ones."""
    found = {}
    for name, parameters in unit_parameters(network, plan).items():
        frozen = sum(p.numel() for p in parameters.values() if not p.requires_grad)
        if frozen and any(p.requires_grad for p in parameters.values()):
            found[name] = 4 * frozen
    return found


def unit_parameters(network: Network, plan: WrapPlan) -> dict[str, dict[str, nn.Parameter]]:
    """Unit -> its parameters by name; a parameter belongs to the innermost unit around it."""
    found: dict[str, dict[str, nn.Parameter]] = {unit: {} for unit in plan}
    for name, parameter in network.named_parameters():
        around = [unit for unit in plan if not unit or name.startswith(f"{unit}.")]
        found[max(around, key=len)][name] = parameter
    return found


class LocalParameter(NamedTuple):
    """A parameter on one device after tensor and expert parallelism, before data parallelism; of uneven parts the largest."""

    shape: tuple[int, ...]
    trained: bool
    is_stack: bool = False
    """A stack of matrices, one for each expert; only those of this device, if they lie on several."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class UnitParameters(NamedTuple):
    """The parameters of a unit on one device after tensor and expert parallelism, before data parallelism."""

    parameters: tuple[LocalParameter, ...]
    reshard_after_forward: bool | int
    """False for the root."""
    lookup: bool
    """As of `Unit`."""
    calls: int = 1
    """How often a forward calls it."""

    def of(self, *, is_stack: bool) -> UnitParameters:
        """The unit with its stacks of experts alone, or without them."""
        return self._replace(parameters=tuple(each for each in self.parameters if each.is_stack == is_stack))

    @property
    def trained(self) -> int:
        """Number of elements of the parameters that are trained."""
        return sum(parameter.numel for parameter in self.parameters if parameter.trained)

    @property
    def frozen(self) -> int:
        """Number of elements of the others."""
        return sum(parameter.numel for parameter in self.parameters if not parameter.trained)


def local_parameters(network: Network, plan: WrapPlan, tensor: int, expert: int = 1) -> dict[str, UnitParameters]:
    """Unit -> its parameters on one device after tensor and expert parallelism, before data parallelism."""
    split = _split_dims(network) if tensor > 1 else {}
    found = {}
    for unit, parameters in unit_parameters(network, plan).items():
        local = []
        for name, parameter in parameters.items():
            shape = list(parameter.shape)
            if (dim := split.get(name)) is not None:
                shape[dim] = -(-shape[dim] // tensor)
            if is_stack := network.is_stack(name):
                shape[0] //= expert
            local.append(LocalParameter(tuple(shape), parameter.requires_grad, is_stack))
        how = plan[unit]
        found[unit] = UnitParameters(tuple(local), how.reshard_after_forward, how.lookup, network.calls(unit))
    return found


def _split_dims(network: Network) -> dict[str, int]:
    """Parameter -> the dimension that tensor parallelism splits. An embedding's table is [rows, width], a weight [out, in]."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    found: dict[str, int] = {}
    for module, style in network.tensor_plan(sequence_parallel=True, loss_parallel=False).items():
        if own := getattr(style, "split_dims", None):  # a style of this project
            found |= {f"{module}.{name}": dim for name, dim in own(network.get_submodule(module)).items()}
        if not isinstance(style, ColwiseParallel | RowwiseParallel):
            continue
        dim = int(isinstance(style, RowwiseParallel) != isinstance(network.get_submodule(module), nn.Embedding))
        for name, parameter in network.get_submodule(module).named_parameters(module, recurse=False):
            if dim < parameter.dim():  # the bias of a row-wise product is whole on every device
                found[name] = dim
    return found
