"""Checkpoints that are written while training goes on: a step waits only until its tensors are copied to host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipes.checkpoint.dcp import DCP

if TYPE_CHECKING:
    from pathlib import Path

    from recipes.checkpoint.base import Saver, Training


class DCPAsync(DCP):
    """The same files. A save that is still being written when the next is due is waited for."""

    def saver(self, folder: Path, training: Training) -> Saver:
        from recipes.checkpoint.save import Background

        return Background(folder, training, self.every, self.keep)
