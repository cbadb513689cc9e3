"""Checkpoints through torch.distributed.checkpoint: each rank writes its shards, training waits until all is on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from recipes.checkpoint.base import Checkpoint
from recipes.option import Count, whole

if TYPE_CHECKING:
    from pathlib import Path

    from recipes.checkpoint.base import Saver, Training


class DCP(Checkpoint):
    """Sharded, and independent of the layout: written under any, loaded under any other, bit for bit."""

    every: Count
    """Steps between two checkpoints; the last step is saved, too."""
    keep: Annotated[int | None, whole(None)]
    """Newest checkpoints that are kept; null: all."""

    def saver(self, folder: Path, training: Training) -> Saver:
        from recipes.checkpoint.save import Blocking

        return Blocking(folder, training, self.every, self.keep)
