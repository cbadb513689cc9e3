"""Runs the graphs of compiled code on meta and records their kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Target, map_aggregate

from meshrunner.runner.predict.meta.compile.fusion import GraphMemory, nbytes
from meshrunner.runner.predict.record.recorder import Fusion, Recorder


class Interpreter(fx.Interpreter):
    """Runs a graph. Each node is an operator of its own, the result of a fused kernel, or inside a kernel."""

    def __init__(self, graph: fx.GraphModule, memory: GraphMemory | None, recorder: Recorder) -> None:
        """
        Args:
            memory: the fused kernels; None: every node is an operator of its own.
        """
        super().__init__(graph)
        self.memory, self.recorder = memory, recorder
        self.in_cache: set[fx.Node] = set()
        """Tensors that kernels have read or written since the last unfused operator: the next kernels are fused with those."""

    def boxed_run(self, args_list: list[Any]) -> Any:
        self.in_cache.clear()
        return super().boxed_run(args_list)

    def run_node(self, n: fx.Node) -> Any:
        if self.memory is None or n.op != "call_function":
            return super().run_node(n)
        if n in self.memory.unfused:
            self.in_cache.clear()
            return super().run_node(n)
        if n not in self.memory.kernels:
            with self.recorder.fusing(Fusion.INSIDE):
                return super().run_node(n)
        with self.recorder.fusing(Fusion.RESULT):
            result = super().run_node(n)
        self._record_kernel(n, self.memory.kernels[n])
        return result

    def call_function(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep the random state of recomputation on the host, as for a GPU, whose state has 16 bytes."""
        if target is torch.ops.higher_order.run_and_save_rng_state:
            operator, *rest = args
            return torch.empty(16, dtype=torch.uint8, device="cpu"), operator(*rest, **kwargs)
        if target is torch.ops.higher_order.run_with_rng_state:
            _, operator, *rest = args
            return operator(*rest, **kwargs)
        return super().call_function(target, args, kwargs)

    def _record_kernel(self, n: fx.Node, read: dict[fx.Node, int]) -> None:
        size = nbytes(n) + sum(each for node, each in read.items() if node not in self.in_cache)
        self.in_cache.update(read)
        self.in_cache.add(n)
        value = n.meta.get("val")
        dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else ""
        self.recorder.fused_kernel(f"fused::{n.name}", dtype, size)


def move_to(device: torch.device, graph: fx.GraphModule) -> None:
    """Have a graph create all its tensors on a device, constants included."""
    for node in graph.graph.nodes:
        node.args = map_aggregate(node.args, lambda each: device if isinstance(each, torch.device) else each)
        node.kwargs = map_aggregate(node.kwargs, lambda each: device if isinstance(each, torch.device) else each)
        if node.op == "get_attr" and isinstance(constant := getattr(graph, node.target, None), Tensor):
            setattr(graph, node.target, torch.empty_like(constant, device=device))
