"""Checkpoints through torch.distributed.checkpoint: each rank writes its shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from meshrunner.recipes.checkpoint.base import Checkpoint
from meshrunner.recipes.option import Count, whole

if TYPE_CHECKING:
    from pathlib import Path

    from meshrunner.recipes.checkpoint.base import Saver, Training


class DCP(Checkpoint):
    """
    Training waits until all is on disk.

    Sharded, and independent of the layout: written under any, loaded under any other, bit for bit.
    """

    every: Count
    """Steps between two checkpoints; the last step is saved, too."""
    keep: Annotated[int | None, whole(None)]
    """Newest checkpoints that are kept; null: all."""

    def saver(self, folder: Path, training: Training) -> Saver:
        from meshrunner.recipes.checkpoint.save import Blocking

        return Blocking(folder, training, self.every, self.keep)


class DCPAsync(DCP):
    """
    The same files, written while training goes on: a step waits only until its tensors are copied to host memory.

    A save that is still being written when the next is due is waited for.
    """

    def saver(self, folder: Path, training: Training) -> Saver:
        from meshrunner.recipes.checkpoint.save import Background

        return Background(folder, training, self.every, self.keep)
