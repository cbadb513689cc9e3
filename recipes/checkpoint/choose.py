"""The checkpoint that a run continues from: the ranks agree on a good one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshrunner.recipes.checkpoint.on_disk import StoredCheckpoint, candidates, remove_leftovers
from meshrunner.recipes.errors import ConfigError

HOST = torch.device("cpu")


def choose_checkpoint(load: str | None, own: Path | None) -> StoredCheckpoint | None:
    """
    The newest checkpoint whose checksums all match, the same on every rank; None: start from scratch.

    Each rank verifies its share of the files. Without a folder to look in, there is no communication.

    Args:
        load: `checkpoint.load`.
        own: the run's own `checkpoints` folder; leftovers of a killed run are removed from it.

    Raises:
        ConfigError: `load` contains no good checkpoint; raised on every rank.
    """
    if own is None and load is None:
        return None
    listed = _candidates_of_rank_0(load, own)
    for candidate in listed:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = candidate.damaged_files(sorted(candidate.record.files)[rank::ranks])
        everyone: list[list[str]] = [[] for _ in range(ranks)]
        dist.all_gather_object(everyone, mine)
        damaged = [name for names in everyone for name in names]
        if not damaged:
            return candidate
        _warn_on_rank_0(f"the checkpoint {candidate.path} is skipped: the checksum differs for {', '.join(damaged)}")
    if listed and load is not None:
        raise ConfigError(f"checkpoint.load: every checkpoint in '{load}' is damaged: a checksum differs")
    return None


def _candidates_of_rank_0(load: str | None, own: Path | None) -> list[StoredCheckpoint]:
    """Rank 0's candidates, broadcast to every rank: a network file system may show the others an older state."""
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            if own is not None:
                remove_leftovers(own)
            answer[0], warnings = candidates(load, own)
            for warning in warnings:
                _warn_on_rank_0(warning)
        except Exception as error:
            answer[0] = error
    dist.broadcast_object_list(answer, device=HOST)
    if isinstance(answer[0], Exception):
        raise answer[0]
    found: list[StoredCheckpoint] = answer[0]
    return found


def _warn_on_rank_0(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"warning: {text}", file=sys.stderr, flush=True)
