"""Environment variables that configure torch's caching allocator, and their default."""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names of the same setting, the current one first."""
DEFAULT = "expandable_segments:True"
"""Fixed-size segments fragment: the allocator reserves memory that no tensor fits into."""


def in_effect(own: Mapping[str, str]) -> dict[str, str]:
    """
    Return the allocator variables of workers on GPUs, in the order of VARIABLES.

    Args:
        own: `launch.env`. Any of the names in it wins over exported variables, which win over the default.
    """
    for variables in (own, os.environ):
        if found := {name: variables[name] for name in VARIABLES if name in variables}:
            return found
    return {VARIABLES[0]: DEFAULT}


def that_counts(variables: Mapping[str, str]) -> tuple[str, str]:
    """Return name and value of the first of VARIABLES that is not empty, two empty strings if all are."""
    return next(((name, text) for name in VARIABLES if (text := variables.get(name))), ("", ""))
