"""Loading a checkpoint into a model and an optimizer under any layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_into

from meshrunner.recipes.checkpoint.metadata import check_metadata
from meshrunner.recipes.checkpoint.state_dict import get_state, set_state
from meshrunner.recipes.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from meshrunner.recipes.checkpoint.on_disk import StoredCheckpoint


def restore(stored: StoredCheckpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint in place; a collective. Raises ConfigError if it is from another model or optimizer."""
    check_metadata(stored.path)
    state = get_state(model, optimizer)
    try:
        load_into(dict(state), storage_reader=FileSystemReader(stored.path))
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise ConfigError(f"the checkpoint {stored.path} does not fit: rank {rank}: {cause}") from error
    set_state(model, optimizer, state)
