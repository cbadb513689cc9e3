"""The wrap plan: which modules become units, checked and measured before anything is wrapped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from torch import nn

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.network import Network
from meshrunner.recipes.parallelism.unit_sizes import LocalParameter, UnitParameters


@dataclass(frozen=True)
class Unit:
    """The wrapping of one module."""

    reshard_after_forward: bool | int
    """Whether to free the unsharded parameters after forward; a number: reshard them over that many devices."""
    lookup: bool = False
    """Whether it is an embedding, whose table backward does not need."""


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
    """Whether a module has its own forward. FSDP gathers a unit when it is called."""
    return type(module).forward is not nn.Module.forward


def parameters_shared_outside(network: Network) -> dict[str, list[str]]:
    """Return module name -> its parameters that a module outside it also uses, such as a tied embedding table."""
    users: dict[nn.Parameter, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        users.setdefault(parameter, []).append(name)
    found: dict[str, list[str]] = {}
    for names in users.values():
        for name in names:
            for module in _parents(name):
                if not all(other.startswith(f"{module}.") for other in names):
                    found.setdefault(module, []).append(name)
    return found


def top_modules(network: Network) -> list[str]:
    """
    Return the blocks and the outermost modules with a matrix outside them, such as embedding and output projection.

    Modules that share a parameter with a module outside them, such as a tied embedding, are left out. So are modules with only
    vectors, such as the final norm, which are too small to be communicated on their own. In `named_modules` order.
    """
    blocks, shared = set(network.block_names()), parameters_shared_outside(network)
    around_blocks = {parent for name in blocks for parent in _parents(name)}
    found: list[str] = []
    for name, module in network.named_modules():
        if not name or name in around_blocks or (found and name.startswith(f"{found[-1]}.")):
            continue
        usable = has_forward(module) and name not in shared
        if name in blocks or (usable and any(parameter.dim() > 1 for parameter in module.parameters())):
            found.append(name)
    return found


def _parents(name: str) -> Iterable[str]:
    """Return the names of the modules around a module or parameter, outermost first, without the root."""
    return accumulate(name.split(".")[:-1], "{}.{}".format)


def inside_blocks(network: Network, names: Iterable[str]) -> list[str]:
    """Return those of the modules that are inside a block, without the blocks themselves."""
    blocks = tuple(f"{block}." for block in network.block_names())
    return [name for name in names if name.startswith(blocks)]


def unit_parameters(network: Network, plan: WrapPlan) -> dict[str, dict[str, nn.Parameter]]:
    """Return unit -> its parameters by name. A parameter belongs to the innermost unit around it."""
    found: dict[str, dict[str, nn.Parameter]] = {unit: {} for unit in plan}
    for name, parameter in network.named_parameters():
        around = [unit for unit in plan if not unit or name.startswith(f"{unit}.")]
        found[max(around, key=len)][name] = parameter
    return found


def local_parameters(network: Network, plan: WrapPlan, tensor: int, expert: int = 1) -> dict[str, UnitParameters]:
    """Return unit -> its parameters on one device after tensor and expert parallelism, before data parallelism."""
    split = _split_dims(network) if tensor > 1 else {}
    found = {}
    for name, parameters in unit_parameters(network, plan).items():
        local = []
        for parameter_name, parameter in parameters.items():
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
    """Return parameter -> the dimension that tensor parallelism splits; a table is [rows, width], a weight [out, in]."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    found: dict[str, int] = {}
    for module, style in network.tensor_plan(sequence_parallel=True, loss_parallel=False).items():
        if own := getattr(style, "split_dims", None):  # one of this project's own styles
            found |= {f"{module}.{name}": dim for name, dim in own(network.get_submodule(module)).items()}
        if not isinstance(style, ColwiseParallel | RowwiseParallel):
            continue
        dim = int(isinstance(style, RowwiseParallel) != isinstance(network.get_submodule(module), nn.Embedding))
        for name, parameter in network.get_submodule(module).named_parameters(module, recurse=False):
            if dim < parameter.dim():  # the bias of a row-wise linear layer is replicated
                found[name] = dim
    return found
