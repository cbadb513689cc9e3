"""Checkpoints with torch.distributed.checkpoint: each rank writes its shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from meshrunner.recipes.checkpoint.base import Checkpoint
from meshrunner.recipes.option import Affects, Count, whole

if TYPE_CHECKING:
    from pathlib import Path

    from meshrunner.recipes.checkpoint.base import Saver, Training


class DCP(Checkpoint):
    """Sharded checkpoints that load bit for bit under any layout. Training waits until they are on disk."""

    in_background: ClassVar[bool] = False

    every: Count
    """Steps between checkpoints. The last step is always saved."""
    keep: Annotated[int | None, whole(None), Affects.FILES]
    """Number of newest checkpoints to keep; null: all of them."""

    def saver(self, folder: Path, training: Training) -> Saver:
        from meshrunner.recipes.checkpoint.save import DCPSaver

        return DCPSaver(folder, training, self.every, self.keep, in_background=self.in_background)


class DCPAsync(DCP):
    """
    The same files, written in the background. Training waits only for the copy to host memory and for an earlier save.

    The copy's memory is allocated once: on every rank, as much host memory as its shards.
    """

    in_background: ClassVar[bool] = True
