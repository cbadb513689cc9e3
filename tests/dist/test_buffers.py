"""Planned communication buffers against dynamic ones.

Losses, norms and weights are bitwise equal, every unit has one address, and nothing is allocated from the second step on. The
requests predicted from the wrap plan are those of FSDP2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshrunner.recipes.assembly import assemble
from meshrunner.recipes.data.base import DataSpec
from meshrunner.recipes.data.loader import Loader
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.loss import chunked as chunked_loss
from meshrunner.recipes.model.network import network_of
from meshrunner.recipes.parallelism.buffers import buffer_pool
from meshrunner.recipes.parallelism.buffers.buffer_pool import BufferPool, pools_of
from meshrunner.recipes.parallelism.mesh import build_mesh
from meshrunner.recipes.parallelism.unit_sizes import local_parameters
from meshrunner.recipes.pretrain import update
from tests.composed import experiment
from tests.dist.ranks import on_ranks
from tests.dist.test_experts import EXPERTS
from tests.dist.test_hybrid import HYBRID
from tests.dist.test_layouts import CPU

STEPS = 20
HYBRIDS, MOE = (" ".join((*model, "parallelism=fsdp2")) for model in (HYBRID, EXPERTS))
"""Overrides for models with units of different sizes. In the first, the output projection is called three times."""
PLANNED = ("max_pool", "scheduled")
FROZEN = "model.freeze=[tok_embeddings.*,layers.1.attention.*]"
NESTED = "wrap=rules wrap.rules=[{match:layers.*},{match:layers.*.feed_forward.experts}]"
OUTPUT = "wrap=rules wrap.rules=[{match:layers.*},{match:output}]"
CHUNKED = "loss=chunked loss.tokens=13"


class Run:
    """A model with units of different sizes, and its training steps."""

    def __init__(self, words: str) -> None:
        self.recipe = experiment(*words.split())
        self.degrees = self.recipe.parallelism.degrees(1, dist.get_world_size())
        mesh = build_mesh("cpu", self.degrees)
        self.model, self.trained, _ = assemble(self.recipe, mesh, CPU)
        self.optimizer = self.recipe.optimizer.build_for(self.trained)
        self.sequences = self.recipe.data.open(DataSpec(self.recipe.model.vocab_size, self.recipe.seq_len, 0))
        self.ranks = {"rank": mesh.get_rank() // self.degrees.tensor, "ranks": self.degrees.data}

    def steps(self, count: int, first: int = 1) -> list[tuple[float, float, float | None]]:
        """Return this rank's loss, the gradient norm, and the number of allocated buffers of every step."""
        total, _ = self.recipe.accumulation(self.degrees.data)
        own = network_of(self.model).own
        size = {"global_batch": total, "micro_batch": self.recipe.micro_batch}
        loader = Loader(self.sequences, **size, **self.ranks, device=CPU, own=own, first=(first - 1) * total)
        found = []
        for _ in range(count):
            batches = loader.next()
            loss, grad_norm, observed = update(self.recipe, self.model, self.trained, self.optimizer, batches, 1e-3)
            allocations = observed.get("perf/comm_allocations")
            counted = None if allocations is None else allocations.item()
            found.append((loss.item(), grad_norm.item(), counted))
        loader.close()
        return found

    def weights(self) -> list[Tensor]:
        """Return this rank's shards."""
        parameters: list[nn.Parameter] = [*self.model.parameters()]
        return [(each.to_local() if isinstance(each, DTensor) else each).detach() for each in parameters]


class Placed(NamedTuple):
    """A run whose buffers may be planned."""

    steps: list[tuple[float, float, float | None]]
    weights: list[Tensor]
    addresses: dict[tuple[int, str], set[int]]
    """(pool, unit) -> addresses of its buffers from the second step on."""


def run(words: str, steps: int) -> Placed:
    addresses: dict[tuple[int, str], set[int]] = defaultdict(set)
    take = BufferPool.take

    def noted(pool: BufferPool, unit: str, *how: Any) -> Tensor:
        buffer = take(pool, unit, *how)
        if pool.offsets:
            addresses[id(pool), unit].add(buffer.data_ptr())
        return buffer

    with patch.object(BufferPool, "take", noted):
        own = Run(words)
        return Placed(own.steps(steps), own.weights(), addresses)


def differences(cases: list[tuple[str, list[str]]], steps: int) -> list[str]:
    """
    Return the differences between a dynamic run and planned ones, and other faults of the planned ones.

    cases: overrides of a dynamic run, and the additional ones of planned runs.
    """
    found = []
    for words, others in cases:
        expected = run(words, steps)
        assert not expected.addresses and {counted for *_, counted in expected.steps} == {None}
        for more in others:
            got = run(f"{words} {more}", steps)
            allocated = [counted for *_, counted in got.steps]
            wrong = {
                "losses": [step[0] for step in got.steps] != [step[0] for step in expected.steps],
                "norms": [step[1] for step in got.steps] != [step[1] for step in expected.steps],
                "weights": not all(map(Tensor.equal, got.weights, expected.weights)),
                "nothing was allocated in the first step": not allocated[0],
                "allocations": any(allocated[1:]),
                "nothing was pooled": not got.addresses,
                "addresses": any(len(each) > 1 for each in got.addresses.values()),
            }
            found += [f"{words} {more}: {what}" for what, it_is in wrong.items() if it_is]
    return found


def ways(ahead: tuple[int, ...] = (0, 2)) -> list[str]:
    return [f"parallelism.buffers={plan} parallelism.prefetch={n}" for plan, n in product(PLANNED, ahead)]


@pytest.mark.slow_cases("recomputed, three*")
@pytest.mark.parametrize(
    ("words", "more"),
    [
        ("micro_batch=6 precision=bf16", [ways()[0], ways()[3]]),
        ("micro_batch=2 activation_checkpoint=full", ways()[1:3]),
    ],
    ids=["bf16", "recomputed, three micro batches"],
)
def test_planned_is_dynamic_to_the_last_bit(words: str, more: list[str]) -> None:
    assert on_ranks(2, differences, [(f"{HYBRIDS} {words}", more)], 4) == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full", "selective_op"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_planned_is_dynamic_to_the_last_bit_over_twenty_steps(dtype: str, recompute: str) -> None:
    common = f"{HYBRIDS} precision={dtype} activation_checkpoint={recompute}"
    cases = [(f"{common} micro_batch={size}", ways()) for size in (6, 2)]
    assert on_ranks(2, differences, cases, STEPS) == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "parallelism=hsdp2 micro_batch=3",
        "parallelism=hsdp2",
        # experts whose width is a multiple of 16 bytes on each of two ranks
        "parallelism=fsdp2_tp micro_batch=3 model.experts.ffn_dim=32",
        "parallelism.reshard_after_forward=2 micro_batch=3",
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_planned_is_dynamic_on_meshes_of_two_dimensions(layout: str, dtype: str) -> None:
    recompute = "none" if "reshard" in layout else "selective_op"
    words = f"{HYBRIDS} {layout} precision={dtype} activation_checkpoint={recompute}"
    assert on_ranks(4, differences, [(words, ways())], STEPS) == [[]] * 4


OTHERS = [
    f"{MOE} parallelism.accumulate=hold micro_batch=2",
    f"{MOE} parallelism=hsdp2 parallelism.accumulate=hold micro_batch=2",
    f"{MOE} parallelism.cpu_offload=true micro_batch=6",
    f"{MOE} parallelism.reshard_after_forward=never micro_batch=6",
    f"{MOE} parallelism.reshard_after_forward=except_last micro_batch=6",
    f"{MOE} wrap=root_only micro_batch=6",
    f"{MOE} wrap=rules activation_checkpoint=full micro_batch=6",
    f"{MOE} compile=per_block compile.backend=aot_eager micro_batch=6",
    f"{MOE} model.tie_embeddings=true micro_batch=6",
    f"{MOE} {FROZEN} micro_batch=6",
    f"{MOE} {NESTED} micro_batch=6",
    f"{MOE} {OUTPUT} {CHUNKED} micro_batch=6",
    f"{HYBRIDS} micro_batch=6",
    f"{HYBRIDS} parallelism.reshard_after_forward=never micro_batch=2",
]


@pytest.mark.slow
def test_planned_is_dynamic_with_every_other_option() -> None:
    assert on_ranks(2, differences, [(words, ways()) for words in OTHERS], 4) == [[]] * 2


def largest(alive: Collection[frozenset[str]]) -> set[frozenset[str]]:
    """Return the sets that are subsets of no other. Only these decide a plan."""
    return {one for one in alive if not any(one < other for other in alive)}


def mispredicted(cases: list[str]) -> list[str]:
    """Return the runs whose first step requests other buffers than predicted from the wrap plan."""
    found = []
    for words in cases:
        own = Run(f"{words} parallelism.buffers=scheduled")
        recipe = own.recipe
        layout, network = recipe.parallelism, recipe.model.on_meta(recipe.seq_len)
        plan = recipe.wrap.plan(network, layout.reshard(own.degrees.shard))
        units = local_parameters(network, plan, own.degrees.tensor)
        named = {name: units[name] for name, _ in network.named_modules() if name in units}
        asked = layout.buffer_schedules(named, recipe.precision, own.degrees)
        assert asked is not None
        own.steps(1)
        for what, expected, pool in zip(("gathers", "reductions"), asked, pools_of[own.model], strict=True):
            got = pool.schedule()
            same_units = dict(got.units) == dict(expected.units)
            if not same_units or largest(got.alive) != largest(expected.alive):
                found.append(f"{words}: {what} are {got}, and not {expected}")
    return found


PREDICTED = {
    2: [
        f"{HYBRIDS} micro_batch=2 precision=bf16",
        f"{HYBRIDS} micro_batch=6 parallelism.prefetch=2",
        f"{MOE} parallelism.prefetch=2 micro_batch=6",
        f"{HYBRIDS} parallelism=hsdp2 micro_batch=6",
        *OTHERS,
    ],
    3: [f"{MOE} micro_batch=4", f"{MOE} micro_batch=4 model.experts.number=6 precision=bf16 precision.reduce=bf16"],
    4: [
        f"{HYBRIDS} parallelism=fsdp2_tp micro_batch=3 model.vocab_size=512",
        f"{HYBRIDS} parallelism=hsdp2 micro_batch=3",
        f"{MOE} parallelism.reshard_after_forward=2 micro_batch=3",
        f"{MOE} model.experts.number=6 micro_batch=3 parallelism.prefetch=2",
    ],
}


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.slow) for world in (3, 4))])
def test_what_is_predicted_is_asked_for(world: int) -> None:
    cases = PREDICTED[world] if world > 2 else PREDICTED[2][:4]
    assert on_ranks(world, mispredicted, cases) == [[]] * world


@pytest.mark.slow
def test_what_is_predicted_of_every_other_option_is_asked_for() -> None:
    assert on_ranks(2, mispredicted, PREDICTED[2][4:]) == [[]] * 2


def refusals() -> list[str]:
    """Return the errors for a unit moved by hand, one gathered twice in a row, and one in a recomputed block."""

    def said(own: Run) -> str:
        try:
            own.steps(2)
        except ConfigError as error:
            return str(error)
        return "nothing"

    found = []
    with patch.object(buffer_pool, "PATIENCE_S", 0.5):
        moved = Run(f"{MOE} micro_batch=6 parallelism.buffers=scheduled")
        moved.steps(2)
        offsets = pools_of[moved.model][0].offsets
        offsets["layers.1"] = offsets["layers.0"]
        found.append(said(moved))
        with patch.object(chunked_loss, "takes_chunks", lambda output: False):
            found.append(said(Run(f"{MOE} {OUTPUT} {CHUNKED} micro_batch=6 parallelism.buffers=max_pool")))
        several = "wrap=rules wrap.rules=[{match:layers.*},{match:layers.*.attention.w*}]"
        found.append(
            said(Run(f"{MOE} {several} activation_checkpoint=full micro_batch=6 parallelism.buffers=scheduled"))
        )
    return found


def test_an_error_names_both_units() -> None:
    for moved, twice, nested in on_ranks(2, refusals):
        assert "'layers.1' would overwrite the buffer in use by 'layers.0'" in moved
        assert "'output' requests a second buffer while its first buffer is in use" in twice
        assert "'layers.2.attention.wk' would overwrite the buffer in use by 'layers.2.attention.wo'" in nested
