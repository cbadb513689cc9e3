"""Sizes of the units of a wrap plan on one device, computed without building or wrapping anything. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class LocalParameter(NamedTuple):
    """A parameter on one device after tensor and expert parallelism, before data parallelism. The largest of uneven parts."""

    shape: tuple[int, ...]
    trained: bool
    is_stack: bool = False
    """Whether it stacks one matrix per expert. With expert parallelism only the matrices of this device count."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def padded(self, ranks: int) -> int:
        """Number of elements once the dimension that FSDP2 shards is padded to equal shards."""
        dim = stack_shard_dim(self.shape, ranks) if self.is_stack else 0
        return -(-self.shape[dim] // ranks) * ranks * self.numel // self.shape[dim]


class UnitParameters(NamedTuple):
    """The parameters of a unit on one device after tensor and expert parallelism, before data parallelism."""

    parameters: tuple[LocalParameter, ...]
    reshard_after_forward: bool | int
    """The value in `wrap_plan.Unit`; False for the root."""
    lookup: bool
    """The value in `wrap_plan.Unit`."""
    calls: int = 1
    """Number of times that a forward calls the unit."""

    def of(self, *, is_stack: bool) -> UnitParameters:
        """Return the unit with only its stacks of experts, or without them."""
        return self._replace(parameters=tuple(each for each in self.parameters if each.is_stack == is_stack))

    @property
    def trained(self) -> int:
        """Number of elements of the trained parameters."""
        return sum(parameter.numel for parameter in self.parameters if parameter.trained)

    @property
    def frozen(self) -> int:
        """Number of elements of the frozen parameters."""
        return sum(parameter.numel for parameter in self.parameters if not parameter.trained)


class Traffic(NamedTuple):
    """Bytes communicated for one unit in one step, before division among devices."""

    gathered: int
    reduced: int


class Stored(NamedTuple):
    """fp32 elements of one unit that a device stores between steps. The largest share if shards are uneven."""

    weights: int
    gradients: int
    trained: int
    """Elements that have optimizer state."""


def stack_shard_dim(shape: Sequence[int], ranks: int) -> int:
    """Return the dimension that a stack of matrices is sharded along: 0, or 1 if only the rows divide evenly."""
    return int(shape[0] % ranks > 0 and shape[1] % ranks == 0)
