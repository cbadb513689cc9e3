"""Replacements in FSDP1 and FSDP2, which look for a device with streams and find meta."""

from __future__ import annotations

import importlib

import torch
from torch.distributed.fsdp import _common_utils, _flat_param, _runtime_utils
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state

from meshrunner.runner.predict.meta.replacements import Replacements
from meshrunner.runner.predict.record.device_streams import DeviceModule
from meshrunner.runner.predict.record.recorder import Recorder

META = torch.device("meta")


def fsdp2_streams(in_torch: Replacements, recorder: Recorder) -> None:
    """
    Give FSDP2 the device's streams, which overlap communication with compute.

    It asks for the device's module, and for the accelerator's stream when it frees all-gathers whose result was never used, such
    as those of frozen blocks below the first trained one.
    """
    module = DeviceModule(recorder.device)
    for user in (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state):
        in_torch.replace(user, "_get_device_handle", lambda _="cuda": module)
    in_torch.replace(torch.accelerator, "current_stream", module.current_stream)


def fsdp2_device(in_torch: Replacements, recorder: Recorder) -> None:
    """Have FSDP2 shard on meta: it takes the mesh's device, and refuses meta parameters as never materialised."""
    fully_shard = importlib.import_module(
        "torch.distributed.fsdp._fully_shard._fully_shard"
    )  # a function has the same name
    for user in (_fsdp_init, fully_shard):
        in_torch.replace(user, "_get_device_from_mesh", lambda mesh: META)
    in_torch.replace(_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda self: None)


def fsdp1_streams(in_torch: Replacements, recorder: Recorder) -> None:
    """
    Give FSDP1 the device's streams.

    It also tells the allocator which stream uses a tensor (`record_stream`), whose memory is kept until the stream has passed. It
    decides by the address whether a tensor has memory, and on meta every address is 0.
    """
    module = DeviceModule(recorder.device, META)
    in_torch.replace(_common_utils._FSDPDeviceHandle, "from_device", classmethod(lambda cls, device: module))
    in_torch.replace(_flat_param, "_data_ptr_allocated", lambda tensor: tensor.untyped_storage().size() > 0)
    for user in (_flat_param, _runtime_utils):
        in_torch.replace(user, "_no_dispatch_record_stream", recorder.used_by_stream)
