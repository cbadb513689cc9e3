"""A real SLURM cluster on this machine: two emulated nodes. Without SLURM these tests, and only these, are skipped."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import own_classes
from tests.slurm.cluster import ended, root

SCRIPTS = Path(__file__).parents[2] / "slurm" / "cluster"


@pytest.fixture(scope="session", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Up before the first test. Who had one up already keeps it."""
    if not all(map(shutil.which, ("sbatch", "slurmctld", "slurmd", "munged"))):
        pytest.skip("SLURM is not installed; slurm/cluster/up.sh, as root, installs it and brings a test cluster up")
    locks = (root().with_suffix(suffix).open("w") for suffix in (".starting", ".users"))
    with next(locks) as starting, next(locks) as users, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(starting, fcntl.LOCK_EX)  # two test processes may start at once
        was_up = (root() / "run" / "slurmctld.pid").exists()
        subprocess.run([str(SCRIPTS / "up.sh")], check=True, timeout=120)
        fcntl.flock(users, fcntl.LOCK_SH)
        fcntl.flock(starting, fcntl.LOCK_UN)
        patch.setenv("SLURM_CONF", str(root() / "etc" / "slurm.conf"))
        patch.setenv("MESHRUNNER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
        if not was_up:
            fcntl.flock(starting, fcntl.LOCK_EX)
            fcntl.flock(users, fcntl.LOCK_EX)  # the other test processes have ended
            subprocess.run([str(SCRIPTS / "down.sh")], check=True, timeout=120)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the directory from which a test submits jobs. It contains the user's module `faulty`. No job outlives its test."""
    own_classes(tmp_path)
    monkeypatch.chdir(tmp_path)  # a job writes its output where sbatch was called, unless it is told otherwise
    with root().with_suffix(".testing").open("w") as testing:
        fcntl.flock(testing, fcntl.LOCK_EX)  # a test ends all jobs and kills nodes, so each has the cluster for itself
        yield tmp_path
        subprocess.run(["scancel", f"--user={os.getuid()}"], check=True, timeout=30)
        ended()
