"""`meshrunner doctor`: report this machine's software and hardware. For each missing part, say what does not work without it."""

import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.storage import cache_dir
from meshrunner.runner.commands.parser import parse
from meshrunner.runner.config.devices import DRIVERS, cores, cpu_name
from meshrunner.runner.console import console, one_line, table_of
from meshrunner.runner.trackers.wandb import logged_in


def doctor(arguments: list[str]) -> int:
    """Print the software and hardware that runs depend on. Raise ConfigError if any argument is given."""
    parse("doctor", arguments)
    console().print(table_of(findings(), ("", "found", "consequence")))
    return 0


def findings() -> Iterator[tuple[str, str, str]]:
    """Yield (part, finding, consequence) for each part that a run depends on. The consequence is empty if nothing is missing."""
    yield "Python", platform.python_version(), ""
    for package in ("torch", "hydra-core", "pydantic", "datasets", "sentencepiece", "wandb"):
        try:
            yield package, version(package), ""
        except PackageNotFoundError:
            yield package, "none", f"install it: pip install {package}"
    yield "processor", f"{cpu_name()}, {cores()} cores", "" if cores() > 1 else "workers share one core"
    yield from _devices()
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    yield "C++ compiler", compiler or "none", "" if compiler else "torch.compile on a CPU needs a compiler; install g++"
    sbatch = shutil.which("sbatch")
    yield "SLURM", sbatch or "no sbatch", "" if sbatch else "runs can only start on this machine"
    key = logged_in()
    why = "" if key else "tracker.mode=online needs a login; `meshrunner sync` uploads offline runs later"
    yield "W&B login", "yes" if key else "no", why
    try:
        folder = cache_dir()
        free = shutil.disk_usage(folder).free / 2**30
        why = "" if free > 5 else "packed tokens and compiled code may not fit; free up space or set MESHRUNNER_CACHE"
        yield "cache", f"{folder}, {free:.0f} GiB free", why
    except ConfigError as error:
        yield "cache", "not writable", str(error)


def _devices() -> Iterator[tuple[str, str, str]]:
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        yield "import torch", "no", f"no run can start: {one_line(error)}"
        return
    if gpus := torch.cuda.device_count():
        yield "GPUs", f"{gpus} x {torch.cuda.get_device_name(0)}", ""
    elif any(driver.exists() for driver in DRIVERS):
        why = "install a CUDA build of torch, or unset CUDA_VISIBLE_DEVICES"
        yield "GPUs", "a driver is installed, but torch sees no GPU", why
    else:
        yield "GPUs", "none", "runs use the CPU and gloo; speeds of CPU runs say nothing about GPUs"
    for backend, why in (("gloo", "every run needs this backend"), ("nccl", "every run on a GPU needs this backend")):
        usable = dist.is_backend_available(backend)
        yield f"backend {backend}", "yes" if usable else "no", "" if usable else why
