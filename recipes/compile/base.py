"""Options of the group `compile`: the parts of the model to compile, and the compiler's arguments. Shapes are always static."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.option import Option, did_you_mean

if TYPE_CHECKING:
    from torch import nn


ASYNC_TP_FUSED = "async_tensor_parallel_fused"
"""Name of the inductor counter for operators that combine a tensor-parallel collective with matmuls."""
WARM_UP = 2
"""Number of steps before the step that is captured as a CUDA graph. The first steps create objects that cannot be created during
a capture: the optimizer's state, communicators and compiled code."""


class Compile(Option):
    """Base class of the options. Each option chooses the parts of the model that torch.compile compiles."""

    kinds: ClassVar[dict[str, str]] = {
        "eager": "meshrunner.recipes.compile.base:Eager",
        "per_block": "meshrunner.recipes.compile.base:PerBlock",
        "whole_model": "meshrunner.recipes.compile.base:WholeModel",
    }

    compiles: ClassVar[bool] = False
    """Whether anything is compiled."""

    cuda_graph: bool = False
    """Whether to capture the third step as a CUDA graph and replay it."""
    async_tensor_parallel: bool = False
    """Whether GPUs overlap matmuls with tensor-parallel communication."""

    @property
    def is_partitioned(self) -> bool:
        """Whether the compiler's partitioner chooses the tensors that forward saves for backward."""
        return False

    @property
    def records_cuda_graphs(self) -> bool:
        """Whether compiled code records CUDA graphs. A replayed graph reads and writes the recorded memory addresses."""
        return False

    @property
    def autotunes(self) -> bool:
        """Whether the compiler chooses kernels by timing them."""
        return False

    def problems(self) -> list[str]:
        """Return a sentence for each setting that the installed torch does not support."""
        return []

    def unsupported(self, device_type: str) -> str | None:
        if self.cuda_graph and device_type != "cuda":
            return "compile.cuda_graph: a CUDA graph needs a GPU; use compile.cuda_graph=false"
        if self.async_tensor_parallel and device_type != "cuda":
            return "compile.async_tensor_parallel: every rank needs a GPU; use compile.async_tensor_parallel=false"
        return None

    def configure(self, *, emulate_casts: bool) -> None:
        """Change torch's process-wide settings. Every worker calls this method before compiling anything. emulate_casts: whether
        fused code rounds intermediate results as eager code does."""

    def compile_block(self, block: nn.Module, *, contains_units: bool) -> None:
        """Compile a block in place. contains_units: whether the block contains FSDP units, which cause graph breaks."""

    def compile_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function, such as the cross entropy. Options that do not compile functions return the function unchanged."""
        return function

    def compile_model(self, model: nn.Module, *, contains_units: bool) -> None:
        """Compile the whole network in place. Data parallelism wraps the network afterwards."""


class Eager(Compile):
    """No compilation: operators run eagerly."""


class TorchCompile(Compile):
    """Base class of the options that call torch.compile."""

    compiles: ClassVar[bool] = True

    backend: str
    """Backend of torch.compile: inductor, aot_eager (graphs without code generation), ..."""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None
    """Inductor's mode, which trades compile time for speed; null: inductor's default."""
    fullgraph: bool | Literal["auto"]
    """Whether a graph break is an error. auto: true, except for modules that contain FSDP units, which cause graph breaks."""
    allow_buffer_reuse: bool
    """Whether inductor stores new results in the memory of dead tensors, to save memory."""

    @model_validator(mode="after")
    def _mode_needs_inductor(self) -> TorchCompile:
        if self.mode is not None and self.backend != "inductor":
            raise PydanticCustomError(
                "mode", f"mode '{self.mode}' needs backend 'inductor', but backend is '{self.backend}'"
            )
        return self

    @property
    def is_partitioned(self) -> bool:
        return self.backend not in ("eager", "aot_eager")

    @property
    def records_cuda_graphs(self) -> bool:
        return self.mode in ("reduce-overhead", "max-autotune")  # according to torch._inductor.list_mode_options

    @property
    def autotunes(self) -> bool:
        return self.mode in ("max-autotune", "max-autotune-no-cudagraphs")

    def problems(self) -> list[str]:
        if self.backend in ("inductor", "aot_eager", "eager"):
            return []  # every version of torch has these backends
        import torch

        if self.backend in torch.compiler.list_backends(exclude_tags=()):
            return []
        known = torch.compiler.list_backends()  # without debugging backends
        hint = did_you_mean(self.backend, known)
        return [f"compile.backend: torch has no backend '{self.backend}'.{hint} Known: {', '.join(known)}"]

    def configure(self, *, emulate_casts: bool) -> None:
        import threading

        import torch._dynamo.config
        import torch._inductor.config
        from tqdm import tqdm

        # torch.fx uses tqdm, whose default lock is a system semaphore that a killed worker would leak.
        tqdm.set_lock(threading.RLock())
        # Ranks exchange a different number of tokens in each step, so the number must not become a constant of the graph.
        torch._dynamo.config.capture_scalar_outputs = True
        torch._inductor.config.allow_buffer_reuse = self.allow_buffer_reuse
        torch._inductor.config.emulate_precision_casts = emulate_casts

    def _arguments(self, contains_units: bool) -> dict[str, Any]:
        fullgraph = not contains_units if self.fullgraph == "auto" else self.fullgraph
        return {"backend": self.backend, "mode": self.mode, "fullgraph": fullgraph, "dynamic": False}


class PerBlock(TorchCompile):
    """Compilation of each block and the loss. Blocks of the same class share the compiled code."""

    def compile_block(self, block: nn.Module, *, contains_units: bool) -> None:
        block.compile(**self._arguments(contains_units))

    def compile_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        compiled: Callable[..., Any] = torch.compile(function, **self._arguments(contains_units=False))
        return compiled


class WholeModel(TorchCompile):
    """Compilation of the whole model into one graph, or into several graphs if communication causes graph breaks."""

    def compile_model(self, model: nn.Module, *, contains_units: bool) -> None:
        model.compile(**self._arguments(contains_units))
