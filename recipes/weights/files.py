"""Headers of the safetensors files of a Hugging Face folder. This module imports neither torch nor safetensors.

A file starts with the header's size in bytes (8 bytes, little-endian) and the header, a JSON object: tensor -> dtype, shape and
[begin, end) of the tensor's bytes after the header.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from meshrunner.recipes.errors import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    file: Path
    dtype: str
    """Name of the dtype in the header, such as BF16."""
    shape: tuple[int, ...]


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise ConfigError if the file is missing or holds something else."""
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {file} ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds no JSON object")
    return found


def has_weights(folder: Path) -> bool:
    """Return whether a folder has safetensors files."""
    return any((folder / name).is_file() for name in (INDEX, SINGLE))


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a folder, keyed by name. Raise ConfigError if a file is missing or damaged."""
    if not has_weights(folder):
        raise ConfigError(f"{folder} has neither {SINGLE} nor {INDEX}; save the weights as safetensors")
    if not (folder / INDEX).is_file():
        return _read_header(folder / SINGLE)
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict):
        raise ConfigError(f"{folder / INDEX} has no weight_map")
    found: dict[str, StoredTensor] = {}
    for name in sorted(set(map(str, index.values()))):
        found |= _read_header(folder / name)
    if missing := sorted(index.keys() - found.keys()):
        raise ConfigError(f"{folder / INDEX} lists {missing[0]}, but {index[missing[0]]} does not hold this tensor")
    return found


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length)) if 8 + length <= size else None
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"} if header else {}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        found = {name: StoredTensor(file, entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
    except OSError as error:
        raise ConfigError(f"cannot read {file} ({error.strerror}); download the folder again") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(f"{file} is not a safetensors file: its header is damaged; download it again") from None
    if header is None or size != 8 + length + end:
        expected = 8 + length + (end if header else 0)
        raise ConfigError(f"{file} has {size} bytes, but at least {expected} are expected; download it again")
    return found
