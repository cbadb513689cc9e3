"""The global gradient norm on any mesh, and clipping by it.

torch's own `clip_grad_norm_` refuses parameters on different meshes and mixtures of DTensor and Tensor, and FSDP1's counts
one dimension of the mesh only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Trained(NamedTuple):
    """A parameter that is trained."""

    name: str
    parameter: nn.Parameter
    groups: tuple[dist.ProcessGroup, ...]
    """The process groups whose ranks hold different parts of it; along every other dimension of the mesh it is replicated."""


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradients(trained: Iterable[Trained]) -> list[Tensor]:
    """This rank's parts of the gradients. A rank whose part of a parameter is empty may have none."""
    return [_local(t.parameter.grad) for t in trained if t.parameter.grad is not None]


@torch.no_grad()
def global_norm(trained: Sequence[Trained]) -> Tensor:
    """
    2-norm over all gradients as if they were whole and in one place: 0-d, fp32, the same on every rank.

    Summed in fp64: on a CPU the error of a sum of millions in fp32 depends on how layouts cut the parameters, and by way of
    clipping that alone (2e-6 of the norm) had FSDP1 and FSDP2, else equal to the last bit, drift apart.

    A collective operation: every rank calls it with the same parameters in the same order.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Trained]] = {}
    for each in trained:
        by_groups.setdefault(each.groups, []).append(each)
    total = torch.zeros((), device=_local(trained[0].parameter).device, dtype=torch.float64)
    for groups, members in by_groups.items():
        parts = local_gradients(members)
        norms = torch._foreach_norm(parts, 2.0, dtype=torch.float64) if parts else (torch.zeros_like(total),)
        square = torch.linalg.vector_norm(torch.stack(norms)) ** 2
        for group in groups:
            dist.all_reduce(square, group=group)
        total += square
    return total.sqrt().float()


@torch.no_grad()
def clip_by_norm(trained: Iterable[Trained], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients in place so that their global norm is at most `max_norm`, without a synchronisation."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(local_gradients(trained), factor)
