"""Read and set a run's state, {"model": ..., "optimizer": ...}, as sharded tensors. A run can load a checkpoint that was
saved with another sharding.

With FSDP1 and tensor parallelism, torch (2.13) crashes or hangs if the tensor-parallel shards of a parameter have unequal sizes.
The class `_UnevenShards` works around this torch bug, but only for parameters. Therefore, optimizer state such as `exp_avg` is
copied into the parameters and read from there. New optimizer state is loaded into the parameters, then copied to the optimizer.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions

from meshrunner.recipes.checkpoint.on_disk import StoredCheckpoint
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.base import clean_name
from meshrunner.recipes.model.network import network_of

State = dict[str, dict[str, Any]]
"""`model`: name -> tensor; `optimizer`: name -> {"exp_avg": tensor, ...}. Names are parameter names of the unwrapped network.
`outliers`: see `Outliers.state`, only with optimizer.skip_above."""


def get_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return a model's and optimizer's state: tensors to save, or to load a checkpoint into. All ranks must call `get_state`."""
    outliers = network_of(model).outliers
    others = {} if outliers is None else {"outliers": outliers.state}
    if patch_if_needed(model):
        return _get_fsdp1_state(model, optimizer) | others
    model_state, optimizer_state = dcp.get_state_dict(model, optimizer)
    by_parameter = optimizer_state["state"]
    assert isinstance(by_parameter, dict)
    return {"model": model_state, "optimizer": by_parameter} | others


def set_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Set the state of a model and optimizer, given in the form that `get_state` returns. All ranks must call `set_state`."""
    if patch_if_needed(model):
        _set_fsdp1_state(model, optimizer, state)
        return
    names = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    groups = [group | {"params": [names[each] for each in group["params"]]} for group in optimizer.param_groups]
    dcp.set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict={"state": state["optimizer"], "param_groups": groups},
    )


def restore(stored: StoredCheckpoint, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Load a checkpoint into a model and optimizer, or raise ConfigError if it does not fit. All ranks must call `restore`.
    optimizer: None to load only the model."""
    if optimizer is None:
        patch_if_needed(model)
        state: State = {"model": dcp.get_model_state_dict(model)}
    else:
        state = get_state(model, optimizer)
        if "outliers" in state and stored.record.config["optimizer"].get("skip_above") is None:
            del state["outliers"]  # the checkpoint has no history, so the run starts with an empty one
    try:
        load(dict(state), storage_reader=FileSystemReader(stored.path))
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise ConfigError(
            f"the checkpoint {stored.path} does not fit this model and optimizer: rank {rank}: {cause}"
        ) from error
    if optimizer is None:
        dcp.set_model_state_dict(model, state["model"])
    else:
        set_state(model, optimizer, state)


def patch_if_needed(model: nn.Module) -> bool:
    """Return whether a model combines FSDP1 with tensor parallelism. If it does, install `_UnevenShards` in its FSDP1 units."""
    units = FullyShardedDataParallel.fsdp_modules(model)
    for unit in units:
        if type(unit._fsdp_extension) is DTensorExtensions:
            unit._fsdp_extension = _UnevenShards(unit._fsdp_extension.device_handle)
    return any(isinstance(unit._fsdp_extension, _UnevenShards) for unit in units)


def _get_fsdp1_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    trained = _trained(model, optimizer)
    dcp._init_optim_state(optimizer)
    optimizer_state: State = {name: {} for name in trained}
    scalars, tensors = _state_keys(optimizer)
    for key in scalars:
        for name, parameter in trained.items():
            if key in optimizer.state[parameter]:  # a rank may hold no part of a parameter
                optimizer_state[name][key] = optimizer.state[parameter][key]
    before = {parameter: parameter.detach().clone() for parameter in trained.values()}
    try:
        for key in tensors:
            for parameter in trained.values():
                if parameter.numel():
                    parameter.data.copy_(optimizer.state[parameter][key])
            for name, value in dcp.get_model_state_dict(model).items():
                if name in trained:
                    optimizer_state[name][key] = value
    finally:
        for parameter, value in before.items():
            parameter.data.copy_(value)
    return {"model": dcp.get_model_state_dict(model), "optimizer": optimizer_state}


def _set_fsdp1_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    trained = _trained(model, optimizer)
    scalars, tensors = _state_keys(optimizer)
    for key in tensors:
        values = {name: state["optimizer"].get(name, {}).get(key, value) for name, value in state["model"].items()}
        dcp.set_model_state_dict(model, values)
        for parameter in trained.values():
            if parameter.numel():
                optimizer.state[parameter][key].copy_(parameter.data)
    for name, parameter in trained.items():
        for key in scalars:
            if key in optimizer.state[parameter]:
                optimizer.state[parameter][key].copy_(state["optimizer"][name][key])
    dcp.set_model_state_dict(model, state["model"])


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return this rank's shards of the parameters that the optimizer updates, keyed by parameter name."""
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return {clean_name(name): parameter for name, parameter in model.named_parameters() if parameter in own}


def _state_keys(optimizer: torch.optim.Optimizer) -> tuple[list[str], list[str]]:
    """Return the keys of an optimizer's state as two lists: keys of scalars such as `step`, and of tensors such as `exp_avg`."""
    found = {key: value.dim() for state in optimizer.state.values() for key, value in state.items()}
    return sorted(key for key in found if not found[key]), sorted(key for key in found if found[key])


class _UnevenShards(DTensorExtensions):
    """Extension of FSDP1 that uses the true global shape of a tensor-parallel parameter, instead of assuming equal shards."""

    def chunk_dtensor(self, tensor: Tensor, rank: int, device_mesh: DeviceMesh) -> Tensor:
        if not isinstance(tensor, DTensor):
            return super().chunk_dtensor(tensor, rank, device_mesh)
        mesh = device_mesh._get_root_mesh()
        gathered: list[Placement] = [Replicate()] * (mesh.ndim - 1) + [tensor.placements[0]]
        sharded: list[Placement] = [Replicate()] * (mesh.ndim - 2) + [Shard(0), tensor.placements[0]]
        local = tensor.to_local().detach().clone()
        placed = DTensor.from_local(local, mesh, gathered, run_check=False, shape=tensor.shape, stride=tensor.stride())
        return placed.redistribute(mesh, sharded)
