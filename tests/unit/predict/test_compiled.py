"""Compiled code in a rehearsal: what is fused has no memory, what is saved follows the options, equal blocks are traced once."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from meshrunner.runner.ledger.phases import Phases
from meshrunner.runner.predict.meta.compile.fusion import memory_of, nbytes
from meshrunner.runner.predict.meta.compile.interpreter import Interpreter
from meshrunner.runner.predict.record.device_streams import TracedDevice
from meshrunner.runner.predict.record.recorder import Recorder
from meshrunner.runner.predict.record.trace_events import Allocated, Freed, Operator
from tests.composed import SMALL, experiment

META = torch.device("meta")
COMPILED = "compile=per_block"
HYBRID = "model=hybrid_tiny launch.workers=2 parallelism=ddp"


def on_meta(function: Any, *shapes: tuple[int, ...]) -> tuple[fx.GraphModule, list[Tensor], Recorder]:
    """The graph of a function, its arguments, and what is to watch it."""
    arguments = [torch.empty(shape, device=META) for shape in shapes]
    graph = make_fx(function, tracing_mode="fake")(*arguments)
    recorder = Recorder(TracedDevice(), Phases(), on_host=False, rounding=1, operators=True)
    return graph, arguments, recorder


def run(graph: fx.GraphModule, arguments: list[Tensor], recorder: Recorder) -> list[Operator]:
    with recorder:
        Interpreter(graph, memory_of(graph.graph), recorder).boxed_run(list(arguments))
    return [each for each in recorder.events if isinstance(each, Operator)]


def test_a_chain_is_one_kernel_and_one_result() -> None:
    graph, arguments, recorder = on_meta(lambda x: x.sin().cos().exp(), (4, 5))
    operators = run(graph, arguments, recorder)
    births = [each.allocation.nbytes for each in recorder.events if isinstance(each, Allocated)]
    assert births == [80]
    assert [(each.kind, each.nbytes) for each in operators] == [("memory", 160)]
    assert any(isinstance(each, Freed) for each in recorder.events)


def test_a_product_is_a_product_and_has_its_arguments_in_memory() -> None:
    graph, arguments, recorder = on_meta(lambda x, y: (x.sin() @ y).exp().cos(), (4, 5), (5, 6))
    operators = run(graph, arguments, recorder)
    assert [each.kind for each in operators] == ["memory", "matmul", "memory"]
    assert operators[1].name == "aten::mm"
    assert operators[1].flops == 2 * 4 * 5 * 6
    assert [each.allocation.nbytes for each in recorder.events if isinstance(each, Allocated)] == [80, 96, 96]


def test_what_is_read_twice_is_computed_twice_unless_much_is_read_for_it() -> None:
    def few(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        both = a + b
        return both.sin(), both.cos()

    def many(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        both = a + b + c + d + e
        return both.sin(), both.cos()

    assert len(memory_of(on_meta(few, *[(3,)] * 2)[0].graph).read) == 2
    assert len(memory_of(on_meta(many, *[(3,)] * 5)[0].graph).read) == 3


def test_a_view_is_read_as_far_as_it_goes() -> None:
    graph = on_meta(lambda x: x[:2].sin(), (8, 5))[0]
    (read,) = memory_of(graph.graph).read.values()
    assert list(read.values()) == [40]
    assert [nbytes(each) for each in read] == [160]


def test_complex_numbers_are_left_to_torch() -> None:
    """Their operators have memory of their own, and so has what they read."""

    def turned(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.exp()) ** 2).sin()

    graph, arguments, recorder = on_meta(turned, (3, 2))
    operators = run(graph, arguments, recorder)
    assert [each.name.partition("::")[0] for each in operators] == ["fused", "aten", "fused"]
    assert [each.allocation.nbytes for each in recorder.events if isinstance(each, Allocated)] == [24, 24, 24]


class Found(NamedTuple):
    """Of a rehearsal."""

    saved: int
    """Bytes of activations alive when the first backward begins, of the last step."""
    without_gradient: int
    """Parameters that no gradient reached."""
    graphs: int
    """Graphs that were compiled."""
    dtypes: set[str]
    """Of matrix products in the blocks."""
    blocks: set[int | None]
    """That backward has phases of."""


def rehearsed(overrides: list[str]) -> list[Found]:
    """Some rehearsals; `pretrain` and the compiler are watched."""
    from meshrunner.recipes import pretrain
    from meshrunner.runner.predict.meta.compile import backend as compiled
    from meshrunner.runner.predict.trace.tracer import trace_recipe

    counted = {"without": 0, "graphs": 0}
    clip, call = pretrain.clip_by_norm, compiled._Backend.__call__

    def clipped(trained: Any, *args: Any) -> None:
        counted["without"] += sum(each.parameter.grad is None for each in trained)
        clip(trained, *args)

    def traced(*args: Any, **kwargs: Any) -> Any:
        counted["graphs"] += 1
        return call(*args, **kwargs)

    pretrain.clip_by_norm = clipped
    compiled._Backend.__call__ = traced  # type: ignore[method-assign]
    found = []
    for line in overrides:
        counted.update(without=0, graphs=0)
        recipe = experiment(*(() if HYBRID in line else SMALL), *line.split()).on("cuda")
        result = trace_recipe(recipe, nodes=1, workers=recipe.launch.workers, device_type="cuda")
        ledger, last = result.ledger, result.last_step
        first = next(each for each in ledger.allocations if (each.phase.step, each.phase.part) == (last, "backward"))
        products = [each for each in result.events if isinstance(each, Operator) and each.kind == "matmul"]
        found.append(
            Found(
                ledger.by_category(first.allocated_at)["activations"],
                counted["without"],
                counted["graphs"],
                {each.dtype for each in products if each.phase.block is not None},
                {each.phase.block for each in ledger.allocations if each.phase.part == "backward"},
            )
        )
    return found


def in_a_process(*overrides: str) -> list[Found]:
    """As `rehearsed`, without a trace of the compiler in this process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(rehearsed, (list(overrides),))


def test_compiled_blocks() -> None:
    layout = "launch.workers=2 micro_batch=2 global_batch=4 model.n_layers=2 parallelism"
    eager, compiled, selective, products, little, ddp, hybrid = in_a_process(
        f"{layout}=fsdp2 activation_checkpoint=none",
        f"{layout}=fsdp2 activation_checkpoint=none {COMPILED}",
        f"{layout}=fsdp2 activation_checkpoint=selective_op {COMPILED}",
        # Attention is recomputed, with the random numbers that it had.
        f"{layout}=fsdp2 activation_checkpoint=selective_op activation_checkpoint.save=[{{op:aten.mm,every:2}}] {COMPILED}",
        f"{layout}=fsdp2 activation_checkpoint=memory_budget activation_checkpoint.budget=0 {COMPILED}",
        f"{layout}=ddp activation_checkpoint=full {COMPILED}",
        # Turns autocast off inside, and converts to the dtype of what autocast has made.
        f"{HYBRID} {COMPILED}",
    )
    assert eager.saved > compiled.saved > selective.saved > products.saved > little.saved > 0
    all_found = (eager, compiled, selective, products, little, ddp, hybrid)
    assert [each.without_gradient for each in all_found] == [0] * 7
    # All blocks are one graph, the loss another.
    assert [each.graphs for each in (eager, compiled, selective, products, little, ddp)] == [0, 2, 2, 2, 2, 2]
    assert compiled.blocks == eager.blocks >= {0, 1}
    # Parameters are in fp32 with ddp: autocast reaches into compiled code.
    assert compiled.dtypes == ddp.dtypes == {"bfloat16"}
    assert hybrid.dtypes == {"bfloat16", "float32"}, "routers and decays"


def saved_by(graph: fx.GraphModule) -> Counter[tuple[str, tuple[int, ...]]]:
    """dtypes and shapes of what a forward graph returns, so what it saves, too."""
    (node,) = (each for each in graph.graph.nodes if each.op == "output")
    values = [each.meta["val"] for each in node.args[0] if isinstance(each, fx.Node)]
    return Counter((str(each.dtype), tuple(each.shape)) for each in values if isinstance(each, Tensor))


def saved_in_training_and_in_rehearsal(model: str) -> tuple[list[Any], list[Any]]:
    """Of every class of block, under autocast on a CPU: as torch's own parts of inductor's front end have it, and as planned."""
    from functools import partial

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    from meshrunner.recipes.data.loader import micro_batches
    from meshrunner.runner.predict.meta.compile import backend as compiled
    from meshrunner.runner.predict.trace.tracer import trace_recipe

    one = ("hardware=cpu", "launch.workers=1", "parallelism=single", "precision=bf16", "data=random", model)
    recipe = experiment(*one).on("cpu")
    trained: list[Any] = []
    rehearsed: list[Any] = []

    def forward(graph: fx.GraphModule, _: Any) -> fx.GraphModule:
        trained.append(saved_by(graph))
        return graph

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, _: graph,
        decompositions=select_decomp_table(),
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    network: Any = recipe.model.network(recipe.seq_len)
    for name in network.block_names():
        network.get_submodule(name).compile(backend=backend, fullgraph=True, dynamic=False)
    network.loss = lambda output, hidden, *_: hidden.float().sum()
    ((tokens, targets),) = micro_batches(
        torch.ones(recipe.micro_batch, recipe.seq_len + 1, dtype=int), recipe.micro_batch
    )
    with torch.autocast("cpu", torch.bfloat16):
        network(tokens, targets)
    interpreted = compiled._Backend._interpreted

    def watched(self: Any, graph: fx.GraphModule, inputs: Any, *, forward: bool) -> Any:
        if forward:
            rehearsed.append(saved_by(graph))
        return interpreted(self, graph, inputs, forward=forward)

    compiled._Backend._interpreted = watched  # type: ignore[method-assign]
    recipe = experiment(*one, COMPILED).on("cpu")
    trace_recipe(recipe, nodes=1, workers=1, device_type="cpu")
    return trained, rehearsed


@pytest.mark.slow
@pytest.mark.parametrize("model", ["model=llama_tiny", "model=hybrid_tiny"])
def test_blocks_save_what_they_save_in_training(model: str) -> None:
    """
    Conversions by autocast included. The partitioner decides otherwise here and there, where a choice hardly matters: of blocks
    with experts, and Mamba-2's.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        trained, rehearsed = pool.apply(saved_in_training_and_in_rehearsal, (model,))
    exact = [each for each in trained if each in rehearsed]
    assert trained and len(trained) <= len(rehearsed)  # the loss is one more
    assert len(exact) == (len(trained) if "llama" in model else 2)

    def nbytes(saved: Any) -> int:
        return sum(
            count * getattr(torch, dtype.removeprefix("torch.")).itemsize * torch.Size(shape).numel()
            for (dtype, shape), count in saved.items()
        )

    for mine, theirs in zip(rehearsed, trained, strict=False):
        assert nbytes(mine) == pytest.approx(nbytes(theirs), rel=0.1)
