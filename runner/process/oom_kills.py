"""How often the kernel has killed for lack of memory, from which follows whether it was the kernel that killed a worker."""

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
    Processes that the kernel has killed for lack of memory: of this process's cgroup, where its memory is accounted, so that the
    kill of another job on the machine does not count; else of the machine, since boot. 0 when unknown.
    """
    for counters in (*_of_cgroup(), MACHINE):
        with suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)", counters.read_text(), re.MULTILINE):
                return int(found[1])
    return 0


def _of_cgroup() -> Iterator[Path]:
    """The files that may hold the count, the nearest cgroup's first: a container may see its own cgroup as the root."""
    with suppress(OSError):
        for line in MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            folder, name = CGROUPS, "memory.events"
            if "memory" in controllers.split(","):  # cgroups of version 1
                folder, name = CGROUPS / "memory", "memory.oom_control"
            elif controllers:
                continue
            place = Path(path.lstrip("/"))
            yield from (folder / each / name for each in (place, *place.parents))
