"""Explains in a sentence why a recipe could not be traced."""

from __future__ import annotations

import re

from meshrunner.runner.console import one_line
from meshrunner.runner.own_code import innermost

NEEDS_VALUES = re.compile(r"meta\b(?!-pytorch)|fake impl", re.IGNORECASE)
"""
Pattern of torch's errors about operators without a kernel for meta, and about values of meta tensors. The compiler ends every
message with an address that contains `meta-pytorch`.
"""


def cause(error: Exception) -> Exception:
    """Return the original error where the compiler wraps one."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, Exception) else error


def needs_memory(error: Exception) -> bool:
    """Whether the error is about tensors that have shapes but no values, and would not occur on a device."""
    return bool(NEEDS_VALUES.search(str(error)))


def why(error: Exception) -> str:
    """Return what went wrong, with the innermost line of the user's own files if the error passed through them."""
    error = cause(error)
    first = one_line(next(iter(str(error).splitlines()), ""))
    kind, line = type(error).__name__, innermost(error)
    where = f" ({line})" if line else ""
    if needs_memory(error):
        message = first.partition(". ")[0].rstrip(".")
        return f"an operator or the model itself needs values, but a trace has only shapes: {kind}: {message}{where}"
    return f"{kind}: {first}{where}" if first else f"{kind}{where}"
