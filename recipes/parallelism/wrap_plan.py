"""The wrap plan: what a policy decided, and what can be said about it before anything is wrapped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.network import Network


@dataclass(frozen=True)
class Unit:
    """How one module is wrapped."""

    reshard_after_forward: bool | int
    """Free the gathered parameters after forward; a number: keep them sharded over that many devices meanwhile."""


WrapPlan = dict[str, Unit]
"""Module name -> how it is wrapped; children before their parents, the root ("") last."""


def check_units(network: Network, names: Iterable[str]) -> None:
    """Raises ConfigError for a unit that would never be gathered, or that holds a parameter which others use, too."""
    shared = shared_outside(network)
    for name in names:
        if not is_called(network.get_submodule(name)):
            raise ConfigError(
                f"wrap: '{name}' is a container that is never called, it cannot be a unit; match what it holds"
            )
        if parameters := shared.get(name):
            raise ConfigError(
                f"wrap: '{name}' cannot be a unit: {parameters[0]} is shared with a module outside of it and belongs to the "
                "unit around both"
            )


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward of its own: FSDP gathers a unit when it is called."""
    return type(module).forward is not nn.Module.forward


def shared_outside(network: Network) -> dict[str, list[str]]:
    """Module name -> its parameters that a module outside of it uses, too, such as a tied embedding table."""
    users: dict[nn.Parameter, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        users.setdefault(parameter, []).append(name)
    found: dict[str, list[str]] = {}
    for names in users.values():
        for name in names if len(names) > 1 else []:
            parts = name.split(".")[:-1]
            for depth in range(1, len(parts) + 1):
                module = ".".join(parts[:depth])
                if not all(other.startswith(f"{module}.") for other in names):
                    found.setdefault(module, []).append(name)
    return found


def frozen_waste(network: Network, plan: WrapPlan) -> dict[str, int]:
    """Unit -> bytes of gradients (fp32) that FSDP1 reserves for frozen parameters which share a unit with trained ones."""
    found = {}
    for name, parameters in unit_parameters(network, plan).items():
        frozen = sum(p.numel() for p in parameters.values() if not p.requires_grad)
        if frozen and any(p.requires_grad for p in parameters.values()):
            found[name] = 4 * frozen
    return found


def unit_parameters(network: Network, plan: WrapPlan) -> dict[str, dict[str, nn.Parameter]]:
    """Parameters of every unit by name; a parameter belongs to the innermost unit around it."""
    found: dict[str, dict[str, nn.Parameter]] = {unit: {} for unit in plan}
    for name, parameter in network.named_parameters():
        around = [unit for unit in plan if not unit or name.startswith(f"{unit}.")]
        found[max(around, key=len)][name] = parameter
    return found


class UnitParameters(NamedTuple):
    """A device's parameters of one unit after tensor parallelism, before sharding."""

    trained: int
    frozen: int
    reshard_after_forward: bool | int
    """False for the root."""


def local_parameters(network: Network, plan: WrapPlan, tensor: int) -> dict[str, UnitParameters]:
    """Unit -> what a device holds of it after tensor parallelism, before sharding."""
    styles = network.tensor_plan(sequence_parallel=True, loss_parallel=False) if tensor > 1 else {}
    split = {name for name, style in styles.items() if isinstance(style, ColwiseParallel | RowwiseParallel)}
    found = {}
    for unit, parameters in unit_parameters(network, plan).items():
        counts = {True: 0, False: 0}
        for name, parameter in parameters.items():
            parts = tensor if name.rpartition(".")[0] in split else 1
            counts[parameter.requires_grad] += -(-parameter.numel() // parts)
        found[unit] = UnitParameters(counts[True], counts[False], plan[unit].reshard_after_forward)
    return found
