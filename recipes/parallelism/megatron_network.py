"""The preparation of a network for megatron-fsdp: unit classes, materialisation unit by unit, and initial values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.init_weights import Initialiser, clean_name
from meshrunner.recipes.model.network import Network

if TYPE_CHECKING:
    from meshrunner.recipes.parallelism.wrap_policy import WrapPlan


def unit_classes(network: Network, plan: WrapPlan, zero: int, double_buffer: str) -> list[type[nn.Module]]:
    """Return the classes of a plan's units. Raises ConfigError if megatron-fsdp, which wraps whole classes, cannot follow it."""
    for name, unit in plan.items():
        if unit.reshard_after_forward not in ((True, False) if zero == 3 else (False,)):
            units_are = "either reshards a unit fully or not at all" if zero == 3 else "never shards parameters"
            raise ConfigError(
                f"wrap: reshard_after_forward of '{name}' must be null: with zero({zero}), megatron_fsdp {units_are}"
            )
    units = {name for name, unit in plan.items() if name and (zero < 3 or unit.reshard_after_forward)}
    if not units and (zero == 3 or double_buffer != "none"):
        raise ConfigError(
            f"wrap: no unit of the plan is resharded, but megatron_fsdp with zero({zero}) and "
            f"double_buffer({double_buffer}) needs one; use wrap=blocks"
        )
    repeated = [name for name in plan if name in units and network.calls(name) > 1]
    if repeated and double_buffer != "none":
        raise ConfigError(
            f"wrap: '{repeated[0]}' is called {network.calls(repeated[0])} times in a forward, while other units occupy both "
            f"buffers of double_buffer({double_buffer}); use double_buffer=none, or wrap=rules without that unit"
        )
    classes = {type(network.get_submodule(name)): name for name in units}
    for name, module in network.named_modules():
        around = [unit for unit in units if name.startswith(f"{unit}.")]
        if around and name in plan:
            raise ConfigError(
                f"wrap: '{name}' cannot be a unit inside '{around[0]}', which megatron_fsdp gathers as a whole; use "
                "wrap=blocks, or parallelism=fsdp2"
            )
        alike = [unit for kind, unit in classes.items() if isinstance(module, kind)]
        if alike and not around and name not in units:
            raise ConfigError(
                f"wrap: '{alike[0]}' is a resharded unit, '{name}' is not, and both are {type(module).__name__}. "
                "megatron_fsdp selects units by class, not by name; use wrap=blocks, or parallelism=fsdp2"
            )
    return list(classes)


@contextmanager
def materialised(network: Network, device: torch.device, *, unit_by_unit: bool) -> Iterator[None]:
    """
    Let the code inside materialise a network on meta without initialising it. `zero` 0 needs everything allocated first.

    With `unit_by_unit`, a device never holds more than one whole unit. megatron-fsdp materialises each module, then calls its
    `reset_parameters`, which here only ties parameters again.
    """
    if not unit_by_unit:
        network.to_empty(device=device)
        network.tie_weights()
        yield
        return
    users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}

    def tie(module: nn.Module, own: dict[str, list[tuple[nn.Module, str]]]) -> None:
        """Give the materialised parameters of a module to every other module that used them."""
        for name, others in own.items():
            for other, other_name in others:
                setattr(other, other_name, getattr(module, name))

    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            users.setdefault(parameter, []).append((module, name))
    owners: list[Any] = [module for module in network.modules() if any(True for _ in module.parameters(recurse=False))]
    for module in owners:
        own = {name: users[parameter] for name, parameter in module.named_parameters(recurse=False)}
        module.reset_parameters = partial(tie, module, own)
    yield
    for module in owners:
        del module.reset_parameters
    for module in network.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))


def initialise(wrapped: nn.Module, initialiser: Initialiser) -> None:
    """Initialise the fp32 master weights, then copy them to the compute parameters. The reverse would round them to bf16."""
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            assert isinstance(parameter, DTensor)
            local, value = parameter.to_local(), initialiser.whole(clean_name(name), parameter.shape)
            elements = getattr(parameter, "megatron_fsdp_slice", slice(None))  # absent if it is not sharded
            local.copy_(value.flatten()[elements].view_as(local))
    sharded: Any = wrapped
    sharded.install_optimized_model_weights()
    initialiser.network.reset_buffers()
