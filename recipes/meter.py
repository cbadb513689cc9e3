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
"""Work in progress between steps, as shown to the user; "" during steps."""
PHASES: tuple[Phase, ...] = get_args(Phase)


class Meter(Protocol):
    """The reporting interface. Reading metrics is a collective, so every rank must call these methods in the same order."""

    def doing(self, phase: Phase) -> None:
        """Report that a possibly long phase begins. Not a collective."""

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
        """Report that the first step is about to begin. Counts are of the full model. Each token uses only `active_params`."""

    def resumed(self, step: int, tokens: int) -> None:
        """Report that the run continues after `step`, having consumed `tokens`. Called before `started`."""

    def waiting_for_data(self) -> AbstractContextManager[None]:
        """Return a context manager around the wait for the next batch."""

    def saving(self) -> AbstractContextManager[None]:
        """Return a context manager around work between two steps. On entry, the meter records every earlier step."""

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

        Raises FloatingPointError if a loss or gradient norm since the last reading of metrics is not finite.

        Tensors are 0-d and on the device: this rank's mean token loss and the global gradient norm before clipping. `observed`
        has further figures by their keys in events.jsonl, with the same keys at every step. `tokens` counts all ranks' tokens.
        """
