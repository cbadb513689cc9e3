"""Tracing compiled code: fused results have no memory, saved tensors follow the options, equal blocks compile once."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from meshrunner.runner.ledger.phases import Phases
from meshrunner.runner.predict.meta.compiler import Interpreter
from meshrunner.runner.predict.meta.fusion import memory_of, nbytes
from meshrunner.runner.predict.record.recorder import Recorder
from meshrunner.runner.predict.record.trace_events import Allocated, Freed, Operator, TracedDevice
from tests.composed import SMALL, experiment

META = torch.device("meta")
COMPILED = "compile=per_block"
HYBRID = "model=hybrid_tiny launch.workers=2 parallelism=ddp"


def on_meta(function: Any, *shapes: tuple[int, ...]) -> tuple[fx.GraphModule, list[Tensor], Recorder]:
    """Return the graph of a function, its arguments, and a recorder."""
    arguments = [torch.empty(shape, device=META) for shape in shapes]
    graph = make_fx(function, tracing_mode="fake")(*arguments)
    recorder = Recorder(TracedDevice(), Phases(), on_host=False, rounding=1)
    return graph, arguments, recorder


def run(graph: fx.GraphModule, arguments: list[Tensor], recorder: Recorder) -> list[Operator]:
    with recorder:
        Interpreter(graph, memory_of(graph.graph), recorder).boxed_run(list(arguments))
    return [each for each in recorder.events if isinstance(each, Operator)]


def test_chain_of_operators_is_one_kernel_with_one_result() -> None:
    graph, arguments, recorder = on_meta(lambda x: x.sin().cos().exp(), (4, 5))
    operators = run(graph, arguments, recorder)
    allocated = [each.allocation.nbytes for each in recorder.events if isinstance(each, Allocated)]
    assert allocated == [80]
    assert [(each.kind, each.nbytes) for each in operators] == [("memory", 160)]
    assert any(isinstance(each, Freed) for each in recorder.events)


def test_matmul_is_not_fused_and_has_its_arguments_in_memory() -> None:
    graph, arguments, recorder = on_meta(lambda x, y: (x.sin() @ y).exp().cos(), (4, 5), (5, 6))
    operators = run(graph, arguments, recorder)
    assert [each.kind for each in operators] == ["memory", "matmul", "memory"]
    assert operators[1].name == "aten::mm"
    assert operators[1].flops == 2 * 4 * 5 * 6
    assert [each.allocation.nbytes for each in recorder.events if isinstance(each, Allocated)] == [80, 96, 96]


@pytest.mark.parametrize(("name", "held"), [("primals_1", 160), ("tangents_1", 160), ("sin", 80)])
def test_kernel_overwrites_saved_results_but_not_inputs(name: str, held: int) -> None:
    graph, _, recorder = on_meta(lambda x: x.exp().cos(), (4, 5))
    next(iter(graph.graph.nodes)).name = name
    interpreter = Interpreter(graph, memory_of(graph.graph), recorder)
    with recorder:
        interpreter.boxed_run([torch.empty((4, 5), device=META)])
    held_now, peak = 0, 0
    for event in recorder.events:
        if isinstance(event, Allocated | Freed):
            held_now += event.allocation.nbytes * (1 if isinstance(event, Allocated) else -1)
            peak = max(peak, held_now)
    assert peak == held


def test_result_with_two_users_is_recomputed_unless_it_reads_many_tensors() -> None:
    def few(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        both = a + b
        return both.sin(), both.cos()

    def many(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        both = a + b + c + d + e
        return both.sin(), both.cos()

    assert len(memory_of(on_meta(few, *[(3,)] * 2)[0].graph).kernels) == 2
    assert len(memory_of(on_meta(many, *[(3,)] * 5)[0].graph).kernels) == 3


def test_only_the_viewed_part_is_read() -> None:
    graph = on_meta(lambda x: x[:2].sin(), (8, 5))[0]
    (read,) = memory_of(graph.graph).kernels.values()
    assert list(read.values()) == [40]
    assert [nbytes(each) for each in read] == [160]


def test_operators_on_complex_numbers_are_not_fused() -> None:
    """Their results and their inputs have memory."""

    def turned(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.exp()) ** 2).sin()

    graph, arguments, recorder = on_meta(turned, (3, 2))
    operators = run(graph, arguments, recorder)
    assert [each.name.partition("::")[0] for each in operators] == ["fused", "aten", "fused"]
    assert [each.allocation.nbytes for each in recorder.events if isinstance(each, Allocated)] == [24, 24, 24]


class Found(NamedTuple):
    """Figures of a trace."""

    saved: int
    """Bytes of activations alive when the last step's first backward begins."""
    without_gradient: int
    """Parameters that no gradient reached."""
    graphs: int
    """Graphs that were compiled."""
    dtypes: set[str]
    """dtypes of matmuls in the blocks."""
    blocks: set[int | None]
    """Blocks with a phase in backward."""
    gradients: int
    """Bytes of all gradients that were allocated."""


def traced(overrides: list[str]) -> list[Found]:
    """Trace some recipes, and count the graphs and the parameters without a gradient."""
    from meshrunner.recipes import pretrain
    from meshrunner.runner.predict.meta import compiler as compiled
    from meshrunner.runner.predict.trace.tracer import trace_recipe

    counted = {"without": 0, "graphs": 0}
    clip, call = pretrain.clip_by_norm, compiled._Backend.__call__

    def clipped(trained: Any, *args: Any) -> None:
        counted["without"] += sum(each.parameter.grad is None for each in trained)
        clip(trained, *args)

    def counted_call(*args: Any, **kwargs: Any) -> Any:
        counted["graphs"] += 1
        return call(*args, **kwargs)

    pretrain.clip_by_norm = clipped
    compiled._Backend.__call__ = counted_call  # type: ignore[method-assign]
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
                sum(each.nbytes for each in ledger.allocations if each.category == "gradients"),
            )
        )
    return found


def in_a_process(*overrides: str) -> list[Found]:
    """Call `traced` in another process, so that the compiler leaves nothing behind in this one."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(traced, (list(overrides),))


@pytest.mark.slow
def test_gradients_of_compiled_blocks_are_known_as_such() -> None:
    layout = "parallelism=ddp launch.workers=2 micro_batch=1 global_batch=4 model.n_layers=2"
    eager, compiled = in_a_process(layout, f"{layout} {COMPILED}")
    assert compiled.gradients == eager.gradients > 0


@pytest.mark.slow
def test_compiled_blocks_save_less_and_get_all_gradients() -> None:
    layout = "launch.workers=2 micro_batch=2 global_batch=4 model.n_layers=2 parallelism"
    eager, compiled, selective, products, little, ddp, hybrid = in_a_process(
        f"{layout}=fsdp2 activation_checkpoint=none",
        f"{layout}=fsdp2 activation_checkpoint=none {COMPILED}",
        f"{layout}=fsdp2 activation_checkpoint=selective_op {COMPILED}",
        # Attention is recomputed with the same random numbers.
        f"{layout}=fsdp2 activation_checkpoint=selective_op activation_checkpoint.save=[{{op:aten.mm,every:2}}] {COMPILED}",
        f"{layout}=fsdp2 activation_checkpoint=memory_budget activation_checkpoint.budget=0 {COMPILED}",
        f"{layout}=ddp activation_checkpoint=full {COMPILED}",
        # It turns autocast off inside, and converts to the dtype of results of autocast.
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
    """Return the dtypes and shapes of a forward graph's outputs, which include the saved tensors."""
    (node,) = (each for each in graph.graph.nodes if each.op == "output")
    values = [each.meta["val"] for each in node.args[0] if isinstance(each, fx.Node)]
    return Counter((str(each.dtype), tuple(each.shape)) for each in values if isinstance(each, Tensor))


def saved_in_training_and_in_trace(model: str) -> tuple[list[Any], list[Any]]:
    """Return the tensors each block saves under autocast on a CPU: by torch's parts of inductor's front end, and in a trace."""
    from functools import partial

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    from meshrunner.recipes.data.loader import micro_batches
    from meshrunner.runner.predict.meta import compiler as compiled
    from meshrunner.runner.predict.trace.tracer import trace_recipe

    one = ("hardware=cpu", "launch.workers=1", "parallelism=single", "precision=bf16", "data=random", model)
    recipe = experiment(*one).on("cpu")
    trained: list[Any] = []
    in_trace: list[Any] = []

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
    network.reset_buffers()
    network.loss = lambda output, hidden, *_: hidden.float().sum()
    ((tokens, targets),) = micro_batches(
        torch.ones(recipe.micro_batch, recipe.seq_len + 1, dtype=int), recipe.micro_batch, network.own
    )
    with torch.autocast("cpu", torch.bfloat16):
        network(tokens, targets)
    interpreted = compiled._Backend._interpreted

    def watched(self: Any, graph: fx.GraphModule, inputs: Any, *, forward: bool) -> Any:
        if forward:
            in_trace.append(saved_by(graph))
        return interpreted(self, graph, inputs, forward=forward)

    compiled._Backend._interpreted = watched  # type: ignore[method-assign]
    recipe = experiment(*one, COMPILED).on("cpu")
    trace_recipe(recipe, nodes=1, workers=1, device_type="cpu")
    return trained, in_trace


@pytest.mark.slow
@pytest.mark.parametrize("model", ["model=llama_tiny", "model=hybrid_tiny"])
def test_traced_blocks_save_the_same_tensors_as_in_training(model: str) -> None:
    """
    This includes conversions by autocast. In blocks with experts and in Mamba-2 blocks the partitioner makes some other choices
    that hardly matter.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        trained, in_trace = pool.apply(saved_in_training_and_in_trace, (model,))
    exact = [each for each in trained if each in in_trace]
    assert trained and len(trained) <= len(in_trace)  # the loss is one more
    assert len(exact) == (len(trained) if "llama" in model else 3)

    def nbytes(saved: Any) -> int:
        return sum(
            count * getattr(torch, dtype.removeprefix("torch.")).itemsize * torch.Size(shape).numel()
            for (dtype, shape), count in saved.items()
        )

    for mine, theirs in zip(in_trace, trained, strict=False):
        assert nbytes(mine) == pytest.approx(nbytes(theirs), rel=0.1)
