"""A checkpoint's metadata is a pickle: what it may contain."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from meshrunner.recipes.checkpoint.metadata import check_metadata
from meshrunner.recipes.checkpoint.on_disk import StoredCheckpoint
from meshrunner.recipes.checkpoint.restore import restore
from meshrunner.recipes.errors import ConfigError


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torch_writes_is_accepted(tmp_path: Path) -> None:
    state = {
        "model": {
            f"w{i}": torch.ones(3, 2, dtype=each) for i, each in enumerate((torch.float32, torch.bfloat16, torch.int64))
        }
    }
    save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    check_metadata(tmp_path)


class Forged:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


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
    with pytest.raises(ConfigError, match="something else than tensors"):
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
