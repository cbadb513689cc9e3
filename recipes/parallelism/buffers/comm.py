"""
The hooks of FSDP2 through which units ask a pool for their communication buffers.

The first optimizer step is dynamic, and the plan is made from what was asked for in it, micro batches and recomputation included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from meshrunner.recipes.model.init_weights import clean_name
from meshrunner.recipes.model.network import network_of
from meshrunner.recipes.parallelism.buffers.plan import PLANS
from meshrunner.recipes.parallelism.buffers.pool import Pool
from meshrunner.recipes.parallelism.buffers.requests import INPUTS_OF_REDUCTIONS, outputs_of_gathers


def _collective(name: str, before: str) -> Callable[..., dist.Work | None]:
    """A collective that has another name before torch 2.13."""
    found: Callable[..., dist.Work | None] = getattr(dist, name, None) or getattr(dist, before)
    return found


_all_gather = _collective("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _collective("reduce_scatter_single", "reduce_scatter_tensor")


class Pools(NamedTuple):
    """The buffers of a model."""

    gathers: Pool
    reductions: Pool


pools_of: WeakKeyDictionary[nn.Module, Pools] = WeakKeyDictionary()
"""Model -> its buffers, where they are planned."""


class PooledAllGather(AllGather):
    """The all-gather of a unit; its output, of which the input is a part, is pooled."""

    def __init__(self, unit: str, pool: Pool) -> None:
        self.unit, self.pool = unit, pool

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.pool.take(self.unit, math.prod(size), dtype, device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class PooledReduceScatter(ReduceScatter):
    """The reduction of a unit's gradients; its input is pooled. `.grad` is a view of its output."""

    def __init__(self, unit: str, pool: Pool) -> None:
        self.unit, self.pool = unit, pool
        self.is_input = True

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        # torch asks twice for a reduction, first for the input.
        is_input, self.is_input = self.is_input, not self.is_input
        if is_input:
            return self.pool.take(self.unit, math.prod(size), dtype, device)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        return _reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def install(model: nn.Module, plan: str, prefetch: int) -> None:
    """
    Have the units of a model ask for their buffers here.

    Args:
        plan: a key of PLANS.
        prefetch: as of `outputs_of_gathers`.
    """
    network = network_of(model)
    units = {
        clean_name(f"{name}.").strip("."): each for name, each in model.named_modules() if isinstance(each, FSDPModule)
    }
    gathers = outputs_of_gathers(prefetch, repeats=any(network.calls(name) > 1 for name in units))
    pools = Pools(Pool(PLANS[plan], gathers), Pool(PLANS[plan], INPUTS_OF_REDUCTIONS))
    for name, module in units.items():
        unit = name or "root"
        module.set_custom_all_gather(PooledAllGather(unit, pools.gathers))
        module.set_custom_reduce_scatter(PooledReduceScatter(unit, pools.reductions))
    pools_of[model] = pools


def step_done(model: nn.Module) -> int:
    """
    How many buffers the allocator served in the optimizer step that has ended; after the first one, they are planned.

    Not earlier: gradients may be reduced in the last micro batch alone. And between two steps no buffer is in use, and forward
    begins with all streams waiting for what was issued before.
    """
    return sum(pool.step_done() for pool in pools_of[model])
