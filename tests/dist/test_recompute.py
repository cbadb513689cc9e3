"""Activation checkpointing and compilation under the layouts: equal numerics, and the promised savings."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import loss_parallel

from meshrunner.recipes.assembly import assemble
from meshrunner.recipes.compatibility import problems
from meshrunner.recipes.parallelism.mesh import build_mesh
from meshrunner.recipes.pretrain import backward
from tests.composed import SMALL, experiment
from tests.dist.ranks import RankError, on_ranks
from tests.dist.test_layouts import compare
from tests.memory import allocated

RECOMPUTE = ["none", "full", "selective_layer", "selective_op"]
LAYOUTS = [
    (1, "parallelism=single"),
    (2, "parallelism=ddp"),
    (2, "parallelism=fsdp1"),
    (3, "parallelism=fsdp2"),
    (4, "parallelism=fsdp2_tp"),
    (4, "parallelism=fsdp1_tp micro_batch=6"),
]
IDS = [f"{world}x {layout}" for world, layout in LAYOUTS]
EAGER = [option for option in RECOMPUTE if option != "none"]  # none and eager is test_layouts


SLOW = {name: [pytest.mark.slow] for name in IDS if "tp" in name}
"""Two-dimensional layouts take a third of the time of all."""


@pytest.mark.slow_but("2x parallelism=fsdp1-full", "3x parallelism=fsdp2-selective_op")
@pytest.mark.parametrize("option", EAGER)
@pytest.mark.parametrize(
    ("world", "layout"),
    [pytest.param(*each, id=name, marks=SLOW.get(name, [])) for each, name in zip(LAYOUTS, IDS, strict=True)],
)
def test_eager_equals_one_process(world: int, layout: str, option: str) -> None:
    found = compare(world, f"{layout} activation_checkpoint={option}")
    assert max(found) < 1e-5, found


@pytest.mark.slow
@pytest.mark.parametrize("option", RECOMPUTE)
@pytest.mark.parametrize("what", ["per_block", "whole_model"])
@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=IDS)
def test_compiled_equals_one_process(world: int, layout: str, what: str, option: str) -> None:
    words = f"{layout} activation_checkpoint={option} compile={what}"
    recipe = experiment(*SMALL, *words.split())
    if refused := problems(recipe, recipe.parallelism.degrees(1, world)):
        assert what == "whole_model" and "tp" in layout and len(refused) == 1
        return
    found = compare(world, words)
    assert max(found) < 1e-5, found


def settle() -> None:
    """Free what is not needed."""
    dist.barrier()
    gc.collect()


class Seen(NamedTuple):
    """One rank's account of a forward pass."""

    kept: int
    """Bytes that are alive after forward and were not before."""
    graphs: int
    breaks: dict[str, int]


def forward(overrides: tuple[str, ...]) -> Seen:
    """One forward pass of an assembled model, after others that compiled what is compiled."""
    from torch._dynamo.utils import counters

    recipe = experiment(*overrides)
    mesh = build_mesh("cpu", recipe.parallelism.degrees(1, dist.get_world_size()))
    model, _, _ = assemble(recipe, mesh, torch.device("cpu"))
    rows = torch.randint(509, (recipe.micro_batch, recipe.seq_len + 1), generator=torch.Generator().manual_seed(0))
    tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    for _ in range(2):
        backward(recipe, model, [(tokens, targets)])

    def run() -> torch.Tensor:
        with loss_parallel() if recipe.parallelism.splits_logits else nullcontext():
            loss: torch.Tensor = model(tokens, targets)
        settle()
        return loss

    settle()
    # The profiler does not see what gloo's threads free, if it is they who hold it last: of a compiled block in more
    # than half of all passes. So the least of many is right.
    gc.freeze()  # what is here already need not be looked through after every pass
    kept = min(allocated(run).kept for _ in range(24))
    gc.unfreeze()
    return Seen(kept, counters["stats"]["unique_graphs"], dict(counters["graph_break"]))


def seen(world: int, *words: str) -> Seen:
    overrides = (*SMALL, "seq_len=128", "micro_batch=3", *(each for word in words for each in word.split()))
    found: Seen = on_ranks(world, forward, overrides)[0]
    return found


def effects(world: int, layout: str, compilation: str) -> dict[str, int]:
    """Bytes kept for backward by every option, and what the options promise about them."""
    options = {
        "none": "activation_checkpoint=none",
        "op": "activation_checkpoint=selective_op",
        "op, every product": "activation_checkpoint=selective_op activation_checkpoint.save=[{op:aten.mm}]",
        "op, no product": "activation_checkpoint=selective_op activation_checkpoint.save=[]",
        "every third": "activation_checkpoint=selective_layer activation_checkpoint.every=3",
        "every second": "activation_checkpoint=selective_layer",
        "every": "activation_checkpoint=selective_layer activation_checkpoint.every=1",
        "full": "activation_checkpoint=full",
    }
    for name, option in list(options.items()):
        recipe = experiment(*SMALL, *layout.split(), *compilation.split(), *option.split())
        if problems(recipe, recipe.parallelism.degrees(1, world)):
            assert name in ("op, every product", "op, no product") and "tp" in layout and compilation
            del options[name]
    kept = {name: seen(world, layout, compilation, option).kept for name, option in options.items()}
    assert kept["none"] > kept["op"] > kept["full"], kept
    assert kept["none"] > kept["every third"] > kept["every second"] > kept["every"], kept
    assert kept["every"] == pytest.approx(kept["full"], rel=0.1), (
        kept
    )  # the same, but for what gloo's threads held last
    if "op, no product" in kept:
        assert kept["none"] > kept["op, every product"] > kept["op"] > kept["op, no product"] >= kept["full"], kept
    return kept


@pytest.mark.slow
@pytest.mark.parametrize(
    "option", ["memory_budget", "selective_op activation_checkpoint.save=[{op:aten.mm}]"], ids=["memory_budget", "mm"]
)
def test_what_is_refused_under_tensor_parallelism_fails_there(option: str) -> None:
    """A row of the table that torch has outgrown is to go."""
    words = f"parallelism=fsdp2_tp compile=per_block activation_checkpoint={option}"
    recipe = experiment(*SMALL, *words.split())
    assert len(problems(recipe, recipe.parallelism.degrees(1, 4))) == 1
    with pytest.raises(RankError, match=r"device_mesh|ScriptObject"):
        seen(4, words)


@pytest.mark.slow
def test_every_option_keeps_what_it_promises() -> None:
    effects(*LAYOUTS[0], "")


@pytest.mark.slow
@pytest.mark.parametrize("compilation", ["", "compile=per_block"], ids=["eager", "per_block"])
@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=IDS)
def test_every_option_keeps_what_it_promises_everywhere(world: int, layout: str, compilation: str) -> None:
    effects(world, layout, compilation)


@pytest.mark.slow_cases(
    "3x parallelism=fsdp2-full",
    "3x parallelism=fsdp2-none",
    "3x parallelism=fsdp2-selective_layer",
    "3x parallelism=fsdp2-selective_op",
)
@pytest.mark.parametrize("option", RECOMPUTE)
@pytest.mark.parametrize(
    ("world", "layout"),
    [pytest.param(*LAYOUTS[i], id=IDS[i], marks=[pytest.mark.slow] * (i < 3)) for i in (1, 2, 3)],
)
def test_blocks_are_one_graph(world: int, layout: str, option: str) -> None:
    found = seen(world, layout, f"activation_checkpoint={option} compile=per_block compile.backend=aot_eager")
    assert found.breaks == {}
    # One for the blocks and one for the loss. With every second block recomputed FSDP2 has blocks of two classes.
    assert found.graphs == (3 if option == "selective_layer" and "fsdp2" in layout else 2)


@pytest.mark.slow
def test_a_unit_inside_a_block_breaks_its_graph_unless_that_is_an_error() -> None:
    inside = "parallelism=fsdp2 wrap=rules wrap.rules=[{match:layers.*},{match:layers.*.feed_forward}]"
    compiled = "compile=per_block compile.backend=aot_eager"
    assert compare(2, f"{inside} {compiled}").gradient < 1e-5


def products(overrides: tuple[str, ...], operator: str = "aten.mm.default") -> list[int]:
    """Matrix products, or calls of another operator, in every graph that inductor was given, forward and backward."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    counts: list[int] = []

    class Count(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            counts.append(sum(str(node.target) == operator for node in graph.nodes))

        def uuid(self) -> Any:
            return None  # never from the cache, which would not call this

    config.post_grad_custom_pre_pass = Count()
    forward(overrides)
    return counts


@pytest.mark.slow
def test_inductor_recomputes_the_products_that_are_not_listed() -> None:
    """A block has 7 products forward and 14 backward. The last one's result is not needed by backward."""

    def backwards(save: str) -> int:
        option = f"activation_checkpoint=selective_op activation_checkpoint.save={save}"
        words = ["parallelism=fsdp2", "compile=per_block", *option.split()]
        return max(on_ranks(2, products, (*SMALL, *words))[0])

    assert backwards("[{op:aten.mm}]") == 14
    assert backwards("[{op:aten.mm,every:2}]") == 14 + 3
    assert backwards("[]") == 14 + 6


@pytest.mark.slow
def test_a_memory_budget_is_kept() -> None:
    kept = [
        seen(2, f"activation_checkpoint=memory_budget activation_checkpoint.budget={budget} compile=per_block").kept
        for budget in (0, 0.5, 1)
    ]
    assert kept[0] < kept[1] < kept[2], kept


def step_of_float8(overrides: tuple[str, ...]) -> list[float]:
    from tests.dist.test_layouts import observe

    found: list[float] = observe(overrides)["losses"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    ["parallelism=fsdp2", "parallelism=fsdp2 precision.all_gather=true", "parallelism=fsdp1", "parallelism=tp"],
)
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"])
def test_float8_stays_near_bf16(layout: str, scaling: str) -> None:
    pytest.importorskip("torchao")
    if scaling != "tensorwise" and "all_gather" in layout:
        pytest.skip("refused")
    sizes = ("model.dim=64", "model.n_heads=4", "model.ffn_dim=112", "model.vocab_size=512", "seq_len=32")
    common = (*SMALL, *sizes, *layout.split())
    bf16 = on_ranks(2, step_of_float8, (*(w for w in common if "precision." not in w), "precision=bf16"))[0]
    float8 = on_ranks(
        2, step_of_float8, (*common, "precision=float8", f"precision.scaling={scaling}", "precision.emulate=true")
    )[0]
    assert float8 != bf16
    assert float8 == pytest.approx(bf16, rel=2e-2)
