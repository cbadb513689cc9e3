"""Capture a whole training step as one CUDA graph. The GPU then replays the step's kernels without waiting for the host.

A replay uses the same memory addresses and the same Python numbers as the captured step. The batch and the learning rate change
between steps, so they are tensors at fixed addresses, which are filled before each replay.
"""

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph as autograd_graph
from torch.optim import Optimizer

from meshrunner.recipes.compile.base import WARM_UP
from meshrunner.recipes.data.loader import Batches
from meshrunner.recipes.errors import ConfigError

Metrics = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Loss, gradient norm and further metrics of a step, as 0-d tensors."""


class CapturedStep:
    """A training step that is captured after WARM_UP calls and replayed until a batch's shape or an optimizer setting changes."""

    def __init__(
        self,
        step: Callable[[Batches, Tensor], Metrics],
        optimizer: Optimizer,
        device: torch.device,
        capturing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """step: function that trains for one step, given the batch and the learning rate (0-d). capturing: `Meter.capturing`."""
        self._step, self._optimizer, self._capturing = step, optimizer, capturing
        self._lr = torch.zeros((), device=device)
        self._uncaptured: float = WARM_UP
        """Number of steps to take before the capture."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batches: Batches
        self._metrics: Metrics
        self._captured_with: Any

    def __call__(self, batches: Batches, lr: float) -> Metrics:
        """Take a training step. Return metrics that later steps do not overwrite."""
        self._lr.fill_(lr)
        if self._graph is not None and self._captured_with != self._constants(batches):
            warnings.warn(
                "compile.cuda_graph: the batch shape or an optimizer setting changed; later steps run without the graph",
                stacklevel=2,
            )
            self._graph, self._uncaptured = None, math.inf
        if self._uncaptured:
            self._uncaptured -= 1
            return self._step(batches, self._lr)
        if self._graph is None:
            self._graph = self._capture(batches)
        for own, given in zip(self._batches, batches, strict=True):
            torch._foreach_copy_(own, given)
        self._graph.replay()
        loss, grad_norm, observed = self._metrics
        return loss.clone(), grad_norm.clone(), {key: value.clone() for key, value in observed.items()}

    def _capture(self, batches: Batches) -> torch.cuda.CUDAGraph:
        """Capture a step without executing it. Raise ConfigError if the step contains work that cannot be captured."""
        if hasattr(autograd_graph, "set_override_stale_capture_stream"):
            autograd_graph.set_override_stale_capture_stream(True)
        else:
            warnings.warn(
                f"compile.cuda_graph: torch {torch.__version__} may fail to capture gradients; if so, use torch 2.13 or later",
                stacklevel=3,
            )
        for group in self._optimizer.param_groups:
            group["capturable"] = True
        self._batches = [(tokens.clone(), targets.clone()) for tokens, targets in batches]
        self._captured_with = self._constants(batches)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as the loader's, may call CUDA during the capture.
        captured = torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local")
        try:
            with self._capturing(), captured:
                self._metrics = self._step(self._batches, self._lr)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(
                f"compile.cuda_graph: cannot capture the step; use compile.cuda_graph=false. {error}"
            ) from error
        return graph

    def _constants(self, batches: Batches) -> Any:
        """Return the values that a graph keeps constant: batch shapes, and the optimizer's settings except the learning rate."""
        settings = [
            {key: value for key, value in group.items() if key not in ("params", "lr")}
            for group in self._optimizer.param_groups
        ]
        return [[each.shape for each in pair] for pair in batches], settings
