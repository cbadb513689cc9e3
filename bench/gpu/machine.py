"""Describe the machine that the bench runs on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from meshrunner.runner.config.devices import cores, cpu_name, gpu_count

PACKAGES = ("torchao", "mamba-ssm", "megatron-fsdp", "torchtitan", "scipy")
"""Packages that some rows need. meshrunner runs without them."""
CPU_RANKS = 4
"""Maximum number of ranks in a run on a CPU."""
PROBE = """
import json, torch
found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "names": [each.name for each in found],
    "memory_gib": min(each.total_memory for each in found) / 2**30,
    "capability": ".".join(map(str, torch.cuda.get_device_capability())),
    "runtime": f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}",
    "nccl": ".".join(map(str, torch.cuda.nccl.version())),
}))
"""


class Machine(NamedTuple):
    """The hardware and software of this machine."""

    name: str
    """Name of the GPUs, or of the processor if there is no GPU."""
    gpus: int
    memory_gib: float | None
    """Memory of the smallest GPU in GiB; None if there is no GPU."""
    cores: int
    versions: tuple[str, ...]
    """Software, for example `torch 2.13.0`."""
    exclusive: bool = False
    """Whether the first GPU accepts only one process at a time."""

    @property
    def devices(self) -> int:
        """Maximum number of ranks in a run: the number of GPUs, or CPU_RANKS if there is no GPU."""
        return self.gpus or CPU_RANKS

    @property
    def pair(self) -> int:
        """Default number of ranks of a run: 2, so that ranks communicate, or 1 if there is only one GPU."""
        return 1 if self.gpus == 1 else 2

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Machine:
        """Return the machine that `_asdict` described in JSON."""
        return cls(**saved | {"versions": tuple(saved["versions"])})

    def version(self, package: str) -> str | None:
        """Return the version of a package, or None if it is not installed."""
        return next((each.partition(" ")[2] for each in self.versions if each.startswith(f"{package} ")), None)

    @property
    def torch(self) -> tuple[int, ...]:
        """Major and minor version of torch."""
        return tuple(int(number) for number in (self.version("torch") or "0.0").split(".")[:2])

    def differs(self, other: Machine) -> str:
        """Return how the GPUs or the software of two machines differ, or "". Ignore differences in cores and memory."""
        mine, others = ({f"{each.gpus} x {each.name}", *each.versions} for each in (self, other))
        missing, more = (", ".join(sorted(each)) or "nothing" for each in (mine - others, others - mine))
        return "" if mine == others else f"{missing} there, {more} here"

    def describe(self) -> str:
        what = (
            f"{self.gpus} x {self.name}, {self.memory_gib:.0f} GiB, " if self.memory_gib else f"{self.name}, no GPU, "
        )
        return what + f"{self.cores} cores, " + ", ".join(self.versions)

    def lanes(self) -> list[dict[str, str]]:
        """Return one dict of environment variables per concurrent row: two GPUs for each row, or a single GPU for all rows."""
        if self.gpus == 1:
            return [{} for _ in range(1 if self.exclusive else max(1, min(4, self.cores // 4)))]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(number) for number in range(self.gpus)]
        pairs = zip(names[0 : self.gpus : 2], names[1 : self.gpus : 2], strict=False)
        return [{"CUDA_VISIBLE_DEVICES": ",".join(pair)} for pair in pairs] if self.gpus else [{}]


def this_machine() -> Machine:
    """Return this machine. Query the GPUs in another process, so that this process uses no GPU memory."""
    versions = [f"torch {version('torch')}", f"Python {platform.python_version()}"]
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    gpus = gpu_count()
    if not gpus:
        return Machine(cpu_name(), 0, None, cores(), tuple(versions))
    probed = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    if probed.returncode:
        sys.exit(f"torch cannot use the GPUs of this machine:\n{probed.stderr}")
    found: dict[str, Any] = json.loads(probed.stdout.splitlines()[-1])
    versions += [found["runtime"], f"NCCL {found['nccl']}", f"compute capability {found['capability']}"]
    names = " and ".join(dict.fromkeys(found["names"]))
    driver, power, mode = _asked_of_driver()
    versions += [f"driver {driver}"] * bool(driver) + [f"power limit {power}"] * bool(power)
    return Machine(names, gpus, found["memory_gib"], cores(), tuple(versions), mode.startswith("Exclusive"))


def _asked_of_driver() -> tuple[str, str, str]:
    """Return the driver's version, the first GPU's power limit and its compute mode. Each is "" if nvidia-smi fails."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version,power.limit,compute_mode", "--format=csv,noheader"]
        lines = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
        driver, power, mode = lines[0].split(", ")
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return "", "", ""
    return driver, power, mode
