"""
What torch.compile would do to memory and time, without generating code: dynamo, AOT autograd, inductor's decompositions and
partitioner as they are. Their graphs are then interpreted on meta, and what inductor would fuse is neither memory nor operator.
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
from meshrunner.runner.predict.meta.compile.interpreter import Interpreter, made_on
from meshrunner.runner.predict.meta.replacements import Replacements
from meshrunner.runner.predict.record.recorder import Recorder

CPU, META = torch.device("cpu"), torch.device("meta")


def installed(torch_own: Replacements, recorder: Recorder) -> None:
    """Have torch.compile end in graphs that are interpreted, until the replacements end."""
    torch_own.callback(torch._dynamo.reset)  # its code belongs to this rehearsal
    # Options of the recipe set them for the whole process.
    torch_own.enter_context(torch._dynamo.config.patch(capture_scalar_outputs=False))
    torch_own.enter_context(torch._inductor.config.patch(allow_buffer_reuse=True))
    torch_own.enter_context(torch._functorch.config.patch(activation_memory_budget=1.0, unlift_effect_tokens=True))
    torch_own.enter_context(_unseen_while_compiling(recorder))
    backends: dict[str, _Backend | str] = {
        "inductor": _Backend(recorder, partitions=True, fuses=True),
        "aot_eager": _Backend(recorder, partitions=False, fuses=False),
        "aot_eager_decomp_partition": _Backend(recorder, partitions=True, fuses=False),
        "eager": "eager",
    }
    compile_before = torch.compile

    def compiled(function: Callable[..., Any], *, backend: str, mode: str | None = None, **arguments: Any) -> Any:
        if backend not in backends:
            raise ConfigError(
                f"plan: what compile.backend={backend} does to memory is not known; use inductor or aot_eager"
            )
        own = backends[backend]
        found: Callable[..., Any] = compile_before(function, backend=own, **arguments)
        return _traced_under_autocast(found)

    torch_own.replace(torch, "compile", compiled)


@contextmanager
def _unseen_while_compiling(recorder: Recorder) -> Iterator[None]:
    """Fake tensors of the compiler have no memory on the device."""

    def begins(_: Any) -> None:
        recorder.paused += 1

    def ends(_: Any) -> None:
        recorder.paused -= 1

    callback_handler.register_start_callback(begins)
    callback_handler.register_end_callback(ends)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begins)
        callback_handler.remove_end_callback(ends)


def _traced_under_autocast(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """
    dynamo traces the mode of functions that autocast is on meta, so its graph has the casts. Where the code turns autocast off
    the mode sees by that of the CPU, which does nothing to tensors on meta.
    """
    cpu_autocast = torch.amp.autocast_mode.autocast

    def called(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("meta"):
            return compiled(*args, **kwargs)
        with cpu_autocast("cpu", torch.get_autocast_dtype("meta")):
            return compiled(*args, **kwargs)

    return called


class _Backend:
    """A backend of torch.compile. dynamo compares them: one for all blocks has equal blocks compiled once."""

    def __init__(self, recorder: Recorder, *, partitions: bool, fuses: bool) -> None:
        """
        Args:
            partitions: whether inductor's decompositions and its partitioner, which chooses what is saved, are used.
            fuses: whether kernels are fused.
        """
        self.recorder, self.partitions, self.fuses = recorder, partitions, fuses
        self.__name__ = "rehearsed"

    def __call__(self, graph: fx.GraphModule, inputs: list[Any], **_: Any) -> Callable[..., Any]:
        for module in graph.modules():
            if isinstance(module, fx.GraphModule):
                made_on(CPU, module)
        # On meta, autograd loses the gradient of some operators, such as cross entropy, without a sign.
        fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        inductor = partial(min_cut_rematerialization_partition, compiler="inductor")
        with tracing(TracingContext(fake)), torch.amp.autocast_mode.autocast("cpu", enabled=False):
            found: Callable[..., Any] = aot_module_simplified(
                graph,
                [_on_cpu(each, fake) for each in inputs],
                fw_compiler=partial(self._interpreted, forward=True),
                bw_compiler=partial(self._interpreted, forward=False),
                inference_compiler=partial(self._interpreted, forward=False),
                decompositions=select_decomp_table() if self.partitions else {},
                partition_fn=inductor if self.partitions else default_partition,
                keep_inference_input_mutations=self.fuses,
            )
        return found

    def _interpreted(self, graph: fx.GraphModule, _: Any, *, forward: bool) -> Callable[[list[Any]], Any]:
        made_on(META, graph)
        memory = memory_of(graph.graph) if self.fuses else None
        interpreter = Interpreter(graph, memory, self.recorder)

        def run(args: list[Any]) -> Any:
            try:
                if not forward:
                    return interpreter.boxed_run(args)
                with self.recorder.for_backward():
                    return interpreter.boxed_run(args)
            finally:
                interpreter.env.clear()

        run._boxed_call = True  # type: ignore[attr-defined]  # it may free its arguments
        return run


def _on_cpu(value: Any, fake: FakeTensorMode) -> Any:
    """A fake tensor on the CPU in place of one on meta, from the inside out."""
    if not isinstance(value, Tensor):
        return value
    if is_traceable_wrapper_subclass(value):
        inside: Tensor = transform_subclass(value, lambda _, part: _on_cpu(part, fake))
        return inside.requires_grad_(value.requires_grad)
    with fake, torch.no_grad():
        found = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return found.requires_grad_(value.requires_grad)
