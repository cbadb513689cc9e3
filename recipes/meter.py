"""The interface through which a recipe reports its progress. The runner's meter implements it."""

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
"""Work that a run does outside of steps, as shown to the user; "" during steps."""
PHASES: tuple[Phase, ...] = get_args(Phase)


class Meter(Protocol):
    """The reporting interface. Reading metrics is a collective, so every rank must call these methods in the same order."""

    def doing(self, phase: Phase) -> None:
        """Report the start of a phase that may take long. Not a collective."""

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
        """Report that the first step begins. Counts are for the full model. active_params: parameters that a token uses."""

    def resumed(self, step: int, tokens: int) -> None:
        """Report that the run continues after `step`, having consumed `tokens`. Called before `started`."""

    def waiting_for_data(self) -> AbstractContextManager[None]:
        """Return a context manager around the wait for the next batch."""

    def saving(self) -> AbstractContextManager[None]:
        """Return a context manager around a checkpoint save. On entry, the meter records all steps that are done."""

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
        Report that an optimizer step, counted from 1, was launched. On an accelerator, the step may still be running.

        A call that reads metrics raises FloatingPointError if a loss or gradient norm since the previous read is not finite.

        All tensors are 0-d and on the device. loss: this rank's mean token loss; grad_norm: global gradient norm before clipping;
        tokens: tokens of all ranks; observed: further figures, by key in events.jsonl. The keys are the same at every step.
        """
