"""The FSDP2 hooks through which units allocate their communication buffers.

The first optimizer step allocates dynamically. The buffers are then planned from its requests, which include those of every
micro batch and of recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from meshrunner.recipes.model.init_weights import clean_name
from meshrunner.recipes.model.network import network_of
from meshrunner.recipes.parallelism.buffers.buffer_pool import BufferPool
from meshrunner.recipes.parallelism.buffers.placement import PLANS
from meshrunner.recipes.parallelism.buffers.requests import REDUCE_SCATTER_INPUTS, all_gather_outputs


class Pools(NamedTuple):
    """The communication buffers of a model."""

    gathers: BufferPool
    reductions: BufferPool


pools_of: WeakKeyDictionary[nn.Module, Pools] = WeakKeyDictionary()
"""Model -> its buffers, for models with planned buffers."""


class PooledAllGather(DefaultAllGather):
    """The all-gather of a unit. Its output, which contains the input, is pooled."""

    def __init__(self, unit: str, pool: BufferPool) -> None:
        self.unit, self.pool = unit, pool

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.pool.take(self.unit, math.prod(size), dtype, device)


class PooledReduceScatter(DefaultReduceScatter):
    """The reduce-scatter of a unit's gradients. Only its input is pooled, because `.grad` is a view of its output."""

    def __init__(self, unit: str, pool: BufferPool) -> None:
        self.unit, self.pool = unit, pool
        self.is_input = True

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        # torch allocates twice for each reduce-scatter, first the input.
        is_input, self.is_input = self.is_input, not self.is_input
        if is_input:
            return self.pool.take(self.unit, math.prod(size), dtype, device)
        return super().allocate(size, dtype=dtype, device=device)


def install(model: nn.Module, plan: str, prefetch: int) -> None:
    """
    Have the units of a model allocate their communication buffers from pools.

    Args:
        plan: a key of PLANS.
        prefetch: as in `all_gather_outputs`.
    """
    network = network_of(model)
    units = {
        clean_name(f"{name}.").strip("."): each for name, each in model.named_modules() if isinstance(each, FSDPModule)
    }
    outputs = all_gather_outputs(prefetch, repeats=any(network.calls(name) > 1 for name in units))
    pools = Pools(BufferPool(PLANS[plan], outputs), BufferPool(PLANS[plan], REDUCE_SCATTER_INPUTS))
    for name, module in units.items():
        unit = name or "root"
        module.set_custom_all_gather(PooledAllGather(unit, pools.gathers))
        module.set_custom_reduce_scatter(PooledReduceScatter(unit, pools.reductions))
    pools_of[model] = pools


def step_done(model: nn.Module) -> int:
    """
    Return the number of buffers that came from the allocator in the step that has ended. Plan them after the first step.

    Planning waits for the end of a step because gradients may be reduced only in the last micro batch. Between two steps no
    buffer is in use, and forward begins by making all streams wait for earlier work.
    """
    return sum(pool.step_done() for pool in pools_of[model])
