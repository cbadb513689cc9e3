"""The checkpoint that a run continues from, verified and agreed on by all ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshrunner.recipes.checkpoint.on_disk import StoredCheckpoint, candidates, remove_leftovers
from meshrunner.recipes.errors import ConfigError


def choose_checkpoint(load: str | None, own: Path | None) -> StoredCheckpoint | None:
    """
    Return the newest checkpoint whose checksums all match, the same on every rank; None: start from step 1.

    Each rank verifies its share of the files. With neither `checkpoint.load` nor the run's `own` directory, there is no
    communication. Raises ConfigError on every rank if `load` contains no good checkpoint.
    """
    if own is None and load is None:
        return None
    listed = _candidates_of_rank_0(load, own)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for candidate in listed:
        by_rank: list[list[str]] = [[] for _ in range(ranks)]
        dist.all_gather_object(by_rank, candidate.damaged_files(sorted(candidate.record.files)[rank::ranks]))
        damaged = [name for names in by_rank for name in names]
        if not damaged:
            return candidate
        if rank == 0:
            _warn(f"skipping the checkpoint {candidate.path}: the checksum differs for {', '.join(damaged)}")
    if listed and load is not None:
        raise ConfigError(
            f"checkpoint.load: every checkpoint in {load} is damaged: a checksum differs; load another one"
        )
    return None


def _candidates_of_rank_0(load: str | None, own: Path | None) -> list[StoredCheckpoint]:
    """Return rank 0's candidates on every rank. A network file system may show the other ranks an older state."""
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            if own is not None:
                remove_leftovers(own)
            answer[0], warnings = candidates(load, own)
            for warning in warnings:
                _warn(warning)
        except Exception as error:
            answer[0] = error
    dist.broadcast_object_list(answer, device=torch.device("cpu"))
    if isinstance(answer[0], Exception):
        raise answer[0]
    found: list[StoredCheckpoint] = answer[0]
    return found


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
