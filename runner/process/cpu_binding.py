"""The CPUs of a worker on a GPU: those next to it, where a node has several NUMA domains."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

FEWEST_CORES = 2
"""Cores that a worker on a GPU needs: one for its Python code, one for the thread of backward."""
PCI_DEVICES = Path("/sys/bus/pci/devices")


def bind_to_gpu(local_rank: int, workers: int) -> None:
    """
    Bind this worker to the CPUs next to its GPU; before CUDA has a context, whose threads and host memory are to be there, too.

    Args:
        workers: workers on this node, one for each of its first GPUs.
    """
    cpus = cpus_to_bind([_bus_id(gpu) for gpu in range(workers)], local_rank, os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").iterdir() if cpus else ():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), cpus)


def cpus_to_bind(bus_ids: Sequence[str], local_rank: int, allowed: set[int]) -> set[int]:
    """
    The CPUs next to the GPU of a worker; empty where binding has no use: they are all there are, or too few for their workers.

    Args:
        bus_ids: PCI addresses of the GPUs of the node's workers.
        allowed: CPUs that this process may run on: SLURM may have given some to it.
    """
    near = [cpus_near(bus_id) & allowed for bus_id in bus_ids]
    own = near[local_rank]
    return own if own != allowed and len(own) >= FEWEST_CORES * near.count(own) else set()


def cpus_near(bus_id: str) -> set[int]:
    """The CPUs in the NUMA domain of a PCI device, such as `0000:dc:00.0`; empty where the kernel does not say."""
    try:
        text = (PCI_DEVICES / bus_id / "local_cpulist").read_text()
    except OSError:
        return set()
    ranges = [each.partition("-") for each in text.strip().split(",") if each]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def allowed_cpus() -> str:
    """The CPUs that this process may run on, as the kernel writes them: `0-31,64-95`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("Cpus_allowed_list:"))


def _bus_id(gpu: int) -> str:
    """The PCI address of a GPU as sysfs writes it."""
    import torch

    found = torch.cuda.get_device_properties(gpu)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"  # type: ignore[attr-defined]
