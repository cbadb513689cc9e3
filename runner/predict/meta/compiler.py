"""Traces the memory and time of compiled code. A torch.compile backend runs graphs on meta instead of generating kernels.

dynamo, AOT autograd, and inductor's decompositions and partitioner run as usual. The compiled graphs then run on meta, operator
by operator. Only the final result of a fused kernel gets memory, because a kernel never stores its intermediate results.
"""

from collections.abc import Callable
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
from torch.fx.node import Target, map_aggregate
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.ledger.memory_ledger import tensors_in
from meshrunner.runner.predict.meta.fusion import GraphMemory, memory_of, mutates, nbytes, selects
from meshrunner.runner.predict.meta.replacements import Replacements
from meshrunner.runner.predict.record.recorder import Fusion, Recorder
from meshrunner.runner.predict.record.trace_events import META

CPU = torch.device("cpu")


def trace_compiled_code(in_torch: Replacements, recorder: Recorder) -> None:
    """Make torch.compile run compiled graphs on the meta device, one operator at a time, while the context `in_torch` is open."""
    # The recipe's options change these settings for the whole process, so restore them afterwards.
    in_torch.enter_context(torch._dynamo.config.patch(capture_scalar_outputs=False))
    in_torch.enter_context(torch._inductor.config.patch(allow_buffer_reuse=True))
    in_torch.enter_context(torch._functorch.config.patch(activation_memory_budget=1.0, unlift_effect_tokens=True))
    _pause_while_compiling(in_torch, recorder)
    for backend in BACKENDS.values():
        backend.recorder = recorder
        in_torch.callback(delattr, backend, "recorder")
    torch_compile, cpu_autocast = torch.compile, torch.amp.autocast_mode.autocast

    def traced_compile(function: Callable[..., Any], *, backend: str, mode: str | None = None, **arguments: Any) -> Any:
        if backend not in (*BACKENDS, "eager"):
            raise ConfigError(
                f"plan: cannot predict the memory of compile.backend={backend}; use inductor or aot_eager"
            )
        compiled: Callable[..., Any] = torch_compile(function, backend=BACKENDS.get(backend, backend), **arguments)

        # dynamo traces the casts of the mode `_Autocast` into the graph. If compiled code disables autocast, it disables only
        # CPU autocast, so `_Autocast` checks whether CPU autocast is enabled. CPU autocast itself casts no meta tensors.
        def called(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_autocast_enabled("meta"):
                return compiled(*args, **kwargs)
            with cpu_autocast("cpu", torch.get_autocast_dtype("meta")):
                return compiled(*args, **kwargs)

        return called

    in_torch.replace(torch, "compile", traced_compile)


def _pause_while_compiling(in_torch: Replacements, recorder: Recorder) -> None:
    """Pause recording whenever code is compiled, because the compiler's fake tensors take no memory on the device."""

    def begin(_: Any) -> None:
        recorder.paused += 1

    def end(_: Any) -> None:
        recorder.paused -= 1

    callback_handler.register_start_callback(begin)
    in_torch.callback(callback_handler.remove_start_callback, begin)
    callback_handler.register_end_callback(end)
    in_torch.callback(callback_handler.remove_end_callback, end)


class _Backend:
    """Backend of torch.compile. All blocks use the same backend object, so that dynamo compiles equal blocks only once."""

    recorder: Recorder

    def __init__(self, *, partitions: bool, fuses: bool) -> None:
        self.partitions, self.fuses = partitions, fuses
        """Whether to use inductor's decompositions and partitioner, and whether to fuse kernels."""
        self.__name__ = "traced"

    def __call__(self, graph: fx.GraphModule, inputs: list[Any], **_: Any) -> Callable[..., Any]:
        for module in graph.modules():
            if isinstance(module, fx.GraphModule):
                move_to(CPU, module)
        # Use fake CPU tensors: on meta, autograd would silently lose the gradients of some operators, such as cross entropy.
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
            interpreter.recorder = self.recorder  # a later trace, with its own recorder, may reuse `run`
            self.recorder.track_parameters(args)  # the recorder sees no operators inside fused kernels
            self.recorder.saving = forward
            try:
                return interpreter.boxed_run(args)
            finally:
                self.recorder.saving = False
                interpreter.env.clear()
                interpreter.in_cache.clear()

        run._boxed_call = True  # type: ignore[attr-defined]  # `run` may free its arguments
        return run


BACKENDS = {
    "inductor": _Backend(partitions=True, fuses=True),
    "aot_eager": _Backend(partitions=False, fuses=False),
    "aot_eager_decomp_partition": _Backend(partitions=True, fuses=False),
}


def _on_cpu(value: Any, fake: FakeTensorMode) -> Any:
    """Return a fake CPU tensor with the shape of a meta tensor. Return any other value unchanged."""
    if not isinstance(value, Tensor):
        return value
    if is_traceable_wrapper_subclass(value):
        wrapped: Tensor = transform_subclass(value, lambda _, part: _on_cpu(part, fake))
        return wrapped.requires_grad_(value.requires_grad)
    with fake, torch.no_grad():
        plain = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return plain.requires_grad_(value.requires_grad)


class Interpreter(fx.Interpreter):
    """Interpreter that runs a compiled graph on meta and records its kernels. If `memory` is None, no operators are fused."""

    def __init__(self, graph: fx.GraphModule, memory: GraphMemory | None, recorder: Recorder) -> None:
        super().__init__(graph)
        self.memory, self.recorder = memory, recorder
        self.in_cache: set[fx.Node] = set()
        """Tensors that kernels have used since the last unfused operator. They count as cached: reading them costs nothing."""
        kernels = memory.kernels if memory else {}
        read_until = {node: kernel for kernel, read in kernels.items() for node in filter(_stays, read)}
        # Keep a value until the last kernel that reads it ends. Its last user may be the first operator of that kernel.
        for user, freed in [*self.user_to_last_uses.items()]:
            for node in [each for each in freed if each in read_until and user < read_until[each]]:
                freed.remove(node)
                self.user_to_last_uses.setdefault(read_until[node], []).append(node)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node of the graph. Skip nodes inside fused kernels, and give them the value None."""
        if self.memory is None or n.op != "call_function":
            return super().run_node(n)
        if n in self.memory.unfused:
            self.in_cache.clear()
            return super().run_node(n)
        read, value = self.memory.kernels.get(n), n.meta.get("val")
        if read is None:
            return self._inside(n)
        before = len(self.recorder.allocations)
        with Replacements() as in_recorder:
            in_recorder.replace(self.recorder, "fusion", Fusion.RESULT)
            result = self.map_nodes_to_values(n.args[0], n) if mutates(n) else _like(value)
        target: Any = n.target
        for new in self.recorder.allocations[before:]:
            new.operator = target._schema.name
        size = nbytes(n) + sum(each for node, each in read.items() if node not in self.in_cache)
        self.in_cache.update(read, [n])
        dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else ""
        self.recorder.fused_kernel(f"fused::{n.name}", dtype, size)
        return result

    def _inside(self, n: fx.Node) -> Any:
        """Run a node of a fused kernel, or return None if the node's result is a tensor that is never stored in memory."""
        from_memory = selects(n) and self.env[n.all_input_nodes[0]] is not None
        if not from_memory and any(True for _ in tensors_in((n.meta.get("val"),))):
            return None
        with Replacements() as in_recorder:
            in_recorder.replace(self.recorder, "fusion", Fusion.INSIDE)
            return super().run_node(n)

    def call_function(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a node. A random state that a node saves for recomputation takes 16 bytes of host memory, as on a GPU."""
        if target is torch.ops.higher_order.run_and_save_rng_state:
            operator, *rest = args
            return torch.empty(16, dtype=torch.uint8, device="cpu"), operator(*rest, **kwargs)
        if target is torch.ops.higher_order.run_with_rng_state:
            _, operator, *rest = args
            return operator(*rest, **kwargs)
        return super().call_function(target, args, kwargs)


def _like(value: Any) -> Any:
    """Return tensors on meta with the shapes of fake tensors."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    return type(value)(map(_like, value)) if isinstance(value, list | tuple) else value


def _stays(node: fx.Node) -> bool:
    """Return whether a node is an input of the compiled function or an output's gradient. No kernel may overwrite such a node."""
    return node.op == "placeholder" and node.name.startswith(("primals_", "tangents_"))


def move_to(device: torch.device, graph: fx.GraphModule) -> None:
    """Rewrite a graph so that it creates all its tensors, including constants, on `device`."""

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in graph.graph.nodes:
        node.args, node.kwargs = map_aggregate(node.args, moved), map_aggregate(node.kwargs, moved)
        if node.op == "get_attr" and isinstance(constant := getattr(graph, node.target, None), Tensor):
            setattr(graph, node.target, torch.empty_like(constant, device=device))
