"""Track which phase a training run is in: the step, the part of the step such as backward, and the block of the network."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshrunner.recipes.model.network import Network
from meshrunner.recipes.parallelism.pipeline.part import Part
from meshrunner.runner.ledger.allocations import END, Phase


class Phases:
    """Tracker of a training run's phase. It registers hooks on modules, autograd and optimizers, so that models need no changes.

    The model may be wrapped, for example by DDP. If the whole network is compiled, blocks and the loss have no separate phases,
    because the compiler would trace the hooks.
    """

    def __init__(self, part: str = "forward", *, compiles: bool = False) -> None:
        """Begin in the given `part` of a step. `compiles`: whether any part of the network is compiled."""
        self.step = -1
        self._part = part
        self._block: int | None = None
        self._hooks = ExitStack()
        self.block_ended: Callable[[Any], None] = lambda output: None
        """Callback that receives a block's output when the block's forward ends. It is not called in recomputation."""
        self.network_found: Callable[[Network], None] = lambda network: None
        """Callback that receives the network when its first forward begins."""
        # Without `disable`, the compiler would trace the hooks of a compiled module, although they run outside the compiled code.
        self._hook: Callable[[Any], Any] = torch.compiler.disable if compiles else lambda hook: hook

    @property
    def now(self) -> Phase:
        if self._part in ("backward", END) and not _in_backward():
            self._part, self._block = "update", None
        elif self._part == "update" and _in_backward():  # a pipeline may compute weight gradients after backward
            self._part = "backward"
        return Phase(self.step, self._part, self._block)

    def begin_step(self) -> None:
        self.step += 1
        self._enter("forward")

    def __enter__(self) -> Self:
        def look_for_network(module: nn.Module, _: Any) -> None:
            if not isinstance(module, Network | Part):
                return
            any_module.remove()
            if isinstance(module, Part):
                self._follow_loss(module.network[0])
                for part in module.parts:
                    self._follow_modules(part, part.blocks)
            elif module._compiled_call_impl is None:
                self._follow_loss(module)
                self._follow_modules(module, dict(enumerate(module.block_names())))
            else:
                self.network_found(module)
                self._follow_module(module, None)
            self._enter("forward")

        any_module = register_module_forward_pre_hook(self._hook(look_for_network))
        self._hooks.enter_context(any_module)
        self._hooks.enter_context(register_optimizer_step_pre_hook(lambda *_: self._enter("optimizer")))
        self._hooks.enter_context(register_optimizer_step_post_hook(lambda *_: self._enter("update")))
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _enter(self, part: str, block: int | None = None) -> None:
        self._part, self._block = part, block

    def _follow_loss(self, network: Network) -> None:
        self.network_found(network)
        loss = network.loss

        def followed(*args: Any) -> Any:
            before, self._part = self._part, "loss"
            try:
                return loss(*args)
            finally:
                self._part = before

        network.loss = followed
        self._hooks.callback(setattr, network, "loss", loss)

    def _follow_modules(self, model: nn.Module, blocks: dict[int, str]) -> None:
        """Track the phases of a network or pipeline stage. `blocks` maps each block's number in the whole network to its name."""
        self._follow_module(model, None)
        for number, name in blocks.items():
            self._follow_module(model.get_submodule(name), number)

        def embedded(module: nn.Module, _: Any, output: Any) -> None:
            if not _in_backward():
                self._enter_in_backward(output, END, None)

        for module in model.modules():
            if isinstance(module, nn.Embedding):
                self._hooks.enter_context(module.register_forward_hook(self._hook(embedded), prepend=True))

    def _follow_module(self, module: nn.Module, block: int | None) -> None:

        def before(*_: Any) -> None:
            if not _in_backward():
                self._enter("forward", block)

        def after(module: nn.Module, _: Any, output: Any) -> None:
            if not _in_backward():
                self._enter_in_backward(output, "backward", block)
                if block is not None:
                    self.block_ended(output)
                self._enter("forward")

        # Prepend these hooks, so that they run before the hooks of FSDP.
        self._hooks.enter_context(module.register_forward_pre_hook(self._hook(before), prepend=True))
        self._hooks.enter_context(module.register_forward_hook(self._hook(after), prepend=True))

    def _enter_in_backward(self, output: Any, part: str, block: int | None) -> None:
        """Enter `part` of the step as soon as backward has computed the gradient of `output`, a module's output."""
        outputs = output if isinstance(output, tuple) else (output,)
        first = next((each for each in outputs if isinstance(each, Tensor)), None)
        if first is not None and first.requires_grad:
            first.register_hook(lambda _: self._enter(part, block))  # type: ignore[no-untyped-call]


def _in_backward() -> bool:
    """Return whether autograd is running backward. A forward inside backward is recomputation and counts as backward."""
    return torch._C._current_graph_task_id() != -1
