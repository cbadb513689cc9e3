"""Checkpoints on disk: which are good, which is the newest, which may be removed. Needs no torch.

    checkpoints/step-00000010/    .metadata, one .distcp file per rank, and checkpoint.json, written last
    checkpoints/.tmp-.../         being written or removed; removed if a killed run left it behind

A folder gets its final name once its contents are complete and on disk. Later damage, or data that a file system lost after
fsync, is detected by the sizes and checksums in checkpoint.json.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.storage.durable import check_regular, checksum, read_regular, replace_file

RECORD = "checkpoint.json"
METADATA = ".metadata"
FOLDER = "checkpoints"
"""The folder with the checkpoints in a run directory."""
FORMAT = 2
"""
What the tensors mean. In format 1, which was not recorded, rotary embeddings turned neighbouring elements of a head and not
its halves, so that the rows of wq and wk, and their optimizer state, were in another order.
"""
RECORD_BYTES = 64 << 20
"""Largest checkpoint.json that is read."""
TEMPORARY = ".tmp-"
NAME = re.compile(r"step-(\d{8,})")


class Damaged(Exception):
    """A checkpoint cannot be used; the message says why."""


class OtherFormat(Damaged):
    """A checkpoint of another version: as good as new, but it means something else."""


@dataclass(frozen=True)
class Record:
    """Contents of checkpoint.json: everything but the tensors, and the checksums of the files."""

    step: int
    tokens: int
    """Tokens consumed up to and including this step."""
    sequences: int
    """Sequences consumed up to and including this step: the index of the next step's first sequence."""
    global_batch: int
    """Sequences per optimizer step."""
    seed: int
    world_size: int
    parameters: int
    """Number of parameters of the full model."""
    config: dict[str, Any]
    """The validated configuration of the run."""
    files: dict[str, tuple[int, int]]
    """Name -> (bytes, CRC-32)."""
    format: int = FORMAT


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint that is complete as far as one can tell without reading the tensors."""

    path: Path
    record: Record

    def damaged_files(self, names: Iterable[str]) -> list[str]:
        """The files whose checksum differs; reads them completely."""
        return [name for name in names if checksum(self.path / name) != tuple(self.record.files[name])]


def step_folder(step: int) -> str:
    """Folder name of a step's checkpoint."""
    return f"step-{step:08}"


def write_record(folder: Path, record: Record) -> None:
    """Write checkpoint.json, and sync the folder to disk."""
    replace_file(folder / RECORD, (json.dumps(asdict(record), indent=2) + "\n").encode())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def read_checkpoint(folder: Path) -> StoredCheckpoint:
    """A checkpoint, verified except for the content of large files; raises Damaged, or OtherFormat."""
    try:
        found = json.loads(read_regular(folder / RECORD, RECORD_BYTES))
        _check_format(found.get("format", 1))
        record = Record(**found)
        sizes = {name: int(size) for name, (size, _) in record.files.items()}
        metadata = tuple(record.files[METADATA])
        _check_types(record)
    except FileNotFoundError:
        raise Damaged(f"{RECORD} is missing") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        raise Damaged(f"{RECORD} cannot be read ({type(error).__name__}: {error})") from None
    for name, size in sizes.items():
        try:
            check_regular(folder / name)
        except FileNotFoundError:
            raise Damaged(f"{name} is missing") from None
        except (OSError, ValueError) as error:
            raise Damaged(f"{name}: {error}") from None
        found = (folder / name).stat().st_size
        if found != size:
            raise Damaged(f"{name} has {found} bytes, {size} were written")
    if checksum(folder / METADATA) != metadata:
        raise Damaged(f"{METADATA} is damaged: its checksum differs")
    return StoredCheckpoint(folder, record)


def _check_format(found: Any) -> None:
    """Raise OtherFormat where the tensors are not to be read as this version reads them."""
    if found == 1:
        raise OtherFormat(
            "it is of format 1: the rows of wq and wk are in another order since rotary embeddings turn the halves of a head. "
            "The version that wrote it can continue it; without it a run begins again at step 1"
        )
    if found != FORMAT:
        raise OtherFormat(f"it is of format {found!r:.20}, which this version cannot read; it reads format {FORMAT}")


def _check_types(record: Record) -> None:
    """Raise ValueError where checkpoint.json holds something else than was written."""
    numbers = ("step", "tokens", "sequences", "global_batch", "seed", "world_size", "parameters")
    for name in numbers:
        if type(getattr(record, name)) is not int:
            raise ValueError(f"{name}: expected a whole number, got {getattr(record, name)!r:.60}")
    if not isinstance(record.config, dict):
        raise ValueError("its config is not an object")
    for name in record.files:
        if "/" in name or "\0" in name or name in ("", ".", ".."):
            raise ValueError(f"{name!r:.100} is no file in this folder")


def checkpoint_folders(folder: Path) -> dict[int, Path]:
    """Step -> checkpoint folder, good or damaged, newest first; {} without a `checkpoints` folder."""
    if not folder.is_dir():
        return {}
    found = {int(match[1]): path for path in folder.iterdir() if (match := NAME.fullmatch(path.name))}
    return dict(sorted(found.items(), reverse=True))


def good_checkpoints(folder: Path) -> tuple[list[StoredCheckpoint], list[str]]:
    """The good checkpoints in a `checkpoints` folder, newest first, and a warning for each damaged one."""
    found, warnings = [], []
    for path in checkpoint_folders(folder).values():
        try:
            found.append(read_checkpoint(path))
        except Damaged as error:
            warnings.append(f"the checkpoint {path} is skipped: {error}")
    return found, warnings


def candidates(load: str | None, own: Path | None) -> tuple[list[StoredCheckpoint], list[str]]:
    """
    Checkpoints that a run can continue from, best first, and warnings about skipped ones.

    Args:
        load: `checkpoint.load`, a run directory or one checkpoint.
        own: the run's own `checkpoints` folder; it takes precedence over `load`.

    Raises:
        ConfigError: `load` contains no good checkpoint, or the run's own ones are of another format.
    """
    found, warnings = good_checkpoints(own) if own else ([], [])
    if own and not found:
        _refuse_other_format(own)
    if found or load is None:
        return found, warnings
    path = Path(load).expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(f"checkpoint.load: there is no folder '{path}'; expected a run directory or one checkpoint")
    if NAME.fullmatch(path.name) or (path / RECORD).exists():
        try:
            return [read_checkpoint(path)], warnings
        except Damaged as error:
            raise ConfigError(f"checkpoint.load: the checkpoint '{path}' cannot be used: {error}") from None
    elsewhere, more = good_checkpoints(path / FOLDER)
    if not elsewhere:
        why = "".join(f"\n  {each}" for each in more) or f"; expected folders like '{path / FOLDER / step_folder(10)}'"
        raise ConfigError(f"checkpoint.load: '{path}' contains no usable checkpoint{why}")
    return elsewhere, warnings + more


def _refuse_other_format(folder: Path) -> None:
    """Raise ConfigError for a checkpoint of another version: to begin again would lose what it holds."""
    for path in checkpoint_folders(folder).values():
        try:
            read_checkpoint(path)
        except OtherFormat as error:
            raise ConfigError(f"the checkpoint {path} cannot be continued from: {error}") from None
        except Damaged:
            continue


def publish(temporary: Path, final: Path, keep: int | None) -> None:
    """Give a complete checkpoint its final name, then remove all that are older than the newest `keep` good ones."""
    if final.exists():
        remove_checkpoint(final)  # it is damaged, or this step would not have been trained again
    temporary.rename(final)
    sync_folder(final.parent)
    if keep is None:
        return
    newest = int(final.name.removeprefix("step-"))
    kept = 0
    for step, path in checkpoint_folders(final.parent).items():
        if step > newest:
            continue
        if kept < keep and (path == final or is_good(path)):
            kept += 1
        else:
            remove_checkpoint(path)


def is_good(path: Path) -> bool:
    """Whether `read_checkpoint` accepts a checkpoint."""
    try:
        read_checkpoint(path)
    except Damaged:
        return False
    return True


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a partly removed one does not look like a damaged one."""
    temporary = path.with_name(f"{TEMPORARY}removed-{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    path.rename(temporary)
    _remove(temporary)


def _remove(path: Path) -> None:
    """Remove a folder, or what lies in its place: a link without what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_leftovers(folder: Path) -> None:
    """Remove the partly written or removed checkpoints of a killed run."""
    if folder.is_dir():
        for path in folder.glob(f"{TEMPORARY}*"):
            _remove(path)
