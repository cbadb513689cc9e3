"""Initial weights that are bit-identical in all parallel layouts, on devices of the same type. Each parameter has a generator,
seeded by the run's seed and the parameter's name. A rank draws the full parameter and keeps only its shard. If the weights are
in files, a rank reads only its shard."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshrunner.recipes.model.base import clean_name
from meshrunner.recipes.model.network import Initial, Network


def initial_value(name: str, shape: torch.Size, initial: Initial, seed: int, device: torch.device) -> Tensor:
    """Draw the full initial value of a parameter in fp32."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator("cpu" if device.type == "meta" else device)
    return initial.draw(shape, generator.manual_seed(int.from_bytes(digest, "little") >> 1), device)  # 63 bits


Read = Callable[[str, list[range], Tensor], None]
"""Function that copies the part of a parameter (name, indices along each dimension) from a file to a tensor."""


@dataclass(frozen=True)
class Initialiser:
    """Sets the initial values of a network before, during or after sharding, without communication."""

    network: Network
    seed: int
    device: torch.device
    read: Read | None = None
    """Function that reads the initial values; None: random values."""

    def materialise(self, model: nn.Module, *, offload: bool = False) -> None:
        """Allocate `model` and set its initial values. offload: put parameters on the host, but buffers on the device."""
        model.to_empty(device="cpu" if offload else self.device)
        self.network.tie_weights()
        for name, parameter in model.named_parameters():
            self._initialise(clean_name(name), parameter)
        self.reset_buffers()

    def param_init_fn(self) -> Callable[[nn.Module], None]:
        """Return FSDP1's `param_init_fn`, which materialises one module of the network without its submodules."""
        names = {module: clean_name(name) for name, module in self.network.named_modules()}
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
                self.reset_buffers()

        return materialise

    def reset_buffers(self) -> None:
        """Let the network compute its buffers on the device. Other tensors created meanwhile are there, too."""
        for module in self.network.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.device.type != self.device.type:
                    setattr(module, name, torch.empty_like(buffer, device=self.device))
        with self.device:
            self.network.reset_buffers()

    def whole(self, name: str, shape: torch.Size) -> Tensor:
        """Return the full initial value of a parameter in fp32, for layouts whose shards are not DTensors."""
        value = nn.Parameter(torch.empty(shape, device=self.device))
        self._initialise(name, value)
        return value.detach()

    @torch.no_grad()
    def _initialise(self, name: str, parameter: nn.Parameter) -> None:
        initial = self.network.initial(name)
        local, own = local_part(parameter), own_indices(parameter)
        if self.read is not None:
            self.read(name, own, local)
        elif self.network.is_stack(name):
            # Draw only the matrices of this rank: a whole stack of experts can take more memory than all other parameters.
            for number, shard in enumerate(local, start=own[0].start):
                value = initial_value(f"{name}.{number}", parameter.shape[1:], initial, self.seed, self.device)
                shard.copy_(narrowed(value, own[1:]))
        else:
            value = initial_value(name, parameter.shape, initial, self.seed, self.device)
            local.copy_(narrowed(value, own))


def narrowed(value: Tensor, own: list[range]) -> Tensor:
    """Return the part of a tensor at the given indices, one range for each dimension."""
    # Use `narrow`, because fake CUDA tensors cannot be sliced.
    for dim, indices in enumerate(own):
        value = value.narrow(dim, indices.start, len(indices))
    return value


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_indices(parameter: Tensor) -> list[range]:
    """Return this rank's indices along each dimension of a parameter: all indices unless the parameter is sharded."""
    own = [range(size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        # A strided shard divides the shards of later mesh dimensions, so process those dimensions first.
        placed = sorted(enumerate(parameter.placements), key=lambda each: isinstance(each[1], _StridedShard))
        for mesh_dim, placement in placed:
            if isinstance(placement, Shard | _StridedShard):
                indices = own[placement.dim]
                size = -(-len(indices) // mesh.size(mesh_dim))
                begin = mesh.get_local_rank(mesh_dim) * size
                own[placement.dim] = indices[begin : begin + size]
    return own
