"""Run a worker, the process of one rank: prepare the device, join the process group, and call the recipe `pretrain`."""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrunner.recipes.checkpoint.on_disk import FOLDER
from meshrunner.recipes.errors import ConfigError, TooLarge
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.launch_env import ALLOCATOR
from meshrunner.runner.launch.environment import apply_allocator_settings, fall_back_to_fixed_segments, sdpa_backend
from meshrunner.runner.process.cpu_binding import allowed_cpus, bind_to_gpu
from meshrunner.runner.process.lone_stages import replace_neighbours
from meshrunner.runner.process.worker_context import WorkerContext
from meshrunner.runner.rundir import Environment, RankError
from meshrunner.runner.rundir.files import ENVIRONMENT, rank_error

if TYPE_CHECKING:
    import torch

_kept_alive: list[Any] = []
"""Objects that must live until the process exits. A DDP module that is destroyed before the process group may hang."""
STOPPED_EARLY = 75
"""Exit code of a worker that ended before the last step because of a stop request."""


def main(run_dir: Path, experiment: bytes, context: WorkerContext) -> int:
    """Run a worker process and return its exit code. `experiment` is pickled."""
    try:
        return _train(run_dir, pickle.loads(experiment), context)
    except BaseException as error:  # the launcher must learn of every exception
        _write_error(run_dir, context, error)
        return 1


def _train(run_dir: Path, experiment: Experiment, context: WorkerContext) -> int:
    import torch
    import torch.distributed as dist

    from meshrunner.recipes.pretrain import train
    from meshrunner.runner.measure.meter import RunMeter
    from meshrunner.runner.measure.out_of_memory import explained

    torch.set_num_threads(context.threads)
    torch.set_float32_matmul_precision(experiment.precision.fp32_matmul)
    kind = context.device_type
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, context.local_rank)
    launch, fallback = experiment.launch, None
    if device.type == "cuda":
        if launch.bind == "auto":
            bind_to_gpu(context.local_rank, len(context.steps))
        apply_allocator_settings()
        torch.cuda.set_device(device)
        fallback = fall_back_to_fixed_segments(device)
        experiment.model.import_kernels()
    elif not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in experiment.launch.env):
        _keep_freed_memory()
    # The launcher must time out first, because its message names the rank that hangs.
    minutes = max(launch.start_timeout_minutes, launch.timeout_minutes) + 1
    if context.emulated:
        join_fake_process_group(context, pipelined=experiment.parallelism.pipeline > 1)
    else:
        _init_process_group(context, device, timedelta(minutes=minutes))
    _record_environment(run_dir, context, experiment, fallback)
    if launch.host_memory_gib is not None:
        held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        limit = held + int(launch.host_memory_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    meter, stop = RunMeter(experiment, run_dir, context), context.stop_requested
    try:
        model, step = train(
            experiment,
            meter,
            device=device,
            nodes=context.node.count,
            workers=context.workers,
            checkpoints=None if context.emulated else run_dir / FOLDER,
            stop_requested=None if stop is None else lambda: bool(stop[0]),
        )
        dist.barrier()
    except BaseException as error:
        ran_out = explained(error, meter.step)
        if ran_out is None:
            raise
        try:
            meter.profiler.out_of_memory()
        except Exception:  # an error in the profiler must not hide the out-of-memory error
            traceback.print_exc()
        raise ran_out from error
    _kept_alive.append(model)
    return 0 if step == experiment.steps or meter.ended else STOPPED_EARLY


def _keep_freed_memory() -> None:
    """Make the C library keep the memory of freed tensors for reuse, as the caching allocator does on a GPU."""
    # By default, glibc returns large blocks to the kernel. In the next step, the kernel zeroes their pages again. This zeroing
    # took 4% of the step time.
    with suppress(AttributeError):  # a C library without mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the heap never shrinks


def _init_process_group(context: WorkerContext, device: torch.device, timeout: timedelta) -> None:
    """Join the process group through a store that rank 0 opens. Rank 0 picks a free port if the port in `context` is 0."""
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    host, port = context.node.host, context.port[0]
    if context.rank == 0:
        try:
            store = TCPStore(host, port, context.world_size, is_master=True, wait_for_workers=False)
        except dist.DistNetworkError as error:
            raise ConfigError(f"launch.port({port}) cannot be used: {str(error).splitlines()[0]}") from error
        context.port[0] = store.port
    else:
        while not context.port[0]:
            time.sleep(0.001)
        store = TCPStore(host, context.port[0], context.world_size, is_master=False, timeout=timeout)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=PrefixStore(context.node.rendezvous, store),
        timeout=timeout,
        rank=context.rank,
        world_size=context.world_size,
        device_id=device if device.type == "cuda" else None,
    )


def join_fake_process_group(context: WorkerContext, *, pipelined: bool = False) -> None:
    """Join a process group whose other ranks do not exist. Collectives return at once, as if all ranks had this rank's data. If
    the run is `pipelined`, stages compute with random values instead of received values."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
    from torch.nn import parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class WithoutReducer(parallel.DistributedDataParallel):
        """DDP that does not reduce gradient buckets, because DDP's built-in all-reduce rejects a fake process group."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.register_comm_hook(None, noop_hook)

    parallel.DistributedDataParallel = WithoutReducer  # type: ignore[misc]
    if pipelined:
        replace_neighbours(setattr, on_host=context.device_type == "cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=context.rank, world_size=context.world_size)


def _record_environment(run_dir: Path, context: WorkerContext, experiment: Experiment, fallback: str | None) -> None:
    """Add to environment.json the facts that only workers know: the CPUs of each rank, the attention backend and, if a rank
    fell back to fixed segments, the allocator settings. `fallback`: this rank's warning from `fall_back_to_fixed_segments`."""
    import torch.distributed as dist

    everyone: list[tuple[str, str | None]] = [(allowed_cpus(), fallback)]
    if not context.emulated:
        everyone *= context.world_size
        dist.all_gather_object(everyone, everyone[context.rank])
    if context.records:
        known, warnings = Environment.read(run_dir / ENVIRONMENT), [warning for _, warning in everyone if warning]
        own = {name: os.environ[name] for name in ALLOCATOR if warnings and name in os.environ}
        facts: dict[str, Any] = {
            "cpus": [cpus for cpus, _ in everyone],
            "environment": known.environment | own,
            "attention_backend": sdpa_backend(experiment, context.device_type),
            "remarks": warnings[:1],
        }
        with suppress(OSError):  # a full disk does not stop the run
            (known | facts).write(run_dir / ENVIRONMENT)


def _write_error(run_dir: Path, context: WorkerContext, error: BaseException) -> None:
    """Write an error to the rank's log, and to a file that the launcher reads."""
    from meshrunner.runner.measure.out_of_memory import explained
    from meshrunner.runner.own_code import fault

    plain = isinstance(error, ConfigError | FloatingPointError)  # a message for the user, without a traceback
    message = f"{error}" if plain else f"{type(error).__name__}: {error}"
    if ran_out := explained(error):
        message, error = str(ran_out), ran_out.__cause__ or error
        plain = isinstance(error, TooLarge)
    trace = "".join(traceback.format_exception(error))
    record = RankError(
        time=time.time(),
        rank=context.rank,
        oom=ran_out is not None,
        message=message.strip(),
        plain=plain,
        traceback=trace,
    )
    # Write the line of the user's code last: the report quotes the end of the log, but tracebacks often end inside a library.
    own = f"{found}\n" if (found := fault(error)) else ""
    sys.stderr.write(f"{message}\n" if plain else trace + own)
    sys.stderr.flush()
    with suppress(OSError):  # on a full disk the launcher has only the exit code
        record.write(rank_error(run_dir, context.rank))
