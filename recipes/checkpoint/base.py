"""Options of the group `checkpoint`, and `Saver`, the interface through which a run saves checkpoints."""

from pathlib import Path
from typing import Annotated, ClassVar, Protocol

from meshrunner.recipes.checkpoint.on_disk import Consumed, Training
from meshrunner.recipes.option import Affects, Count, Option, whole


class Saver(Protocol):
    """The interface for saving a run's checkpoints. Saving is a collective: all ranks make the same calls in the same order."""

    def due(self, step: int) -> bool:
        """Return whether to save a checkpoint after this step. Does not block. Raises NotSaved if an earlier save failed."""

    def save(self, step: int, consumed: Consumed) -> None:
        """Save the state after `step`. Raises NotSaved if this or an earlier save fails."""

    def close(self) -> None:
        """Wait until all checkpoints are on disk. Raises NotSaved if a save fails."""


class Checkpoint(Option):
    """Base class of the options. A run continues from the newest checkpoint in its run directory, even with `checkpoint=none`."""

    kinds: ClassVar[dict[str, str]] = {
        "none": "meshrunner.recipes.checkpoint.base:NoCheckpoint",
        "dcp": "meshrunner.recipes.checkpoint.base:DCP",
        "dcp_async": "meshrunner.recipes.checkpoint.base:DCPAsync",
    }

    affects: ClassVar[Affects] = Affects.FIGURES

    saves: ClassVar[bool] = True
    """Whether a run saves checkpoints."""

    load: str | None
    """Checkpoint or run directory from which the run starts. `load` is ignored if the run already has a usable checkpoint."""

    def saver(self, folder: Path, training: Training) -> Saver | None:
        """Return the saver that writes checkpoints to `folder`, or None if the option saves no checkpoints."""
        return None


class NoCheckpoint(Checkpoint):
    """No checkpoints are saved. A run still continues from a checkpoint in its run directory or from `load`."""

    saves: ClassVar[bool] = False


class DCP(Checkpoint):
    """Sharded checkpoints that load bit for bit with any parallelism and number of ranks. Training waits for each save."""

    in_background: ClassVar[bool] = False

    every: Count
    """Steps between checkpoints. The last step is always saved."""
    keep: Annotated[int | None, whole(None), Affects.FILES]
    """Number of newest checkpoints to keep; null keeps all checkpoints."""

    def saver(self, folder: Path, training: Training) -> Saver:
        from meshrunner.recipes.checkpoint.save import DCPSaver

        return DCPSaver(folder, training, self.every, self.keep, in_background=self.in_background)


class DCPAsync(DCP):
    """Checkpoints with the same files as `dcp`, written in the background. At each save, training waits only until the previous
    save has ended and the rank's shards are in host memory. The first save allocates the host memory; later saves reuse it."""

    in_background: ClassVar[bool] = True
