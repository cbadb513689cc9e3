"""Validate the environment variables that `launch.env` sets in workers, and find the settings of torch's caching allocator."""

import json
import os
from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

from meshrunner.recipes.secrets import WHERE, is_secret

EXPORT = "the launching process also reads it; export it before the command or, with SLURM, in hydra.launcher.preamble"
WITHOUT_EFFECT = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), "the launcher sets it for each worker"),
    **dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), "the launcher opens the rendezvous; launch.port sets its port"),
    **dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "PYTHONPATH"), EXPORT),
    "MKL_NUM_THREADS": "set launch.threads",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "set precision.matmul",
}
"""Variables that `launch.env` refuses because they would have no effect there, each mapped to the reason that users see."""
OF_THE_LAUNCHER = ("MESHRUNNER_", "WANDB_", "HF_")
"""Prefixes of variables that `launch.env` refuses: they also affect the launching process, which `launch.env` does not."""
THREADS = "OMP_NUM_THREADS"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names of the variable that configures torch's caching allocator: first the current name, then the older names."""
ALLOCATOR_DEFAULT = "expandable_segments:True"
"""Allocator setting if the user sets none: expandable segments, because segments of fixed size cause fragmentation."""


def as_text(value: Any) -> Any:
    """Return a YAML number or bool as text, because environment variables hold only text."""
    return json.dumps(value) if isinstance(value, int | float) else value


def effective(variables: dict[str, str]) -> dict[str, str]:
    """Return valid `launch.env` variables unchanged; raise PydanticCustomError if one is secret, invalid or has no effect."""
    if secret := sorted(filter(is_secret, variables)):
        raise PydanticCustomError(
            "secret", "the name {names} suggests a secret value, and " + WHERE, {"names": ", ".join(secret)}
        )
    reasons = WITHOUT_EFFECT | {name: EXPORT for name in variables if name.startswith(OF_THE_LAUNCHER)}
    if idle := [f"{name} ({reasons[name]})" for name in sorted(variables) if name in reasons]:
        raise PydanticCustomError(
            "no_effect", "these variables would have no effect here: {idle}", {"idle": ", ".join(idle)}
        )
    threads = variables.get(THREADS, "1")
    if not (threads.isascii() and threads.isdecimal() and int(threads) > 0):
        raise PydanticCustomError(
            "threads",
            "expected a whole number of at least 1 for {name}, got '{got}'",
            {"name": THREADS, "got": threads},
        )
    return variables


def allocator_variables(own: Mapping[str, str]) -> dict[str, str]:
    """Return the allocator variables for a GPU worker: those in `own` (launch.env), else exported variables, else the default."""
    for variables in (own, os.environ):
        if found := {name: variables[name] for name in ALLOCATOR if name in variables}:
            return found
    return {ALLOCATOR[0]: ALLOCATOR_DEFAULT}


def allocator_setting(variables: Mapping[str, str]) -> tuple[str, str]:
    """Return the name and value of the first allocator variable with a value, or two empty strings if there is none."""
    return next(((name, text) for name in ALLOCATOR if (text := variables.get(name))), ("", ""))
