"""`meshrunner doctor`: report what this machine has, what is missing and why it matters."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from rich.table import Table

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.storage import cache_dir
from meshrunner.runner.commands.parser import parse
from meshrunner.runner.config.devices import DRIVERS, cores, cpu_name
from meshrunner.runner.console import console

Finding = tuple[str, str, str]
"""Subject, finding, and why it matters (empty if nothing is missing)."""


def doctor(arguments: list[str]) -> int:
    """Print what runs depend on; raise ConfigError for any argument."""
    parse("doctor", arguments)
    table = Table(box=None, pad_edge=False)
    for title in ("", "found", "what that means"):
        table.add_column(title, overflow="fold")
    for finding in findings():
        table.add_row(*finding)
    console().print(table)
    return 0


def findings() -> Iterator[Finding]:
    """Yield everything that a run depends on."""
    import torch
    import torch.distributed as dist

    yield "Python", platform.python_version(), ""
    for package in ("torch", "hydra-core", "pydantic", "datasets", "sentencepiece", "wandb"):
        yield package, version(package), ""
    yield "processor", f"{cpu_name()}, {cores()} cores", "" if cores() > 1 else "workers share one core"
    yield _gpus([torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])
    for backend, why in (("gloo", "nothing runs without it"), ("nccl", "GPUs need it")):
        usable = dist.is_backend_available(backend)
        yield f"backend {backend}", "yes" if usable else "no", "" if usable else why
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    yield "C++ compiler", compiler or "none", "" if compiler else "compiling for a CPU needs one"
    sbatch = shutil.which("sbatch")
    yield "SLURM", sbatch or "no sbatch", "" if sbatch else "runs can only start on this machine"
    yield _wandb()
    yield _cache()


def _gpus(names: list[str]) -> Finding:
    if names:
        return "GPUs", f"{len(names)} x {names[0]}", ""
    if any(driver.exists() for driver in DRIVERS):
        why = "is this a CPU build of torch, or is CUDA_VISIBLE_DEVICES empty?"
        return "GPUs", "a driver, but torch sees no GPU", why
    return "GPUs", "none", "runs use the CPU and gloo; their figures say nothing about GPUs"


def _wandb() -> Finding:
    netrc = Path.home() / ".netrc"
    key = bool(os.environ.get("WANDB_API_KEY")) or (netrc.is_file() and "api.wandb.ai" in netrc.read_text())
    why = "" if key else "tracker.mode=online needs one; `meshrunner sync` uploads offline runs later"
    return "W&B login", "yes" if key else "no", why


def _cache() -> Finding:
    try:
        folder = cache_dir()
    except ConfigError as error:
        return "cache", "not writable", str(error)
    free = shutil.disk_usage(folder).free / 2**30
    return "cache", f"{folder}, {free:.0f} GiB free", "" if free > 5 else "packed tokens and compiled code may not fit"
