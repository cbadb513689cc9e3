"""The state of a run as tensors that know their place in the whole, whatever the layout: {"model": ..., "optimizer": ...}."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from meshrunner.recipes.checkpoint import fsdp1_tensor
from meshrunner.recipes.init_weights import clean_name

if TYPE_CHECKING:
    import torch
    from torch import nn

State = dict[str, dict[str, Any]]
"""`model`: name -> tensor; `optimizer`: name -> {"exp_avg": tensor, ...}. Names are those of the network as it was built.

The optimizer's settings (learning rate, decay, ...) are not state: the configuration has them.
"""


def take(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The state as it is, or to be loaded over. A collective operation."""
    if fsdp1_tensor.applies(model):
        return fsdp1_tensor.take(model, optimizer)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    of_parameters = of_optimizer["state"]
    assert isinstance(of_parameters, dict)
    return {"model": of_model, "optimizer": of_parameters}


def put(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Put a state that `take` gave, and that was loaded over, into place. A collective operation."""
    if fsdp1_tensor.applies(model):
        fsdp1_tensor.put(model, optimizer, state)
        return
    names = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    groups = [group | {"params": [names[each] for each in group["params"]]} for group in optimizer.param_groups]
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict={"state": state["optimizer"], "param_groups": groups},
    )
