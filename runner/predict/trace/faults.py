"""Why a recipe could not be rehearsed, as a sentence."""

from __future__ import annotations

import re

from meshrunner.runner.console import one_line
from meshrunner.runner.own_code import innermost

WITHOUT_MEMORY = re.compile(r"meta\b(?!-pytorch)|fake impl", re.IGNORECASE)
"""
What torch says where an operator has no kernel for tensors on meta, or a value of one is asked for. The compiler's messages end
with an address that has `meta-pytorch` in it, whatever they are about.
"""


def cause(error: Exception) -> Exception:
    """What really happened, where the compiler wraps it."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, Exception) else error


def needs_memory(error: Exception) -> bool:
    """Whether something cannot be done with tensors that have shapes alone, and would have worked on a device."""
    return bool(WITHOUT_MEMORY.search(str(error)))


def why(error: Exception) -> str:
    """What happened, and the innermost line of the user's own files that it came through, if there is one."""
    error = cause(error)
    first = one_line(next(iter(str(error).splitlines()), ""))
    kind, line = type(error).__name__, innermost(error)
    where = f" ({line})" if line else ""
    if needs_memory(error):
        said = first.partition(". ")[0].rstrip(".")
        return f"an operator or the model itself needs values, and a rehearsal has shapes alone: {kind}: {said}{where}"
    return f"{kind}: {first}{where}" if first else f"{kind}{where}"
