"""Every layout against one process: initial weights, gradients before the first update, losses and norms of five steps.

python -m tests.dist.test_layouts > docs/measurements/parity.md
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from meshrunner.recipes.assembly import assemble
from meshrunner.recipes.compatibility import problems
from meshrunner.recipes.data.base import DataSpec
from meshrunner.recipes.data.loader import Loader
from meshrunner.recipes.model.base import clean_name
from meshrunner.recipes.model.network import network_of
from meshrunner.recipes.optim.grad_norm import squared_norm
from meshrunner.recipes.parallelism.mesh import build_mesh, place
from meshrunner.recipes.parallelism.wrap_policy import unit_parameters
from meshrunner.recipes.pretrain import backward, train
from tests.composed import SMALL, experiment
from tests.dist.ranks import RankError, on_ranks
from tests.documents import END

CPU = torch.device("cpu")
CONTEXT, ULYSSES = "parallelism.context=2 seq_len=36", "parallelism.context_method=ulysses"
DOCUMENTS = "data.kind=tests.documents:RandomDocuments"
PIPELINE = "parallelism.pipeline=2 model.n_layers=5"
NEVER = "parallelism.reshard_after_forward=never"
COMPILED = "compile=per_block compile.backend=aot_eager"
ONE_F_ONE_B, GPIPE, INTERLEAVED, LOOPED, ZERO_BUBBLE, ZBV, DUALPIPE = (
    f"parallelism.pipeline_schedule={name}"
    for name in ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipe_v")
)
SPLIT = (ZERO_BUBBLE, ZBV, DUALPIPE)
QWEN = "model.qkv_bias=true model.qk_norm=true model.head_dim=10"
LAYOUTS = [
    *(
        (world, f"{layout} {QWEN}")
        for world, layout in (
            (3, "parallelism=fsdp2"),
            (2, "parallelism=fsdp1"),
            (2, "parallelism=tp micro_batch=6"),
            (
                2,
                "parallelism=tp parallelism.sequence_parallel=false micro_batch=6 compile=per_block compile.backend=aot_eager",
            ),
            (4, "parallelism=fsdp2_tp micro_batch=3"),
            (4, "parallelism=fsdp1_tp parallelism.sequence_parallel=false micro_batch=6"),
            (4, f"parallelism=fsdp2_tp {CONTEXT} micro_batch=6"),
            (4, f"parallelism=tp {PIPELINE} micro_batch=3"),
        )
    ),
    (1, "parallelism=fsdp2"),
    (2, "parallelism=fsdp2"),
    (3, "parallelism=fsdp2"),
    (4, "parallelism=fsdp2"),
    (2, "parallelism=fsdp2 parallelism.reshard_after_forward=never"),
    (2, "parallelism=fsdp2 parallelism.reshard_after_forward=except_last"),
    (4, "parallelism=fsdp2 parallelism.reshard_after_forward=2"),
    (4, "parallelism=hsdp2"),
    (2, "parallelism=hsdp2"),
    (2, "parallelism=fsdp2 micro_batch=3"),
    (2, "parallelism=fsdp2 model.tie_embeddings=true"),
    (2, "parallelism=fsdp2 model.freeze=[tok_embeddings.*,layers.1.attention.*]"),
    (2, "parallelism=fsdp2 optimizer.implementation=foreach"),
    (2, "parallelism=fsdp2 parallelism.prefetch=2"),
    (2, "parallelism=fsdp2 parallelism.cpu_offload=true"),
    (2, "parallelism=fsdp2 wrap=root_only"),
    (2, "parallelism=fsdp2 wrap=size wrap.min_parameters=10000"),
    (2, "parallelism=fsdp1 wrap=root_only"),
    (2, "parallelism=fsdp1 wrap=size wrap.min_parameters=10000"),
    (2, "parallelism=fsdp1 model.freeze=[tok_embeddings.*,layers.1.attention.*]"),
    (2, "parallelism=fsdp1 parallelism.backward_prefetch=post parallelism.forward_prefetch=true"),
    (2, "parallelism=ddp model.tie_embeddings=true"),
    (2, "parallelism=ddp model.freeze=[tok_embeddings.*,layers.1.attention.*]"),
    (2, "parallelism=ddp"),
    (4, "parallelism=ddp"),
    (2, "parallelism=fsdp1"),
    (3, "parallelism=fsdp1"),
    (4, "parallelism=fsdp1"),
    (2, "parallelism=fsdp1 parallelism.reshard_after_forward=never"),
    (2, "parallelism=fsdp1 parallelism.reshard_after_forward=except_last"),
    (4, "parallelism=hsdp1"),
    (4, "parallelism=hsdp1 parallelism.reshard_after_forward=never"),
    (4, "parallelism=hsdp1 parallelism.reshard_after_forward=except_last"),
    (2, "parallelism=fsdp1 model.tie_embeddings=true"),
    (2, "parallelism=tp micro_batch=6"),
    (2, "parallelism=tp parallelism.sequence_parallel=false micro_batch=6"),
    (2, "parallelism=tp parallelism.loss_parallel=false micro_batch=6"),
    (2, "parallelism=tp parallelism.loss_parallel=false parallelism.sequence_parallel=false micro_batch=6"),
    (4, "parallelism=fsdp2_tp micro_batch=3"),
    (4, "parallelism=fsdp2_tp parallelism.sequence_parallel=false micro_batch=3"),
    (4, "parallelism=fsdp2_tp parallelism.loss_parallel=false micro_batch=3"),
    (4, "parallelism=fsdp1_tp micro_batch=6"),
    (4, "parallelism=fsdp1_tp micro_batch=3"),
    (4, "parallelism=fsdp1_tp micro_batch=6 parallelism.sequence_parallel=false"),
    (4, "parallelism=fsdp1_tp micro_batch=6 parallelism.loss_parallel=false"),
    (4, "parallelism=fsdp2_tp model.tie_embeddings=true micro_batch=3"),
    (4, "parallelism=tp model.n_heads=4 model.n_kv_heads=4 seq_len=36 micro_batch=6"),
    (4, "parallelism=hsdp2 parallelism.shard=1 parallelism.replicate=2 parallelism.tensor=2 micro_batch=3"),
    (1, "parallelism=single loss=chunked loss.tokens=13"),
    (1, "parallelism=single loss=chunked loss.tokens=13 compile=whole_model compile.backend=aot_eager"),
    (2, "parallelism=ddp loss=chunked loss.tokens=13"),
    (2, "parallelism=fsdp1 loss=chunked loss.tokens=13"),
    (2, "parallelism=fsdp2 loss=chunked loss.tokens=13 micro_batch=3"),
    (2, "parallelism=fsdp2 loss=chunked loss.tokens=13 model.tie_embeddings=true"),
    (2, "parallelism=tp loss=chunked loss.tokens=5 micro_batch=6"),
    (2, "parallelism=tp loss=chunked loss.tokens=5 parallelism.sequence_parallel=false micro_batch=6"),
    (2, "parallelism=tp loss=chunked loss.tokens=5 parallelism.loss_parallel=false micro_batch=6"),
    (2, "parallelism=tp loss=chunked loss.tokens=5 model.tie_embeddings=true micro_batch=6"),
    (4, "parallelism=fsdp2_tp loss=chunked loss.tokens=5 micro_batch=3"),
    (4, "parallelism=fsdp1_tp micro_batch=6 loss=chunked loss.tokens=5"),
    (2, "parallelism=fsdp2 loss=chunked loss.tokens=13 wrap=rules wrap.rules=[{match:layers.*},{match:output}]"),
    (2, "parallelism=fsdp2 wrap=rules"),
    (2, "parallelism=fsdp1 wrap=rules"),
    (1, "parallelism=fsdp1"),
    *(
        (world, f"{layout} parallelism.accumulate=hold")
        for world, layout in (
            (2, "parallelism=fsdp1"),
            (2, "parallelism=fsdp1 model.tie_embeddings=true"),
            (2, "parallelism=fsdp1 model.freeze=[tok_embeddings.*,layers.1.attention.*]"),
            (2, "parallelism=fsdp1 loss=chunked loss.tokens=13"),
            (4, "parallelism=hsdp1"),
            (2, "parallelism=fsdp2"),
            (2, "parallelism=fsdp2 model.tie_embeddings=true"),
            (2, "parallelism=fsdp2 model.freeze=[tok_embeddings.*,layers.1.attention.*]"),
            (2, "parallelism=fsdp2 loss=chunked loss.tokens=13"),
            (2, "parallelism=fsdp2 parallelism.cpu_offload=true"),
            (2, "parallelism=hsdp2"),
            (4, "parallelism=hsdp2"),
            (4, "parallelism=fsdp2_tp micro_batch=3"),
        )
    ),
    (4, "parallelism=hsdp2 loss=chunked loss.tokens=13"),
    (2, "parallelism=fsdp1 loss=chunked loss.tokens=13 wrap=rules wrap.rules=[{match:layers.*},{match:output}]"),
    (4, "parallelism=fsdp2_tp loss=chunked loss.tokens=5 wrap=rules wrap.rules=[{match:output}] micro_batch=3"),
    (4, "parallelism=fsdp1_tp loss=chunked loss.tokens=5 wrap=rules wrap.rules=[{match:output}] micro_batch=6"),
    (2, "parallelism=fsdp2 loss=chunked loss.tokens=13 model.freeze=[output.*]"),
    (2, f"parallelism=ddp {CONTEXT}"),
    (4, f"parallelism=ddp {CONTEXT} micro_batch=3"),
    (2, f"parallelism=ddp {CONTEXT} {ULYSSES}"),
    (2, f"parallelism=fsdp1 {CONTEXT} {ULYSSES}"),
    (4, f"parallelism=fsdp1 {CONTEXT} micro_batch=3"),
    (2, f"parallelism=fsdp2 {CONTEXT} micro_batch=3"),
    (3, "parallelism=fsdp2 parallelism.context=3 seq_len=36"),
    (3, f"parallelism=fsdp2 parallelism.context=3 seq_len=36 {ULYSSES} model.n_kv_heads=1"),
    (3, f"parallelism=fsdp2 parallelism.context=3 seq_len=36 {ULYSSES} model.n_kv_heads=3"),
    (4, "parallelism=fsdp2 parallelism.context=4 seq_len=40"),
    (4, f"parallelism=fsdp2 parallelism.context=4 seq_len=36 {ULYSSES} model.n_heads=8"),
    (4, f"parallelism=hsdp2 {CONTEXT} micro_batch=3"),
    (4, f"parallelism=hsdp2 parallelism.shard=1 {CONTEXT}"),
    (4, f"parallelism=fsdp2_tp {CONTEXT} micro_batch=6"),
    (4, f"parallelism=fsdp2_tp {CONTEXT} parallelism.sequence_parallel=false parallelism.loss_parallel=false"),
    (4, f"parallelism=fsdp2_tp {CONTEXT} {ULYSSES} model.n_heads=4"),
    (4, f"parallelism=fsdp1_tp {CONTEXT} micro_batch=6"),
    (2, f"parallelism=fsdp2 {CONTEXT} loss=chunked loss.tokens=13 micro_batch=3"),
    (2, f"parallelism=fsdp2 {CONTEXT} model.tie_embeddings=true"),
    (2, f"parallelism=fsdp2 {CONTEXT} model.freeze=[tok_embeddings.*,layers.1.attention.*]"),
    *(
        (2, f"parallelism=fsdp2 {CONTEXT} activation_checkpoint={kind} {compilation}")
        for kind in ("full", "selective_layer", "selective_op")
        for compilation in ("compile=eager", COMPILED)
    ),
    (2, f"parallelism=fsdp2 {CONTEXT} {ULYSSES} activation_checkpoint=selective_op {COMPILED}"),
    (2, f"parallelism=fsdp2 {CONTEXT} compile=whole_model compile.backend=aot_eager"),
    *(
        (2, f"parallelism=single {PIPELINE} {schedule}")
        for schedule in (ONE_F_ONE_B, GPIPE, INTERLEAVED, LOOPED, *SPLIT)
    ),
    *(
        (4, f"parallelism=single parallelism.pipeline=4 {schedule} model.n_layers={layers}")
        for schedule, layers in ((ONE_F_ONE_B, 5), (GPIPE, 5), *((each, 9) for each in (INTERLEAVED, LOOPED, *SPLIT)))
    ),
    *(
        (4, f"parallelism={kind} {PIPELINE} {schedule}")
        for kind in ("ddp", "fsdp2")
        for schedule in (ONE_F_ONE_B, INTERLEAVED)
    ),
    *((4, f"parallelism=fsdp2 {PIPELINE} {NEVER} {schedule}") for schedule in SPLIT),
    (4, f"parallelism=fsdp2 {PIPELINE} wrap=root_only {ZBV}"),
    (4, f"parallelism=fsdp2 {PIPELINE} parallelism.pipeline_split=[1,4]"),
    (4, f"parallelism=fsdp2 {PIPELINE} parallelism.cpu_offload=true"),
    (8, f"parallelism=hsdp2 {PIPELINE}"),
    (8, f"parallelism=fsdp2_tp {PIPELINE} micro_batch=3"),
    (4, f"parallelism=tp {PIPELINE} micro_batch=3"),
    (4, f"parallelism=tp {PIPELINE} micro_batch=3 parallelism.sequence_parallel=false"),
    (4, f"parallelism=tp {PIPELINE} micro_batch=3 parallelism.loss_parallel=false"),
    *((4, f"parallelism=tp {PIPELINE} micro_batch=3 {NEVER} {schedule}") for schedule in SPLIT),
    (4, f"parallelism=fsdp2 {PIPELINE} loss=chunked loss.tokens=13"),
    (4, f"parallelism=tp {PIPELINE} micro_batch=3 loss=chunked loss.tokens=5"),
    *(
        (2, f"parallelism=fsdp2 {PIPELINE} model.freeze=[{frozen}]")
        for frozen in (
            "tok_embeddings.*,layers.0.*,layers.1.*,layers.2.*",
            "layers.3.*,layers.4.*,norm.*,output.*",
            "tok_embeddings.*,layers.1.*",
        )
    ),
    *(
        (4, f"parallelism=fsdp2 {PIPELINE} activation_checkpoint={kind} {compilation}")
        for kind in ("full", "selective_layer", "selective_op")
        for compilation in ("compile=eager", COMPILED)
    ),
    (4, f"parallelism=fsdp2 {PIPELINE} {CONTEXT}"),
    (4, f"parallelism=ddp {PIPELINE} {CONTEXT} {ULYSSES} {INTERLEAVED}"),
    (4, f"parallelism=fsdp2 {PIPELINE} {CONTEXT} {NEVER} {ZERO_BUBBLE}"),
    (8, "parallelism=fsdp2_tp parallelism.replicate=2 micro_batch=3"),
    (1, f"parallelism=single {DOCUMENTS} compile=whole_model compile.backend=aot_eager compile.fullgraph=true"),
    (2, f"parallelism=ddp {DOCUMENTS} loss=chunked loss.tokens=13"),
    (2, f"parallelism=fsdp1 {DOCUMENTS} activation_checkpoint=full"),
    (2, f"parallelism=fsdp2 {DOCUMENTS} micro_batch=3"),
    (2, f"parallelism=fsdp2 {DOCUMENTS} model.rope_theta=null activation_checkpoint=full {COMPILED}"),
    (2, f"parallelism=tp {DOCUMENTS} micro_batch=6 parallelism.sequence_parallel=false {COMPILED}"),
    (4, f"parallelism=hsdp2 {DOCUMENTS} activation_checkpoint=selective_op {COMPILED} compile.fullgraph=true"),
    (4, f"parallelism=fsdp2_tp {DOCUMENTS} micro_batch=3 activation_checkpoint=selective_op"),
    (8, "parallelism=fsdp1_tp parallelism.replicate=2 micro_batch=3"),
]


BF16 = [
    (2, "parallelism=ddp micro_batch=6 precision=bf16"),
    (1, "parallelism=fsdp2 micro_batch=12 precision=bf16"),
    (2, "parallelism=fsdp2 micro_batch=6 precision=bf16"),
    (2, "parallelism=fsdp1 micro_batch=6 precision=bf16"),
]
OF_REFERENCE = ("model", "data", "seq_len", "precision", "loss.z", "optimizer.no_decay", "optimizer.weight_decay")
"""Beginnings of the overrides that a layout shares with the run in one process."""


class Recorder:
    """A meter that records the global token-mean loss and the gradient norm of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.observed: list[float] = []
        """Losses beside the cross entropy, which are not part of it."""
        self.phases: list[str] = []

    def started(self, **figures: Any) -> None:
        pass

    def resumed(self, step: int, tokens: int) -> None:
        pass

    def doing(self, phase: str) -> None:
        self.phases.append(phase)

    def waiting_for_data(self) -> AbstractContextManager[None]:
        return nullcontext()

    def capturing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def saving(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step_done(self, step: int, *, loss: Tensor, grad_norm: Tensor, observed: dict[str, Tensor], **_: Any) -> None:
        others = [value for key, value in sorted(observed.items()) if key.endswith("_loss")]
        for mean, values in ((loss, self.losses), *((other, self.observed) for other in others)):
            dist.all_reduce(mean)
            values.append(mean.item() / dist.get_world_size())
        self.norms.append(grad_norm.item())


def whole(tensor: Tensor) -> Tensor:
    """Return the unsharded value, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_values(model: nn.Module, *, gradients: bool) -> dict[str, Tensor]:
    """Return unsharded parameters or their gradients by the network's names, on every rank."""
    fsdp1 = isinstance(model, FullyShardedDataParallel)
    summon = FullyShardedDataParallel.summon_full_params(model, with_grads=gradients) if fsdp1 else nullcontext()
    with summon:
        named = {clean_name(name): p.grad if gradients else p for name, p in model.named_parameters()}
        return {name: whole(value) for name, value in named.items() if value is not None}


def union(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of all ranks. Pipeline ranks have different ones."""
    parts: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, named)
    return {name: value for part in parts for name, value in part.items()}


def observe(overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return initial weights, gradients and norm of the first step, then losses and norms of a whole run. On every rank."""
    recipe, world = experiment(*overrides), dist.get_world_size()
    degrees = recipe.parallelism.degrees(1, world)
    mesh = build_mesh("cpu", degrees)
    model, trained, _ = assemble(recipe, mesh, CPU)
    global_batch, _ = recipe.accumulation(degrees.data)
    spec = DataSpec(recipe.model.vocab_size, recipe.seq_len, recipe.seed)
    if recipe.data.separates_documents:
        network_of(model).document_end = recipe.data.document_end(spec)
    loader = Loader(
        recipe.data.open(spec),
        global_batch=global_batch,
        micro_batch=recipe.micro_batch,
        rank=place(mesh, degrees)[0],
        ranks=degrees.data,
        device=CPU,
        own=network_of(model).own,
    )
    backward(recipe, model, loader.next())
    loader.close()
    weights, gradients = (whole_values(model, gradients=what) for what in (False, True))
    names = {each.name for each in trained}
    gradients = {
        name: gradient for name, gradient in gradients.items() if name in names
    }  # FSDP1 has zeros for frozen ones
    square = squared_norm(trained, CPU)
    if degrees.pipeline > 1:
        weights, gradients = union(weights), union(gradients)
        (square,) = network_of(model).pipeline.summed([square])
    norm = square.sqrt().item()
    recorder = Recorder()
    model, _ = train(recipe, recorder, device=CPU, nodes=1, workers=world)
    assert network_of(model).document_end == (END if recipe.data.separates_documents else None)
    found: dict[str, Any] = {"norm": norm, "losses": recorder.losses, "norms": recorder.norms}
    found["observed"] = recorder.observed
    return found | ({"weights": weights, "gradients": gradients} if dist.get_rank() == 0 else {})


@cache
def reference(model: str) -> dict[str, Any]:
    """Train on one process, nothing distributed, in one micro batch."""
    overrides = (*SMALL, "parallelism=single", "micro_batch=12", *model.split())
    return on_ranks(1, observe, overrides)[0]


class Difference(NamedTuple):
    """The largest relative difference from one process."""

    gradient: float
    """Largest ||difference|| / ||gradient|| of any parameter before the first update."""
    norm: float
    """Largest difference of the global gradient norm, before the first update and in five steps of AdamW."""
    loss: float
    """Largest difference of the loss in five steps."""


def compare(world: int, layout: str) -> Difference:
    """Train with and without a layout."""
    expected = reference(" ".join(word for word in layout.split() if word.startswith(OF_REFERENCE)))
    return difference(on_ranks(world, observe, (*SMALL, *layout.split())), expected)


def difference(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> Difference:
    """Return the difference between ranks and one process. Assert equality where it must be exact."""
    found = ranks[0]
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert torch.equal(found["weights"][name], weight), f"initial {name} differs"
    assert found["gradients"].keys() == expected["gradients"].keys()
    assert all(gradient.norm() > 0 for gradient in expected["gradients"].values())
    assert expected["norm"] > 0.2, "clipping must bite, or it is not tested"
    assert all(rank["norms"] == found["norms"] for rank in ranks), "ranks disagree about the norm"

    def largest(key: str) -> float:
        pairs = zip(found[key], expected[key], strict=True)
        return max(abs(a - b) / b for a, b in pairs)

    of_gradients = {
        name: relative(found["gradients"][name], gradient) for name, gradient in expected["gradients"].items()
    }
    before = abs(found["norm"] - expected["norm"]) / expected["norm"]
    return Difference(max(of_gradients.values()), max(before, largest("norms")), largest("losses"))


def relative(a: Tensor, b: Tensor) -> float:
    """Return ||a - b|| / ||b||."""
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.slow_but(
    f"4x parallelism=fsdp2_tp micro_batch=3 {QWEN}",
    "2x parallelism=fsdp2",
    "3x parallelism=fsdp2",
    "2x parallelism=fsdp2 micro_batch=3",
    "2x parallelism=fsdp2 model.tie_embeddings=true",
    "2x parallelism=fsdp2 loss=chunked loss.tokens=13 micro_batch=3",
    "2x parallelism=fsdp1",
    "3x parallelism=fsdp1",
    "2x parallelism=ddp",
    "4x parallelism=fsdp2_tp micro_batch=3",
    "1x parallelism=single loss=chunked loss.tokens=13",
    f"2x parallelism=ddp {CONTEXT}",
    f"2x parallelism=fsdp1 {CONTEXT} {ULYSSES}",
    f"4x parallelism=fsdp2 {PIPELINE} {INTERLEAVED}",
    f"2x parallelism=fsdp2 {DOCUMENTS} micro_batch=3",
    f"4x parallelism=fsdp2_tp {DOCUMENTS} micro_batch=3 activation_checkpoint=selective_op",
    f"2x parallelism=single {PIPELINE} {ZBV}",
    f"4x parallelism=tp {PIPELINE} micro_batch=3",
)
@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=[f"{world}x {layout}" for world, layout in LAYOUTS])
def test_layout_equals_one_process(world: int, layout: str) -> None:
    found = compare(world, layout)
    assert max(found) < 1e-5, found


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        f"parallelism=fsdp1 {PIPELINE}",  # fails
        f"parallelism=ddp {PIPELINE} {ZBV}",  # ranks disagree
        f"parallelism=fsdp2 {PIPELINE} {ZBV}",  # parameters without a gradient
        f"parallelism=fsdp2 {PIPELINE} {DUALPIPE}",  # wrong gradients
    ],
)
def test_a_pipeline_is_wrong_where_it_is_refused(layout: str) -> None:
    """If torch fixes one of these, its row of the compatibility table can go."""
    recipe = experiment(*SMALL, *layout.split())
    assert len(problems(recipe, recipe.parallelism.degrees(1, 4))) == 1
    with pytest.raises((AssertionError, RankError)):
        assert compare(4, layout).gradient < 1e-3


@pytest.mark.slow_cases("parallelism=hsdp1-disagree about the norm")
@pytest.mark.parametrize(
    ("layout", "error"),
    [
        ("parallelism=hsdp1", "disagree about the norm"),
        ("parallelism=fsdp1 parallelism.tensor=2 model.vocab_size=512 micro_batch=12", "parameter shape changes"),
    ],
)
def test_a_single_shard_of_fsdp1_fails_where_it_is_refused(layout: str, error: str) -> None:
    """If torch fixes this, the row of the compatibility table can go."""
    recipe = experiment(*SMALL, *layout.split())
    assert len(problems(recipe, recipe.parallelism.degrees(1, 2))) == 1
    with pytest.raises((AssertionError, RankError), match=error):
        compare(2, layout)


WRAPS = [
    "wrap=blocks",
    "wrap=root_only",
    "wrap=size wrap.min_parameters=10000",
    "wrap=rules "
    "wrap.rules=[{match:layers.0,reshard_after_forward:never},{match:Block},{match:layers.*.feed_forward},{match:output}]",
]


def wrapped_units(overrides: tuple[str, ...]) -> dict[str, set[str]]:
    """Return unit -> names of the parameters that the wrapped model really has in it."""
    recipe, world = experiment(*overrides), dist.get_world_size()
    model, _, _ = assemble(recipe, build_mesh("cpu", recipe.parallelism.degrees(1, world)), CPU)
    found: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            below = {
                p
                for m in module.modules()
                if isinstance(m, FullyShardedDataParallel) and m is not module
                for p in m.parameters()
            }
        elif isinstance(module, FSDPModule):
            below = {
                p for m in module.modules() if isinstance(m, FSDPModule) and m is not module for p in m.parameters()
            }
        else:
            continue
        names = {clean_name(f"{name}.{n}".strip(".")) for n, p in module.named_parameters() if p not in below}
        found[clean_name(name)] = names
    return found


@pytest.mark.slow_cases("wrap=size wrap.min_parameters=10000", "wrap=root_only", "wrap3")
@pytest.mark.parametrize("wrap", WRAPS)
def test_fsdp1_and_fsdp2_have_the_units_of_the_plan(wrap: str) -> None:
    overrides = (*SMALL, *wrap.split())
    recipe = experiment(*overrides)
    with torch.device("meta"):
        network = recipe.model.build(recipe.seq_len)
    planned = unit_parameters(network, recipe.wrap.plan(network, "always"))
    expected = {unit: set(parameters) for unit, parameters in planned.items()}
    for kind in ("fsdp1", "fsdp2"):
        assert on_ranks(2, wrapped_units, (*overrides, f"parallelism={kind}")) == [expected] * 2


@pytest.mark.slow
def test_bf16_of_fsdp1_and_fsdp2_agree() -> None:
    runs = [on_ranks(2, observe, (*SMALL, f"parallelism={kind}", "precision=bf16"))[0] for kind in ("fsdp1", "fsdp2")]
    assert runs[0]["losses"] == pytest.approx(runs[1]["losses"], rel=1e-3)
    assert runs[0]["norms"] == pytest.approx(runs[1]["norms"], rel=1e-2)


def test_bf16_stays_near_fp32() -> None:
    fp32 = reference("")
    bf16 = on_ranks(2, observe, (*SMALL, "parallelism=fsdp2", "precision=bf16"))[0]
    assert bf16["losses"] != fp32["losses"]
    assert bf16["losses"] == pytest.approx(fp32["losses"], rel=2e-2)
    assert all(weight.dtype == torch.float32 for weight in bf16["weights"].values())


@pytest.mark.slow_but("2x parallelism=ddp", "1x parallelism=fsdp2")
@pytest.mark.parametrize(("world", "layout"), BF16, ids=[f"{world}x {layout.split()[0]}" for world, layout in BF16])
def test_bf16_layouts_round_alike(world: int, layout: str) -> None:
    """`single` and `ddp` run under autocast, and FSDP casts parameters. With autocast alone, gradients differ by 1e-2."""
    found = compare(world, layout)
    assert found.gradient < 5e-3 and found.norm < 1e-3 and found.loss < 1e-3, found


AUTOCASTS = [(1, "single micro_batch=12"), (2, "ddp micro_batch=6")]


@pytest.mark.slow_cases("1-single micro_batch=12")
@pytest.mark.parametrize(("world", "layout"), AUTOCASTS)
def test_bf16_without_fsdp_is_autocast(world: int, layout: str) -> None:
    """The result is near fp32 and near FSDP's bf16. Weights and accumulated values are fp32."""
    given = (*SMALL, *f"parallelism={layout} precision=bf16".split())
    fp32, bf16 = reference(""), on_ranks(world, observe, given)[0]
    fsdp2 = on_ranks(world, observe, (*SMALL, *f"parallelism=fsdp2 {layout.split()[1]} precision=bf16".split()))[0]
    assert bf16["losses"] != fp32["losses"]
    assert bf16["losses"] == pytest.approx(fp32["losses"], rel=2e-2)
    assert bf16["losses"] == pytest.approx(fsdp2["losses"], rel=1e-2)
    assert bf16["norms"] == pytest.approx(fsdp2["norms"], rel=5e-2)
    for name, gradient in fp32["gradients"].items():
        found = bf16["gradients"][name]
        assert found.dtype == bf16["weights"][name].dtype == torch.float32
        assert 1e-6 < relative(found, gradient) < 5e-2, name


@pytest.mark.slow_but("micro_batch=2")
@pytest.mark.parametrize("with_", ["activation_checkpoint=full", "loss=chunked loss.tokens=13", "micro_batch=2"])
def test_bf16_of_ddp_recomputes_and_accumulates_as_it_is(with_: str) -> None:
    """Backward recomputes, under autocast, exactly what forward computed."""
    given = (*SMALL, "parallelism=ddp", "precision=bf16", "micro_batch=6")
    plain, other = (on_ranks(2, observe, (*given, *words.split()))[0] for words in ("", with_))
    if with_.startswith("activation"):
        assert other["losses"] == plain["losses"] and other["norms"] == plain["norms"]
    assert other["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    for name, gradient in plain["gradients"].items():
        assert relative(other["gradients"][name], gradient) < 2e-2, name


def communicated(overrides: tuple[str, ...]) -> tuple[dict[str, int], Tensor]:
    """Return the number of each collective in one step, and the gradient of the projection."""
    recipe = experiment(*overrides)
    model, _, _ = assemble(recipe, build_mesh("cpu", recipe.parallelism.degrees(1, dist.get_world_size())), CPU)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens, targets = torch.randint(509, (2, 6, 34), generator=generator)
    with CommDebugMode() as mode:
        backward(recipe, model, [(tokens, targets)])
    gradient = whole_values(model, gradients=True)["output.weight"]
    return {str(operator): count for operator, count in mode.get_comm_counts().items()}, gradient


@pytest.mark.slow_cases("fsdp1-bf16", "fsdp1-fp32")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_chunks_are_gathered_for_and_reduced_once(kind: str, dtype: str) -> None:
    wrap = ("wrap=rules", "wrap.rules=[{match:layers.*},{match:output}]")
    given = (*SMALL, *wrap, f"parallelism={kind}", f"precision={dtype}", "micro_batch=6")
    plain, chunked = (
        on_ranks(2, communicated, (*given, *words.split()))[0] for words in ("", "loss=chunked loss.tokens=13")
    )
    assert chunked[0] == plain[0] and sum(plain[0].values()) > 4
    assert relative(chunked[1], plain[1]) < {"fp32": 1e-6, "bf16": 5e-3}[dtype]


def masked_step(implementation: str) -> tuple[bool, bool]:
    """Whether a step with a non-finite gradient left weights and state alone, and a finite one changed them."""
    recipe = experiment(*SMALL, "parallelism=fsdp2", f"optimizer.implementation={implementation}")
    degrees = recipe.parallelism.degrees(1, dist.get_world_size())
    _, trained, _ = assemble(recipe, build_mesh("cpu", degrees), CPU)
    parameters = [each.parameter for each in trained]
    optimizer = recipe.optimizer.build(parameters)
    from meshrunner.recipes.optim.optimizer import step_if_finite

    def step(poison: bool) -> list[Tensor]:
        for p in parameters:
            p.grad = torch.ones_like(p)
        if poison and dist.get_rank() == 1:
            gradient = parameters[3].grad
            assert isinstance(gradient, DTensor)
            gradient.to_local().view(-1)[0] = float("nan")
        step_if_finite(optimizer, squared_norm(trained).sqrt().float())
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [whole(t) for t in [*parameters, *states]]

    before = step(poison=False)
    poisoned = step(poison=True)
    after = step(poison=False)
    same = all(torch.equal(a, b) for a, b in zip(before, poisoned, strict=True))
    moved = not any(torch.equal(a, b) for a, b in zip(poisoned, after, strict=True))
    return same, moved


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for_loop"])
def test_a_gradient_that_is_not_finite_changes_nothing(implementation: str) -> None:
    assert on_ranks(2, masked_step, implementation) == [(True, True)] * 2


def rows(layouts: list[tuple[int, str]]) -> None:
    print("| ranks | layout | gradient | norm | loss |\n|---|---|---|---|---|")
    for world, layout in layouts:
        found = compare(world, layout)
        print(f"| {world} | `{layout}` | {found.gradient:.1e} | {found.norm:.1e} | {found.loss:.1e} |", flush=True)


def document() -> None:
    """Print docs/measurements/parity.md."""
    print("# Every layout against one process\n")
    print(f"All runs use torch {torch.__version__}, gloo on CPU and fp32. The overrides are `{' '.join(SMALL)}`.")
    print("Gradients are clipped. The vocabulary size 509 is prime, so it never divides evenly among ranks.")
    print(
        "Initial weights are bit-equal to those of a run in one process. `python -m tests.dist.test_layouts` prints this table.\n"
    )
    print("The last three columns show the largest relative difference from a run in one process. The column")
    print("`gradient` shows the largest ||difference|| / ||gradient|| of any parameter's gradient before the first")
    print("update. The columns `norm` and `loss` compare the global gradient norm and the loss in five steps of")
    print("AdamW.\n")
    rows(LAYOUTS)
    print("\nThe layouts of the second table use bf16. They are compared with `parallelism=single precision=bf16`:\n")
    rows(BF16)


if __name__ == "__main__":
    document()
