"""The `checkpoint` group, and the interface between its options and a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Protocol

from meshrunner.recipes.checkpoint.on_disk import Consumed, Training
from meshrunner.recipes.option import Affects, Count, Option, whole


class Saver(Protocol):
    """The interface that saves the checkpoints of a run. Saving is a collective, so every rank makes the same calls in order."""

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step. Does not block; raises NotSaved if an earlier save failed."""

    def save(self, step: int, consumed: Consumed) -> None:
        """Save the state after `step`; raises NotSaved."""

    def close(self) -> None:
        """Wait until everything is on disk; raises NotSaved."""


class Checkpoint(Option):
    """Whether a run is saved. With every option, a run directory with checkpoints continues from the newest."""

    kinds: ClassVar[dict[str, str]] = {
        "none": "meshrunner.recipes.checkpoint.base:NoCheckpoint",
        "dcp": "meshrunner.recipes.checkpoint.base:DCP",
        "dcp_async": "meshrunner.recipes.checkpoint.base:DCPAsync",
    }

    affects: ClassVar[Affects] = Affects.FIGURES

    saves: ClassVar[bool] = True
    """Whether a run saves checkpoints."""

    load: str | None
    """A run directory, whose newest good checkpoint is used, or a checkpoint to continue from. The run's own take precedence."""

    def saver(self, folder: Path, training: Training) -> Saver | None:
        """Return the saver that writes to a run's `checkpoints` directory; None if nothing is saved."""
        return None


class NoCheckpoint(Checkpoint):
    """No saving. A run still continues from checkpoints in its directory or in `load`."""

    saves: ClassVar[bool] = False


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
