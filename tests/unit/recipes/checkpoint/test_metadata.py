"""The check of a checkpoint's metadata, which is a pickle."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata

from meshrunner.recipes.checkpoint.metadata import check_metadata
from meshrunner.recipes.checkpoint.on_disk import StoredCheckpoint
from meshrunner.recipes.checkpoint.state_dict import restore
from meshrunner.recipes.errors import ConfigError


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("old_python", [False, True])
def test_metadata_written_by_torch_is_accepted(
    old_python: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if old_python:  # 3.11.2, which Debian 12 has: a member of an enumeration is written as an attribute of it
        monkeypatch.setattr(
            _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda member, _: (getattr, (type(member), member.name))
        )
    state = {
        "model": {
            f"w{i}": torch.ones(3, 2, dtype=each) for i, each in enumerate((torch.float32, torch.bfloat16, torch.int64))
        }
    }
    save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    check_metadata(tmp_path)


class Forged:
    """An object that runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


class Attribute:
    """An object that is pickled as a call of `getattr`."""

    def __init__(self, *of: Any) -> None:
        self.of = of

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.of


@pytest.mark.parametrize("of", [(_MEM_FORMAT_ENCODING, "__init__"), (Metadata, "__init__")])
def test_of_nothing_else_is_an_attribute_read(of: tuple[Any, ...], tmp_path: Path) -> None:
    content: Any = Attribute(*of)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, planner_data=content)))
    with pytest.raises(ConfigError, match=r"it refers to builtins\.getattr"):
        check_metadata(tmp_path)


@pytest.mark.parametrize("inside", [False, True])
def test_a_forged_one_runs_nothing(inside: bool, tmp_path: Path) -> None:
    forged: Any = Forged(tmp_path / "it_ran")
    content = Metadata({}, planner_data=forged) if inside else forged
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(ConfigError, match=r"it refers to (posix|os)\.system"):
        check_metadata(tmp_path)
    assert not (tmp_path / "it_ran").exists()


def test_bytes_are_refused(tmp_path: Path) -> None:
    """torch would unpickle them without restriction."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"w": BytesStorageMetadata()})))
    with pytest.raises(ConfigError, match="something other than tensors"):
        check_metadata(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"garbage", pickle.dumps({"state_dict_metadata": {}}), pickle.dumps(Metadata(3))]
)  # type: ignore[arg-type]
def test_damage(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ConfigError):
        check_metadata(tmp_path)


def test_it_is_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Forged(tmp_path / "it_ran")))
    nothing: Any = None
    with pytest.raises(ConfigError, match="it refers to"):
        restore(StoredCheckpoint(tmp_path, nothing), nothing, nothing)
    assert not (tmp_path / "it_ran").exists()
