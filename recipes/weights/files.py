"""Headers of the safetensors files of a Hugging Face folder. This module imports neither torch nor safetensors.

The first 8 bytes of a file are the header's size in bytes, little-endian. The header follows, a JSON object: tensor -> dtype,
shape and [begin, end) of the tensor's bytes, counted from the end of the header.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from meshrunner.recipes.errors import ConfigError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
CONFIG = "config.json"
LONGEST_HEADER = 10**8
"""Maximum size of a header in bytes, as in the package safetensors."""


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    file: Path
    dtype: str
    """Name of the dtype in the header, such as BF16."""
    shape: tuple[int, ...]


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise ConfigError if the file cannot be read."""
    try:
        return dict(json.loads(file.read_bytes()))
    except OSError as error:
        raise ConfigError(f"cannot read {file} ({error.strerror}); expected a Hugging Face folder") from None
    except (ValueError, TypeError):
        raise ConfigError(f"{file} holds no JSON object; download it again") from None


def has_weights(folder: Path) -> bool:
    """Return whether a folder has safetensors files."""
    return any((folder / name).is_file() for name in (INDEX, SINGLE))


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a folder, keyed by name. Raise ConfigError if a file is missing or damaged."""
    if not (folder / INDEX).is_file():
        return _read_header(folder / SINGLE)
    index = read_json(folder / INDEX).get("weight_map")
    if not (isinstance(index, dict) and all(isinstance(name, str) for name in index.values())):
        raise ConfigError(f"{folder / INDEX} has no valid weight_map; download the file again")
    found = {key: each for name in sorted(set(index.values())) for key, each in _read_header(folder / name).items()}
    if missing := sorted(index.keys() - found.keys()):
        raise ConfigError(f"{folder / INDEX} lists {missing[0]}, but {index[missing[0]]} does not hold this tensor")
    return found


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, LONGEST_HEADER)))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        found = {name: StoredTensor(file, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    except OSError as error:
        expected = "expected safetensors files in a Hugging Face folder, a run directory or a checkpoint"
        raise ConfigError(f"cannot read {file} ({error.strerror}); {expected}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(f"the header of {file} is damaged; download the file again") from None
    if (size := file.stat().st_size) != end:
        raise ConfigError(f"{file} has {size} bytes, but {end} are expected; download the file again")
    return found
