"""Where in a training step something happens: which step, which part of it, which block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from meshrunner.recipes.model.network import Network

START = "start"
"""Everything before the first step: the model is built, sharded and initialised."""
END = "end of backward"
"""Below the first block: the gradient of the embedding, and what layouts do when all gradients are there."""
PARTS = (START, "forward", "loss", "backward", END, "update", "optimizer")
"""In the order of a step. update: gradient norm, clipping and whatever else follows backward."""


class Phase(NamedTuple):
    """A part of a step; within forward and backward a block's own share of it."""

    step: int
    """From 0; -1 at the start."""
    part: str
    """One of PARTS."""
    block: int | None = None
    """Index in the network's blocks; None before the first and after the last."""

    def __str__(self) -> str:
        return self.part if self.block is None else f"{self.part} of block {self.block}"


class Phases:
    """
    Follows a network's step through global hooks of modules, autograd and optimizers: the model needs no edit, and may be
    wrapped.

    Compiled code would trace the hooks: they are for models that run eagerly.
    """

    def __init__(self, part: str = "forward") -> None:
        """part: that it begins in."""
        self.step = -1
        self._part = part
        self._block: int | None = None
        self._blocks: dict[int, int] = {}
        self._network: Network | None = None
        self._loss: Callable[..., Any] | None = None
        self._handles: list[RemovableHandle] = []

    @property
    def now(self) -> Phase:
        """The present phase."""
        if self._part in ("backward", END) and torch._C._current_graph_task_id() == -1:  # backward has ended
            self._part, self._block = "update", None
        return Phase(self.step, self._part, self._block)

    def begin_step(self) -> None:
        """A new optimizer step."""
        self.step += 1
        self._part, self._block = "forward", None

    def __enter__(self) -> Phases:
        self._handles = [
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward),
            register_optimizer_step_pre_hook(lambda *_: self._enter("optimizer")),
            register_optimizer_step_post_hook(lambda *_: self._enter("update")),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._network is not None and self._loss is not None:
            self._network.loss = self._loss
        self._network = self._loss = None

    def _enter(self, part: str, block: int | None = None) -> None:
        self._part, self._block = part, block

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # recomputed: it is part of backward
            return
        if isinstance(module, Network):
            self._follow(module)
            self._enter("forward")
        elif (block := self._blocks.get(id(module))) is not None:
            self._enter("forward", block)

    def _follow(self, network: Network) -> None:
        if self._network is not network:
            self._network, self._loss = network, network.loss
            network.loss = self._timed(network.loss)
            # By identity: other wrappers may lie around a block, which have other names.
            self._blocks = {id(network.get_submodule(name)): i for i, name in enumerate(network.block_names())}

    def _timed(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        def followed(*args: Any) -> Any:
            before, self._part = self._part, "loss"
            try:
                return loss(*args)
            finally:
                self._part = before

        return followed

    def _after_forward(self, module: nn.Module, _: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        if isinstance(module, Network):
            self._begins_backward(output, "backward", None)
        elif (block := self._blocks.get(id(module))) is not None:
            self._begins_backward(output, "backward", block)
            self._enter("forward")
        elif isinstance(module, nn.Embedding):
            self._begins_backward(output, END, None)

    def _begins_backward(self, output: Any, part: str, block: int | None) -> None:
        """The gradient of an output is where backward of what made it begins."""
        first = next(
            (each for each in (output if isinstance(output, tuple) else (output,)) if isinstance(each, Tensor)), None
        )
        if first is not None and first.requires_grad:
            first.register_hook(lambda _: self._enter(part, block))  # type: ignore[no-untyped-call]
