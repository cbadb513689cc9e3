"""Find the devices of this node, and the devices for which to predict a run. Import torch only if a GPU driver exists."""

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from meshrunner.recipes.errors import ConfigError, Incompatible
from meshrunner.runner.config.consistency import fit
from meshrunner.runner.config.experiment import Experiment, check
from meshrunner.runner.config.hardware import CPU, GPU, AutoHardware, Hardware
from meshrunner.runner.config.interpreter import is_other, unsuitable
from meshrunner.runner.console import counted
from meshrunner.runner.process.cpu_binding import FEWEST_CORES

DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""Device files of the NVIDIA driver and the AMD driver."""
CORES = "MESHRUNNER_CORES"
"""Environment variable with the number of CPU cores that a run may use; a sweep sets it if several runs share the node."""
CPU_WORKERS = 2
"""Default number of workers on a node without GPUs: more than one, because a single worker would not communicate."""


class ExpectedDevices(NamedTuple):
    """The devices for which speed and memory are predicted: the GPU that `hardware` describes, or else this machine's devices."""

    type: str
    """`cuda` or `cpu`."""
    hardware: GPU | CPU | None
    """Option of the group `hardware` with the rates from which `plan` predicts the speed; None if the rates are unknown."""
    name: str
    memory_gib: float
    """Memory of one device in GiB; on a CPU, launch.host_memory_gib, or else the machine's memory divided by `workers`."""
    workers: int
    """Number of workers on each node."""


class NodeDevices(NamedTuple):
    """The devices that a run's workers use on one node."""

    type: str
    workers: int
    """Number of workers per node in the run's mesh; this node starts `processes` of them."""
    threads: int
    """CPU threads of each worker."""
    emulated: bool = False
    """Whether a single process emulates one rank of the mesh (`launch.emulate`)."""

    @property
    def processes(self) -> int:
        """Number of worker processes that this node starts, one per device."""
        return 1 if self.emulated else self.workers


def gpu_count() -> int:
    """Return the number of GPUs that torch can use. Try NVML first, because importing torch takes seconds."""
    if not any(driver.exists() for driver in DRIVERS):
        return 0
    if (count := _count_with_nvml()) is not None:
        return count
    import torch

    return torch.cuda.device_count()


def _count_with_nvml() -> int | None:
    """Return the number of visible NVIDIA GPUs. Return None if the driver's library NVML is missing or fails, if torch is built
    without CUDA, or if CUDA_VISIBLE_DEVICES is not a list of distinct GPU indices."""
    visible, torch_spec = os.environ.get("CUDA_VISIBLE_DEVICES"), find_spec("torch")
    folders = torch_spec.submodule_search_locations if torch_spec else None
    if not folders or not Path(folders[0], "lib", "libtorch_cuda.so").exists():
        return None
    count = ctypes.c_int()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return None
    except (OSError, AttributeError):
        return None
    if not visible:
        return count.value if visible is None else 0
    named = {each.strip() for each in visible.split(",")}
    known = len(named) == len(visible.split(",")) and named <= {*map(str, range(count.value))}
    return len(named) if known else None


def visible_gpus() -> list[str]:
    """Return the index or UUID of each GPU that torch can use, from CUDA_VISIBLE_DEVICES if it is set, or else 0, 1, 2, ..."""
    count = gpu_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(count)] if named is None else [each.strip() for each in named.split(",")][:count]


def cores() -> int:
    """Return the number of cores that this process may use: the CPUs in its affinity mask, or $MESHRUNNER_CORES if fewer."""
    own = len(os.sched_getaffinity(0))
    return min(own, int(os.environ.get(CORES, own)))


def too_few_cores(devices: NodeDevices) -> str | None:
    """Return a warning if the workers have too few CPU cores to feed their GPUs, else None."""
    if devices.type == "cpu" or cores() >= FEWEST_CORES * devices.processes:
        return None
    return (
        f"{counted(cores(), 'CPU core')} for {counted(devices.processes, 'GPU worker')}: with fewer than "
        f"{FEWEST_CORES} cores per worker, the GPUs wait for the CPU. Under SLURM, request more with "
        "hydra.launcher.cpus_per_task or cpus_per_gpu"
    )


def cpu_name() -> str:
    """Return the processor's name as Linux reports it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return "CPU"


def expected_device_type(hardware: Hardware) -> str:
    """Return `cuda` if `hardware` is a GPU, `cpu` if it is a CPU, else the type of this machine's devices."""
    return "cuda" if isinstance(hardware, GPU) or (not isinstance(hardware, CPU) and gpu_count()) else "cpu"


def expected_devices(experiment: Experiment) -> ExpectedDevices:
    """Return the devices for which to predict an experiment. With hardware=h200, return H200s even on a machine without H200s."""
    hardware, given = experiment.hardware, experiment.launch.workers
    if given != "auto":
        workers = given
    elif isinstance(hardware, GPU) and not gpu_count():
        workers = hardware.devices_per_node
    else:
        workers = node_devices(experiment).workers
    if isinstance(hardware, GPU):
        return ExpectedDevices("cuda", hardware, hardware.name, hardware.memory_gib, workers)
    if expected_device_type(hardware) == "cuda":
        import torch

        device = torch.cuda.get_device_properties(0)
        memory_gib = device.total_memory / 2**30
        found = hardware.found(device.name, memory_gib)
        return ExpectedDevices("cuda", found if isinstance(found, GPU) else None, device.name, memory_gib, workers)
    timed = hardware if isinstance(hardware, CPU) and hardware.speed is not None else None
    return ExpectedDevices("cpu", timed, *experiment.host_memory(workers), workers)


def check_on_devices(config: dict[str, Any]) -> tuple[Experiment, ExpectedDevices]:
    """Build an experiment and find the devices for its prediction. Raise ConfigError if these devices cannot run it."""
    experiment = check(config)
    experiment = experiment.on(expected_device_type(experiment.hardware))
    device = expected_devices(experiment)
    fit(experiment, device.workers)
    return experiment, device


def node_devices(experiment: Experiment) -> NodeDevices:
    """Return the devices of this node for an experiment; raise ConfigError if the experiment cannot run on this node."""
    launch, hardware = experiment.launch, experiment.hardware
    other = is_other(launch.python)
    if other and (fault := unsuitable(str(launch.python))):
        raise Incompatible(fault)
    gpus = 0 if isinstance(hardware, CPU) else gpu_count()
    if not isinstance(hardware, CPU | AutoHardware) and not gpus:
        raise ConfigError(
            f"hardware: this node has no GPU that torch can use, but hardware.kind is '{hardware.kind}'; use hardware=auto. "
            "`meshrunner doctor` lists the devices of this node"
        )
    workers = (gpus or CPU_WORKERS) if launch.workers == "auto" else launch.workers
    threads = launch.given_threads or max(1, cores() // workers)
    found = NodeDevices("cuda" if gpus else "cpu", workers, threads, launch.emulate is not None)
    if gpus and found.processes > gpus:
        raise Incompatible(
            f"launch.workers({workers}) is more than this node's {gpus} GPU{'s' * (gpus > 1)}; lower it, or use hardware=cpu"
        )
    # If another interpreter executes the run, that interpreter checks the options for its own torch.
    for option in () if other else (experiment.precision, experiment.model, experiment.parallelism, experiment.compile):
        if reason := option.unsupported(found.type):
            raise Incompatible(reason)
    return found
