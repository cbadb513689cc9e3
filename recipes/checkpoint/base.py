"""The base class of the `checkpoint` options, what they need from a run, and `none`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from meshrunner.recipes.option import Option

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn


class Consumed(NamedTuple):
    """How much data all steps so far have trained on."""

    sequences: int
    tokens: int


class Training(NamedTuple):
    """What is saved, and what a checkpoint's record says about it."""

    config: dict[str, Any]
    """The checked configuration."""
    steps: int
    seed: int
    model: nn.Module
    """The network as the parallelism has wrapped it."""
    optimizer: torch.optim.Optimizer
    parameters: int
    """Number of parameters of the whole model."""
    global_batch: int


class Saver(Protocol):
    """Saves one run. Every rank calls it, in the same order on each: saving is a collective operation."""

    def due(self, step: int) -> bool:
        """Whether a checkpoint is wanted after this step. Does not wait; raises NotSaved when an earlier save has failed."""

    def save(self, step: int, consumed: Consumed) -> None:
        """Save what there is after `step`; raises NotSaved."""

    def close(self) -> None:
        """Wait until everything is on disk; raises NotSaved."""


class Checkpoint(Option):
    """Whether a run is saved. A run directory that holds checkpoints continues from the newest under every option."""

    kinds: ClassVar[dict[str, str]] = {
        "none": "meshrunner.recipes.checkpoint.base:NoCheckpoint",
        "dcp": "meshrunner.recipes.checkpoint.dcp:DCP",
        "dcp_async": "meshrunner.recipes.checkpoint.dcp:DCPAsync",
    }

    load: str | None
    """A run directory (its newest good checkpoint counts) or one checkpoint to continue from, whatever layout wrote it;
    checkpoints in the run's own directory go first."""

    def saver(self, folder: Path, training: Training) -> Saver | None:
        """What saves a run into its `checkpoints` folder; None when nothing is to be saved."""
        return None


class NoCheckpoint(Checkpoint):
    """Nothing is saved; what lies in the run directory or in `load` is continued from all the same."""
