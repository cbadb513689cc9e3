"""Checkpoints on disk: which one a run continues from, and which may be removed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from meshrunner.recipes.checkpoint.on_disk import (
    METADATA,
    Record,
    StoredCheckpoint,
    candidates,
    checkpoint_folders,
    good_checkpoints,
    publish,
    remove_checkpoint,
    remove_leftovers,
    step_folder,
    write_record,
)
from meshrunner.recipes.config_keys import differences
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.storage import checksum


def written(folder: Path, step: int, name: str | None = None) -> Path:
    """Write a checkpoint of one small shard."""
    path = folder / (name or step_folder(step))
    path.mkdir(parents=True)
    (path / METADATA).write_bytes(b"metadata")
    (path / "__0_0.distcp").write_bytes(bytes(1000 + step))
    files = {file.name: checksum(file) for file in path.iterdir()}
    write_record(path, Record(step, 34 * step, step, 1, 0, 2, 5, {"model": {}}, files))
    return path


def publish_step(folder: Path, step: int, keep: int | None) -> None:
    publish(written(folder, step, f".tmp-{step_folder(step)}"), folder / step_folder(step), keep)


def test_the_newest_comes_first(tmp_path: Path) -> None:
    for step in (10, 123456789, 9):
        written(tmp_path, step)
    (tmp_path / "step-7").mkdir()
    (tmp_path / "notes").mkdir()
    found, warnings = good_checkpoints(tmp_path)
    assert [each.record.step for each in found] == [123456789, 10, 9] and not warnings
    assert found[1].record.tokens == 340 and found[1].damaged_files(found[1].record.files) == []


def test_a_missing_directory_has_no_checkpoints(tmp_path: Path) -> None:
    assert good_checkpoints(tmp_path / "checkpoints") == ([], [])
    assert candidates(None, tmp_path / "checkpoints") == ([], [])


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("__0_0.distcp", b"x", "__0_0.distcp has 1 bytes, but 1020 were written"),
        ("__0_0.distcp", None, "__0_0.distcp is missing"),
        (METADATA, b"metadatA", ".metadata is damaged: wrong checksum"),
        ("checkpoint.json", b"{", "checkpoint.json cannot be read"),
        ("checkpoint.json", b"[]", "checkpoint.json cannot be read"),
        ("checkpoint.json", b'{"step": 20, "format": 2}', "checkpoint.json cannot be read"),
        ("checkpoint.json", b"\xff", "checkpoint.json cannot be read"),
        ("checkpoint.json", None, "checkpoint.json is missing"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_the_reason(
    file: str, content: bytes | None, said: str, tmp_path: Path
) -> None:
    written(tmp_path, 10)
    damaged = written(tmp_path, 20) / file
    damaged.unlink() if content is None else damaged.write_bytes(content)
    found, (warning,) = good_checkpoints(tmp_path)
    assert [each.record.step for each in found] == [10]
    assert step_folder(20) in warning and said in warning


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"files": {".metadata": [float("inf"), 1]}}, "cannot be read"),
        ({"step": "20"}, "step: Input should be a valid integer"),
        ({"tokens": True}, "tokens: Input should be a valid integer"),
        ({"config": [1]}, "config: Input should be an object"),
    ],
)
def test_an_invalid_record_is_damage(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    path = written(tmp_path / "checkpoints", 20) / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    found, (warning,) = good_checkpoints(tmp_path / "checkpoints")
    assert not found and said in warning


def test_a_pipe_in_place_of_a_file_is_damage(tmp_path: Path) -> None:
    for step, name in enumerate(("checkpoint.json", "__0_0.distcp", METADATA), 1):
        (written(tmp_path, step) / name).unlink()
        os.mkfifo(tmp_path / step_folder(step) / name)
    (written(tmp_path, 10) / "checkpoint.json").write_text("[" * 100_000)
    found, warnings = good_checkpoints(tmp_path)
    assert not found and len(warnings) == 4 and sum("is missing" in each for each in warnings) == 3


def test_the_target_of_a_link_is_not_removed(tmp_path: Path) -> None:
    outside = written(tmp_path / "outside", 1)
    (tmp_path / step_folder(3)).symlink_to(outside)
    remove_checkpoint(tmp_path / step_folder(3))
    remove_leftovers(tmp_path)
    assert not checkpoint_folders(tmp_path) and len(list(outside.iterdir())) == 3


def test_damage_inside_a_shard_is_found_by_its_checksum(tmp_path: Path) -> None:
    path = written(tmp_path, 10) / "__0_0.distcp"
    path.write_bytes(b"1" + path.read_bytes()[1:])
    stored = good_checkpoints(tmp_path)[0][0]
    assert isinstance(stored, StoredCheckpoint)
    assert stored.damaged_files(stored.record.files) == ["__0_0.distcp"]


def test_the_newest_k_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        publish_step(tmp_path, step, keep=2)
    assert list(checkpoint_folders(tmp_path)) == [5, 4]
    publish_step(tmp_path, 6, keep=None)
    assert list(checkpoint_folders(tmp_path)) == [6, 5, 4]
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_damaged_checkpoint_does_not_count_towards_keep(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        publish_step(tmp_path, step, keep=3)
    (tmp_path / step_folder(2) / METADATA).unlink()
    publish_step(tmp_path, 4, keep=2)
    assert list(checkpoint_folders(tmp_path)) == [4, 3]
    (tmp_path / step_folder(4) / METADATA).unlink()
    publish_step(tmp_path, 5, keep=2)
    assert list(checkpoint_folders(tmp_path)) == [5, 3], "the good one before the damaged one"


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        publish_step(tmp_path, step, keep=None)
    (tmp_path / step_folder(2) / METADATA).unlink()
    (tmp_path / step_folder(3) / METADATA).unlink()
    publish_step(tmp_path, 2, keep=1)
    found, warnings = good_checkpoints(tmp_path)
    assert [each.record.step for each in found] == [2] and len(warnings) == 1
    assert list(checkpoint_folders(tmp_path)) == [3, 2]


def test_leftovers_are_removed(tmp_path: Path) -> None:
    written(tmp_path, 3)
    written(tmp_path, 4, ".tmp-step-00000004")
    (tmp_path / ".tmp-removed-step-00000001").mkdir()
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [step_folder(3)]
    remove_checkpoint(tmp_path / step_folder(3))
    assert not list(tmp_path.iterdir())


def test_load_takes_a_run_or_a_checkpoint_after_the_runs_own(tmp_path: Path) -> None:
    for step in (1, 2):
        written(tmp_path / "other" / "checkpoints", step)
    own = tmp_path / "own"
    assert [each.record.step for each in candidates(str(tmp_path / "other"), own)[0]] == [2, 1]
    one = tmp_path / "other" / "checkpoints" / step_folder(1)
    assert [each.record.step for each in candidates(str(one), own)[0]] == [1]
    written(own, 7)
    assert [each.record.step for each in candidates(str(one), own)[0]] == [7]


def test_load_without_usable_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a run directory or one checkpoint"):
        candidates(str(tmp_path / "nowhere"), None)
    with pytest.raises(ConfigError, match="contains no usable checkpoint"):
        candidates(str(tmp_path), None)
    one = written(tmp_path / "checkpoints", 1)
    (one / METADATA).unlink()
    with pytest.raises(ConfigError, match=r"cannot be used: \.metadata is missing"):
        candidates(str(one), None)
    with pytest.raises(ConfigError, match=r"\.metadata is missing"):
        candidates(str(tmp_path), None)


def in_format(path: Path, number: object) -> None:
    record = json.loads((path / "checkpoint.json").read_text())
    assert record.pop("format") == 2
    (path / "checkpoint.json").write_text(json.dumps(record if number is None else record | {"format": number}))


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (None, "its format is 1, but this version of meshrunner reads only format 2"),
        (3, "its format is 3, but"),
        ("2", "its format is '2', but"),
    ],
)
def test_another_format_is_refused_and_kept(number: object, said: str, tmp_path: Path) -> None:
    own = tmp_path / "run" / "checkpoints"
    in_format(written(own, 10), number)
    (written(own, 20) / METADATA).unlink()
    with pytest.raises(ConfigError, match=rf"cannot continue from the checkpoint .*{step_folder(10)}: {said}"):
        candidates(None, own)
    with pytest.raises(ConfigError, match=rf"contains no usable checkpoint\n.*\n.*skipping the checkpoint .*: {said}"):
        candidates(str(tmp_path / "run"), tmp_path / "other")
    with pytest.raises(ConfigError, match=rf"cannot be used: {said}"):
        candidates(str(own / step_folder(10)), None)
    written(own, 30)
    found, warnings = candidates(None, own)
    assert [each.record.step for each in found] == [30] and len(warnings) == 2


def test_differences_name_the_keys() -> None:
    old = {"a": 1, "b": {"c": [1, 2], "d": None}, "e": {"f": 1}}
    new = {"a": 1, "b": {"c": [1, 3], "d": None, "g": 2}, "e": 5}
    assert differences(old, new) == [("b.c", [1, 2], [1, 3]), ("b.g", ..., 2), ("e", {"f": 1}, 5)]
    assert differences(old, old) == []
