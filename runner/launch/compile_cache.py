"""Choose the folder in which the workers of this node cache compiled code."""

import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from meshrunner.recipes.storage import cache_dir

LOCAL = "bcachefs btrfs ecryptfs ext2 ext3 ext4 f2fs jfs overlay ramfs rootfs tmpfs xfs zfs"
"""Types of file systems on this node's disks or in its memory. Any other file system may be slow, or shared with other nodes."""
MOUNTS = Path("/proc/self/mounts")


def compile_caches(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that set the cache folders of Inductor and Triton. `variables`: the workers' environment.
    If the cache directory may be on a network file system, use a private folder on a disk of this node. All ranks write compiled
    code when a run starts, but network file systems are slow, and renaming or locking files there may fail."""
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
