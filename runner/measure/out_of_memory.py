"""What is said of a run whose memory ran out: how much was asked for, in which step, in which part of it and which module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

GIB = 2**30
ON_CPU = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)(?:: you tried to allocate (\d+) bytes)?"
)
ON_DEVICE = re.compile(
    r"(CUDA|HIP|XPU) out of memory"  # torch's allocator
    r"|(CUDA|HIP)( driver| runtime)? error: out of memory"  # a call of torch's past the allocator
    r"|(CUDA|HIP) failure:? (2 )?'out of memory'|Failed to (CUDA|HIP) calloc"  # NCCL, RCCL
    r"|[A-Z]_ALLOC(ATION)?_FAILED"  # CUBLAS_STATUS_ALLOC_FAILED, and so cuDNN, cuSOLVER, hipBLAS
    r"|Triton Error \[\w+\]: out of memory",
    re.IGNORECASE,
)
"""Messages of what allocates on a device. Not Triton's "out of resource": a kernel that asks for more than a block may have."""
ASKED = re.compile(r"Tried to allocate ([\d.]+ \w+)")
CAPACITY = re.compile(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")
PARTS = {
    "assemble": "building the model",
    "restore": "loading the checkpoint",
    "save": "saving a checkpoint",
    "step_if_finite": "optimizer",
    "global_norm": "gradient norm",
    "clip_by_norm": "clipping",
}
"""Function of a recipe -> the part of a run that it is."""


class MemoryRanOut(Exception):
    """The memory of the device or of this process ran out; the message is a line for the user."""


def explained(error: BaseException, step: int = 0) -> MemoryRanOut | None:
    """
    What an exception says about memory: `out of host memory in step 3 (forward of layers.1): 2.00 GiB more were asked for`.

    The exceptions that it was raised from or while handling are asked, too: compilers wrap what they meet.

    Args:
        step: the step that was under way, counted from 1; 0 before the first.

    Returns:
        None: it says something else.
    """
    if isinstance(error, MemoryRanOut):
        return error
    chain = list(_chain(error))
    for each in chain:
        on_device = says_out_of_device_memory(str(each)) or type(each).__name__ == "OutOfMemoryError"
        if on_device or isinstance(each, MemoryError) or ON_CPU.search(str(each)):
            what, where, part = "device" if on_device else "host", f" in step {step}" if step else "", _part(chain)
            return MemoryRanOut(f"out of {what} memory{where}" + (f" ({part})" if part else "") + _amount(str(each)))
    return None


def says_out_of_device_memory(message: str) -> bool:
    """Whether a message is of a device's memory that ran out, whoever asked for it."""
    return ON_DEVICE.search(message) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, then the one that it was raised from or while handling, and so on, also where `from None` hides it."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        yield following
        seen.add(id(following))
        following = following.__cause__ or following.__context__


def _amount(message: str) -> str:
    """What was asked for, from torch's message; else the line that says that memory ran out."""
    if found := ON_CPU.search(message):
        return f": {int(found[1]) / GIB:.2f} GiB more were asked for" if found[1] else ""
    if found := ASKED.search(message):
        free = CAPACITY.search(message)
        return f": {found[1]} more were asked for" + (
            f", {free[2]} of the device's {free[1]} were free" if free else ""
        )
    lines = message.strip().splitlines()
    return f": {next(filter(ON_DEVICE.search, lines), lines[0])}" if lines else ""


def _part(chain: list[BaseException]) -> str:
    """The part of the step in which exceptions were raised: a module's forward if it is one's, else one of PARTS."""
    from torch import nn  # here: the launcher imports this module, too

    frames = [frame for error in chain for frame in _frames(error)]
    functions = [frame.f_code.co_name for frame in frames]
    modules = [module for frame in frames if isinstance(module := frame.f_locals.get("self"), nn.Module)]
    # A block that is recomputed runs its forward inside of backward.
    if modules and "backward" in functions and "unpack_hook" in functions:
        return f"recomputing {_name(modules)}".rstrip()
    if modules and {"forward", "_call_impl"} & set(functions):  # the latter calls hooks, too
        return f"forward of {_name(modules)}".removesuffix(" of ")
    if "run_backward" in functions or "_engine_run_backward" in functions:
        return "backward"
    return next((PARTS[name] for name in reversed(functions) if name in PARTS), "")


def _name(modules: list[nn.Module]) -> str:
    """The name of the innermost module in the outermost one, as the model was built; empty for the model itself."""
    from meshrunner.recipes.model.init_weights import clean_name

    names = {id(module): clean_name(name) for name, module in modules[0].named_modules()}
    return next((name for module in reversed(modules) if (name := names.get(id(module)))), "")


def _frames(error: BaseException) -> Iterator[FrameType]:
    """The frames from the outermost to where the exception was raised."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
