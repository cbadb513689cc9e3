"""Environment variables of the workers: validation of `launch.env`, and settings of torch's caching allocator."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

from meshrunner.recipes.secrets import WHERE, is_secret

EXPORT = "the launching process reads it too; export it before the command, on SLURM in hydra.launcher.preamble"
WITHOUT_EFFECT = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), "the launcher sets it for each worker"),
    **dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), "the launcher opens the rendezvous; launch.port sets its port"),
    **dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "PYTHONPATH"), EXPORT),
    "MKL_NUM_THREADS": "launch.threads decides",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "precision.matmul decides",
}
"""Variable whose value the workers would not see, or would see too late -> the reason."""
OF_THE_LAUNCHER = ("MESHRUNNER_", "WANDB_", "HF_")
"""Prefixes of variables that the launching process reads for the cache, trackers and data preparation."""
THREADS = "OMP_NUM_THREADS"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables that configure torch's caching allocator: the current name, then older names."""
ALLOCATOR_DEFAULT = "expandable_segments:True"
"""Default allocator setting. With fixed-size segments, the allocator reserves memory that no tensor fits into."""


def as_text(value: Any) -> Any:
    """Return a YAML number or bool as text, because environment variables hold only text."""
    return json.dumps(value) if isinstance(value, int | float) else value


def effective(variables: dict[str, str]) -> dict[str, str]:
    """Return the variables unchanged; raise PydanticCustomError for secrets and for variables that would have no effect."""
    if secret := sorted(filter(is_secret, variables)):
        raise PydanticCustomError(
            "secret", "the value of {names} is secret, as the name says: " + WHERE, {"names": ", ".join(secret)}
        )
    reasons = WITHOUT_EFFECT | {name: EXPORT for name in variables if name.startswith(OF_THE_LAUNCHER)}
    if idle := [f"{name} ({reasons[name]})" for name in sorted(variables) if name in reasons]:
        raise PydanticCustomError("no_effect", "these would have no effect here: {idle}", {"idle": ", ".join(idle)})
    threads = variables.get(THREADS, "1")
    if not (threads.isascii() and threads.isdecimal() and int(threads) > 0):
        raise PydanticCustomError(
            "threads",
            "expected a whole number of at least 1 for {name}, got '{got}'",
            {"name": THREADS, "got": threads},
        )
    return variables


def allocator_variables(own: Mapping[str, str]) -> dict[str, str]:
    """Return the ALLOCATOR variables of GPU workers from `launch.env` (own), else from the environment, else the default."""
    for variables in (own, os.environ):
        if found := {name: variables[name] for name in ALLOCATOR if name in variables}:
            return found
    return {ALLOCATOR[0]: ALLOCATOR_DEFAULT}


def allocator_setting(variables: Mapping[str, str]) -> tuple[str, str]:
    """Return the name and value of the first non-empty ALLOCATOR variable, or two empty strings if all are empty."""
    return next(((name, text) for name in ALLOCATOR if (text := variables.get(name))), ("", ""))
