"""Binds a worker to the CPUs in the NUMA domain of its GPU, if the node has several NUMA domains."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

FEWEST_CORES = 2
"""Minimum number of CPU cores for a worker with a GPU: one for the Python thread and one for autograd's backward thread."""
PCI_DEVICES = Path("/sys/bus/pci/devices")


def bind_to_gpu(local_rank: int, workers: int) -> None:
    """Bind this process to the CPUs close to GPU `local_rank` before CUDA is initialised. `workers`: number of GPUs in use."""
    cpus = cpus_to_bind([_bus_id(gpu) for gpu in range(workers)], local_rank, os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").iterdir() if cpus else ():
        with suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread.name), cpus)


def cpus_to_bind(bus_ids: Sequence[str], local_rank: int, allowed: set[int]) -> set[int]:
    """Return the CPUs in `allowed` that are close to GPU `bus_ids[local_rank]`, or an empty set if binding is not useful."""
    near = [cpus_near(bus_id) & allowed for bus_id in bus_ids]
    own = near[local_rank]
    # Binding has no effect if all allowed CPUs are close to the GPU. Workers may share these CPUs, but each worker needs
    # FEWEST_CORES of them.
    return own if own != allowed and len(own) >= FEWEST_CORES * near.count(own) else set()


def cpus_near(bus_id: str) -> set[int]:
    """Return the CPUs in the NUMA domain of a PCI device such as `0000:dc:00.0`, or an empty set if the domain is unknown."""
    try:
        text = (PCI_DEVICES / bus_id / "local_cpulist").read_text()
    except OSError:
        return set()
    ranges = [each.partition("-") for each in text.strip().split(",") if each]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def allowed_cpus() -> str:
    """Return the CPUs that this process may run on, in the kernel's notation, such as `0-31,64-95`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("Cpus_allowed_list:"))


def _bus_id(gpu: int) -> str:
    """Return the PCI address of a GPU as sysfs writes it: `0000:dc:00.0`."""
    import torch

    found = torch.cuda.get_device_properties(gpu)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"  # type: ignore[attr-defined]
