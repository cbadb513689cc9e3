"""Initial weights that do not depend on the layout.

Each parameter is drawn from its own generator, seeded by the run's seed and the parameter's name, and a shard is a slice of
that draw. One rank, FSDP1, FSDP2, tensor parallelism or any mix therefore start bit-identical (per device type).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from meshrunner.recipes.model.initial import Initial
from meshrunner.recipes.model.network import Network

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""Prefixes that FSDP1, activation checkpointing and torch.compile add to parameter names."""


def parameter_seed(seed: int, name: str) -> int:
    """A 63-bit seed from the run's seed and the parameter's fully qualified name."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def initial_value(name: str, shape: torch.Size, initial: Initial, seed: int, device: torch.device) -> Tensor:
    """The full initial value of a parameter, fp32."""
    generator = torch.Generator("cpu" if device.type == "meta" else device)
    return initial.draw(shape, generator.manual_seed(parameter_seed(seed, name)), device)


@dataclass(frozen=True)
class Initialiser:
    """Sets the initial values of a network before, while or after it is sharded. Purely local, no communication."""

    network: Network
    seed: int
    device: torch.device

    def materialise(self, model: nn.Module, *, offload: bool = False) -> None:
        """
        Allocate and initialise a network on meta, sharded or not; values are drawn on the device.

        Args:
            model: the network or its wrapper.
            offload: parameters are kept in host memory; buffers are on the device even then.
        """
        model.to_empty(device="cpu" if offload else self.device)
        if offload:
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, torch.empty_like(buffer, device=self.device))
        self.network.tie_weights()
        for name, parameter in model.named_parameters():
            self._initialise(clean_name(name), parameter)
        self.network.reset_buffers()

    def param_init_fn(self) -> Callable[[nn.Module], None]:
        """FSDP1's `param_init_fn`: materialises one module of the network, without its submodules."""
        names = {module: clean_name(f"{name}.").strip(".") for name, module in self.network.named_modules()}
        # A tied parameter is listed once, under its first name.
        own = {clean_name(name) for name, _ in self.network.named_parameters()}

        def materialise(module: nn.Module) -> None:
            if any(p.is_meta for p in module.parameters(recurse=False)) or module is self.network:
                module.to_empty(device=self.device, recurse=False)
                self.network.tie_weights()
            for name, parameter in module.named_parameters(names[module], recurse=False):
                if name in own:
                    self._initialise(name, parameter)
            if module is self.network:
                self.network.reset_buffers()

        return materialise

    def whole(self, name: str, shape: torch.Size) -> Tensor:
        """The full initial value of a parameter, fp32, for a layout that cuts it as no DTensor is cut."""
        value = nn.Parameter(torch.empty(shape, device=self.device))
        self._initialise(name, value)
        return value.detach()

    @torch.no_grad()
    def _initialise(self, name: str, parameter: nn.Parameter) -> None:
        initial = self.network.initial(name)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if self.network.is_stack(name):
            # A whole stack can take more memory than all else: a rank draws only the matrices that it has a part of.
            for number, own in zip(_own_numbers(parameter), local, strict=True):
                value = initial_value(f"{name}.{number}", parameter.shape[1:], initial, self.seed, self.device)
                own.copy_(_own_part(value, parameter, first_dim=1))
        else:
            value = initial_value(name, parameter.shape, initial, self.seed, self.device)
            local.copy_(_own_part(value, parameter))


def _own_numbers(stack: nn.Parameter) -> range:
    """The matrices of a stack that this rank has, or has a part of."""
    numbers = range(stack.shape[0])
    if isinstance(stack, DTensor):
        mesh = stack.device_mesh
        cuts = {
            dim: cut
            for dim, cut in enumerate(stack.placements)
            if isinstance(cut, Shard | _StridedShard) and cut.dim == 0
        }
        # A strided shard is a shard of what the mesh dimensions behind it have cut.
        for dim in sorted(cuts, key=lambda dim: isinstance(cuts[dim], _StridedShard)):
            size = -(-len(numbers) // mesh.size(dim))
            begin = mesh.get_local_rank(dim) * size
            numbers = numbers[begin : begin + size]
    return numbers


def _own_part(value: Tensor, parameter: nn.Parameter, first_dim: int = 0) -> Tensor:
    """This rank's part of a value that a parameter has in its dimensions from `first_dim` on."""
    if not isinstance(parameter, DTensor):
        return value
    sliced = distribute_tensor(
        value,
        parameter.device_mesh,
        [_of_later_dims(placement, first_dim) for placement in parameter.placements],
        src_data_rank=None,
    )
    assert isinstance(sliced, DTensor)
    return sliced.to_local()


def _of_later_dims(placement: Placement, first_dim: int) -> Placement:
    """A placement as it is for a tensor without the dimensions before `first_dim`."""
    match placement:
        case Shard(dim=dim) | _StridedShard(dim=dim) if dim < first_dim:
            return Replicate()
        case _StridedShard(dim=dim):  # in torch before 2.13 it is a Shard, too
            return _StridedShard(dim - first_dim, split_factor=placement.split_factor)
        case Shard(dim=dim):
            return Shard(dim - first_dim)
    return placement


def clean_name(name: str) -> str:
    """A parameter's name in the network as it was built, without the prefixes of wrappers."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")  # DDP
