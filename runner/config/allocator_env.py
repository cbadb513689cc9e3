"""The environment variables that torch's caching allocator is set with, and what they are where nobody sets them."""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names of one setting, today's first."""
DEFAULT = "expandable_segments:True"
"""Segments of fixed size would fragment: memory is reserved that no tensor fits into."""


def in_effect(own: Mapping[str, str]) -> dict[str, str]:
    """
    The variables that workers on GPUs have, in the order of VARIABLES.

    Args:
        own: `launch.env`. It wins over what was exported, under whichever name, and that over the default.
    """
    for variables in (own, os.environ):
        if found := {name: variables[name] for name in VARIABLES if name in variables}:
            return found
    return {VARIABLES[0]: DEFAULT}


def that_counts(variables: Mapping[str, str]) -> tuple[str, str]:
    """Name and value of the first of VARIABLES that is not empty; both empty: none is."""
    return next(((name, text) for name in VARIABLES if (text := variables.get(name))), ("", ""))
