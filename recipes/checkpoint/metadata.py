"""A check of a checkpoint's `.metadata`, a pickle that could run any code, before torch unpickles it without restriction."""

from __future__ import annotations

import pickle
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from meshrunner.recipes.checkpoint.on_disk import METADATA
from meshrunner.recipes.errors import ConfigError

ALLOWED: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,  # Python 3.13
} | {
    ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
    for name in (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
    )
}  # fmt: skip
"""(module, name) -> object, for everything that torch writes into the file besides dtypes and `builtins.getattr`."""


def check_metadata(folder: Path) -> None:
    """Raise ConfigError if a checkpoint's metadata refers to anything but tensors, or to code that torch does not write."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
        tensors = isinstance(found, Metadata) and all(
            isinstance(each, TensorStorageMetadata) for each in found.state_dict_metadata.values()
        )
    except Exception as error:  # a damaged pickle may raise anything
        raise ConfigError(f"{path} is not the metadata of a checkpoint: {error}; load another checkpoint") from None
    if not tensors:
        raise ConfigError(f"{path} refers to something other than tensors; load another checkpoint")


def _memory_format(kind: Any, name: Any) -> Any:
    """Stand in for `getattr`, through which Python up to 3.11.3 pickles a member of an enumeration."""
    if kind is not metadata._MEM_FORMAT_ENCODING or name not in kind.__members__:
        raise pickle.UnpicklingError("it refers to builtins.getattr")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        found = ALLOWED.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return found
