"""The memory and traffic that `show` reports per device, against the tensors of real ranks after a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshrunner.recipes.assembly import assemble
from meshrunner.recipes.data.base import DataSpec
from meshrunner.recipes.data.loader import Loader
from meshrunner.recipes.model.network import network_of
from meshrunner.recipes.parallelism.mesh import build_mesh
from meshrunner.recipes.parallelism.unit_sizes import local_parameters
from meshrunner.recipes.pretrain import backward
from tests.composed import SMALL, experiment
from tests.dist.ranks import on_ranks

EXPERTS = "model=moe_tiny model.experts.ffn_dim=24 model.experts.shared_ffn_dim=20"
PREDICTIONS = (
    "model=hybrid_tiny model.pattern=*- model.mamba=null model.experts=null model.head_dim=8 model.mtp.depth=2"
)
FREEZE = "model.freeze=[tok_embeddings.*,layers.1.*]"
LAYOUTS = [
    (1, "parallelism=single"),
    (2, "parallelism=ddp"),
    (2, f"parallelism=ddp {FREEZE}"),
    (3, "parallelism=fsdp2"),
    (2, f"parallelism=fsdp2 {FREEZE}"),
    (2, "parallelism=fsdp2 model.tie_embeddings=true"),
    (4, "parallelism=hsdp2"),
    (4, "parallelism=fsdp2_tp micro_batch=3"),
    (2, "parallelism=tp parallelism.sequence_parallel=false micro_batch=6"),
    (3, "parallelism=fsdp1"),
    (
        3,
        "parallelism=fsdp1 model.dim=30 model.n_heads=5 model.n_kv_heads=5",
    ),  # parameters between which FSDP1 leaves gaps
    (2, f"parallelism=fsdp1 {FREEZE}"),
    (4, "parallelism=hsdp1"),
    (4, "parallelism=fsdp1_tp micro_batch=6"),
    (2, f"parallelism=fsdp2 {EXPERTS}"),
    (4, f"parallelism=fsdp2 {EXPERTS} model.experts.number=6"),
    (4, f"parallelism=fsdp2 {EXPERTS} parallelism.expert=2"),
    (2, f"parallelism=fsdp2 {EXPERTS} parallelism.expert=2"),
    (2, f"parallelism=tp {EXPERTS} micro_batch=6"),
    (3, f"parallelism=fsdp1 {EXPERTS}"),
]


def nbytes(tensors: list[Tensor]) -> int:
    """Return the bytes of the storages behind some tensors, counting shared ones once."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in local}.values())


def measured(overrides: tuple[str, ...]) -> tuple[int, int, int]:
    """Return the bytes of weights, gradients and optimizer state on this rank."""
    recipe = experiment(*overrides)
    degrees = recipe.parallelism.degrees(1, dist.get_world_size())
    mesh = build_mesh("cpu", degrees)
    model, trained, _ = assemble(recipe, mesh, torch.device("cpu"))
    optimizer = recipe.optimizer.build_for(trained)
    loader = Loader(
        recipe.data.open(DataSpec(recipe.model.vocab_size, recipe.seq_len, recipe.seed)),
        global_batch=recipe.accumulation(degrees.data)[0],
        micro_batch=recipe.micro_batch,
        rank=mesh.get_rank() // degrees.tensor,
        ranks=degrees.data,
        device=torch.device("cpu"),
        own=network_of(model).own,
    )
    backward(recipe, model, loader.next())
    loader.close()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    parameters = list(model.parameters())
    return nbytes(parameters), nbytes([p.grad for p in parameters if p.grad is not None]), nbytes(states)


def expected(overrides: tuple[str, ...], world: int) -> tuple[int, int, int]:
    recipe = experiment(*overrides)
    degrees = recipe.parallelism.degrees(1, world)
    network = recipe.model.on_meta(recipe.seq_len)
    units = local_parameters(
        network, recipe.wrap.plan(network, "always"), degrees.tensor, recipe.parallelism.expert
    ).values()
    held = [recipe.parallelism.stored(unit, recipe.precision, degrees) for unit in units]
    tensors = sum(parameter.trained for unit in units for parameter in unit.parameters)
    state = recipe.optimizer.state_bytes(sum(unit.trained for unit in held), tensors)
    assert state is not None
    return 4 * sum(unit.weights for unit in held), 4 * sum(unit.gradients for unit in held), state


@pytest.mark.slow_but(
    "1x*",
    "2x parallelism=ddp",
    "3x parallelism=fsdp2",
    "3x parallelism=fsdp1",
    "2x parallelism=fsdp2 model=moe_tiny model.experts.ffn_dim=24 model.experts.shared_ffn_dim=20",
)
@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=[f"{world}x {layout}" for world, layout in LAYOUTS])
def test_what_a_device_holds(world: int, layout: str) -> None:
    overrides = (*SMALL, *layout.split())
    weights, gradients, state = (max(each) for each in zip(*on_ranks(world, measured, overrides), strict=True))
    planned = expected(overrides, world)
    assert (weights, gradients) == planned[:2]
    if "sdp1" in layout:  # a bound: its ranks hold pieces of some parameters, and none of others
        assert 0.9 * planned[2] < state <= planned[2]
    else:
        assert state == planned[2]


def accumulated(overrides: tuple[str, ...]) -> tuple[int, int]:
    """Return the bytes of unsharded gradients between two micro batches, and of sharded gradients, on this rank."""
    recipe = experiment(*overrides)
    mesh = build_mesh("cpu", recipe.parallelism.degrees(1, dist.get_world_size()))
    model, _, _ = assemble(recipe, mesh, torch.device("cpu"))
    tokens = torch.zeros(recipe.micro_batch, recipe.seq_len, dtype=torch.long)
    with recipe.parallelism.accumulating(model, last=False):
        model(tokens, tokens).backward()
    found: list[Tensor | None] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):  # torch has no public name for it
            parameters: Any = module._get_fsdp_state()._fsdp_param_group.fsdp_params
            own = [p.unsharded_accumulated_grad for p in parameters]
            found += [p.unsharded_param.grad if g is None else g for p, g in zip(parameters, own, strict=True)]
        elif isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            flat: Any = module._handle.flat_param
            if flat.grad is not None and flat.grad.numel() > flat._local_shard.numel():
                found.append(flat.grad)
    shards = [p.grad for p in model.parameters() if p.grad is not None]
    return nbytes([gradient for gradient in found if gradient is not None]), nbytes(shards)


@pytest.mark.slow_but("fsdp1-fp32-hold", "fsdp2-bf16-hold")
@pytest.mark.parametrize("accumulate", ["reduce", "hold"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_what_accumulates_between_micro_batches(kind: str, precision: str, accumulate: str) -> None:
    overrides = (*SMALL, f"parallelism={kind}", f"precision={precision}", "global_batch=4")
    overrides += (f"parallelism.accumulate={accumulate}",)
    recipe = experiment(*overrides)
    degrees, network = recipe.parallelism.degrees(1, 2), recipe.model.on_meta(recipe.seq_len)
    units = local_parameters(
        network, recipe.wrap.plan(network, "always"), degrees.tensor, recipe.parallelism.expert
    ).values()
    if accumulate == "hold":
        whole = sum(
            recipe.parallelism.stored(unit, recipe.precision, degrees).unsharded_gradient_bytes for unit in units
        )
        assert [rank[0] for rank in on_ranks(2, accumulated, overrides)] == [whole] * 2
    else:
        shards = 4 * sum(recipe.parallelism.stored(unit, recipe.precision, degrees).gradients for unit in units)
        ranks = on_ranks(2, accumulated, overrides)
        assert [rank[0] for rank in ranks] == [0, 0]
        assert max(rank[1] for rank in ranks) == shards


class Communicated(TorchDispatchMode):
    """A mode that counts the bytes all-gathered and reduced, before division among ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered = self.reduced = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d._allgather_base_.default:
            self.gathered += args[0].nbytes
        elif func is torch.ops.c10d.allgather_.default:  # FSDP1's over gloo
            self.gathered += sum(each.nbytes for each in args[0][0])
        elif func is torch.ops.c10d._reduce_scatter_base_.default:
            self.reduced += args[1].nbytes
        elif func is torch.ops.c10d.allreduce_.default:
            self.reduced += sum(each.nbytes for each in args[0])
        return func(*args, **(kwargs or {}))


def communicated(overrides: tuple[str, ...]) -> tuple[int, int]:
    """Return the bytes that the micro batches of a step gather and reduce."""
    recipe = experiment(*overrides)
    degrees = recipe.parallelism.degrees(1, dist.get_world_size())
    model, _, _ = assemble(recipe, build_mesh("cpu", degrees), torch.device("cpu"))
    tokens = torch.zeros(recipe.micro_batch, recipe.seq_len, dtype=torch.long)
    with Communicated() as seen:
        backward(recipe, model, [(tokens, tokens)] * recipe.accumulation(degrees.data)[1])
    return seen.gathered, seen.reduced


@pytest.mark.slow_but("parallelism=fsdp1", "parallelism=fsdp2")
@pytest.mark.parametrize(
    "layout",
    [
        "parallelism=fsdp1",
        "parallelism=fsdp1 parallelism.reshard_after_forward=never",
        "parallelism=fsdp2",
        "parallelism=fsdp2 parallelism.prefetch=2",
        "parallelism=fsdp2 parallelism.reshard_after_forward=never",
        "parallelism=fsdp2 parallelism.accumulate=hold",
        "parallelism=fsdp2 precision=bf16",
        "parallelism=fsdp2 model.tie_embeddings=true",
        f"parallelism=fsdp2 {EXPERTS}",
        f"parallelism=fsdp2 {EXPERTS} parallelism.expert=2",
        f"parallelism=fsdp1 {EXPERTS}",
        f"parallelism=fsdp1 {PREDICTIONS}",
        f"parallelism=fsdp1 {PREDICTIONS} parallelism.reshard_after_forward=never",
        f"parallelism=fsdp2 {PREDICTIONS}",
        f"parallelism=fsdp2 {PREDICTIONS} parallelism.reshard_after_forward=never",
        f"parallelism=fsdp2 {PREDICTIONS} parallelism.accumulate=hold",
    ],
)
def test_what_is_communicated_is_what_show_says(layout: str) -> None:
    """Two ranks divide these shapes evenly, so nothing is padded."""
    overrides = (*SMALL, "model.vocab_size=512", "global_batch=6", *layout.split())
    if PREDICTIONS in layout:
        overrides = tuple(word for word in overrides if not word.startswith("model.n_layers"))
    recipe = experiment(*overrides)
    degrees, network = recipe.parallelism.degrees(1, 2), recipe.model.on_meta(recipe.seq_len)
    units = local_parameters(network, recipe.wrap.plan(network, recipe.parallelism.reshard(2)), 1).values()
    each = [recipe.parallelism.traffic(unit, recipe.precision, degrees, 3) for unit in units]
    planned = sum(unit.gathered for unit in each), sum(unit.reduced for unit in each)
    assert on_ranks(2, communicated, overrides) == [planned] * 2
