"""
Everything that stands in for the device, each with its reason: torch's operators on meta have shapes, dtypes and autograd, but no
streams, no memory, and not always the kernels of the device.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import _common_utils, _flat_param, _runtime_utils
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim import optimizer as torch_optimizer

from meshrunner.recipes.model import transformer
from meshrunner.recipes.model.network import Network
from meshrunner.recipes.precision.float8 import Float8
from meshrunner.runner.predict.meta import kernels
from meshrunner.runner.predict.meta.autocast import rehearsed_autocast
from meshrunner.runner.predict.meta.ddp_reducer import ddp_reduces
from meshrunner.runner.predict.meta.replacements import Replacements
from meshrunner.runner.predict.record.device_streams import DeviceModule
from meshrunner.runner.predict.record.recorder import Recorder

META = torch.device("meta")
DEVICES_OF_OPTIMIZERS = ["meta", "cpu", "cuda"]


def _fsdp2_streams(torch_own: Replacements, recorder: Recorder) -> None:
    """
    FSDP2 asks for the module of the device, whose streams overlap communication with compute, and of what it gathered in vain,
    such as frozen blocks below the first trained one, for the accelerator's. meta has none.
    """
    handle = DeviceModule(recorder.device)
    for module in (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state):
        torch_own.replace(module, "_get_device_handle", lambda _="cuda": handle)
    torch_own.replace(torch.accelerator, "current_stream", handle.current_stream)


def _fsdp2_takes_meta(torch_own: Replacements, recorder: Recorder) -> None:
    """FSDP2 looks for the mesh's device, and takes parameters on meta for forgotten ones."""
    fully_shard = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")  # a function has its name
    for module in (_fsdp_init, fully_shard):
        torch_own.replace(module, "_get_device_from_mesh", lambda mesh: META)
    torch_own.replace(_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda self: None)


def _fsdp1_streams(torch_own: Replacements, recorder: Recorder) -> None:
    """
    As FSDP2's; and FSDP1 tells the allocator which stream uses a tensor, whose memory is then kept until that has passed.
    Whether something has memory it sees by its address.
    """
    handle = DeviceModule(recorder.device, META)
    torch_own.replace(_common_utils._FSDPDeviceHandle, "from_device", classmethod(lambda cls, device: handle))
    torch_own.replace(_flat_param, "_data_ptr_allocated", lambda tensor: tensor.untyped_storage().size() > 0)
    for module in (_flat_param, _runtime_utils):
        torch_own.replace(module, "_no_dispatch_record_stream", recorder.used)


def _optimizers(torch_own: Replacements, recorder: Recorder) -> None:
    """Fused and foreach kernels are refused for devices that torch does not list; their shapes work on meta."""
    for name in ("_get_fused_kernels_supported_devices", "_get_foreach_kernels_supported_devices"):
        torch_own.replace(torch_optimizer, name, lambda: DEVICES_OF_OPTIMIZERS)


def _shadows(torch_own: Replacements, recorder: Recorder) -> None:
    """To find a result's shape, DTensor runs operators on tensors of global size, which have no memory on any device."""
    for name in ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta"):
        if hasattr(ShardingPropagator, name):
            torch_own.replace(ShardingPropagator, name, recorder.unseen(vars(ShardingPropagator)[name]))


def _grouped_attention(torch_own: Replacements, recorder: Recorder) -> None:
    """The model repeats keys and values where a GPU has no kernel for grouped heads, and asks a tensor whether it is on one."""
    if not recorder.on_host:
        torch_own.replace(transformer, "lacks_grouped_kernel", lambda query: query.dtype == torch.float32)


def _float8_gathers(torch_own: Replacements, recorder: Recorder) -> None:
    """A weight that is gathered in float8 sees by the value of its scale whether it has one. On meta there are no values."""
    convert = Float8.convert

    def converted(self: Float8, network: Network) -> None:
        convert(self, network)
        from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Weight

        flatten = Weight.__tensor_flatten__

        def flattened(weight: Any) -> Any:
            scale, weight._precomputed_scale = weight._precomputed_scale, weight._precomputed_scale is not None
            try:
                return flatten(weight)
            finally:
                weight._precomputed_scale = scale

        torch_own.replace(Weight, "__tensor_flatten__", flattened)

    torch_own.replace(Float8, "convert", converted)


STAND_INS = (
    *(_fsdp2_streams, _fsdp2_takes_meta, _fsdp1_streams, _optimizers, ddp_reduces, _shadows),
    *(_grouped_attention, _float8_gathers),
)
"""Besides autocast and the kernels, which have modules of their own."""


@contextmanager
def in_place_of(device_type: str, recorder: Recorder, *, compiles: bool = False) -> Iterator[None]:
    """
    Have meta stand in for a device.

    Args:
        device_type: `cpu` or `cuda`.
        compiles: whether any of the recipe is compiled.
    """
    if compiles:
        # Importing the compiler takes seconds; first, since while it is imported it collects functions that are replaced here.
        from meshrunner.runner.predict.meta.compile import backend as compiled
    with Replacements() as torch_own:
        for stand_in in STAND_INS:
            stand_in(torch_own, recorder)
        torch_own.enter_context(rehearsed_autocast(torch_own, device_type))
        torch_own.enter_context(kernels.installed(device_type, compiles=compiles))
        if compiles:
            compiled.installed(torch_own, recorder)
        yield
