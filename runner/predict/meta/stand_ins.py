"""Makes torch's meta device behave like a GPU or CPU while a recipe is traced.

Meta tensors have shapes, dtypes and autograd. The meta device has no memory and no streams, and some meta kernels differ from
those of other devices. The streams of `recorder.device`, a `TracedDevice`, imitate CUDA streams, and the recorder logs their use.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _DEFAULT_FIRST_BUCKET_BYTES, GradBucket, _compute_bucket_assignment_by_size
from torch.distributed.fsdp import _common_utils, _flat_param, _runtime_utils
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer

from meshrunner.recipes.model import transformer
from meshrunner.recipes.model.network import Network
from meshrunner.recipes.parallelism.buffers import buffer_pool
from meshrunner.recipes.precision.base import Float8
from meshrunner.runner.predict.meta import kernels
from meshrunner.runner.predict.meta.autocast import autocast_on_meta
from meshrunner.runner.predict.meta.replacements import Replacements
from meshrunner.runner.predict.record.recorder import Recorder
from meshrunner.runner.predict.record.trace_events import META, PipelinePass, TracedDevice, TracedStream
from meshrunner.runner.process.lone_stages import replace_neighbours


def fsdp2_streams(in_torch: Replacements, recorder: Recorder) -> None:
    """Make FSDP2 use the streams of `recorder.device`, so that the trace shows which communication overlaps with compute."""
    for user in (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state):
        in_torch.replace(user, "_get_device_handle", lambda _="cuda": recorder.device)
    # FSDP2 calls this function only to free all-gathered parameters that no block used, such as those of a frozen first block.
    in_torch.replace(torch.accelerator, "current_stream", recorder.device.current_stream)


def fsdp2_device(in_torch: Replacements, recorder: Recorder) -> None:
    """Make FSDP2 shard parameters on meta. Unpatched, FSDP2 would use the mesh's device and reject parameters on meta."""
    # Import by name, because the package exports a function with the same name as this module.
    fully_shard = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
    for user in (_fsdp_init, fully_shard):
        in_torch.replace(user, "_get_device_from_mesh", lambda mesh: META)
    in_torch.replace(_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda self: None)


def planned_buffers(in_torch: Replacements, recorder: Recorder) -> None:
    """Log each call of `buffer_pool.empty_cache`. The call frees the memory of the buffers that the first step used."""
    in_torch.replace(buffer_pool, "empty_cache", recorder.device.empty_cache)


def fsdp1_streams(in_torch: Replacements, recorder: Recorder) -> None:
    """Make FSDP1 use the streams of `recorder.device`, and log FSDP1's calls of `record_stream` (see `UsedByStream`)."""
    handle = classmethod(lambda cls, device: recorder.device)
    in_torch.replace(_common_utils._FSDPDeviceHandle, "from_device", handle)
    # FSDP1 considers a tensor freed if its address is 0, but every address on meta is 0.
    in_torch.replace(_flat_param, "_data_ptr_allocated", lambda tensor: tensor.untyped_storage().size() > 0)
    for user in (_flat_param, _runtime_utils):
        in_torch.replace(user, "_no_dispatch_record_stream", recorder.used_by_stream)


def ddp_reducer(in_torch: Replacements, recorder: Recorder) -> None:
    """Make DDP reduce its buckets in a Python hook, because DDP's C++ reducer rejects a fake process group. The buckets have
    their final order from the start: DDP would broadcast a new order after the first step, but meta tensors have no values."""
    init, init_helper = DistributedDataParallel.__init__, DistributedDataParallel._ddp_init_helper

    def traced_init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        device, stream = recorder.device, recorder.device.Stream()
        self.register_comm_hook(self.process_group, lambda group, bucket: _reduce(device, stream, group, bucket))
        self.reducer = _Overridden(self.reducer, _rebuild_buckets=lambda: False)  # type: ignore[assignment]
        # DDP's step timer does not support meta.
        self.logger = _Overridden(self.logger, set_runtime_stats_and_log=lambda: None)

    def traced_init_helper(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        cap = self.bucket_bytes_cap
        first = _DEFAULT_FIRST_BUCKET_BYTES if self.bucket_bytes_cap_default else cap

        def rebuilt(parameters: list[Tensor], limits: list[int], sparse: list[bool]) -> Any:
            if limits != [sys.maxsize]:  # DDP does not rebuild these buckets
                return _compute_bucket_assignment_by_size(parameters, limits, sparse)
            # Fill buckets in the order in which gradients arrive, and return them reversed, because DDP reverses the result.
            buckets, sizes = _compute_bucket_assignment_by_size(parameters[::-1], [first, cap], sparse[::-1])
            last = len(parameters) - 1
            return [[last - number for number in bucket] for bucket in reversed(buckets)], sizes[::-1]

        with Replacements() as in_dist:
            in_dist.replace(dist, "_compute_bucket_assignment_by_size", rebuilt)
            init_helper(self, *args, **kwargs)  # type: ignore[no-untyped-call]

    in_torch.replace(DistributedDataParallel, "__init__", traced_init)
    in_torch.replace(DistributedDataParallel, "_ddp_init_helper", traced_init_helper)


def _reduce(device: TracedDevice, stream: TracedStream, group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Like DDP, divide a bucket by the group size and all-reduce it on NCCL's stream. The compute stream waits for
    the last bucket."""
    buffer, computing = bucket.buffer(), device.current_stream()
    buffer.div_(group.size())
    stream.wait_stream(computing)
    with device.stream(stream):
        dist.all_reduce(buffer, group=group)
    if bucket.is_last():
        computing.wait_stream(stream)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


class _Overridden:
    """Wrapper that replaces some methods of a C++ object."""

    def __init__(self, wrapped: Any, **methods: Any) -> None:
        self.__dict__.update(methods, _wrapped=wrapped)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_wrapped"], name)


def optimizer_devices(in_torch: Replacements, recorder: Recorder) -> None:
    """Allow fused and foreach optimizers on meta, where they work although torch does not list meta as a supported device."""
    for name in ("_get_fused_kernels_supported_devices", "_get_foreach_kernels_supported_devices"):
        in_torch.replace(torch_optimizer, name, lambda: ["meta", "cpu", "cuda"])


def sharding_propagation(in_torch: Replacements, recorder: Recorder) -> None:
    """Pause recording while DTensor runs an operator on fake unsharded tensors to find the shape of the operator's result."""
    for name in ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta"):
        if hasattr(ShardingPropagator, name):
            in_torch.replace(ShardingPropagator, name, recorder.pause()(vars(ShardingPropagator)[name]))


def grouped_attention(in_torch: Replacements, recorder: Recorder) -> None:
    """Repeat keys and values in grouped-query attention wherever `lacks_grouped_kernel` would be true on GPUs."""
    if not recorder.on_host:
        in_torch.replace(transformer, "lacks_grouped_kernel", lambda q, masked: masked or q.dtype == torch.float32)


def float8_gathers(in_torch: Replacements, recorder: Recorder) -> None:
    """Replace torchao's check whether a float8 weight has a scale: the check reads a value, but meta tensors have no values."""
    convert = Float8.convert

    def traced_convert(self: Float8, network: Network, tensor: int) -> None:
        convert(self, network, tensor)
        from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Weight

        flatten = Weight.__tensor_flatten__

        def traced_flatten(weight: Any) -> Any:
            scale, weight._precomputed_scale = weight._precomputed_scale, weight._precomputed_scale is not None
            try:
                return flatten(weight)
            finally:
                weight._precomputed_scale = scale

        in_torch.replace(Weight, "__tensor_flatten__", traced_flatten)

    in_torch.replace(Float8, "convert", traced_convert)


def pipeline_passes(in_torch: Replacements, recorder: Recorder) -> None:
    """Let a rank run its pipeline schedule alone, without transfers, and log when the host begins and ends each pass."""
    from torch.distributed.pipelining.stage import _PipelineStageBase  # not at the top: only pipelines need it

    replace_neighbours(in_torch.replace, on_host=recorder.on_host)

    def logged(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(stage: _PipelineStageBase, micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            this = PipelinePass(name, stage.stage_index, micro_batch, begins=True)
            recorder.device.write(this)
            try:
                return method(stage, micro_batch, *args, **kwargs)
            finally:
                recorder.device.write(this._replace(begins=False))

        return run

    methods = {"forward": "forward_one_chunk", "backward": "backward_one_chunk", "weights": "backward_weight_one_chunk"}
    for name, method in methods.items():
        in_torch.replace(_PipelineStageBase, method, logged(name, vars(_PipelineStageBase)[method]))


STAND_INS = (
    *(fsdp2_streams, fsdp2_device, planned_buffers, fsdp1_streams, ddp_reducer),
    *(optimizer_devices, sharding_propagation, grouped_attention, float8_gathers),
)
"""All replacements except those for autocast, kernels, compiled code and pipelines."""


@contextmanager
def meta_as(device_type: str, recorder: Recorder, *, compiles: bool, cudnn: bool, pipelined: bool) -> Iterator[None]:
    """Make meta behave like a `cpu` or `cuda` device. See `device_kernels` for `compiles` and `cudnn`."""
    if compiles:
        # Import only if needed: it takes seconds. Import before replacing torch's functions, because the module stores them.
        from meshrunner.runner.predict.meta.compiler import trace_compiled_code
    with Replacements() as in_torch:
        for stand_in in STAND_INS:
            stand_in(in_torch, recorder)
        autocast_on_meta(in_torch, device_type)
        kernels.device_kernels(in_torch, device_type, compiles=compiles, cudnn=cudnn)
        if compiles:
            trace_compiled_code(in_torch, recorder)
        if pipelined:
            pipeline_passes(in_torch, recorder)
        yield
