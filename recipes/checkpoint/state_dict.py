"""The state of a run, {"model": ..., "optimizer": ...}, as sharded tensors of any layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from meshrunner.recipes.checkpoint import fsdp1_tensor
from meshrunner.recipes.model.init_weights import clean_name

if TYPE_CHECKING:
    import torch
    from torch import nn

State = dict[str, dict[str, Any]]
"""`model`: name -> tensor; `optimizer`: name -> {"exp_avg": tensor, ...}. Names are those in the network as it was built.

The optimizer's hyperparameters are not part of the state: they are in the configuration.
"""


def get_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The current state, also as the target of a load. A collective."""
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
