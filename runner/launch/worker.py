"""A worker: what one rank does around the recipe. Its process comes from the forkserver, which has imported torch."""

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
from meshrunner.runner.process import forkserver
from meshrunner.runner.rundir.files import rank_error, rank_log, write_json

if TYPE_CHECKING:
    import torch

    from meshrunner.runner.config.experiment import Experiment
    from meshrunner.runner.measure.meter import RunMeter
    from meshrunner.runner.process.worker_context import WorkerContext

GIB = 2**30
_until_exit: list[Any] = []
"""The model stays referenced until the process ends: DDP destroyed before its process group may hang."""
STOPPED_EARLY = 75
"""Exit code of a worker that has stopped before the last step, as it was requested to."""


def main(run_dir: str, experiment: bytes, context: WorkerContext, environment: dict[str, str], path: list[str]) -> None:
    """
    The worker process, from start to end.

    Args:
        experiment: pickled. It may hold objects of a user's own classes, which can be imported under `path` only.
    """
    folder = Path(run_dir)
    forkserver.enter(rank_log(folder, context.rank), environment, path)
    try:
        code = _work(folder, pickle.loads(experiment), context)
    except BaseException as error:  # whatever it is, the launcher has to learn of it
        _report(folder, context.rank, error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a regular exit destroys the process group under DDP's feet and may hang


def _work(run_dir: Path, experiment: Experiment, context: WorkerContext) -> int:
    """Train as this rank; returns the exit code."""
    import torch
    import torch.distributed as dist

    from meshrunner.recipes.pretrain import train
    from meshrunner.runner.measure.meter import RunMeter

    torch.set_num_threads(context.threads)
    torch.set_float32_matmul_precision(getattr(experiment.precision, "matmul", "highest"))
    device = (
        torch.device(context.device_type, context.local_rank) if context.device_type != "cpu" else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        _keep_freed_memory()
    launch = experiment.launch
    _join(context, device, timedelta(minutes=max(launch.start_timeout_minutes, launch.timeout_minutes) + 1))
    if launch.host_memory_gib is not None:
        held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        limit = held + int(launch.host_memory_gib * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    meter = RunMeter(experiment, run_dir, context)
    try:
        result = train(
            experiment,
            meter,
            device=device,
            nodes=context.node.count,
            workers=context.workers,
            checkpoints=run_dir / FOLDER,
            stop_requested=None if context.stop_requested is None else lambda: bool(context.stop_requested[0]),
        )
        dist.barrier()
    except BaseException as error:
        if _is_out_of_memory(error):
            _tell_profiler(meter)
        raise
    _until_exit.append(result.model)
    return 0 if result.step == experiment.steps else STOPPED_EARLY


def _keep_freed_memory() -> None:
    """
    Let the C library keep what a CPU's tensors gave back, as the caching allocator of a GPU does.

    glibc would return large ones to the kernel at once, and the next step would get them zeroed page by page: 4% of a step.
    """
    with suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: large blocks are part of the heap, too
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: and the heap does not shrink


def _tell_profiler(meter: RunMeter) -> None:
    """Whatever goes wrong, what is reported is that there was not enough memory."""
    try:
        meter.out_of_memory()
    except Exception:
        traceback.print_exc()


def _join(context: WorkerContext, device: torch.device, timeout: timedelta) -> None:
    """
    Meet the other ranks. Rank 0 opens the store on a port of the system's choice and tells the node through memory.

    Args:
        timeout: of collectives; longer than the launcher's patience, which knows which rank did not come.
    """
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    from meshrunner.recipes.errors import ConfigError

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


def _report(run_dir: Path, rank: int, error: BaseException) -> None:
    """Print the traceback to the rank's log, and write the error for the launcher to read."""
    message = f"{error}" if _is_plain(error) else f"{type(error).__name__}: {error}"
    trace = traceback.format_exc()
    record = {
        "time": time.time(),
        "rank": rank,
        "oom": _is_out_of_memory(error),
        "message": message.strip(),
        "plain": _is_plain(error),
        "traceback": trace,
    }
    sys.stderr.write(f"{message}\n" if _is_plain(error) else trace)
    sys.stderr.flush()
    with suppress(OSError):  # on a full disk the exit code has to do
        write_json(rank_error(run_dir, rank), record)


def _is_plain(error: BaseException) -> bool:
    """Errors whose text is written for the user and says all there is to say."""
    from meshrunner.recipes.errors import ConfigError

    return isinstance(error, ConfigError | FloatingPointError)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)
    return "DefaultCPUAllocator: can't allocate memory" in text or "DefaultCPUAllocator: not enough memory" in text
