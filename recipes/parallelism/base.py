"""The `parallelism` group: ways to distribute a model over devices. Each kind, such as FSDP2, is a subclass of `Parallelism`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import Affects, AutoCount, Count, Option, whole
from meshrunner.recipes.parallelism.pipeline.stages import SCHEDULES, Schedule
from meshrunner.recipes.parallelism.unit_sizes import Stored, Traffic, UnitParameters, Units
from meshrunner.recipes.parallelism.wrap_policy import RESHARD, Reshard, WrapPlan

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from meshrunner.recipes.model.init_weights import Initialiser
    from meshrunner.recipes.model.network import Network
    from meshrunner.recipes.parallelism.buffers.placement import BufferSchedules
    from meshrunner.recipes.precision.base import Precision


class Degrees(NamedTuple):
    """Number of devices along each mesh dimension, outermost first."""

    replicate: int
    shard: int
    tensor: int
    context: int = 1
    """Number of adjacent ranks that hold different parts of the same sequences. The degree `shard` (or `replicate`, if nothing is
    sharded) is a multiple of `context`. The ranks hold the same weights, or different shards of the same weights."""
    pipeline: int = 1
    """Size of the outermost dimension: the number of groups of devices that hold different blocks."""

    @property
    def devices(self) -> int:
        return self.pipeline * self.replicate * self.shard * self.tensor

    @property
    def data(self) -> int:
        """Number of slices into which data parallelism cuts the sequences of a global batch."""
        return self.replicate * self.shard // self.context

    @property
    def without_context(self) -> tuple[int, int]:
        """The degrees (`replicate`, `shard`), with `context` divided out of the degree that is a multiple of `context`."""
        if self.shard % self.context:
            return self.replicate // self.context, self.shard
        return self.replicate, self.shard // self.context

    def unsharded(self) -> Self:
        """Return a copy in which the `shard` devices are counted as replicas."""
        return self._replace(replicate=self.replicate * self.shard, shard=1)


class Parallelism(Option):
    """A way to distribute a model over devices."""

    kinds: ClassVar[dict[str, str]] = {
        "single": "meshrunner.recipes.parallelism.base:Single",
        "ddp": "meshrunner.recipes.parallelism.ddp:DDP",
        "fsdp1": "meshrunner.recipes.parallelism.fsdp1:FSDP1",
        "fsdp2": "meshrunner.recipes.parallelism.fsdp2:FSDP2",
        "megatron_fsdp": "meshrunner.recipes.parallelism.megatron_fsdp:MegatronFSDP",
    }

    affects: ClassVar[Affects] = Affects.SPEED

    wraps_units: ClassVar[bool] = False
    """Whether each unit of the wrap plan is wrapped and all-gathered separately."""
    checks_units: ClassVar[bool] = False
    """Whether `check_units` can reject a wrap plan. If so, checking a configuration requires building the model."""
    autocasts: ClassVar[bool] = False
    """Whether forward runs under autocast with fp32 parameters. Without autocast, `apply` sets the compute dtype."""
    gathers_per_call: ClassVar[bool] = False
    """Whether backward all-gathers a unit once for each of its forward calls, and never gathers an embedding. If false, backward
    all-gathers every unit once per micro batch."""

    shard: AutoCount
    """Devices that parameters, gradients and optimizer state are sharded over. auto: all devices divided by other degrees."""
    replicate: Count
    """Model replicas, each sharded over `shard` devices."""
    tensor: Count
    """Devices that each matmul is split over."""
    context: Count = 1
    """Devices that share each sequence."""
    context_method: Literal["allgather", "ulysses"] = "allgather"
    """Exchange between `context` devices for attention. allgather: gather keys and values. ulysses: give each device some heads
    of all tokens."""
    pipeline: Count = 1
    """Groups of devices that hold different blocks."""
    pipeline_schedule: Literal[
        "1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipe_v"
    ] = "1f1b"
    """Order of the forward and backward passes of micro batches."""
    pipeline_stages: AutoCount = "auto"
    """Stages per device. auto: 1 or 2, depending on `pipeline_schedule`."""
    pipeline_split: list[Count] | None = None
    """Blocks per stage. null: balance FLOPs."""
    expert: Count = 1
    """Devices that divide the experts and exchange tokens."""
    sequence_parallel: bool
    """Whether `tensor` shards the residual stream along the sequence."""
    loss_parallel: bool
    """Whether `tensor` keeps logits sharded along the vocabulary."""
    reshard_after_forward: Annotated[
        int | Literal["auto", "always", "never", "except_last"], whole("auto", *RESHARD, at_least=2)
    ]
    """Whether to free gathered parameters after forward. except_last: free all but those of the last block. N: keep 1/N of
    a unit. auto: never if `shard` is 1, otherwise always."""
    accumulate: Literal["reduce", "hold"] = "reduce"
    """Time at which FSDP reduces gradients. reduce: after every micro batch (FSDP2's replicas all-reduce once per step). hold:
    after the last micro batch; until then, devices store unsharded gradients (FSDP1: in the compute dtype)."""

    @property
    def sequence_pieces(self) -> int:
        """Number of equal pieces into which context and sequence parallelism together cut a sequence."""
        chunks = self.context * (2 if self.context_method == "allgather" else 1)
        return chunks * (self.tensor if self.sequence_parallel else 1)

    @property
    def schedule(self) -> Schedule:
        """The schedule that `pipeline_schedule` names."""
        return SCHEDULES[self.pipeline_schedule]

    @property
    def stages_per_rank(self) -> int:
        """Value of `pipeline_stages`, with `auto` resolved."""
        return self.schedule.stages if self.pipeline_stages == "auto" else self.pipeline_stages

    @property
    def units_ahead(self) -> int:
        """Number of later units that are all-gathered while the current unit computes. 0: torch decides."""
        return 0

    @property
    def plans_buffers(self) -> bool:
        """Whether the communication buffers of every unit have fixed addresses."""
        return False

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture a step. If so, every step launches the same kernels, and the host never waits."""
        return False

    @property
    def offloads(self) -> bool:
        """Whether parameters, gradients and optimizer state are stored in host memory."""
        return False

    @property
    def splits_logits(self) -> bool:
        """Whether logits are sharded along the vocabulary. If so, forward and backward use torch's `loss_parallel`."""
        return self.tensor > 1 and self.loss_parallel

    def degrees(self, nodes: int, workers: int) -> Degrees:
        """Return the degrees, with `shard: auto` resolved. Raise ConfigError if they do not fit `nodes` x `workers` devices."""
        world = nodes * workers
        have = f"launch.nodes({nodes}) x launch.workers({workers}) = {world}"
        others = self.pipeline * self.replicate * self.context * self.tensor
        context = f" x context({self.context})" if self.context > 1 else ""
        pipeline = f"pipeline({self.pipeline}) x " if self.pipeline > 1 else ""
        given = f"{pipeline}replicate({self.replicate}){context} x tensor({self.tensor})"
        if self.shard == "auto" and world % others:
            raise ConfigError(f"parallelism: {given} = {others} does not divide {have}")
        shard = world // others if self.shard == "auto" else self.shard
        degrees = Degrees(self.replicate, shard * self.context, self.tensor, self.context, self.pipeline)
        if degrees.devices != world:
            raise ConfigError(f"parallelism: shard({self.shard}) x {given} = {degrees.devices}, but {have}")
        if degrees.shard % self.expert:
            raise ConfigError(
                f"parallelism: expert({self.expert}) does not divide shard({shard}){context}; use a divisor"
            )
        reshard = self.reshard_after_forward
        if isinstance(reshard, int) and (degrees.shard % reshard or reshard >= degrees.shard):
            raise ConfigError(
                f"parallelism: reshard_after_forward({reshard}) must be a proper divisor of shard({degrees.shard}); "
                "use 'always' to reshard over all devices, or 'never' to keep parameters gathered"
            )
        return degrees

    def reshard(self, shard: int) -> Reshard:
        """Return `reshard_after_forward` with `auto` resolved for `shard` devices."""
        if self.reshard_after_forward == "auto":
            return "never" if shard == 1 else "always"
        return self.reshard_after_forward

    def problems(self) -> list[str]:
        """Return one sentence for each setting that the installed torch does not support."""
        return []

    def untraceable(self) -> str | None:
        """Return the reason why a step cannot be traced on the meta device, or None if tracing is possible."""
        return None

    def check_units(self, network: Network, plan: WrapPlan) -> None:
        """Raise ConfigError if this kind of parallelism cannot wrap the units of a wrap plan."""

    @abstractmethod
    def apply(
        self, model: nn.Module, mesh: DeviceMesh, plan: WrapPlan, precision: Precision, initialiser: Initialiser
    ) -> nn.Module:
        """Distribute a network over the mesh's data-parallel dimensions, after tensor or expert parallelism has split it. Move
        the network from meta to the device, and initialise it. Return the model to train: the network or its wrapper."""

    def mixes_dtypes(self) -> bool:
        """Return whether some parameters can be used in fp32 and others in a lower precision. See `Network.stays_fp32`."""
        return not self.wraps_units

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> Optimizer:
        """Return `optimizer`, possibly wrapped. model: the result of `apply`. Called before a checkpoint is loaded."""
        return optimizer

    def computing(self, precision: Precision, device_type: str) -> AbstractContextManager[None]:
        """Return the context manager to run forward in, such as autocast."""
        if not self.autocasts or precision.param_dtype is None:
            return nullcontext()
        import torch

        return torch.autocast(device_type, precision.param_dtype)

    def accumulating(self, model: Any, last: bool) -> AbstractContextManager[None]:
        """Set whether a micro batch reduces gradients. Return its context manager. last: whether it is the step's last one."""
        return nullcontext()

    def after_step(self, model: nn.Module) -> dict[str, float]:
        """Return further metrics of the optimizer step that has just ended, with the same keys in every step."""
        return {}

    def after_evaluation(self, model: nn.Module) -> None:
        """Undo the changes to the wrapped model that forward passes without a backward have caused."""

    def traffic(self, unit: UnitParameters, precision: Precision, degrees: Degrees, micro_batches: int) -> Traffic:
        """Return the bytes that data parallelism all-gathers and reduces for one unit in one step."""
        reduced = precision.reduce_bytes * unit.trained
        if not self.wraps_units or degrees.shard == 1:
            return Traffic(0, reduced if degrees.replicate > 1 else 0)
        resharded = bool(unit.reshard_after_forward)
        in_forward = unit.calls if resharded else 1
        in_backward = (unit.calls if self.gathers_per_call else 1) - (not resharded)
        if unit.lookup and self.gathers_per_call:
            in_backward = 0
        reductions = micro_batches
        if self.accumulate == "hold":  # if a unit is called twice, its gradients are also reduced between the calls
            reductions = 2 if self.gathers_per_call and unit.calls > 1 < micro_batches else 1
        gathers = micro_batches * (in_forward + in_backward)
        return Traffic(gathers * precision.param_bytes * (unit.trained + unit.frozen), reductions * reduced)

    def stored(self, unit: UnitParameters, precision: Precision, degrees: Degrees) -> Stored:
        """Return how many elements of one unit a device stores between steps, assuming that all shards have the same size."""
        weights, trained = (-(-count // degrees.shard) for count in (unit.trained + unit.frozen, unit.trained))
        return Stored(weights, trained, trained)

    def buffer_schedules(self, units: Units, precision: Precision, degrees: Degrees) -> BufferSchedules | None:
        """Return the schedules of the communication buffers; None if unknown."""
        return None

    def shard_groups(
        self, name: str, parameter: Tensor, mesh: DeviceMesh, split: Collection[str]
    ) -> tuple[ProcessGroup, ...]:
        """Return the groups whose ranks hold different shards of a parameter. split: names of the tensor-parallel parameters."""
        from torch.distributed.tensor import DTensor

        if not isinstance(parameter, DTensor):
            return ()
        own = parameter.device_mesh
        return tuple(own.get_group(dim) for dim, part in enumerate(parameter.placements) if not part.is_replicate())


class Single(Parallelism):
    """The unwrapped model on one device: the reference for every other layout."""

    autocasts: ClassVar[bool] = True
    capturable: ClassVar[bool] = True

    def apply(
        self, model: nn.Module, mesh: DeviceMesh, plan: WrapPlan, precision: Precision, initialiser: Initialiser
    ) -> nn.Module:
        initialiser.materialise(model)
        return model
