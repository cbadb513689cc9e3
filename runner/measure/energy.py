"""Reads from NVML, the library of NVIDIA's driver, how much energy a GPU has used."""

import ctypes
import math
from collections.abc import Callable


def energy_counter(uuid: str) -> Callable[[], float]:
    """Return a function that returns the joules that a GPU has used since the driver was loaded. The function returns NaN if NVML
    does not count the energy, as for MIG slices and for GPUs older than Volta. uuid: UUID of the GPU, without `GPU-`."""
    device, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(device)):
            return lambda: math.nan
        read = nvml.nvmlDeviceGetTotalEnergyConsumption
    except (OSError, AttributeError):
        return lambda: math.nan
    return lambda: math.nan if read(device, ctypes.byref(millijoules)) else millijoules.value / 1000
