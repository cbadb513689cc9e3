"""Initial values of parameters, as distributions: what a network says of each of its parameters, by name."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

CUTOFF = 3.0
"""Truncation of the normal distribution, in standard deviations."""
TABLE_SIZE = 1024
"""Number of truncated-normal draws from which values beyond the cutoff are replaced."""


class Initial(ABC):
    """A distribution of initial values."""

    @abstractmethod
    def draw(self, shape: torch.Size, generator: Generator, device: torch.device) -> Tensor:
        """
        Values of a parameter, fp32, on the device; with the same seed the same to the last bit.

        Args:
            generator: of the device; on meta, where nothing is drawn, of the CPU.
        """


@dataclass(frozen=True)
class Constant(Initial):
    """The same value everywhere."""

    value: float

    def draw(self, shape: torch.Size, generator: Generator, device: torch.device) -> Tensor:
        return torch.full(shape, self.value, device=device)


@dataclass(frozen=True)
class TruncatedNormal(Initial):
    """A normal of mean 0, truncated at `CUTOFF` standard deviations."""

    std: float

    def draw(self, shape: torch.Size, generator: Generator, device: torch.device) -> Tensor:
        value = torch.empty(shape, device=device).normal_(generator=generator)
        # Values beyond the cutoff (0.3%) are replaced from a small table: several times faster on a CPU than inverting the
        # error function for all of them, and without data-dependent control flow.
        table = nn.init.trunc_normal_(torch.empty(TABLE_SIZE, device=device), a=-CUTOFF, b=CUTOFF, generator=generator)
        rows = table[: shape[-1]] if shape[-1] <= TABLE_SIZE else table.repeat(-(-shape[-1] // TABLE_SIZE))[: shape[-1]]
        return torch.where(value.abs() > CUTOFF, rows, value).mul_(self.std)


@dataclass(frozen=True)
class LogOfUniform(Initial):
    """The logarithm of what is uniform between two bounds above 0."""

    low: float
    high: float

    def draw(self, shape: torch.Size, generator: Generator, device: torch.device) -> Tensor:
        return torch.empty(shape, device=device).uniform_(self.low, self.high, generator=generator).log_()


@dataclass(frozen=True)
class InverseSoftplus(Initial):
    """What softplus maps to values whose logarithm is uniform between those of two bounds above 0."""

    low: float
    high: float

    def draw(self, shape: torch.Size, generator: Generator, device: torch.device) -> Tensor:
        bounds = math.log(self.low), math.log(self.high)
        value = torch.empty(shape, device=device).uniform_(*bounds, generator=generator).exp_()
        return value + torch.log(-torch.expm1(-value))


ONES = Constant(1.0)
ZEROS = Constant(0.0)
