"""Which CPUs a worker is bound to, on machines described as sysfs does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshrunner.runner.process import cpu_binding
from meshrunner.runner.process.cpu_binding import allowed_cpus, cpus_near, cpus_to_bind

TWO_DOMAINS = {"0000:1b:00.0": "0-3,8-11\n", "0000:9b:00.0": "4-7,12-15\n", "0002:9c:00.0": "4-7,12-15\n"}
FIRST, SECOND, THIRD = TWO_DOMAINS
ALL = set(range(16))


@pytest.fixture(autouse=True)
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for bus_id, cpus in (TWO_DOMAINS | {"0000:00:04.0": "0-15\n"}).items():
        (tmp_path / bus_id).mkdir()
        (tmp_path / bus_id / "local_cpulist").write_text(cpus)
    monkeypatch.setattr(cpu_binding, "PCI_DEVICES", tmp_path)
    return tmp_path


def test_the_cpus_near_a_device() -> None:
    assert cpus_near(FIRST) == {0, 1, 2, 3, 8, 9, 10, 11}
    assert cpus_near("0000:ff:00.0") == set()  # a container may hide it


def test_each_worker_is_bound_to_the_domain_of_its_gpu() -> None:
    gpus = [FIRST, SECOND, THIRD]
    assert [cpus_to_bind(gpus, rank, ALL) for rank in range(3)] == [
        {0, 1, 2, 3, 8, 9, 10, 11},
        {4, 5, 6, 7, 12, 13, 14, 15},
        {4, 5, 6, 7, 12, 13, 14, 15},
    ]


@pytest.mark.parametrize(
    ("gpus", "allowed"),
    [
        (["0000:00:04.0"], ALL),  # one domain
        (["0000:ff:00.0"], ALL),  # nothing is known
        ([FIRST], {4, 5, 6, 7}),  # SLURM gave CPUs of the other domain
        ([FIRST], {3, 4, 5, 6}),  # one core is too few
        ([SECOND, THIRD, FIRST], {0, 1, 4, 5, 6}),  # three cores for two workers
    ],
)
def test_where_binding_has_no_use(gpus: list[str], allowed: set[int]) -> None:
    assert cpus_to_bind(gpus, 0, allowed) == set()


def test_only_what_the_process_was_given() -> None:
    assert cpus_to_bind([FIRST, SECOND], 1, {3, 4, 5}) == {4, 5}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU is all there is")
def test_all_threads_are_bound() -> None:
    """In a process of its own, as sysfs of a machine whose second GPU is near one CPU of those that there are."""
    cpu = max(os.sched_getaffinity(0))
    code = (
        "import os, threading, time\n"
        "from meshrunner.runner.process import cpu_binding as b\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "b._bus_id = lambda gpu: f'gpu{gpu}'\n"
        f"b.cpus_near = lambda bus_id: {{'gpu0': set(), 'gpu1': {{{cpu}}}}}[bus_id]\n"
        "b.FEWEST_CORES = 1\n"
        "b.bind_to_gpu(1, 2)\n"
        "print(b.allowed_cpus(), *{len(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(cpu), "1"]


def test_this_process_is_allowed_some() -> None:
    assert allowed_cpus()[0].isdigit()
