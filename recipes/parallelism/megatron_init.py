"""How a network comes into being under Megatron-FSDP: materialised by it, unit by unit, and initialised afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshrunner.recipes.model.init_weights import Initialiser, clean_name
from meshrunner.recipes.model.network import Network

Places = list[tuple[nn.Module, str]]
"""Modules that have a parameter, and their name of it."""


@contextmanager
def materialised(network: Network, device: torch.device, *, unit_by_unit: bool) -> Iterator[None]:
    """
    Have a network on meta materialised, but not initialised, by what is called inside.

    unit_by_unit: megatron-fsdp materialises module by module and keeps its shards, so that no device ever holds more than a unit
        besides; it then calls the module's `reset_parameters`, for which there is nothing to do but to tie parameters again.
        Otherwise, as `zero` 0 asks for, everything is allocated before.
    """
    if not unit_by_unit:
        network.to_empty(device=device)
        network.tie_weights()
        yield
        return
    places: dict[nn.Parameter, Places] = {}
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((module, name))
    owners: list[Any] = [module for module in network.modules() if any(True for _ in module.parameters(recurse=False))]
    for module in owners:
        own = {name: places[parameter] for name, parameter in module.named_parameters(recurse=False)}
        module.reset_parameters = partial(_tie, module, own)
    yield
    for module in owners:
        del module.reset_parameters
    for module in network.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))


def _tie(module: nn.Module, own: dict[str, Places]) -> None:
    """Put the parameters of a module wherever else they were before. own: name -> modules that have it, and their name of it."""
    for name, places in own.items():
        for other, other_name in places:
            setattr(other, other_name, getattr(module, name))


def initialise(wrapped: nn.Module, initialiser: Initialiser) -> None:
    """
    Set what the optimizer updates to its initial values in fp32, and what computes to these in its dtype.

    Initialised in `reset_parameters`, master weights would be copies of weights that were rounded to bf16.
    """
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            assert isinstance(parameter, DTensor)
            local, value = parameter.to_local(), initialiser.whole(clean_name(name), parameter.shape)
            elements = getattr(parameter, "megatron_fsdp_slice", slice(None))  # without shards it has none
            local.copy_(value.flatten()[elements].view_as(local))
    sharded: Any = wrapped
    sharded.install_optimized_model_weights()
    initialiser.network.reset_buffers()
