"""The state of a run, {"model": ..., "optimizer": ...}, as sharded tensors of any layout; and loading a checkpoint into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

from meshrunner.recipes.checkpoint import fsdp1_tensor
from meshrunner.recipes.checkpoint.metadata import check_metadata
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.init_weights import clean_name

if TYPE_CHECKING:
    import torch
    from torch import nn

    from meshrunner.recipes.checkpoint.on_disk import StoredCheckpoint

State = dict[str, dict[str, Any]]
"""`model`: name -> tensor; `optimizer`: name -> {"exp_avg": tensor, ...}. Names are those in the network as it was built.

The optimizer's hyperparameters are not part of the state, they are in the configuration.
"""


def get_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return the current state, also as the target of a load. A collective."""
    if fsdp1_tensor.patch_if_needed(model):
        return fsdp1_tensor.get_fsdp1_state(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    by_parameter = optimizer_state["state"]
    assert isinstance(by_parameter, dict)
    return {"model": model_state, "optimizer": by_parameter}


def set_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Set a state that came from `get_state` and that a checkpoint was loaded into. A collective."""
    if fsdp1_tensor.patch_if_needed(model):
        fsdp1_tensor.set_fsdp1_state(model, optimizer, state)
        return
    names = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    groups = [group | {"params": [names[each] for each in group["params"]]} for group in optimizer.param_groups]
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict={"state": state["optimizer"], "param_groups": groups},
    )


def restore(stored: StoredCheckpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint in place, under any layout. A collective. Raises ConfigError if it is from another model."""
    check_metadata(stored.path)
    state = get_state(model, optimizer)
    try:
        load(dict(state), storage_reader=FileSystemReader(stored.path))
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise ConfigError(
            f"the checkpoint {stored.path} does not fit this model and optimizer: rank {rank}: {cause}"
        ) from error
    set_state(model, optimizer, state)
