"""What a recipe reports to. The runner's meter measures and records; `NullMeter` is for running a recipe without one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Meter(Protocol):
    """Called by every rank, in the same order on each: reading out is a collective operation."""

    def started(
        self, *, device: torch.device, params: int, flops_per_token: int, attention_flops_per_token: int
    ) -> None:
        """The model stands and the first step is about to begin. Counts are of the whole model, not of a shard."""

    def resumed(self, step: int, tokens: int) -> None:
        """The run continues after a step, with so many tokens consumed. Called before `started`."""

    def waiting_for_data(self) -> AbstractContextManager[None]:
        """A context around the wait for the next batch."""

    def saving(self) -> AbstractContextManager[None]:
        """A context around what is done between two steps and belongs to neither. Inside, every step so far has its row."""

    def step_done(self, step: int, *, loss: torch.Tensor, grad_norm: torch.Tensor, lr: float, tokens: int) -> None:
        """
        One optimizer step was issued (on an accelerator it may not have finished).

        Args:
            step: counts from 1.
            loss: this data-parallel rank's token mean over the step's micro batches, 0-d, on the device.
            grad_norm: global gradient norm before clipping, 0-d, the same on every rank.
            lr: the step's learning rate.
            tokens: tokens of the step, over all ranks.

        Raises:
            FloatingPointError: a loss or gradient norm since the last read-out was not finite.
        """


class NullMeter:
    """A meter that measures nothing."""

    def started(
        self, *, device: torch.device, params: int, flops_per_token: int, attention_flops_per_token: int
    ) -> None:
        pass

    def resumed(self, step: int, tokens: int) -> None:
        pass

    def waiting_for_data(self) -> AbstractContextManager[None]:
        return nullcontext()

    def saving(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step_done(self, step: int, *, loss: torch.Tensor, grad_norm: torch.Tensor, lr: float, tokens: int) -> None:
        pass
