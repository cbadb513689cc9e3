"""The folder in which workers cache compiled code, chosen by the file system of the cache directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshrunner.runner.launch import environment
from meshrunner.runner.launch.environment import compile_caches, worker_environment
from tests.composed import experiment

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """File system types keyed by folder. The cache directory is `tmp_path / "home" / "cache"`."""
    table = {"/": "overlay"}

    class Mounts:
        def read_text(self, errors: str) -> str:
            return "".join(f"device {point} {kind} rw 0 0\n" for point, kind in table.items())

    monkeypatch.setattr(environment, "MOUNTS", Mounts())
    monkeypatch.setenv("MESHRUNNER_CACHE", str(tmp_path / "home" / "cache"))
    monkeypatch.delenv(INDUCTOR, raising=False)
    (tmp_path / "local").mkdir()
    return table


def folder(tmp_path: Path, temporary: str = "local") -> Path:
    found = compile_caches({"TMPDIR": str(tmp_path / temporary)})
    assert found[INDUCTOR] == f"{found['TRITON_HOME']}/inductor"
    return Path(found["TRITON_HOME"])


def test_a_local_cache_directory_is_used(tmp_path: Path, mount: dict[str, str]) -> None:
    for kind in ("ext4", "xfs", "tmpfs", "overlay"):
        mount[str(tmp_path / "home")] = kind
        assert folder(tmp_path) == tmp_path / "home" / "cache"
    assert not list((tmp_path / "local").iterdir())


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.juicefs", "wekafs", "autofs", "9p"])
def test_a_network_file_system_is_left_for_a_private_folder(
    kind: str, tmp_path: Path, mount: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mount[str(tmp_path / "home")] = kind
    private = tmp_path / "local" / f"meshrunner-{os.getuid()}"
    assert folder(tmp_path) == private and private.stat().st_mode & 0o777 == 0o700
    assert folder(tmp_path) == private, "the next run uses the same folder"
    monkeypatch.setenv("TMPDIR", str(tmp_path / "local"))
    found = worker_environment(experiment(f"++launch.env.{INDUCTOR}=/mine"), "cpu")
    assert (found[INDUCTOR], found["TRITON_HOME"]) == ("/mine", str(private))
    monkeypatch.setenv(INDUCTOR, "/exported")
    assert worker_environment(experiment(), "cpu")[INDUCTOR] == "/exported"


def test_the_innermost_mount_counts(tmp_path: Path, mount: dict[str, str]) -> None:
    home = tmp_path / "home"
    mount[str(home)] = "nfs4"
    mount[str(home / "cache")] = "ext4"
    assert folder(tmp_path) == home / "cache"
    mount[str(tmp_path / "hom")] = "ext4"
    del mount[str(home / "cache")]
    assert folder(tmp_path) != home / "cache", "`hom` does not contain `home`"


def test_mount_points_may_contain_spaces(
    tmp_path: Path, mount: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHRUNNER_CACHE", str(tmp_path / "my home"))
    mount[f"{tmp_path}/my\\040home"] = "nfs"
    assert folder(tmp_path).parent == tmp_path / "local"


def test_a_folder_that_others_can_access_is_not_used(tmp_path: Path, mount: dict[str, str]) -> None:
    mount[str(tmp_path / "home")] = "nfs"
    mount["/tmp"] = mount["/var/tmp"] = "nfs"
    mount[str(tmp_path / "local")] = "ext4"
    usual, name = tmp_path / "home" / "cache", f"meshrunner-{os.getuid()}"
    (tmp_path / "local" / name).mkdir(mode=0o700)
    (tmp_path / "local" / name).chmod(0o770)
    assert folder(tmp_path) == usual
    (tmp_path / "local" / name).rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "local" / name).symlink_to(tmp_path / "elsewhere")
    assert folder(tmp_path) == usual
    assert folder(tmp_path, "home") == usual, "no folder of this node remains"
