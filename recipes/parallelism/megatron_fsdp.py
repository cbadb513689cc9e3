"""Megatron-FSDP: ZeRO by NVIDIA's package megatron-fsdp, which can keep communication buffers in pools. The package joins several
parameters in a bucket and cuts the bucket into equal shards, so ranks can hold different numbers of a parameter's rows. Do not
gather such DTensors with torch, because torch expects the shards that torch.chunk makes."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.base import clean_name
from meshrunner.recipes.option import whole
from meshrunner.recipes.parallelism.base import Degrees, Parallelism
from meshrunner.recipes.parallelism.mesh import named_mesh, replicas
from meshrunner.recipes.parallelism.unit_sizes import Stored, Traffic, UnitParameters
from meshrunner.recipes.parallelism.wrap_policy import Reshard, WrapPlan

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from meshrunner.recipes.model.init_weights import Initialiser
    from meshrunner.recipes.model.network import Network
    from meshrunner.recipes.precision.base import Precision

OLDEST = "0.6.1"  # the oldest release that was tested


class MegatronFSDP(Parallelism):
    """ZeRO with NVIDIA's package megatron-fsdp, on GPUs. With `zero` 3, only the units that the wrap plan reshards after forward
    become units of the package. The parameters of other units are gathered once per step, into separate memory."""

    wraps_units: ClassVar[bool] = True
    checks_units: ClassVar[bool] = True

    zero: Annotated[int, whole(at_least=0, at_most=3)]
    """ZeRO stage: the state that is sharded over the `shard` devices. 0: none, all devices are replicas. 1: optimizer state
    and master weights. 2: also gradients. 3: also parameters."""
    double_buffer: Literal["none", "fixed", "max_pool"]
    """Memory for unsharded parameters and unreduced gradients. none: allocated for a unit when needed, then freed. fixed: two
    buffers, shared by all units of the most common shape. max_pool: two sets of buffers, each large enough for any unit."""
    grad_comm: Literal["auto", "fp32", "bf16"]
    """dtype in which gradients are reduced. auto: the dtype set by `precision`. Gradients are always accumulated in fp32."""
    nccl_registration: bool
    """Whether to register the memory of `double_buffer` with NCCL. Needs the allocator of Megatron-Core or Apex."""

    def unsupported(self, device_type: str) -> str | None:
        if device_type != "cuda":
            return "parallelism: megatron_fsdp needs a GPU; use parallelism=fsdp2"
        from importlib.metadata import PackageNotFoundError, version

        from packaging.version import Version

        try:
            found = version("megatron-fsdp")
            problem = f"{found} is installed" if Version(found) < Version(OLDEST) else ""
        except PackageNotFoundError:
            problem = "it is not installed"
        if problem:
            needed = f"megatron-fsdp {OLDEST} or later"
            return f"parallelism: megatron_fsdp needs {needed}, but {problem}; pip install 'meshrunner[megatron]'"
        if self.nccl_registration and find_spec("megatron") is None and find_spec("apex") is None:
            return (
                "parallelism.nccl_registration: NCCL registration needs Megatron-Core or Apex, and neither is installed; "
                "use parallelism.nccl_registration=false"
            )
        return None

    def degrees(self, nodes: int, workers: int) -> Degrees:
        if self.zero:
            return super().degrees(nodes, workers)
        if self.shard not in ("auto", 1):
            raise ConfigError(
                f"parallelism.shard: zero=0 does not shard, but shard is {self.shard}; use shard=auto, or zero=1, 2 or 3"
            )
        return super().degrees(nodes, workers).unsharded()

    def reshard(self, shard: int) -> Reshard:
        return "always" if self.zero == 3 else "never"

    def mixes_dtypes(self) -> bool:
        return True

    def untraceable(self) -> str | None:
        return "parallelism=megatron_fsdp uses a separate package, which runs only on a GPU"

    def check_units(self, network: Network, plan: WrapPlan) -> None:
        unit_classes(network, plan, self.zero, self.double_buffer)

    def apply(
        self, model: nn.Module, mesh: DeviceMesh, plan: WrapPlan, precision: Precision, initialiser: Initialiser
    ) -> nn.Module:
        import torch
        from torch import distributed as dist

        network, device = initialiser.network, initialiser.device
        with warnings.catch_warnings(action="ignore"):  # optional packages, such as Apex, may be missing
            from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model

        # The package computes in the dtype of each parameter. If the dtype is below fp32, the optimizer updates fp32 copies.
        if precision.param_dtype is not None:
            for name, parameter in network.named_parameters():
                if not network.stays_fp32(clean_name(name)):
                    parameter.data = parameter.data.to(precision.param_dtype)
        reduce_dtype = {"auto": precision.reduce_dtype, "fp32": torch.float32, "bf16": torch.bfloat16}[self.grad_comm]
        replicate, shard = replicas(mesh), mesh["shard"].size()
        hybrid = replicate > 1 and self.zero > 0  # with zero 0 the package also reduces over the `shard` dimension
        dims = {"replicate": replicate, "shard": shard} if hybrid else {"shard": replicate * shard}
        # The package requires a `tensor` dimension, even if its size is 1.
        own_mesh = named_mesh(mesh.device_type, dims | {"tensor": 1})
        outer_group = dist.group.WORLD if hybrid else None
        with materialised(network, device, unit_by_unit=self.zero > 0):
            wrapped: nn.Module = fully_shard_model(
                network,
                device_mesh=own_mesh,
                dp_shard_dim="shard",
                dp_outer_dim="replicate" if hybrid else None,
                tp_dim="tensor",
                # For parameters with `.experts.` in their name, the package uses a separate mesh and group.
                expt_device_mesh=own_mesh,
                hybrid_fsdp_group=outer_group,
                hybrid_fsdp_expt_group=outer_group,
                fsdp_unit_modules=unit_classes(network, plan, self.zero, self.double_buffer),
                zero_dp_strategy=self.zero,
                device=device,
                init_model_with_meta_device=self.zero > 0,
                mixed_precision_policy=MixedPrecisionPolicy(
                    main_params_dtype=None if precision.param_dtype is None else torch.float32,
                    main_grads_dtype=torch.float32,
                    grad_comm_dtype=reduce_dtype or torch.float32,
                ),
                sync_model_each_microbatch=False,  # `accumulating` decides
                preproc_state_dict_for_dcp_ckpt=False,
                fsdp_double_buffer=self.double_buffer != "none",
                maxpool_double_buffer=self.double_buffer == "max_pool",
                nccl_ub=self.nccl_registration,
            )
        initialise(wrapped, initialiser)
        return wrapped

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> Optimizer:
        from megatron_fsdp import fully_shard_optimizer

        with without_update(optimizer):
            sharded: Optimizer = fully_shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt=False)
        return sharded

    def accumulating(self, model: Any, last: bool) -> AbstractContextManager[None]:
        # If set, backward ends with gradients reduced among all devices. Unsharded gradients (`zero` 0 and 1) must be reduced
        # only once per step. `set_model_auto_sync` would warn in every step.
        model.model_auto_sync = last
        return nullcontext()

    def traffic(self, unit: UnitParameters, precision: Precision, degrees: Degrees, micro_batches: int) -> Traffic:
        """Return approximately how many bytes are gathered and reduced for one unit in one step.

        With `zero` 1 and 2, the estimate is too high for the last unit, because that unit is gathered once, not twice. The
        estimate can be too low, because it ignores the padding of buckets and the larger size of parameters that stay in fp32.
        With `zero` 3, the estimate also ignores unused prefetches after a unit that is called several times.
        """
        reduced = unit.trained * {"auto": precision.reduce_bytes, "fp32": 4, "bf16": 2}[self.grad_comm]
        if self.zero == 0 or degrees.shard == 1:
            return Traffic(0, reduced if degrees.replicate > 1 else 0)
        calls = micro_batches * unit.calls
        if self.zero < 3:  # gathered in the first micro batch's forward, and again in its backward
            gathers = 2
        elif not unit.reshard_after_forward:
            gathers = 1
        else:  # tokens have no gradient, so no hook reshards the table of an embedding after backward
            gathers = calls + (1 if unit.lookup else calls)
        gathered = gathers * precision.param_bytes * (unit.trained + unit.frozen)
        return Traffic(gathered, reduced * (micro_batches if self.zero >= 2 else 1))

    def stored(self, unit: UnitParameters, precision: Precision, degrees: Degrees) -> Stored:
        """Return the approximate numbers of stored elements. `weights` includes fp32 master weights if compute is not in fp32."""
        compute, gradients, trained = (
            -(-count // (degrees.shard if self.zero >= stage else 1))
            for stage, count in ((3, unit.trained + unit.frozen), (2, unit.trained), (1, unit.trained))
        )
        masters = trained if precision.element_bytes < 4 else 0
        weights = -(-compute * precision.element_bytes // 4) + masters
        return Stored(weights, gradients, trained)


@contextmanager
def without_update(optimizer: Optimizer) -> Iterator[None]:
    """Suppress the effect of the optimizer step in `fully_shard_optimizer` of releases before 0.7.0 (Megatron-LM PR 5976)."""
    keys = ("lr", "weight_decay")
    before = [{key: group[key] for key in keys if key in group} for group in optimizer.param_groups]
    for group, values in zip(optimizer.param_groups, before, strict=True):
        group.update(dict.fromkeys(values, 0.0))
    yield
    for group, values in zip(optimizer.param_groups, before, strict=True):
        group.update(values)
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] *= 0


def unit_classes(network: Network, plan: WrapPlan, zero: int, double_buffer: str) -> list[type[nn.Module]]:
    """Return the classes of the modules that become units. Raise ConfigError if megatron-fsdp cannot apply the wrap plan."""
    for name, unit in plan.items():
        if unit.reshard_after_forward not in ((True, False) if zero == 3 else (False,)):
            units_are = "reshards a unit either fully or not at all" if zero == 3 else "never shards parameters"
            raise ConfigError(
                f"wrap: megatron_fsdp with zero={zero} {units_are}; set reshard_after_forward of '{name}' to null"
            )
    units = {name for name, unit in plan.items() if name and (zero < 3 or unit.reshard_after_forward)}
    if not units and (zero == 3 or double_buffer != "none"):
        raise ConfigError(
            f"wrap: megatron_fsdp with zero={zero} and double_buffer={double_buffer} needs a "
            f"{'resharded ' * (zero == 3)}unit besides the root, but there is none; use wrap=blocks"
        )
    repeated = [name for name in plan if name in units and network.calls(name) > 1]
    if repeated and double_buffer != "none":
        raise ConfigError(
            f"wrap: '{repeated[0]}' is called {network.calls(repeated[0])} times per forward pass, but between the calls, other "
            f"units occupy both buffers of double_buffer={double_buffer}; use double_buffer=none, or wrap=rules without this unit"
        )
    classes = {type(network.get_submodule(name)): name for name in units}
    for name, module in network.named_modules():
        around = [unit for unit in units if name.startswith(f"{unit}.")]
        if around and name in plan:
            raise ConfigError(
                f"wrap: '{name}' cannot be a unit inside '{around[0]}', which megatron_fsdp gathers as a whole; use wrap=blocks"
            )
        alike = [unit for kind, unit in classes.items() if isinstance(module, kind)]
        if alike and not around and name not in units:
            raise ConfigError(
                f"wrap: '{alike[0]}' and '{name}' are both {type(module).__name__}, but wrap makes only '{alike[0]}' a resharded "
                "unit. megatron_fsdp can select units only by class; use wrap=blocks, or parallelism=fsdp2"
            )
    return list(classes)


@contextmanager
def materialised(network: Network, device: torch.device, *, unit_by_unit: bool) -> Iterator[None]:
    """Let megatron-fsdp allocate the parameters of a meta-device network within this context, without initialising them.

    If `unit_by_unit` is true, the package allocates one module at a time, so a device never holds more than one unsharded unit.
    The package then calls the module's `reset_parameters`. Within the context, `reset_parameters` only ties shared parameters.
    If `unit_by_unit` is false (`zero` 0), the whole network is allocated before the context begins.
    """
    if not unit_by_unit:
        network.to_empty(device=device)
        network.tie_weights()
        yield
        return
    users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    owners: list[Any] = []

    def tie(module: nn.Module, own: dict[str, list[tuple[nn.Module, str]]]) -> None:
        """Give the materialised parameters of a module to every other module that shares them."""
        for name, others in own.items():
            for other, other_name in others:
                setattr(other, other_name, getattr(module, name))

    for module in network.modules():
        own = {name: users[parameter] for name, parameter in module.named_parameters(recurse=False)}
        for name, others in own.items():
            others.append((module, name))
        if own:
            owners.append(module)
            owners[-1].reset_parameters = partial(tie, module, own)
    yield
    for owner in owners:
        del owner.reset_parameters


def initialise(wrapped: Any, initialiser: Initialiser) -> None:
    """Initialise the fp32 master weights, then copy them to the compute parameters. The reverse order would round the weights."""
    import torch

    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            local, value = parameter.to_local(), initialiser.whole(clean_name(name), parameter.shape)
            elements = getattr(parameter, "megatron_fsdp_slice", slice(None))  # absent if the parameter is not sharded
            local.copy_(value.flatten()[elements].view_as(local))
    wrapped.install_optimized_model_weights()
    initialiser.reset_buffers()
