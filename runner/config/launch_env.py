"""`launch.env`, the environment variables of the workers: values as text, and names that would have no effect there."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import PydanticCustomError

from meshrunner.recipes.secrets import WHERE, is_secret

EXPORT = "the launching process reads it, too: export it before the command, on SLURM in hydra.launcher.preamble"
WITHOUT_EFFECT = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), "it follows from a worker's place"),
    **dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), "the launcher opens the rendezvous; launch.port sets its port"),
    **dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "PYTHONPATH"), EXPORT),
    "MKL_NUM_THREADS": "launch.threads decides",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "precision.matmul decides",
}
"""Variables of which the workers would not see the value, or too late, and why."""
OF_THE_LAUNCHER = ("MESHRUNNER_", "WANDB_", "HF_")
"""Prefixes of variables that the launching process reads: cache, trackers, preparation of data."""
THREADS = "OMP_NUM_THREADS"


def as_text(value: Any) -> Any:
    """What YAML reads as a number or a bool was meant as text: the environment knows nothing else."""
    return json.dumps(value) if isinstance(value, int | float) else value


def effective(variables: dict[str, str]) -> dict[str, str]:
    """The variables; raises PydanticCustomError for secrets and for those that would have no effect."""
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
