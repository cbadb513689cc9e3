"""Explains an out-of-memory error in one line: host or device, step, part of the step, module and requested memory."""

from __future__ import annotations

import re
from traceback import walk_tb
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

ON_CPU = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)(?:: you tried to allocate (\d+) bytes)?"
)
ON_DEVICE = re.compile(
    r"(CUDA|HIP|XPU) out of memory"  # torch's allocator
    r"|(CUDA|HIP)( driver| runtime)? error: out of memory"  # torch calls that bypass the allocator
    r"|(CUDA|HIP) failure:? (2 )?'out of memory'|Failed to (CUDA|HIP) calloc"  # NCCL, RCCL
    r"|[A-Z]_ALLOC(ATION)?_FAILED"  # CUBLAS_STATUS_ALLOC_FAILED, and similar errors of cuDNN, cuSOLVER, hipBLAS
    r"|Triton Error \[\w+\]: out of memory",
    re.IGNORECASE,
)
"""Pattern of errors about device memory. Triton's "out of resource" does not match, because that error is about thread blocks."""
ASKED = re.compile(r"Tried to allocate ([\d.]+ \w+)")
CAPACITY = re.compile(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")
PARTS = {
    "assemble": "building the model",
    "restore": "loading the checkpoint",
    "save": "saving a checkpoint",
    "step_if_finite": "optimizer",
    "squared_norm": "gradient norm",
    "clip_by_norm": "clipping",
}
"""Phrases for error messages, keyed by function name. Each phrase describes the work of a function of the recipe."""


class MemoryRanOut(Exception):
    """Error raised if the device or this process runs out of memory. The message is one line for the user."""


def explained(error: BaseException, step: int = 0) -> MemoryRanOut | None:
    """Return an error such as `out of host memory in step 3 (forward of layers.1): tried to allocate 2.00 GiB`. Return None if
    neither `error` nor an exception that it wraps reports a lack of memory. `step` is 0 before the first step."""
    if isinstance(error, MemoryRanOut):
        return error
    chain = [error]
    while (wrapped := chain[-1].__cause__ or chain[-1].__context__) is not None and wrapped not in chain:
        chain.append(wrapped)
    for each in chain:
        on_device = ON_DEVICE.search(str(each)) or type(each).__name__ == "OutOfMemoryError"
        if on_device or isinstance(each, MemoryError) or ON_CPU.search(str(each)):
            what, where, part = "device" if on_device else "host", f" in step {step}" if step else "", _part(chain)
            return MemoryRanOut(f"out of {what} memory{where}" + (f" ({part})" if part else "") + _amount(str(each)))
    return None


def _amount(message: str) -> str:
    """Return `: tried to allocate 2.00 GiB` or, if `message` names no amount, the line of `message` that reports the failure."""
    if found := ON_CPU.search(message):
        return f": tried to allocate {int(found[1]) / 2**30:.2f} GiB" if found[1] else ""
    if found := ASKED.search(message):
        capacity = CAPACITY.search(message)
        free = f", {capacity[2]} of the device's {capacity[1]} were free" if capacity else ""
        return f": tried to allocate {found[1]}{free}"
    lines = message.strip().splitlines()
    return f": {next(filter(ON_DEVICE.search, lines), lines[0])}" if lines else ""


def _part(chain: list[BaseException]) -> str:
    """Return the work during which memory ran out, such as `forward of layers.1` or `backward`, or "" if unknown."""
    from torch import nn  # not at the top, because the launcher imports this module without torch

    frames = [frame for error in chain for frame, _ in walk_tb(error.__traceback__)]
    functions = [frame.f_code.co_name for frame in frames]
    modules = [module for frame in frames if isinstance(module := frame.f_locals.get("self"), nn.Module)]
    # Recomputation runs a block's forward inside backward.
    if modules and "backward" in functions and "unpack_hook" in functions:
        return f"recomputing {_name(modules)}".rstrip()
    if modules and {"forward", "_call_impl"} & set(functions):  # `_call_impl` also calls hooks
        return f"forward of {_name(modules)}".removesuffix(" of ")
    if "run_backward" in functions or "_engine_run_backward" in functions:
        return "backward"
    return next((PARTS[name] for name in reversed(functions) if name in PARTS), "")


def _name(modules: list[nn.Module]) -> str:
    """Return the innermost module's name, such as `layers.1`, without the names of wrappers. Return "" for the whole model."""
    from meshrunner.recipes.model.base import clean_name

    names = {id(module): clean_name(name) for name, module in modules[0].named_modules()}
    return next((name for module in reversed(modules) if (name := names.get(id(module)))), "")
