"""Loading a checkpoint into a model and an optimizer under any layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_into

from meshrunner.recipes.checkpoint.state_dict import put, take
from meshrunner.recipes.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from meshrunner.recipes.checkpoint.on_disk import Stored


def restore(stored: Stored, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """
    Put a checkpoint's parameters and optimizer state in place; a collective operation.

    Raises:
        ConfigError: it holds another model or optimizer.
    """
    state = take(model, optimizer)
    try:
        load_into(dict(state), storage_reader=FileSystemReader(stored.path))
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise ConfigError(f"the checkpoint {stored.path} does not fit: rank {rank}: {cause}") from error
    put(model, optimizer, state)
