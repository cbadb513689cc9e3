"""The global gradient norm on any mesh, and gradient clipping. torch's `clip_grad_norm_` rejects parameters on different meshes,
and mixtures of DTensor and Tensor. FSDP1's `clip_grad_norm_` reduces over only one mesh dimension."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrunner.recipes.model.init_weights import local_part


class Trainable(NamedTuple):
    """A trained parameter, and the process groups that it is sharded over."""

    name: str
    parameter: nn.Parameter
    shard_groups: tuple[dist.ProcessGroup, ...]
    """Process groups whose ranks hold different shards. The parameter is replicated over all other mesh dimensions."""
    is_matrix: bool = False
    """Whether the parameter is in `Network.matrices`."""


def local_gradients(trained: Iterable[Trainable]) -> list[Tensor]:
    """Return this rank's gradient shards. Skip parameters without a gradient, such as some empty shards."""
    gradients = (each.parameter.grad for each in trained)
    return [local_part(g) for g in gradients if g is not None]


@torch.no_grad()
def squared_norm(trained: Sequence[Trainable], device: torch.device | None = None) -> Tensor:
    """Return the squared 2-norm of full gradients: 0-d, fp64. All ranks of a parameter's groups must pass the same parameters. An
    fp32 sum on a CPU would have a relative error of 2e-6 that depends on the sharding. FSDP1 and FSDP2 would then clip
    differently, although their gradients are equal. device: the device of the all-reduce; default: the parameters' device."""
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Trainable]] = {}
    for each in trained:
        by_groups.setdefault(each.shard_groups, []).append(each)
    total = torch.zeros((), device=device or trained[0].parameter.device, dtype=torch.float64)
    for shard_groups, members in by_groups.items():
        parts = local_gradients(members)
        norms = torch._foreach_norm(parts, 2.0, dtype=torch.float64) if parts else (torch.zeros_like(total),)
        square = torch.linalg.vector_norm(torch.stack(norms)).to(total.device) ** 2
        for group in shard_groups:
            dist.all_reduce(square, group=group)
        total += square
    return total


@torch.no_grad()
def clip_by_norm(trained: Sequence[Trainable], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place if `norm` exceeds `max_norm`. The host waits for the device only if gradients are
    in host memory, because scaling them there needs the value of `norm`."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if gradients := local_gradients(trained):  # a pipeline stage may have no gradients
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
