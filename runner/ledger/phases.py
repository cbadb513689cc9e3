"""Positions in training: which step, which part of it, which block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from meshrunner.recipes.model.network import Network

START = "start"
"""Everything before the first step: the model is built, sharded and initialised."""
END = "end of backward"
"""Below the first block: the gradient of the embedding, and work that layouts do once all gradients are there."""
PARTS = (START, "forward", "loss", "backward", END, "update", "optimizer")
"""Parts of a step in order. update: gradient norm, clipping and whatever else follows backward."""


class Phase(NamedTuple):
    """A part of a step, within forward and backward one block's share of it."""

    step: int
    """Counted from 0; -1 at the start."""
    part: str
    """One of PARTS."""
    block: int | None = None
    """Index in the network's blocks; None before the first and after the last."""

    def __str__(self) -> str:
        return self.part if self.block is None else f"{self.part} of block {self.block}"


class Phases:
    """
    Follows a network's step through hooks of modules, autograd and optimizers. The model needs no edit, and may be wrapped.

    In a network compiled as a whole, blocks and loss have no phases of their own: the compiler would trace their hooks.
    """

    def __init__(self, part: str = "forward", *, compiles: bool = False) -> None:
        """
        Args:
            part: the first part.
            compiles: whether any part of the network is compiled.
        """
        self.step = -1
        self._part = part
        self._block: int | None = None
        self._network: Network | None = None
        self._loss: Callable[..., Any] | None = None
        self._handles: list[RemovableHandle] = []
        self.block_ended: Callable[[Any], None] = lambda output: None
        """Called with the output of a block at the end of its forward, but not of its recomputation."""
        # The hooks of a compiled module run outside the compiled code, but the compiler would trace them.
        self._hook: Callable[[Any], Any] = torch.compiler.disable if compiles else lambda hook: hook

    @property
    def now(self) -> Phase:
        """The present phase."""
        if self._part in ("backward", END) and not _in_backward():
            self._part, self._block = "update", None
        return Phase(self.step, self._part, self._block)

    def begin_step(self) -> None:
        """Begin an optimizer step."""
        self.step += 1
        self._enter("forward")

    def __enter__(self) -> Phases:
        self._handles = [
            register_module_forward_pre_hook(self._hook(self._before_any)),
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

    def _before_any(self, module: nn.Module, _: Any) -> None:
        """Look for the network: the hook of every module until it is found."""
        if isinstance(module, Network):
            self._handles.pop(0).remove()
            self._follow(module)
            self._enter("forward")

    def _follow(self, network: Network) -> None:
        self._follow_module(network, None)
        if network._compiled_call_impl is not None:
            return
        self._network, self._loss = network, network.loss
        network.loss = self._followed_loss(network.loss)
        for number, name in enumerate(network.block_names()):
            self._follow_module(network.get_submodule(name), number)
        for module in network.modules():
            if isinstance(module, nn.Embedding):
                self._handles.append(module.register_forward_hook(self._hook(self._embedded), prepend=True))

    def _follow_module(self, module: nn.Module, block: int | None) -> None:
        """Follow a block, or the network if `block` is None."""

        def before(*_: Any) -> None:
            if not _in_backward():
                self._enter("forward", block)

        def after(module: nn.Module, _: Any, output: Any) -> None:
            if not _in_backward():
                self._enter_in_backward(output, "backward", block)
                if block is not None:
                    self.block_ended(output)
                self._enter("forward")

        # Prepended, so that the hooks enclose those of sharding.
        self._handles.append(module.register_forward_pre_hook(self._hook(before), prepend=True))
        self._handles.append(module.register_forward_hook(self._hook(after), prepend=True))

    def _embedded(self, module: nn.Module, _: Any, output: Any) -> None:
        if not _in_backward():
            self._enter_in_backward(output, END, None)

    def _followed_loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        def followed(*args: Any) -> Any:
            before, self._part = self._part, "loss"
            try:
                return loss(*args)
            finally:
                self._part = before

        return followed

    def _enter_in_backward(self, output: Any, part: str, block: int | None) -> None:
        """Enter a part once backward computes the gradient of a module's output."""
        outputs = output if isinstance(output, tuple) else (output,)
        first = next((each for each in outputs if isinstance(each, Tensor)), None)
        if first is not None and first.requires_grad:
            first.register_hook(lambda _: self._enter(part, block))  # type: ignore[no-untyped-call]


def _in_backward() -> bool:
    """Whether autograd is running. A forward that runs then is recomputation, which is part of backward."""
    return torch._C._current_graph_task_id() != -1
