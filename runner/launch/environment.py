"""Build the workers' environment variables and the content of environment.json (versions, devices, variables, `auto` values)."""

import os
import platform
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from meshrunner.recipes.determinism import VARIABLES
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.secrets import is_secret
from meshrunner.recipes.storage import cache_dir
from meshrunner.runner.config import launch_env
from meshrunner.runner.config.devices import NodeDevices
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.console import one_line
from meshrunner.runner.rundir import Environment

PACKAGES = "meshrunner torch hydra-core omegaconf pydantic datasets sentencepiece tokenizers numpy wandb"
PACKAGES += " mamba-ssm causal-conv1d megatron-fsdp"
RECORDED = ("NCCL_", "CUDA_", "CUBLAS_", "TORCH", "PYTORCH_", "TRITON_", "MAMBA_", "OMP_", "MKL_", "GLOO_", "SLURM_")
"""Prefixes of the environment variables that environment.json records, because they may affect measurements."""
LOCAL = "bcachefs btrfs ecryptfs ext2 ext3 ext4 f2fs jfs overlay ramfs rootfs tmpfs xfs zfs"
"""Types of file systems on this node's disks or in its memory. Any other file system may be slow, or shared with other nodes."""
MOUNTS = Path("/proc/self/mounts")


def worker_environment(experiment: Experiment, device_type: str) -> dict[str, str]:
    """Return the workers' environment variables. Values in `launch.env` override exported values, and both override defaults."""
    own = experiment.launch.env
    given = dict(os.environ) | own
    defaults = compile_caches(given)
    if device_type == "cuda":
        # If allocator settings are given under several names, torch may ignore the name in `own`, so remove the other names.
        others = {name: value for name, value in given.items() if name not in launch_env.ALLOCATOR}
        given = others | launch_env.allocator_variables(own)
        if experiment.deterministic:
            defaults |= VARIABLES
    return defaults | given


def compile_caches(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that set the cache folders of Inductor and Triton. `variables`: the workers' environment.
    If the cache directory may be on a network file system, use a private folder on a disk of this node. All ranks write compiled
    code when a run starts. Network file systems are slow at this, and renaming or locking files there may fail."""
    usual = cache_dir()
    local = filter(_is_local, map(Path, (variables.get("TMPDIR") or "/tmp", "/tmp", "/var/tmp")))
    folder = usual if _is_local(usual) else next(filter(None, map(_private, local)), usual)
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_HOME": str(folder)}


def _is_local(folder: Path) -> bool:
    """Return whether a folder is on a file system of this node, according to the most specific mount point that contains it."""
    mounted: dict[str, str] = {}  # a later mount hides an earlier one at the same point
    for line in MOUNTS.read_text(errors="surrogateescape").splitlines():
        _, point, kind, *_ = line.split(" ")
        mounted[re.sub(r"\\([0-7]{3})", lambda escaped: chr(int(escaped[1], 8)), point)] = kind
    path = folder.resolve()
    return next((mounted[str(each)] for each in (path, *path.parents) if str(each) in mounted), "") in LOCAL.split()


def _private(parent: Path) -> Path | None:
    """Create a folder that only this user may access. Return None if the folder cannot be created or is not private."""
    folder = parent / f"meshrunner-{os.getuid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return folder
    return None


def apply_allocator_settings() -> None:
    """Pass allocator variables to torch, even if torch is already imported. Raise ConfigError if a variable is invalid."""
    import torch

    name, settings = launch_env.allocator_setting(os.environ)
    if not settings:
        return
    try:
        torch._C._accelerator_setAllocatorSettings(settings)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{name}={settings}: {str(error).splitlines()[0]}") from error


def fall_back_to_fixed_segments(device: Any) -> str | None:
    """Allocate the first block on a torch device. If the device, for example a virtual GPU, does not support expandable
    segments, use fixed segments and return a warning."""
    import torch

    name, settings = launch_env.allocator_setting(os.environ)
    fixed = re.sub(r"(expandable_segments\s*:\s*)True", r"\1False", settings)
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        if fixed == settings:
            raise
        torch._C._accelerator_setAllocatorSettings(fixed)
        torch.empty(1, device=device)
        os.environ[name] = fixed
        return (
            f"this run used {fixed}, because this GPU does not support expandable segments "
            f"({one_line(str(error).splitlines()[0])}). Set launch.env.{name}={fixed}, so that `plan` also assumes this setting"
        )
    return None


def sdpa_backend(experiment: Experiment, device: str) -> str | None:
    """Return torch's attention backend on a device, such as `flash_attention`, or None for a model without attention."""
    import torch

    if (head_dim := getattr(experiment.model, "head_width", None)) is None:
        return None
    torch.use_deterministic_algorithms(experiment.deterministic)  # `train` also sets this, but later
    dtype = experiment.precision.on(device).param_dtype
    qkv = torch.empty(1, 1, 2, head_dim, dtype=dtype, device=device, requires_grad=True)
    return torch._C._SDPBackend(torch._fused_sdp_choice(qkv, qkv, qkv, is_causal=True)).name.lower()


def environment(devices: NodeDevices, launch_env: dict[str, str], variables: dict[str, str]) -> Environment:
    """Return the content of environment.json except `resolved` and the keys that workers add, such as `cpus` and `remarks`."""
    recorded = {name: each for name, each in sorted(variables.items()) if name.startswith(RECORDED)}
    return Environment(
        host=socket.gethostname(),
        command=sys.argv,
        python=platform.python_version(),
        system=platform.platform(),
        packages={name: _version(name) for name in PACKAGES.split()},
        git_commit=_git_commit(),
        device_type=devices.type,
        workers=devices.workers,
        threads=devices.threads,
        environment={name: value for name, value in recorded.items() if not is_secret(name)},
    ) | {"launch.env": launch_env}


def resolved(experiment: Experiment, devices: NodeDevices) -> dict[str, Any]:
    """Return the values that replace `auto` or null, one per configuration key. `experiment`: a result of `Experiment.on`."""
    degrees = experiment.parallelism.degrees(experiment.launch.nodes, devices.workers)
    kind = experiment.hardware.kind
    replicate, shard = degrees.without_context
    return {
        "launch.workers": devices.workers,
        "launch.threads": devices.threads,
        "parallelism.shard": shard,
        "parallelism.replicate": replicate,
        "parallelism.reshard_after_forward": experiment.parallelism.reshard(degrees.shard),
        **{f"model.{key}": value for key, value in experiment.model.resolved().items()},
        "precision.kind": experiment.precision.kind,
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
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
