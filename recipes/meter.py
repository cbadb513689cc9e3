"""The interface through which a recipe (the training code) reports its progress. `runner.measure.meter` implements it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import Tensor

Phase = Literal[
    "starting the workers",
    "building the model",
    "loading the checkpoint",
    "opening the data",
    "measuring the peak FLOP/s of this CPU",
    "the first step",
    "compiling during the first step",
    "saving a checkpoint",
    "computing the held-out loss",
    "",
]
"""Name of a slow phase of a run, as shown to the user; "" during ordinary steps."""
PHASES: tuple[Phase, ...] = get_args(Phase)
EVALUATING: Phase = "computing the held-out loss"


class Meter(Protocol):
    """The reporting interface. All ranks must call all methods in the same order, because reading metrics is a collective."""

    def doing(self, phase: Phase) -> None:
        """Report the start of a phase that may take a long time. Not a collective."""

    def started(self, *, device: torch.device, params: int, describe_data: Callable[[], dict[str, Any]]) -> None:
        """Report that the first step begins. params: number of parameters of the full model."""

    def resumed(self, step: int, tokens: int) -> None:
        """Report that this run was resumed: `step` steps with `tokens` tokens are already done. Called before `started`."""

    def waiting_for_data(self) -> AbstractContextManager[None]:
        """Return a context manager that measures the wait for the next batch."""

    def capturing(self) -> AbstractContextManager[None]:
        """Return a context manager that measures memory peaks while a step is captured as a CUDA graph. The peaks are valid for
        all later steps, because later steps replay the graph. All ranks capture the same step."""

    def saving(self) -> AbstractContextManager[None]:
        """Return a context manager for saving a checkpoint. Entering the context writes pending metrics to events.jsonl."""

    def evaluate(self, step: int, loss: Callable[[], Tensor], tokens: int) -> bool:
        """Record the held-out loss after a step (0: before the first step). Other metrics exclude the evaluation's time and
        memory. Return whether the run ends because the held-out loss no longer falls (eval.stop_after). `loss` returns a 0-d
        tensor. The mean of this tensor over all ranks is the held-out loss of `tokens` tokens."""

    def step_done(
        self, step: int, *, loss: Tensor, grad_norm: Tensor, lr: float, tokens: int, observed: Mapping[str, Tensor]
    ) -> None:
        """Report that an optimizer step, counted from 1, was launched. On an accelerator, the step may still be running. A
        call may also read the metrics of all steps since the last read. It then raises FloatingPointError if a loss or gradient
        norm is not finite.

        All tensors are 0-d and on the device. loss: this rank's mean token loss; grad_norm: global gradient norm before clipping;
        tokens: tokens of all ranks; observed: further metrics, keyed by name as in events.jsonl; every step has the same keys.
        """
