"""
A backend of torch.compile that generates no code, to trace what compiled code does to memory and time.

dynamo, AOT autograd, inductor's decompositions and its partitioner run as usual. The resulting graphs are interpreted on meta,
where only the results of fused kernels get memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, fx
from torch._dynamo.callback import callback_handler
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.predict.meta.compile.fusion import memory_of
from meshrunner.runner.predict.meta.compile.interpreter import Interpreter, move_to
from meshrunner.runner.predict.meta.replacements import Replacements
from meshrunner.runner.predict.record.recorder import Recorder

CPU, META = torch.device("cpu"), torch.device("meta")


def trace_compiled_code(in_torch: Replacements, recorder: Recorder) -> None:
    """Have torch.compile interpret its graphs until the replacements end."""
    in_torch.callback(torch._dynamo.reset)  # its cached code belongs to this trace
    # Options of the recipe set these for the whole process.
    in_torch.enter_context(torch._dynamo.config.patch(capture_scalar_outputs=False))
    in_torch.enter_context(torch._inductor.config.patch(allow_buffer_reuse=True))
    in_torch.enter_context(torch._functorch.config.patch(activation_memory_budget=1.0, unlift_effect_tokens=True))
    in_torch.enter_context(_unrecorded_compilation(recorder))
    backends: dict[str, _Backend | str] = {
        "inductor": _Backend(recorder, partitions=True, fuses=True),
        "aot_eager": _Backend(recorder, partitions=False, fuses=False),
        "aot_eager_decomp_partition": _Backend(recorder, partitions=True, fuses=False),
        "eager": "eager",
    }
    torch_compile = torch.compile

    def traced_compile(function: Callable[..., Any], *, backend: str, mode: str | None = None, **arguments: Any) -> Any:
        if backend not in backends:
            raise ConfigError(
                f"plan: cannot predict the memory of compile.backend={backend}; use inductor or aot_eager"
            )
        compiled: Callable[..., Any] = torch_compile(function, backend=backends[backend], **arguments)
        return _traced_under_autocast(compiled)

    in_torch.replace(torch, "compile", traced_compile)


@contextmanager
def _unrecorded_compilation(recorder: Recorder) -> Iterator[None]:
    """Record nothing while code is compiled: the compiler's fake tensors have no memory on the device."""

    def begin(_: Any) -> None:
        recorder.paused += 1

    def end(_: Any) -> None:
        recorder.paused -= 1

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begin)
        callback_handler.remove_end_callback(end)


def _traced_under_autocast(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """
    Turn the CPU's autocast on wherever autocast on meta is.

    dynamo traces the function mode that does the casts, so they are part of its graph. Code that turns autocast off inside the
    graph turns off that of the CPU, by which the mode knows. The CPU's autocast itself does nothing to tensors on meta.
    """
    cpu_autocast = torch.amp.autocast_mode.autocast

    def called(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("meta"):
            return compiled(*args, **kwargs)
        with cpu_autocast("cpu", torch.get_autocast_dtype("meta")):
            return compiled(*args, **kwargs)

    return called


class _Backend:
    """A backend of torch.compile. dynamo compares backends: with one for all blocks it compiles equal blocks once."""

    def __init__(self, recorder: Recorder, *, partitions: bool, fuses: bool) -> None:
        """
        Args:
            partitions: whether to use inductor's decompositions and its partitioner, which chooses the saved tensors.
            fuses: whether kernels are fused.
        """
        self.recorder, self.partitions, self.fuses = recorder, partitions, fuses
        self.__name__ = "traced"

    def __call__(self, graph: fx.GraphModule, inputs: list[Any], **_: Any) -> Callable[..., Any]:
        for module in graph.modules():
            if isinstance(module, fx.GraphModule):
                move_to(CPU, module)
        # On meta, autograd would silently lose the gradient of some operators, such as cross entropy.
        fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        inductor = partial(min_cut_rematerialization_partition, compiler="inductor")
        with tracing(TracingContext(fake)), torch.amp.autocast_mode.autocast("cpu", enabled=False):
            compiled: Callable[..., Any] = aot_module_simplified(
                graph,
                [_on_cpu(each, fake) for each in inputs],
                fw_compiler=partial(self._interpreted, forward=True),
                bw_compiler=partial(self._interpreted, forward=False),
                inference_compiler=partial(self._interpreted, forward=False),
                decompositions=select_decomp_table() if self.partitions else {},
                partition_fn=inductor if self.partitions else default_partition,
                keep_inference_input_mutations=self.fuses,
            )
        return compiled

    def _interpreted(self, graph: fx.GraphModule, _: Any, *, forward: bool) -> Callable[[list[Any]], Any]:
        move_to(META, graph)
        interpreter = Interpreter(graph, memory_of(graph.graph) if self.fuses else None, self.recorder)

        def run(args: list[Any]) -> Any:
            try:
                if not forward:
                    return interpreter.boxed_run(args)
                with self.recorder.saving_for_backward():
                    return interpreter.boxed_run(args)
            finally:
                interpreter.env.clear()

        run._boxed_call = True  # type: ignore[attr-defined]  # it may free its arguments
        return run


def _on_cpu(value: Any, fake: FakeTensorMode) -> Any:
    """Return a fake tensor on the CPU with the shape of one on meta, or any other value unchanged."""
    if not isinstance(value, Tensor):
        return value
    if is_traceable_wrapper_subclass(value):
        wrapped: Tensor = transform_subclass(value, lambda _, part: _on_cpu(part, fake))
        return wrapped.requires_grad_(value.requires_grad)
    with fake, torch.no_grad():
        plain = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return plain.requires_grad_(value.requires_grad)
