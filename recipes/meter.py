"""The interface through which a recipe reports its progress. The runner's meter measures and records it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

Phase = Literal[
    "starting the workers",
    "building the model",
    "loading the checkpoint",
    "opening the data",
    "measuring the peak of this CPU",
    "the first step",
    "compiling, in the first step",
    "saving a checkpoint",
    "",
]
"""What takes place outside of steps, as it is shown to a person who waits; empty while steps follow each other."""
PHASES: tuple[Phase, ...] = get_args(Phase)


class Meter(Protocol):
    """Every rank calls these methods in the same order: a read-out is a collective."""

    def doing(self, phase: Phase) -> None:
        """Something begins that may take long. Not a collective."""

    def started(
        self,
        *,
        device: torch.device,
        params: int,
        active_params: int,
        flops_per_token: int,
        attention_flops_per_token: int,
        describe_data: Callable[[], dict[str, Any]],
    ) -> None:
        """
        The model is ready and the first step is about to begin. Counts are for the full model, not a shard.

        Args:
            active_params: those that one token passes through; all, where there are no experts.
            describe_data: `Sequences.describe`; data that is still being read tells more of itself later.
        """

    def resumed(self, step: int, tokens: int) -> None:
        """The run continues after `step`, with `tokens` consumed so far. Called before `started`."""

    def waiting_for_data(self) -> AbstractContextManager[None]:
        """Context manager around the wait for the next batch."""

    def saving(self) -> AbstractContextManager[None]:
        """Context manager around work between two steps that belongs to neither. Inside, every step so far has its row."""

    def step_done(
        self,
        step: int,
        *,
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        lr: float,
        tokens: int,
        observed: Mapping[str, torch.Tensor],
    ) -> None:
        """
        One optimizer step was issued; on an accelerator it may still be running.

        Args:
            step: counts from 1.
            loss: mean token loss of this data-parallel rank over the step's micro batches, 0-d, on the device.
            grad_norm: global gradient norm before clipping, 0-d, the same on every rank.
            lr: learning rate of the step.
            tokens: tokens of the step over all ranks.
            observed: further figures by their keys, 0-d, on the device, the same keys in every step; the mean over ranks is
                recorded.

        Raises:
            FloatingPointError: a loss or gradient norm since the last read-out was not finite.
        """
