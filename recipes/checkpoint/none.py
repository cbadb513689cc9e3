"""No checkpoints are written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipes.checkpoint.base import Checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from recipes.checkpoint.base import Training


class NoCheckpoint(Checkpoint):
    """Nothing is saved; what lies in the run directory or in `load` is continued from all the same."""

    def saver(self, folder: Path, training: Training) -> None:
        return None
