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
"""Variables whose value the workers would not see, or see too late -> the reason."""
OF_THE_LAUNCHER = ("MESHRUNNER_", "WANDB_", "HF_")
"""Prefixes of variables that the launching process reads: cache, trackers, preparation of data."""
THREADS = "OMP_NUM_THREADS"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names of the setting of torch's caching allocator, the current one first."""
ALLOCATOR_DEFAULT = "expandable_segments:True"
"""Fixed-size segments fragment: the allocator reserves memory that no tensor fits into."""


def as_text(value: Any) -> Any:
    """Return a number or bool of YAML as text, the only type in an environment."""
    return json.dumps(value) if isinstance(value, int | float) else value


def effective(variables: dict[str, str]) -> dict[str, str]:
    """Return the variables; raise PydanticCustomError for secrets and for variables that would have no effect."""
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
    """Return the ALLOCATOR variables of workers on GPUs: those of `launch.env` (own), else exported ones, else the default."""
    for variables in (own, os.environ):
        if found := {name: variables[name] for name in ALLOCATOR if name in variables}:
            return found
    return {ALLOCATOR[0]: ALLOCATOR_DEFAULT}


def allocator_setting(variables: Mapping[str, str]) -> tuple[str, str]:
    """Return name and value of the first of ALLOCATOR that is not empty, two empty strings if all are."""
    return next(((name, text) for name in ALLOCATOR if (text := variables.get(name))), ("", ""))
