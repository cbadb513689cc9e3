"""Write the weights of a checkpoint as safetensors files that transformers loads. One process reads the checkpoint tensor by
tensor, so it needs memory for one file and one tensor, whatever the size of the model and the layout of the run."""

import json
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from meshrunner.recipes.checkpoint.on_disk import StoredCheckpoint
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.base import Model
from meshrunner.recipes.model.llama import Llama
from meshrunner.recipes.weights.files import INDEX, SINGLE
from meshrunner.recipes.weights.names import counterparts


def write_weights(stored: StoredCheckpoint, model: Model, folder: Path, dtype: str, file_bytes: int) -> tuple[int, int]:
    """Write safetensors files, each with at most `file_bytes` bytes of tensors or with one tensor. Several files have an index.
    Return the number of tensors and their bytes. Raise OSError, or ConfigError if the checkpoint cannot be read."""
    assert isinstance(model, Llama)
    target = getattr(torch, dtype)
    shapes = {name: each.shape for each in counterparts(model).values() for name in each.tensors}
    sizes = {name: prod(shape) * target.itemsize for name, shape in shapes.items()}
    files: list[dict[str, int]] = [{}]
    for name, size in sizes.items():
        if files[-1] and sum(files[-1].values()) + size > file_bytes:
            files.append({})
        files[-1][name] = size
    tensors = _tensors(stored, model, target)
    where: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file = folder / (SINGLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors")
        save_file(dict(islice(tensors, len(names))), file, metadata={"format": "pt"})
        file.chmod(folder.stat().st_mode & 0o666)  # safetensors lets only the owner read its files
        where |= dict.fromkeys(names, file.name)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return len(sizes), sum(sizes.values())


def _tensors(stored: StoredCheckpoint, model: Llama, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of the tensors to write, in the order of `counterparts`."""
    reader = FileSystemReader(stored.path)
    # .metadata describes every shard of every tensor, so parsing it may take seconds.
    reader.read_metadata = cache(reader.read_metadata)  # type: ignore[method-assign]
    for name, counterpart in counterparts(model).items():
        shape = counterpart.shape
        value = torch.empty((len(counterpart.tensors), *shape[::-1]) if counterpart.stack else shape)
        try:
            with warnings.catch_warnings(
                action="ignore", category=UserWarning
            ):  # torch warns of the missing process group
                load({f"model.{name}": value}, storage_reader=reader, no_dist=True)
        except (CheckpointException, OSError) as error:
            raise ConfigError(f"export: cannot read {name} in the checkpoint {stored.path}: {error}") from error
        parts: Iterable[Tensor] = (matrix.T for matrix in value) if counterpart.stack else (value,)
        for tensor, part in zip(counterpart.tensors, parts, strict=True):
            yield tensor, part.to(dtype).contiguous()
