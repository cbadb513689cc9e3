"""Verify checkpoints on disk, choose the checkpoint that a run continues from, and remove old checkpoints.

    checkpoints/step-00000010/    .metadata, one .distcp file per rank, and checkpoint.json, written last
    checkpoints/.tmp-.../         a checkpoint being written or removed; deleted if a killed run left it behind

A checkpoint's directory gets its final name only after all its files are synced. If a file is damaged later, or the file system
loses data despite fsync, the file's size or checksum does not match checkpoint.json. Only `choose_checkpoint` imports torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import from_json

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.storage import checksum, replace_file

if TYPE_CHECKING:
    import torch
    from torch import nn

RECORD = "checkpoint.json"
METADATA = ".metadata"
FOLDER = "checkpoints"
"""Name of the directory, inside a run directory, that contains the checkpoints."""
FORMAT = 2
"""Version of the checkpoint format. Format 1 ordered the rows of wq and wk differently and had no key `format`."""
TEMPORARY = ".tmp-"
NAME = re.compile(r"step-(\d{8,})")


class Damaged(Exception):
    """The error for a checkpoint that cannot be used. The message gives the reason."""


class OtherFormat(Damaged):
    """The error for an intact checkpoint in a format that this version of meshrunner cannot read."""


class Consumed(NamedTuple):
    """Amount of data that all steps so far have consumed."""

    sequences: int
    tokens: int


class Training(NamedTuple):
    """The model and optimizer to save, and the properties of the run that checkpoint.json records."""

    config: dict[str, Any]
    steps: int
    seed: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    parameters: int
    global_batch: int


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True, defer_build=True))
class Record:
    """The contents of checkpoint.json: properties of the run, and the sizes and checksums of the checkpoint's files."""

    step: int
    tokens: int
    """Tokens consumed up to and including this step."""
    sequences: int
    """Sequences consumed up to and including this step; also the index of the next step's first sequence."""
    global_batch: int
    """Sequences per optimizer step."""
    seed: int
    world_size: int
    parameters: int
    """Number of parameters of the full model."""
    config: dict[str, Any]
    files: dict[str, tuple[int, int]]
    """(Size in bytes, CRC-32) of each file of the checkpoint, keyed by file name."""
    format: int = FORMAT


class StoredCheckpoint(NamedTuple):
    """A checkpoint whose files have the recorded sizes. The files' contents may still be damaged."""

    path: Path
    record: Record

    def damaged_files(self, names: Iterable[str]) -> list[str]:
        """Return the names of the given files whose size or checksum differs from the record."""
        return [name for name in names if checksum(self.path / name) != self.record.files[name]]


def step_folder(step: int) -> str:
    """Return the directory name of a step's checkpoint."""
    return f"step-{step:08}"


def write_record(folder: Path, record: Record) -> None:
    """Write checkpoint.json and sync the directory."""
    replace_file(folder / RECORD, (json.dumps(asdict(record), indent=2) + "\n").encode())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Call fsync on a directory, so that created and renamed files survive a crash."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def read_checkpoint(folder: Path) -> StoredCheckpoint:
    """Return a checkpoint after verifying the sizes of all files and the checksum of .metadata. Raises Damaged or OtherFormat."""
    stored = StoredCheckpoint(folder, _read_record(folder))
    for name, (size, _) in stored.record.files.items():
        if not (folder / name).is_file():
            raise Damaged(f"{name} is missing")
        if (found := (folder / name).stat().st_size) != size:
            raise Damaged(f"{name} has {found} bytes, but {size} were written")
    if stored.damaged_files([METADATA]):
        raise Damaged(f"{METADATA} is damaged: wrong checksum")
    return stored


def _read_record(folder: Path) -> Record:
    path = folder / RECORD
    if not path.is_file():
        raise Damaged(f"{RECORD} is missing")
    try:
        content = path.read_bytes()
        if (found := from_json(content).get("format", 1)) != FORMAT:
            raise OtherFormat(f"its format is {found!r:.20}, but this version of meshrunner reads only format {FORMAT}")
        return TypeAdapter(Record).validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise Damaged(f"{RECORD} cannot be read: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: the JSON is not an object
        raise Damaged(f"{RECORD} cannot be read: {error}") from None


def checkpoint_folders(folder: Path) -> dict[int, Path]:
    """Return the directories of all checkpoints, even damaged ones, keyed by step, newest first; {} if there is no `folder`."""
    if not folder.is_dir():
        return {}
    found = {int(match[1]): path for path in folder.iterdir() if (match := NAME.fullmatch(path.name))}
    return dict(sorted(found.items(), reverse=True))


def good_checkpoints(folder: Path, *, may_ignore: bool = True) -> tuple[list[StoredCheckpoint], list[str]]:
    """Return the checkpoints in `folder` that `read_checkpoint` accepts, newest first, and a warning for each of the others.
    Raise ConfigError if `may_ignore` is false, no checkpoint is good, and at least one checkpoint has another format."""
    good, damaged = [], {}
    for path in checkpoint_folders(folder).values():
        try:
            good.append(read_checkpoint(path))
        except Damaged as error:
            damaged[path] = error
    for path, problem in damaged.items():
        if isinstance(problem, OtherFormat) and not (good or may_ignore):  # starting again would lose this checkpoint
            raise ConfigError(f"cannot continue from the checkpoint {path}: {problem}")
    return good, [f"skipping the checkpoint {path}: {problem}" for path, problem in damaged.items()]


def candidates(
    load: str | None, own: Path | None, key: str = "checkpoint.load"
) -> tuple[list[StoredCheckpoint], list[str]]:
    """Return the good checkpoints in `own` (the run's `checkpoints` directory), newest first. If there are none, return those
    in `load`. Also return a warning for each damaged checkpoint. Raises ConfigError if `own` has checkpoints in another format
    and no good checkpoint, or if `load` is given and neither directory has a good checkpoint. key: name of the key."""
    found, warnings = good_checkpoints(own, may_ignore=False) if own else ([], [])
    if found or load is None:
        return found, warnings
    elsewhere, more = named_checkpoints(load, key)
    return elsewhere, warnings + more


def named_checkpoints(name: str, key: str) -> tuple[list[StoredCheckpoint], list[str]]:
    """Return the good checkpoints of the run directory `name`, newest first, and a warning for each damaged one. If `name` is a
    checkpoint, return only this checkpoint. Raise ConfigError if none is good. key: the configuration key of `name`."""
    path = Path(name).expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(f"{key}: no such directory: {path}; expected a run directory or one checkpoint")
    if _is_checkpoint(path):
        try:
            return [read_checkpoint(path)], []
        except Damaged as error:
            raise ConfigError(f"{key}: the checkpoint {path} cannot be used: {error}") from None
    found, warnings = good_checkpoints(path / FOLDER)
    if not found:
        raise ConfigError("\n  ".join([f"{key}: {path} contains no usable checkpoint", *warnings]))
    return found, warnings


def _is_checkpoint(path: Path) -> bool:
    return NAME.fullmatch(path.name) is not None or (path / RECORD).exists()


def holds_checkpoints(path: Path) -> bool:
    """Return whether a path is a checkpoint or has the files of a run directory."""
    return _is_checkpoint(path) or (path / FOLDER).is_dir() or (path / "config.yaml").is_file()


def publish(temporary: Path, final: Path, keep: int | None) -> None:
    """Give a complete checkpoint its final name. Then delete older checkpoints, except the newest `keep` - 1 good ones."""
    if final.exists():
        remove_checkpoint(final)  # the old one must be damaged, otherwise this step would not have been trained again
    temporary.rename(final)
    sync_folder(final.parent)
    if keep is None:
        return
    newest = int(final.name.removeprefix("step-"))
    good = [each.path for each in good_checkpoints(final.parent)[0] if each.record.step <= newest]
    for step, path in checkpoint_folders(final.parent).items():
        if step < newest and path not in good[:keep]:
            remove_checkpoint(path)


def remove_checkpoint(path: Path) -> None:
    """Rename a checkpoint, then delete its files. Without the new name, a partly deleted checkpoint would look damaged."""
    temporary = path.with_name(f"{TEMPORARY}removed-{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    path.rename(temporary)
    shutil.rmtree(temporary, ignore_errors=True)  # rmtree deletes neither a symbolic link nor its target


def remove_leftovers(folder: Path) -> None:
    """Remove checkpoints that a killed run had partly written or partly removed."""
    for path in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def choose_checkpoint(load: str | None, own: Path | None, key: str = "checkpoint.load") -> StoredCheckpoint | None:
    """Return the newest checkpoint whose checksums all match, or None to start from step 1. Each rank verifies its share of the
    files, and all ranks return the same result. Raises ConfigError on every rank if `candidates` raises it, or if `load` is
    given and all checkpoints are damaged."""
    if own is None and load is None:
        return None
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    listed: list[Any] = [None]
    if rank == 0:  # a network file system may show the other ranks an older state
        try:
            if own is not None:
                remove_leftovers(own)
            listed[0], warnings = candidates(load, own, key)
            for warning in warnings:
                print(f"warning: {warning}", file=sys.stderr, flush=True)
        except Exception as error:
            listed[0] = error
    dist.broadcast_object_list(listed, device=torch.device("cpu"))
    if isinstance(listed[0], Exception):
        raise listed[0]
    found: list[StoredCheckpoint] = listed[0]
    for candidate in found:
        by_rank: list[list[str]] = [[] for _ in range(ranks)]
        dist.all_gather_object(by_rank, candidate.damaged_files(sorted(candidate.record.files)[rank::ranks]))
        damaged = [name for names in by_rank for name in names]
        if not damaged:
            return candidate
        if rank == 0:
            why = f"wrong checksum of {', '.join(damaged)}"
            print(f"warning: skipping the checkpoint {candidate.path}: {why}", file=sys.stderr, flush=True)
    if found and load is not None:
        raise ConfigError(
            f"{key}: every checkpoint in {load} is damaged (wrong checksums); load another run's checkpoint"
        )
    return None
