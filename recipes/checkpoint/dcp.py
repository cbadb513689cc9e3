"""Checkpoints with torch.distributed.checkpoint: each rank writes its shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from meshrunner.recipes.checkpoint.base import Checkpoint
from meshrunner.recipes.option import Count, whole

if TYPE_CHECKING:
    from pathlib import Path

    from meshrunner.recipes.checkpoint.base import Saver, Training


class DCP(Checkpoint):
    """Sharded checkpoints, loaded bit for bit under any layout; training waits until they are on disk."""

    every: Count
    """Steps between two checkpoints; the last step is always saved."""
    keep: Annotated[int | None, whole(None)]
    """Number of newest checkpoints to keep; null: all."""

    def saver(self, folder: Path, training: Training) -> Saver:
        from meshrunner.recipes.checkpoint.save import BlockingSaver

        return BlockingSaver(folder, training, self.every, self.keep)


class DCPAsync(DCP):
    """
    The same files, written in the background: training waits only for the copy to host memory and for an earlier save.

    The copy keeps its place in host memory: every rank takes as much of it as its shards.
    """

    def saver(self, folder: Path, training: Training) -> Saver:
        from meshrunner.recipes.checkpoint.save import AsyncSaver

        return AsyncSaver(folder, training, self.every, self.keep)
