"""Megatron-FSDP: ZeRO by NVIDIA's package megatron-fsdp, which can keep what it communicates in pools of buffers.

The package (read and run: 0.6.1) is told classes of modules, and every module of such a class is a unit. Its parameters are
DTensors whose shards end where its buckets do, at any row: torch's own functions must not gather them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import whole
from meshrunner.recipes.parallelism.base import Degrees, Held, Parallelism, Reshard, Traffic

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from meshrunner.recipes.model.init_weights import Initialiser
    from meshrunner.recipes.model.network import Network
    from meshrunner.recipes.parallelism.wrap_plan import UnitParameters, WrapPlan
    from meshrunner.recipes.precision.base import Precision

PACKAGE = "megatron-fsdp"
OLDEST = "0.6.1"
"""The oldest release that was run."""
MENDED = "0.7.0"
"""The release from which building an optimizer is no update."""


class MegatronFSDP(Parallelism):
    """ZeRO with NVIDIA's package megatron-fsdp, on GPUs. With `zero` 3 a unit that the plan keeps gathered is to it no unit: it
    is gathered once a step, with all else outside units, into memory of its own."""

    wraps_units: ClassVar[bool] = True
    checks_units: ClassVar[bool] = True

    zero: Annotated[int, whole(at_least=0, at_most=3)]
    """What the devices of `shard` share out. 1: optimizer state and master weights; 2: gradients, too; 3: parameters, too;
    0: nothing, they are replicas."""
    double_buffer: Literal["none", "fixed", "max_pool"]
    """Memory of gathered parameters and unreduced gradients. none: allocated for each unit and freed; fixed: two buffers for the
    shape that most units have, none for others; max_pool: two for each bucket, of the size of the largest among all units."""
    grad_comm: Literal["auto", "fp32", "bf16"]
    """dtype in which gradients are reduced; they are added up in fp32. auto: that of the precision."""
    nccl_registration: bool
    """Register the memory of `double_buffer` with NCCL; needs the allocator of Megatron-Core or Apex."""

    def unsupported(self, device_type: str) -> str | None:
        if device_type != "cuda":
            return "parallelism: megatron_fsdp needs a GPU; use parallelism=fsdp2"
        try:
            lacking = f"{version(PACKAGE)} is installed" if installed_before(OLDEST) else ""
        except PackageNotFoundError:
            lacking = "it is not installed"
        if lacking:
            return (
                f"parallelism: megatron_fsdp needs {PACKAGE} {OLDEST}, {lacking}; pip install 'meshrunner[megatron]', "
                "or use parallelism=fsdp2"
            )
        if self.nccl_registration and find_spec("megatron") is None and find_spec("apex") is None:
            return (
                "parallelism.nccl_registration: it needs the allocator of Megatron-Core or Apex, and neither is installed; "
                "use parallelism.nccl_registration=false"
            )
        return None

    def degrees(self, nodes: int, workers: int) -> Degrees:
        if self.zero:
            return super().degrees(nodes, workers)
        if self.shard not in ("auto", 1):
            raise ConfigError(
                f"parallelism.shard: zero(0) does not shard, but shard is {self.shard}; use shard=auto, or zero of at least 1"
            )
        found = super().degrees(nodes, workers)
        return Degrees(found.replicate * found.shard, 1, found.tensor)

    def reshard(self, shard: int) -> Reshard:
        return "always" if self.zero == 3 else "never"

    def keeps_some_fp32(self) -> bool:
        return True

    def untraceable(self) -> str | None:
        return "parallelism=megatron_fsdp is a package of its own, which runs only on a GPU"

    def check_units(self, network: Network, plan: WrapPlan) -> None:
        self._unit_classes(network, plan)

    def _unit_classes(self, network: Network, plan: WrapPlan) -> list[type[nn.Module]]:
        """The classes whose modules are the units of a plan; raises ConfigError if there are none that are only these."""
        for name, unit in plan.items():
            if unit.reshard_after_forward not in ((True, False) if self.zero == 3 else (False,)):
                does = "frees a unit or keeps it" if self.zero == 3 else "has whole parameters"
                raise ConfigError(
                    f"wrap: reshard_after_forward of '{name}' cannot be its own, as with zero({self.zero}) megatron_fsdp {does}; "
                    "use null there"
                )
        units = {name for name, unit in plan.items() if name and (self.zero < 3 or unit.reshard_after_forward)}
        classes = {type(network.get_submodule(name)): name for name in units}
        if not units and (self.zero == 3 or self.double_buffer != "none"):
            raise ConfigError(
                f"wrap: the plan has no unit to be freed, and megatron_fsdp with zero({self.zero}) and "
                f"double_buffer({self.double_buffer}) needs one; use wrap=blocks"
            )
        again = [name for name in plan if name in units and network.calls(name) > 1]
        if again and self.double_buffer != "none":
            raise ConfigError(
                f"wrap: '{again[0]}' is called {network.calls(again[0])} times in a forward, and then units around it have both "
                f"buffers of double_buffer({self.double_buffer}); use double_buffer=none, or wrap=rules without that unit"
            )
        for name, module in network.named_modules():
            around = [unit for unit in units if name.startswith(f"{unit}.")]
            if around and name in plan:
                raise ConfigError(
                    f"wrap: '{name}' cannot be a unit inside '{around[0]}', which megatron_fsdp gathers as a whole; use "
                    "wrap=blocks, or parallelism=fsdp2"
                )
            alike = [unit for kind, unit in classes.items() if isinstance(module, kind)]
            if alike and not around and name not in units:
                raise ConfigError(
                    f"wrap: '{alike[0]}' is a unit to be freed, '{name}' is not, and both are {type(module).__name__}: "
                    "megatron_fsdp knows classes, not names; use wrap=blocks, or parallelism=fsdp2"
                )
        return list(classes)

    def apply(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        plan: WrapPlan,
        precision: Precision,
        initialiser: Initialiser,
        expert_mesh: DeviceMesh | None = None,
    ) -> nn.Module:
        import torch
        from torch import distributed as dist

        from meshrunner.recipes.model.init_weights import clean_name
        from meshrunner.recipes.parallelism.megatron_init import initialise, materialised

        network, device = initialiser.network, initialiser.device
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Transformer Engine and Apex are not installed")
            from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model

        # What a parameter computes in is its own dtype. What an optimizer updates is a copy in fp32, where that is another.
        if precision.param_dtype is not None:
            for name, parameter in network.named_parameters():
                if not network.stays_fp32(clean_name(name)):
                    parameter.data = parameter.data.to(precision.param_dtype)
        reduction = {"auto": precision.reduce_dtype, "fp32": torch.float32, "bf16": torch.bfloat16}[self.grad_comm]
        own_mesh = self._mesh(mesh)
        replicated = "replicate" in (own_mesh.mesh_dim_names or ())
        with materialised(network, device, unit_by_unit=self.zero > 0):
            wrapped: nn.Module = fully_shard_model(
                network,
                device_mesh=own_mesh,
                dp_shard_dim="shard",
                dp_outer_dim="replicate" if replicated else None,
                tp_dim="tensor",
                # What has `.experts.` in its name is looked up in a mesh and a group of its own: here the same.
                expt_device_mesh=own_mesh,
                hybrid_fsdp_group=dist.group.WORLD if replicated else None,
                hybrid_fsdp_expt_group=dist.group.WORLD if replicated else None,
                fsdp_unit_modules=self._unit_classes(network, plan),
                zero_dp_strategy=self.zero,
                device=device,
                init_model_with_meta_device=self.zero > 0,
                mixed_precision_policy=MixedPrecisionPolicy(
                    main_params_dtype=None if precision.param_dtype is None else torch.float32,
                    main_grads_dtype=torch.float32,
                    grad_comm_dtype=reduction or torch.float32,
                ),
                sync_model_each_microbatch=False,  # `accumulating` says when
                preproc_state_dict_for_dcp_ckpt=False,
                fsdp_double_buffer=self.double_buffer != "none",
                maxpool_double_buffer=self.double_buffer == "max_pool",
                nccl_ub=self.nccl_registration,
            )
        initialise(wrapped, initialiser)
        return wrapped

    def _mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """The mesh of the run as megatron-fsdp takes it: with a dimension of tensor parallelism, if only of one device."""
        from torch.distributed.device_mesh import init_device_mesh

        replicate = mesh["replicate"].size() if "replicate" in (mesh.mesh_dim_names or ()) else 1
        shard = mesh["shard"].size()
        if self.zero == 0:  # among replicas, too, it reduces over what it calls shards
            replicate, shard = 1, replicate * shard
        dims = ({"replicate": replicate} if replicate > 1 else {}) | {"shard": shard, "tensor": 1}
        return init_device_mesh(mesh.device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> Optimizer:
        from megatron_fsdp import fully_shard_optimizer

        with without_update(optimizer) if installed_before(MENDED) else nullcontext():
            sharded: Optimizer = fully_shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt=False)
        return sharded

    def accumulating(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        # After a backward with it, gradients are reduced among all devices and lie where the optimizer looks for them. Of whole
        # gradients (`zero` 0 and 1) a second reduction would be wrong. `set_model_auto_sync` would warn of that in every step.
        wrapped: Any = model
        wrapped.model_auto_sync = last
        return nullcontext()

    def _traffic(self, unit: UnitParameters, precision: Precision, degrees: Degrees, micro_batches: int) -> Traffic:
        """
        With `zero` 1 and 2, whose weights are whole on every device, a unit is nevertheless gathered in forward and in backward,
        of the first micro batch; the last one called, and what is in none, only once. That is not counted, nor is what `zero` 3
        gathers ahead in vain behind a unit that is called again, what rounds buckets up to whole rows on every device, and that
        some parameters stay in fp32 (`Network.stays_fp32`).
        """
        reduced = unit.trained * {"auto": precision.reduce_bytes, "fp32": 4, "bf16": 2}[self.grad_comm]
        if self.zero == 0 or degrees.shard == 1:
            return Traffic(0, reduced if degrees.replicate > 1 else 0)
        calls = micro_batches * unit.calls
        if self.zero < 3:
            gathers = 2
        elif not unit.reshard_after_forward:
            gathers = 1
        else:  # no gradient flows into tokens, and nothing says when backward is done with their table: it stays gathered
            gathers = calls + (1 if unit.lookup else calls)
        gathered = gathers * precision.param_bytes * (unit.trained + unit.frozen)
        return Traffic(gathered, reduced * (micro_batches if self.zero >= 2 else 1))

    def held(self, unit: UnitParameters, precision: Precision, degrees: Degrees) -> Held:
        """Weights: those that compute, and below fp32 the master weights. What `_traffic` does not count is not here, either."""

        def share(count: int, sharded: bool) -> int:
            return -(-count // degrees.shard) if sharded else count

        compute, trained = share(unit.trained + unit.frozen, self.zero == 3), share(unit.trained, self.zero >= 1)
        masters = trained if precision.element_bytes < 4 else 0
        return Held(-(-compute * precision.element_bytes // 4) + masters, share(unit.trained, self.zero >= 2), trained)


def installed_before(release: str) -> bool:
    """Whether the installed megatron-fsdp is older than a release; raises PackageNotFoundError if there is none."""
    from packaging.version import Version

    return Version(version(PACKAGE)) < Version(release)


@contextmanager
def without_update(optimizer: Optimizer) -> Iterator[None]:
    """
    Make the step that `fully_shard_optimizer` takes, to have a state, no update.

    Before 0.7.0 it is a real one, with gradients of zero: weights decay, and Adam counts it (Megatron-LM pull request 5976).
    """
    keys = ("lr", "weight_decay")
    given: list[dict[str, Any]] = [
        {key: group[key] for key in keys if key in group} for group in optimizer.param_groups
    ]
    for group, values in zip(optimizer.param_groups, given, strict=True):
        group.update(dict.fromkeys(values, 0.0))
    yield
    for group, values in zip(optimizer.param_groups, given, strict=True):
        group.update(values)
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] *= 0
