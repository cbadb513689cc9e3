"""environment.json: the versions, devices and environment variables of a run, and what `auto` became."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from meshrunner.recipes.secrets import is_secret
from meshrunner.runner.config.devices import NodeDevices
from meshrunner.runner.config.experiment import Experiment

PACKAGES = ("meshrunner", "torch", "hydra-core", "omegaconf", "pydantic", "datasets", "sentencepiece", "numpy", "wandb")
RECORDED = ("NCCL_", "CUDA_", "TORCH", "PYTORCH_", "OMP_", "SLURM_")
"""Prefixes of environment variables that may affect measurements."""


def environment(devices: NodeDevices, launch_env: dict[str, str]) -> dict[str, Any]:
    """The content of environment.json; `launch_env` is the configuration's `launch.env`."""
    return {
        "host": socket.gethostname(),
        "command": sys.argv,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git_commit": _git_commit(),
        "device_type": devices.type,
        "workers": devices.workers,
        "threads": devices.threads,
        "launch.env": launch_env,
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(RECORDED) and not is_secret(name)
        },
    }


def resolved(experiment: Experiment, devices: NodeDevices) -> dict[str, Any]:
    """Key -> value, for keys of the configuration whose `auto` or null stands for something that depends on the devices."""
    degrees = experiment.parallelism.degrees(experiment.launch.nodes, devices.workers)
    kind = experiment.hardware.kind
    return {
        "launch.workers": devices.workers,
        "launch.threads": devices.threads,
        "parallelism.shard": degrees.shard,
        "parallelism.replicate": degrees.replicate,
        "log_every": experiment.steps_between_read_outs(devices.type),
        "global_batch": experiment.accumulation(degrees.data)[0],
        "hardware.kind": {"cpu": "cpu", "cuda": "gpu"}.get(devices.type, kind) if kind == "auto" else kind,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit checked out in the current directory; None outside a repository."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
