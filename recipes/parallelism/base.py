"""The `parallelism` group: degrees (the same for every kind) and the mechanism (one class per kind)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import AutoCount, Count, Option, whole

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from meshrunner.recipes.init_weights import Initial
    from meshrunner.recipes.parallelism.wrap_plan import UnitParameters, WrapPlan
    from meshrunner.recipes.precision import Precision

    Groups = tuple[ProcessGroup, ...]

Reshard = Annotated[
    int | Literal["always", "never", "except_last"], whole("always", "never", "except_last", at_least=2)
]


class Degrees(NamedTuple):
    """Devices along each dimension of the mesh; their product is the number of devices."""

    replicate: int
    shard: int
    tensor: int

    @property
    def data(self) -> int:
        """Data-parallel ranks: each sees its own part of the global batch."""
        return self.replicate * self.shard


class Traffic(NamedTuple):
    """Bytes of one unit in one step, before they are divided among devices."""

    gathered: int
    reduced: int


class Parallelism(Option):
    """How a model is spread over devices."""

    kinds: ClassVar[dict[str, str]] = {
        "single": "meshrunner.recipes.parallelism.single:Single",
        "ddp": "meshrunner.recipes.parallelism.ddp:DDP",
        "fsdp1": "meshrunner.recipes.parallelism.fsdp1:FSDP1",
        "fsdp2": "meshrunner.recipes.parallelism.fsdp2:FSDP2",
    }

    wraps_units: ClassVar[bool] = False
    """Whether the units of the wrap plan are gathered one by one."""

    shard: AutoCount
    """Devices that share one copy of parameters, gradients and optimizer state; auto: what the other degrees leave."""
    replicate: Count
    """Copies of the model, each sharded over `shard` devices."""
    tensor: Count
    """Devices that split each matrix product."""
    sequence_parallel: bool
    """Between the matrix products each of the `tensor` devices holds a part of the sequence, not all of it."""
    loss_parallel: bool
    """The logits stay split over the vocabulary on the `tensor` devices, and so does the cross entropy."""
    reshard_after_forward: Reshard
    """Free a block's gathered parameters after its forward and gather them again in backward: always, never, except_last
    (the last block's are needed at once), or the number of devices to keep them sharded over meanwhile."""

    def degrees(self, nodes: int, workers: int) -> Degrees:
        """The degrees on nodes x workers devices, `auto` resolved; raises ConfigError that shows the arithmetic."""
        world = nodes * workers
        have = f"launch.nodes({nodes}) x launch.workers({workers}) = {world}"
        if self.shard == "auto":
            others = self.replicate * self.tensor
            if world % others:
                raise ConfigError(
                    f"parallelism: replicate({self.replicate}) x tensor({self.tensor}) = {others} does not divide {have}"
                )
            degrees = Degrees(self.replicate, world // others, self.tensor)
        else:
            degrees = Degrees(self.replicate, self.shard, self.tensor)
        if math.prod(degrees) != world:
            raise ConfigError(
                f"parallelism: shard({self.shard}) x replicate({self.replicate}) x tensor({self.tensor}) = "
                f"{math.prod(degrees)}, but {have}"
            )
        reshard = self.reshard_after_forward
        if isinstance(reshard, int) and (degrees.shard % reshard or reshard >= degrees.shard):
            raise ConfigError(
                f"parallelism: reshard_after_forward({reshard}) must be a divisor of shard({degrees.shard}) and smaller; "
                "all of them is 'always', one is 'never'"
            )
        return degrees

    @abstractmethod
    def apply(
        self, model: nn.Module, mesh: DeviceMesh, plan: WrapPlan, precision: Precision, initial: Initial
    ) -> nn.Module:
        """
        Spread a network over the data-parallel dimensions of the mesh, and give it its initial values.

        Args:
            model: on meta, already split over the mesh's `tensor` dimension.
            plan: which modules become units.
            initial: materialises the model, as soon as this kind of parallelism wants it.

        Returns:
            What is trained: `model`, or a wrapper around it.
        """

    def accumulating(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """A context around forward and backward of a micro batch: ranks exchange gradients in the last one of a step only."""
        return nullcontext()

    def traffic(self, unit: UnitParameters, precision: Precision, degrees: Degrees, micro_batches: int) -> Traffic:
        """Bytes of a unit's parameters that data parallelism gathers, and of its gradients that it reduces, in one step."""
        return Traffic(0, 0)

    def shard_groups(self, name: str, parameter: Tensor, mesh: DeviceMesh, split: Collection[str]) -> Groups:
        """
        The process groups whose ranks hold different parts of a parameter and its gradient; elsewhere it is replicated.

        Args:
            name: as the network names it.
            parameter: as `apply` left it.
            split: names of the parameters that tensor parallelism has split.
        """
        from torch.distributed.tensor import DTensor

        if not isinstance(parameter, DTensor):
            return ()
        own = parameter.device_mesh
        return tuple(own.get_group(dim) for dim, part in enumerate(parameter.placements) if not part.is_replicate())


def sharded_traffic(unit: UnitParameters, precision: Precision, degrees: Degrees, micro_batches: int) -> Traffic:
    """Traffic of fully sharded data parallelism: gathered in forward, and once more in backward where it was freed meanwhile;
    reduced once, in the last micro batch."""
    if degrees.shard == 1:
        return Traffic(0, 0) if degrees.replicate == 1 else Traffic(0, precision.reduce_bytes * unit.trained)
    times = micro_batches * (2 if unit.reshard_after_forward else 1)
    return Traffic(times * precision.param_bytes * (unit.trained + unit.frozen), precision.reduce_bytes * unit.trained)
