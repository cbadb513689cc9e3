"""Counts the kernel's kills for lack of memory, to tell whether the kernel killed a worker."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MACHINE = Path("/proc/vmstat")


def oom_kills() -> int:
    """
    Return how many processes the kernel has killed for lack of memory; 0 if unknown.

    The count of this process's cgroup excludes other jobs on the machine. Without one, it is the machine's count since boot.
    """
    for counters in (*_cgroup_files(), MACHINE):
        with suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)", counters.read_text(), re.MULTILINE):
                return int(found[1])
    return 0


def _cgroup_files() -> Iterator[Path]:
    """Yield the files that may hold the count, nearest cgroup first. A container may see its own cgroup as the root."""
    with suppress(OSError):
        for line in MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            folder, name = CGROUPS, "memory.events"
            if "memory" in controllers.split(","):  # cgroups of version 1
                folder, name = CGROUPS / "memory", "memory.oom_control"
            elif controllers:
                continue
            cgroup = Path(path.lstrip("/"))
            yield from (folder / each / name for each in (cgroup, *cgroup.parents))
