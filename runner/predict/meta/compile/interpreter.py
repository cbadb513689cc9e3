"""Runs the graphs of compiled code on meta, and writes down what their kernels do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Target, map_aggregate

from meshrunner.runner.predict.meta.compile.fusion import GraphMemory, nbytes
from meshrunner.runner.predict.record.recorder import Compiled, Recorder


class Interpreter(fx.Interpreter):
    """Runs a graph; every node is an operator of its own, the result of a fused kernel, or neither."""

    def __init__(self, graph: fx.GraphModule, memory: GraphMemory | None, recorder: Recorder) -> None:
        super().__init__(graph)
        self.memory, self.recorder = memory, recorder
        self.fresh: set[fx.Node] = set()
        """What kernels have read or written since the last operator that is not fused: the next ones are fused with them."""

    def boxed_run(self, args_list: list[Any]) -> Any:
        self.fresh.clear()
        return super().boxed_run(args_list)

    def run_node(self, n: fx.Node) -> Any:
        if self.memory is None or n.op != "call_function":
            return super().run_node(n)
        if n in self.memory.extern:
            self.fresh.clear()
            return super().run_node(n)
        if n not in self.memory.read:
            with self.recorder.within(Compiled.FUSED):
                return super().run_node(n)
        with self.recorder.within(Compiled.RESULT):
            result = super().run_node(n)
        self._log(n, self.memory.read[n])
        return result

    def call_function(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The state of random numbers, which is kept for what is recomputed, is on the host: 16 bytes of a GPU's generator."""
        if target is torch.ops.higher_order.run_and_save_rng_state:
            operator, *rest = args
            return torch.empty(16, dtype=torch.uint8, device="cpu"), operator(*rest, **kwargs)
        if target is torch.ops.higher_order.run_with_rng_state:
            _, operator, *rest = args
            return operator(*rest, **kwargs)
        return super().call_function(target, args, kwargs)

    def _log(self, n: fx.Node, read: dict[fx.Node, int]) -> None:
        size = nbytes(n) + sum(each for node, each in read.items() if node not in self.fresh)
        self.fresh.update(read)
        self.fresh.add(n)
        value = n.meta.get("val")
        dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else ""
        self.recorder.kernel(f"fused::{n.name}", dtype, size)


def made_on(device: torch.device, graph: fx.GraphModule) -> None:
    """Have everything that a graph makes made on a device."""
    for node in graph.graph.nodes:
        node.args = map_aggregate(node.args, lambda each: device if isinstance(each, torch.device) else each)
        node.kwargs = map_aggregate(node.kwargs, lambda each: device if isinstance(each, torch.device) else each)
        if node.op == "get_attr" and isinstance(constant := getattr(graph, node.target, None), Tensor):
            setattr(graph, node.target, torch.empty_like(constant, device=device))
