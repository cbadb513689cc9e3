"""Checkpoints as they lie on disk: which are good, which is the newest, which may go. Needs no torch.

    checkpoints/step-00000010/    .metadata, a .distcp file of every rank, and checkpoint.json, written last
    checkpoints/.tmp-.../         being written or removed; left over by a run that was killed, it is swept away

A folder gets its final name when everything in it is complete and on the disk. What is damaged later (or by a file system
that lost what it promised to hold) is found by the sizes and checksums in checkpoint.json.
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

from meshrunner.recipes.durable import checksum, replace_file
from meshrunner.recipes.errors import ConfigError

RECORD = "checkpoint.json"
METADATA = ".metadata"
FOLDER = "checkpoints"
"""The folder of a run directory that holds its checkpoints."""
TEMPORARY = ".tmp-"
NAME = re.compile(r"step-(\d{8,})")


class Damaged(Exception):
    """A checkpoint that cannot be used; the text says what is wrong with it."""


@dataclass(frozen=True)
class Record:
    """checkpoint.json: what a checkpoint holds beside tensors, and by what it is recognised as complete."""

    step: int
    tokens: int
    """Tokens consumed in all steps up to this one."""
    sequences: int
    """Sequences consumed in all steps up to this one: the next step begins with the one of this index."""
    global_batch: int
    """Sequences of this step."""
    seed: int
    world_size: int
    parameters: int
    """Number of parameters of the whole model."""
    config: dict[str, Any]
    """The checked configuration it was written with."""
    files: dict[str, tuple[int, int]]
    """Name -> (bytes, CRC-32)."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint that is complete as far as can be told without reading the tensors."""

    path: Path
    record: Record

    def damaged_files(self, names: Iterable[str]) -> list[str]:
        """Those of the files whose content is not what was written; reads all of it."""
        return [name for name in names if checksum(self.path / name) != tuple(self.record.files[name])]


def step_folder(step: int) -> str:
    """Name of the folder of a step's checkpoint."""
    return f"step-{step:08}"


def write_record(folder: Path, record: Record) -> None:
    """Write checkpoint.json, and see that all there is in the folder has reached the disk."""
    replace_file(folder / RECORD, (json.dumps(asdict(record), indent=2) + "\n").encode())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def read(folder: Path) -> Stored:
    """A checkpoint, after a look at everything but the content of the large files; raises Damaged."""
    try:
        record = Record(**json.loads((folder / RECORD).read_text()))
        sizes = {name: int(size) for name, (size, _) in record.files.items()}
        metadata = tuple(record.files[METADATA])
    except FileNotFoundError:
        raise Damaged(f"{RECORD} is missing") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"{RECORD} cannot be read ({type(error).__name__}: {error})") from None
    for name, size in sizes.items():
        if not (folder / name).is_file():
            raise Damaged(f"{name} is missing")
        found = (folder / name).stat().st_size
        if found != size:
            raise Damaged(f"{name} has {found} bytes, {size} were written")
    if checksum(folder / METADATA) != metadata:
        raise Damaged(f"{METADATA} is not what was written (its checksum differs)")
    return Stored(folder, record)


def steps(folder: Path) -> dict[int, Path]:
    """Step -> checkpoint of a `checkpoints` folder, newest first, good or not; {} where there is no folder."""
    if not folder.is_dir():
        return {}
    found = {int(match[1]): path for path in folder.iterdir() if (match := NAME.fullmatch(path.name))}
    return dict(sorted(found.items(), reverse=True))


def good(folder: Path) -> tuple[list[Stored], list[str]]:
    """The good checkpoints of a `checkpoints` folder, newest first, and a warning for each that is not."""
    found, warnings = [], []
    for path in steps(folder).values():
        try:
            found.append(read(path))
        except Damaged as error:
            warnings.append(f"the checkpoint {path} is skipped: {error}")
    return found, warnings


def candidates(load: str | None, own: Path | None) -> tuple[list[Stored], list[str]]:
    """
    What a run may continue from, best first, and warnings about what is skipped.

    Args:
        load: `checkpoint.load`, a run directory or one checkpoint.
        own: the run's own `checkpoints` folder; what it holds goes before `load`.

    Raises:
        ConfigError: `load` names something that holds no good checkpoint.
    """
    found, warnings = good(own) if own else ([], [])
    if found or load is None:
        return found, warnings
    path = Path(load).expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(f"checkpoint.load: there is no folder '{path}'; expected a run directory or one checkpoint")
    if NAME.fullmatch(path.name) or (path / RECORD).exists():
        try:
            return [read(path)], warnings
        except Damaged as error:
            raise ConfigError(f"checkpoint.load: the checkpoint '{path}' cannot be used: {error}") from None
    elsewhere, more = good(path / FOLDER)
    if not elsewhere:
        why = (
            "".join(f"\n  {warning}" for warning in more)
            or f"; there is no '{path}/{FOLDER}/{step_folder(10)}' or the like"
        )
        raise ConfigError(f"checkpoint.load: '{path}' holds no checkpoint that can be used{why}")
    return elsewhere, warnings + more


def publish(temporary: Path, final: Path, keep: int | None) -> None:
    """Give a complete checkpoint its final name; then remove what is older than the newest `keep` good ones."""
    if final.exists():
        remove(final)  # it was found damaged, or this step would not have been trained again
    temporary.rename(final)
    sync_folder(final.parent)
    if keep is None:
        return
    newest = int(final.name.removeprefix("step-"))
    kept = 0
    for step, path in steps(final.parent).items():
        if step > newest:
            continue
        if kept < keep and (path == final or is_good(path)):
            kept += 1
        else:
            remove(path)


def is_good(path: Path) -> bool:
    """Whether `read` accepts a checkpoint."""
    try:
        read(path)
    except Damaged:
        return False
    return True


def remove(path: Path) -> None:
    """Remove a checkpoint. It loses its name first, so that no half of it is ever taken for one that is damaged."""
    going = path.with_name(f"{TEMPORARY}removed-{path.name}")
    shutil.rmtree(going, ignore_errors=True)
    path.rename(going)
    shutil.rmtree(going)


def sweep(folder: Path) -> None:
    """Remove what a run that was killed has left half-written or half-removed."""
    if folder.is_dir():
        for path in folder.glob(f"{TEMPORARY}*"):
            shutil.rmtree(path)
