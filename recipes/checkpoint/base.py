"""The `checkpoint` group, and the interface between its options and a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from meshrunner.recipes.option import Affects, Option

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn


class Consumed(NamedTuple):
    """The data consumed by all steps so far."""

    sequences: int
    tokens: int


class Training(NamedTuple):
    """The state to save, and what a checkpoint records about its run."""

    config: dict[str, Any]
    steps: int
    seed: int
    model: nn.Module
    """The model that `Parallelism.apply` returned."""
    optimizer: torch.optim.Optimizer
    parameters: int
    """Number of parameters of the full model."""
    global_batch: int


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
        "dcp": "meshrunner.recipes.checkpoint.dcp:DCP",
        "dcp_async": "meshrunner.recipes.checkpoint.dcp:DCPAsync",
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
