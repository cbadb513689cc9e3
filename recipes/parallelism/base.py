"""The `parallelism` group: the degrees are common to every kind, the mechanism is one class per kind."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import AutoCount, Count, Option, whole

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from meshrunner.recipes.model.init_weights import Initialiser
    from meshrunner.recipes.model.network import Network
    from meshrunner.recipes.parallelism.buffers.plan import Schedule
    from meshrunner.recipes.parallelism.wrap_plan import UnitParameters, WrapPlan
    from meshrunner.recipes.precision.base import Precision

    Groups = tuple[ProcessGroup, ...]

RESHARD = ("always", "never", "except_last")
Reshard = Annotated[int | Literal["always", "never", "except_last"], whole(*RESHARD, at_least=2)]


class Degrees(NamedTuple):
    """Devices along each dimension of the mesh; their product is the number of devices."""

    replicate: int
    shard: int
    tensor: int

    @property
    def data(self) -> int:
        """Number of data-parallel ranks; each gets its own slice of the global batch."""
        return self.replicate * self.shard


class Traffic(NamedTuple):
    """Bytes communicated for one unit in one step, before division among devices."""

    gathered: int
    reduced: int


class Held(NamedTuple):
    """Elements of one unit that a device holds from step to step; of devices with uneven shards the one with most."""

    weights: int
    gradients: int
    trained: int
    """Elements that the optimizer has a state for."""


class Parallelism(Option):
    """A way to distribute a model over devices."""

    kinds: ClassVar[dict[str, str]] = {
        "single": "meshrunner.recipes.parallelism.single:Single",
        "ddp": "meshrunner.recipes.parallelism.ddp:DDP",
        "fsdp1": "meshrunner.recipes.parallelism.fsdp1:FSDP1",
        "fsdp2": "meshrunner.recipes.parallelism.fsdp2:FSDP2",
        "megatron_fsdp": "meshrunner.recipes.parallelism.megatron_fsdp:MegatronFSDP",
    }

    gathers_lookups_again: ClassVar[bool] = True
    """Whether backward all-gathers the table of an embedding again, which it has no use for."""
    frees_after_every_call: ClassVar[bool] = False
    """Whether backward frees a unit that forward called several times, and gathers it again, behind every call."""
    wraps_units: ClassVar[bool] = False
    """Whether the units of the wrap plan are wrapped and all-gathered one by one."""
    checks_units: ClassVar[bool] = False
    """Whether there are plans that it cannot wrap (see `check_units`), so that checking one needs the built model."""
    autocasts: ClassVar[bool] = False
    """Whether parameters are fp32 in forward, so that autocast is what lowers the precision; else `apply` lowers it."""

    shard: AutoCount
    """Devices that parameters, gradients and optimizer state are sharded over; auto: what the other degrees leave."""
    replicate: Count
    """Replicas of the model, each sharded over `shard` devices."""
    tensor: Count
    """Devices that each matrix product is split over."""
    expert: Count = 1
    """Devices, out of those of `shard`, that hold different experts of a block and exchange tokens; an expert is sharded over
    the others. 1: each has a shard of all."""
    sequence_parallel: bool
    """Shard activations between the matrix products over the sequence, on the `tensor` devices."""
    loss_parallel: bool
    """Keep the logits sharded over the vocabulary on the `tensor` devices, and the cross entropy too."""
    reshard_after_forward: Annotated[
        int | Literal["auto", "always", "never", "except_last"], whole("auto", *RESHARD, at_least=2)
    ]
    """Free a unit's gathered parameters after forward and all-gather them again in backward: always, never, except_last
    (backward needs the last block immediately), or the number of devices over which to keep them sharded meanwhile; auto:
    always, and never where `shard` is 1, as there nothing is gathered."""
    accumulate: Literal["reduce", "hold"] = "reduce"
    """When FSDP reduces gradients of several micro batches. reduce: in each, so that a device holds only its shard (and FSDP2's
    replicas exchange these once); hold: only in the last, and a device holds whole gradients until then, FSDP1 in the dtype of
    compute. `show` has the bytes of both. DDP's are always whole."""

    @property
    def units_ahead(self) -> int:
        """Units that are all-gathered ahead of the current one; 0: torch decides."""
        return 0

    @property
    def plans_buffers(self) -> bool:
        """Whether every unit has one place for its communication buffers."""
        return False

    @property
    def offloads(self) -> bool:
        """Whether parameters, gradients and optimizer state lie in host memory."""
        return False

    def degrees(self, nodes: int, workers: int) -> Degrees:
        """The degrees on nodes x workers devices, `auto` resolved; raises ConfigError with the arithmetic."""
        world = nodes * workers
        have = f"launch.nodes({nodes}) x launch.workers({workers}) = {world}"
        others = self.replicate * self.tensor
        if self.shard == "auto" and world % others:
            raise ConfigError(
                f"parallelism: replicate({self.replicate}) x tensor({self.tensor}) = {others} does not divide {have}"
            )
        degrees = Degrees(self.replicate, world // others if self.shard == "auto" else self.shard, self.tensor)
        if math.prod(degrees) != world:
            raise ConfigError(
                f"parallelism: shard({self.shard}) x replicate({self.replicate}) x tensor({self.tensor}) = "
                f"{math.prod(degrees)}, but {have}"
            )
        if degrees.shard % self.expert:
            raise ConfigError(
                f"parallelism: expert({self.expert}) does not divide shard({degrees.shard}), whose devices hold the experts"
            )
        reshard = self.reshard_after_forward
        if isinstance(reshard, int) and (degrees.shard % reshard or reshard >= degrees.shard):
            raise ConfigError(
                f"parallelism: reshard_after_forward({reshard}) must be a proper divisor of shard({degrees.shard}); "
                "for all devices use 'always', for one use 'never'"
            )
        return degrees

    @property
    def splits_logits(self) -> bool:
        """Whether the logits are split over the vocabulary: forward and backward then take place in torch's `loss_parallel`."""
        return self.tensor > 1 and self.loss_parallel

    def reshard(self, shard: int) -> Reshard:
        """`reshard_after_forward`, `auto` resolved for so many shards."""
        if self.reshard_after_forward == "auto":
            return "never" if shard == 1 else "always"
        return self.reshard_after_forward

    def problems(self) -> list[str]:
        """One sentence for each setting that this torch does not support."""
        return []

    def unsupported(self, device_type: str) -> str | None:
        """Reason that `cpu` or `cuda` devices of this node do not support it, with an alternative; None if they do."""
        return None

    def untraceable(self) -> str | None:
        """Reason that a step cannot be traced on the meta device; None if it can."""
        return None

    def check_units(self, network: Network, plan: WrapPlan) -> None:
        """Raise ConfigError for a plan whose units it cannot wrap."""

    @abstractmethod
    def apply(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        plan: WrapPlan,
        precision: Precision,
        initialiser: Initialiser,
        expert_mesh: DeviceMesh | None = None,
    ) -> nn.Module:
        """
        Distribute a network over the data-parallel dimensions of the mesh and initialise it.

        Args:
            model: on meta, already split over the mesh's `tensor` dimension.
            plan: modules that become units.
            initialiser: materialises the model, whenever this kind of parallelism needs it.
            expert_mesh: with expert parallelism the ranks of replicate x shard once more, as `build_expert_mesh` makes it.

        Returns:
            The model to train: `model` or a wrapper around it.
        """

    def keeps_some_fp32(self) -> bool:
        """Whether single parameters can stay in fp32 where `precision` lowers the others: see `Network.stays_fp32`."""
        return not self.wraps_units

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> Optimizer:
        """The optimizer to train with, of a model that `apply` returned; called before a checkpoint is loaded into it."""
        return optimizer

    def computing(self, precision: Precision, device_type: str) -> AbstractContextManager[None]:
        """Context manager around forward."""
        if not self.autocasts or precision.param_dtype is None:
            return nullcontext()
        import torch

        return torch.autocast(device_type, precision.param_dtype)

    def accumulating(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Context manager around a micro batch, the last of a step or not: when gradients are reduced, see `accumulate`."""
        return nullcontext()

    def after_step(self, model: nn.Module) -> dict[str, float]:
        """Called after every optimizer step. Returns further figures of the step, the same keys in every one."""
        return {}

    def traffic(self, unit: UnitParameters, precision: Precision, degrees: Degrees, micro_batches: int) -> Traffic:
        """
        Bytes that data parallelism all-gathers and reduces for one unit in one step.

        FSDP: an all-gather in forward, another in backward if resharded, a reduction in every micro batch or the last. Experts
        on several devices are sharded over fewer.
        """
        if self.expert > 1 and (stacks := unit.of(is_stack=True)).parameters:
            own = degrees._replace(shard=degrees.shard // self.expert)
            parts = (unit.of(is_stack=False), degrees), (stacks, own)
            each = [self._traffic(part, precision, over, micro_batches) for part, over in parts]
            return Traffic(sum(part.gathered for part in each), sum(part.reduced for part in each))
        return self._traffic(unit, precision, degrees, micro_batches)

    def _traffic(self, unit: UnitParameters, precision: Precision, degrees: Degrees, micro_batches: int) -> Traffic:
        reduced = precision.reduce_bytes * unit.trained
        if not self.wraps_units or degrees.shard == 1:
            return Traffic(0, reduced if degrees.replicate > 1 else 0)
        freed = bool(unit.reshard_after_forward)
        forward = unit.calls if freed else 1
        is_read = not unit.lookup or self.gathers_lookups_again
        backward = (unit.calls if self.frees_after_every_call else 1) - (not freed) if is_read else 0
        reductions = micro_batches
        if self.accumulate == "hold":  # a unit that is called again first reduces what it held
            reductions = 2 if self.frees_after_every_call and unit.calls > 1 < micro_batches else 1
        gathers = micro_batches * (forward + backward)
        return Traffic(gathers * precision.param_bytes * (unit.trained + unit.frozen), reductions * reduced)

    def held(self, unit: UnitParameters, precision: Precision, degrees: Degrees) -> Held:
        """What a device holds of one unit: whole parameters where there is one shard, else an even share of each."""
        weights, trained = (-(-count // degrees.shard) for count in (unit.trained + unit.frozen, unit.trained))
        return Held(weights, trained, trained)

    def accumulated(self, unit: UnitParameters, precision: Precision, degrees: Degrees) -> int:
        """Bytes of a unit's unsharded gradients, which a device holds between micro batches if `accumulate` is hold."""
        return 0

    def buffers_asked_for(
        self, units: Mapping[str, UnitParameters], precision: Precision, degrees: Degrees
    ) -> tuple[Schedule, Schedule] | None:
        """
        The buffers of all-gathers and of reductions that a micro batch asks for; None: they are not known in advance.

        Args:
            units: in the order of forward.
        """
        return None

    def shard_groups(self, name: str, parameter: Tensor, mesh: DeviceMesh, split: Collection[str]) -> Groups:
        """
        Process groups whose ranks hold different shards of a parameter and its gradient; elsewhere it is replicated.

        Args:
            name: name of the parameter in the network.
            parameter: the parameter after `apply`.
            split: names of the parameters that tensor parallelism has split.
        """
        from torch.distributed.tensor import DTensor

        if not isinstance(parameter, DTensor):
            return ()
        own = parameter.device_mesh
        return tuple(own.get_group(dim) for dim, part in enumerate(parameter.placements) if not part.is_replicate())
