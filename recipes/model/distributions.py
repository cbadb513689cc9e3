"""Distributions of initial values. A network names one for each of its parameters."""

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
        """Draw the values of a parameter, fp32, on the device. The generator is there, too, or on the CPU for meta."""


@dataclass(frozen=True)
class Filled(Initial):
    """The same value everywhere."""

    value: float

    def draw(self, shape: torch.Size, generator: Generator, device: torch.device) -> Tensor:
        return torch.full(shape, self.value, device=device)


@dataclass(frozen=True)
class TruncatedNormal(Initial):
    """A normal distribution with mean 0, truncated at `CUTOFF` standard deviations."""

    std: float

    def draw(self, shape: torch.Size, generator: Generator, device: torch.device) -> Tensor:
        value = torch.empty(shape, device=device).normal_(generator=generator)
        # Values beyond the cutoff (0.3%) are replaced from a small table. On a CPU this is several times faster than
        # inverting the error function for every value, and it needs no data-dependent control flow.
        table = nn.init.trunc_normal_(torch.empty(TABLE_SIZE, device=device), a=-CUTOFF, b=CUTOFF, generator=generator)
        rows = table[: shape[-1]] if shape[-1] <= TABLE_SIZE else table.repeat(-(-shape[-1] // TABLE_SIZE))[: shape[-1]]
        return torch.where(value.abs() > CUTOFF, rows, value).mul_(self.std)


@dataclass(frozen=True)
class LogOfUniform(Initial):
    """The logarithm of a variable that is uniform between two positive bounds."""

    low: float
    high: float

    def draw(self, shape: torch.Size, generator: Generator, device: torch.device) -> Tensor:
        return torch.empty(shape, device=device).uniform_(self.low, self.high, generator=generator).log_()


@dataclass(frozen=True)
class InverseSoftplus(Initial):
    """Values whose softplus is log-uniform between two positive bounds."""

    low: float
    high: float

    def draw(self, shape: torch.Size, generator: Generator, device: torch.device) -> Tensor:
        bounds = math.log(self.low), math.log(self.high)
        value = torch.empty(shape, device=device).uniform_(*bounds, generator=generator).exp_()
        return value + torch.log(-torch.expm1(-value))  # softplus(this) = log(1 + exp(this)) = value


ONES = Filled(1.0)
ZEROS = Filled(0.0)
