"""The `compile` group: what torch.compile is given. Shapes are static, so every shape is compiled by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.option import Option, did_you_mean

if TYPE_CHECKING:
    from torch import nn

BACKENDS = ("inductor", "aot_eager", "eager")
"""Backends of every torch: for others torch is imported and asked."""
Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


class Compile(Option):
    """What is compiled."""

    kinds: ClassVar[dict[str, str]] = {
        "eager": "meshrunner.recipes.compile:Eager",
        "per_block": "meshrunner.recipes.compile:PerBlock",
        "whole_model": "meshrunner.recipes.compile:WholeModel",
    }

    compiles: ClassVar[bool] = False

    @property
    def partitions(self) -> bool:
        """Whether the compiler decides, block by block, what forward saves for backward."""
        return False

    def problems(self) -> list[str]:
        """What this torch does not know, a sentence each."""
        return []

    def configure(self) -> None:
        """Set what is global to a process. Called by every worker before anything is compiled."""

    def block(self, block: nn.Module, *, units_inside: bool) -> None:
        """
        Compile a block in place.

        Args:
            units_inside: data parallelism gathers and frees parts of it by themselves, which breaks its graph.
        """

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of tensors, such as the cross entropy, compiled or as it is."""
        return function

    def model(self, model: nn.Module, *, units_inside: bool) -> None:
        """Compile the whole network in place, before data parallelism wraps it."""


class Eager(Compile):
    """Nothing: operators run one by one."""


class Compiling(Compile):
    """Base of the options that compile."""

    compiles: ClassVar[bool] = True

    backend: str
    """A backend that torch knows: inductor, aot_eager (graphs without code generation), ..."""
    mode: Mode | None
    """inductor's trade between compile time and speed; null: its default."""
    fullgraph: bool | Literal["auto"]
    """true: a graph break is an error; auto: true unless communication of data parallelism lies inside."""
    allow_buffer_reuse: bool
    """Whether inductor puts results where tensors lay that are not needed any more: less memory, more dependencies."""

    @model_validator(mode="after")
    def _mode_is_inductors(self) -> Compiling:
        if self.mode is not None and self.backend != "inductor":
            raise PydanticCustomError(
                "mode",
                "mode '{mode}' is inductor's, but backend is '{backend}'",
                {"mode": self.mode, "backend": self.backend},
            )
        return self

    @property
    def partitions(self) -> bool:
        return self.backend not in ("eager", "aot_eager")

    def problems(self) -> list[str]:
        if self.backend in BACKENDS:
            return []
        import torch

        if self.backend in torch.compiler.list_backends(exclude_tags=()):
            return []
        known = torch.compiler.list_backends()  # without those for debugging
        hint = did_you_mean(self.backend, known)
        return [f"compile.backend: torch has no backend '{self.backend}'.{hint} Known: {', '.join(known)}"]

    def configure(self) -> None:
        import threading

        import torch._inductor.config
        from tqdm import tqdm

        # torch.fx draws with tqdm, whose own lock is a semaphore of the system that nobody would clean up.
        tqdm.set_lock(threading.RLock())
        torch._inductor.config.allow_buffer_reuse = self.allow_buffer_reuse

    def _arguments(self, units_inside: bool) -> dict[str, Any]:
        fullgraph = not units_inside if self.fullgraph == "auto" else self.fullgraph
        return {"backend": self.backend, "mode": self.mode, "fullgraph": fullgraph, "dynamic": False}


class PerBlock(Compiling):
    """Every block, and the loss. Blocks of one class share the compiled code."""

    def block(self, block: nn.Module, *, units_inside: bool) -> None:
        block.compile(**self._arguments(units_inside))

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        compiled: Callable[..., Any] = torch.compile(function, **self._arguments(units_inside=False))
        return compiled


class WholeModel(Compiling):
    """One graph, or as few as communication allows."""

    def model(self, model: nn.Module, *, units_inside: bool) -> None:
        model.compile(**self._arguments(units_inside))
