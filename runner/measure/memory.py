"""Peak memory of a rank: resident host memory, and on CUDA the caching allocator's peaks."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from meshrunner.runner.figures import row_keys

GIB = 2**30


class HostMemory:
    """Peak resident set size (VmHWM), which Linux lets a process reset."""

    keys: tuple[str, ...] = ("memory/peak_rss_gib",)
    """Figures that a rank measures."""
    total_gib: float | None = None
    """Memory of the device in GiB; None on a CPU, whose memory is shared with other ranks and programs."""

    def row(self, peaks: dict[str, float]) -> dict[str, float | None]:
        """Return the memory keys of a row, given the maxima over ranks. Figures that this device does not have are null."""
        found: dict[str, float | None] = dict.fromkeys(row_keys("memory/"))
        found |= peaks
        if self.total_gib:
            for key in ("active", "reserved"):
                found[f"memory/peak_{key}_pct"] = 100 * peaks[f"memory/peak_{key}_gib"] / self.total_gib
        return found

    def read(self) -> dict[str, float | None]:
        """Return the peaks since the last reset, by key."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return {"memory/peak_rss_gib": int(line.split()[1]) * 1024 / GIB}
        return {"memory/peak_rss_gib": None}

    def release_cached(self) -> None:
        """Return cached memory to the device, so that the peak of reserved memory is that of the steps, not of the start-up."""

    def reset(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:  # some containers forbid it; the peak then includes the start-up
            return


class CudaMemory(HostMemory):
    """Peaks of the caching allocator: active (in use by tensors) and reserved (on the device)."""

    keys = ("memory/peak_active_gib", "memory/peak_reserved_gib", "memory/alloc_retries", *HostMemory.keys)

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.total_gib = torch.cuda.get_device_properties(device).total_memory / GIB
        self._retries = 0

    def read(self) -> dict[str, float | None]:
        stats = torch.cuda.memory_stats(self.device)
        return {
            "memory/peak_active_gib": stats["active_bytes.all.peak"] / GIB,
            "memory/peak_reserved_gib": stats["reserved_bytes.all.peak"] / GIB,
            "memory/alloc_retries": float(stats["num_alloc_retries"] - self._retries),
            **super().read(),
        }

    def release_cached(self) -> None:
        gc.collect()  # reference cycles keep tensors alive
        torch.cuda.empty_cache()

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
        self._retries = torch.cuda.memory_stats(self.device)["num_alloc_retries"]
        super().reset()


def memory_of(device: torch.device) -> HostMemory:
    """Return the memory meter for a rank's device."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory()
