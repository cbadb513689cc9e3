"""The state of FSDP1 over tensor parallelism, where torch's own way fails.

torch (2.13) takes every rank's part of a split parameter for equally large, and crashes or hangs where it is not. For
parameters that is one line, corrected here. For optimizer state it is at the bottom of FSDP1, so another way is taken: a
rank's part of a state tensor has the shape of its part of the parameter, so the state is put where the parameters are and
read, or written, as if it were them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions

from meshrunner.recipes.init_weights import clean_name

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh


def applies(model: nn.Module) -> bool:
    """Whether the model is FSDP1 over tensor parallelism; if so it is made ready."""
    units = FullyShardedDataParallel.fsdp_modules(model)
    for unit in units:
        if type(unit._fsdp_extension) is DTensorExtensions:
            unit._fsdp_extension = _Uneven(unit._fsdp_extension.device_handle)
    return any(isinstance(unit._fsdp_extension, _Uneven) for unit in units)


def take(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """What `state_dict.take` does elsewhere."""
    trained = _trained(model, optimizer)
    _initialise(optimizer)
    of_optimizer: dict[str, dict[str, Any]] = {name: {} for name in trained}
    scalars, tensors = _keys(optimizer)
    for key in scalars:
        for name, parameter in trained.items():
            if key in optimizer.state[parameter]:  # a rank may hold nothing of a parameter
                of_optimizer[name][key] = optimizer.state[parameter][key]
    with _kept(trained):
        for key in tensors:
            for parameter in trained.values():
                if parameter.numel():
                    parameter.data.copy_(optimizer.state[parameter][key])
            for name, value in get_model_state_dict(model).items():
                if name in trained:
                    of_optimizer[name][key] = value
    return {"model": get_model_state_dict(model), "optimizer": of_optimizer}


def put(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, dict[str, Any]]) -> None:
    """What `state_dict.put` does elsewhere."""
    trained = _trained(model, optimizer)
    scalars, tensors = _keys(optimizer)
    for key in tensors:
        of_key = {name: state["optimizer"].get(name, {}).get(key, value) for name, value in state["model"].items()}
        set_model_state_dict(model, of_key)
        for parameter in trained.values():
            if parameter.numel():
                optimizer.state[parameter][key].copy_(parameter.data)
    for name, parameter in trained.items():
        for key in scalars:
            if key in optimizer.state[parameter]:
                optimizer.state[parameter][key].copy_(state["optimizer"][name][key])
    set_model_state_dict(model, state["model"])


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Name -> this rank's part, of every parameter that the optimizer has."""
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return {clean_name(name): parameter for name, parameter in model.named_parameters() if parameter in own}


def _initialise(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that has not stepped yet its state, of whatever value: it will be loaded over, and so will the
    parameters that this moves."""
    if optimizer.state:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _keys(optimizer: torch.optim.Optimizer) -> tuple[list[str], list[str]]:
    """The names of a parameter's state: (scalars, tensors of the parameter's shape)."""
    found = {key: value.dim() for state in optimizer.state.values() for key, value in state.items()}
    return sorted(key for key in found if not found[key]), sorted(key for key in found if found[key])


@contextmanager
def _kept(parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    """Inside, the parameters may be anything; then they are what they were."""
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data.copy_(before[name])


class _Uneven(DTensorExtensions):
    """Says how large the whole of a split parameter is, instead of taking every part for equal."""

    def chunk_dtensor(self, tensor: Tensor, rank: int, device_mesh: DeviceMesh) -> Tensor:
        if not isinstance(tensor, DTensor):
            return super().chunk_dtensor(tensor, rank, device_mesh)
        mesh = device_mesh._get_root_mesh()
        whole: list[Placement] = [Replicate()] * (mesh.ndim - 1) + [tensor.placements[0]]
        sharded: list[Placement] = [Replicate()] * (mesh.ndim - 2) + [Shard(0), tensor.placements[0]]
        local = tensor.to_local().detach().clone()
        placed = DTensor.from_local(local, mesh, whole, run_check=False, shape=tensor.shape, stride=tensor.stride())
        return placed.redistribute(mesh, sharded)
