"""Which checkpoint a run continues from: the ranks agree on one that is good."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshrunner.recipes.checkpoint.on_disk import Stored, candidates, sweep
from meshrunner.recipes.errors import ConfigError

HOST = torch.device("cpu")


def agreed(load: str | None, own: Path | None) -> Stored | None:
    """
    The newest checkpoint that is good to the last byte, the same on every rank; None: begin at the beginning.

    Each rank reads its part of the files. Where there is nothing that might be loaded, nothing is exchanged.

    Args:
        load: `checkpoint.load`.
        own: the run's own `checkpoints` folder; left-overs of a killed run are removed from it.

    Raises:
        ConfigError: on every rank; `load` names something that holds no good checkpoint.
    """
    if own is None and load is None:
        return None
    listed = _listed(load, own)
    for candidate in listed:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = candidate.damaged_files(sorted(candidate.record.files)[rank::ranks])
        everyone: list[list[str]] = [[] for _ in range(ranks)]
        dist.all_gather_object(everyone, mine)
        damaged = [name for names in everyone for name in names]
        if not damaged:
            return candidate
        _warn(f"the checkpoint {candidate.path} is skipped: not what was written: {', '.join(damaged)}")
    if listed and load is not None:
        raise ConfigError(f"checkpoint.load: no checkpoint in '{load}' is as it was written")
    return None


def _listed(load: str | None, own: Path | None) -> list[Stored]:
    """What rank 0 finds on disk, on every rank: a file system may show the others something older."""
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            if own is not None:
                sweep(own)
            answer[0], warnings = candidates(load, own)
            for warning in warnings:
                _warn(warning)
        except Exception as error:
            answer[0] = error
    dist.broadcast_object_list(answer, device=HOST)
    if isinstance(answer[0], Exception):
        raise answer[0]
    found: list[Stored] = answer[0]
    return found


def _warn(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"warning: {text}", file=sys.stderr, flush=True)
