"""Initial weights that do not depend on the layout.

Every parameter is drawn from a generator of its own, seeded by the run's seed and the parameter's name, and a shard is a
slice of that draw. So one rank, FSDP1, FSDP2, tensor parallelism or any mix begin bit-identically (per device type).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from meshrunner.recipes.model.network import Network

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""What FSDP1, activation checkpointing and torch.compile insert into the names of parameters."""
CUT = 3.0
"""Standard deviations at which the normal distribution is truncated."""
SPARE = 1024
"""Draws of the truncated normal that replace those beyond the cut."""


def parameter_seed(seed: int, name: str) -> int:
    """63 bits from the run's seed and the parameter's fully qualified name."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def initial_value(name: str, shape: torch.Size, std: float | None, seed: int, device: torch.device) -> Tensor:
    """The whole initial value of a parameter, fp32: ones, or a normal of `std` truncated at `CUT` standard deviations."""
    if std is None:
        return torch.ones(shape, device=device)
    generator = torch.Generator(device).manual_seed(parameter_seed(seed, name))
    value = torch.empty(shape, device=device).normal_(generator=generator)
    # What lies beyond the cut (0.3%) takes a value from a small table of draws within it: several times faster on a CPU
    # than inverting the error function for all, and without control flow that depends on the values.
    spare = nn.init.trunc_normal_(torch.empty(SPARE, device=device), a=-CUT, b=CUT, generator=generator)
    rows = spare[: shape[-1]] if shape[-1] <= SPARE else spare.repeat(-(-shape[-1] // SPARE))[: shape[-1]]
    return torch.where(value.abs() > CUT, rows, value).mul_(std)


@dataclass(frozen=True)
class Initial:
    """The initial values of a network, to be put in place before, while or after it is sharded. Local work only."""

    network: Network
    seed: int
    device: torch.device

    def materialise(self, model: nn.Module) -> None:
        """Give a network on meta, sharded or not, its memory, parameters and buffers. `model` is it or wraps it."""
        model.to_empty(device=self.device)
        self.network.tie_weights()
        for name, parameter in model.named_parameters():
            self._fill(clean_name(name), parameter)
        self.network.reset_buffers()

    def module_by_module(self) -> Callable[[nn.Module], None]:
        """A function that materialises one module of the network, without the modules below it: FSDP1 asks for it."""
        names = {module: clean_name(f"{name}.").strip(".") for name, module in self.network.named_modules()}
        own = {
            clean_name(name) for name, _ in self.network.named_parameters()
        }  # a tied parameter once, by its first name

        def materialise(module: nn.Module) -> None:
            if any(p.is_meta for p in module.parameters(recurse=False)) or module is self.network:
                module.to_empty(device=self.device, recurse=False)
                self.network.tie_weights()
            for name, parameter in module.named_parameters(names[module], recurse=False):
                if name in own:
                    self._fill(name, parameter)
            if module is self.network:
                self.network.reset_buffers()

        return materialise

    @torch.no_grad()
    def _fill(self, name: str, parameter: nn.Parameter) -> None:
        value = initial_value(name, parameter.shape, self.network.initial_std(name), self.seed, self.device)
        if isinstance(parameter, DTensor):
            sliced = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            assert isinstance(sliced, DTensor)
            parameter.to_local().copy_(sliced.to_local())
        else:
            parameter.copy_(value)


def clean_name(name: str) -> str:
    """A parameter's name in the network as it was built, without what wrappers put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")  # DDP's
