"""Read the values of a rank's shards from the safetensors files of a Hugging Face folder."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrunner.recipes.model.base import Model
from meshrunner.recipes.model.llama import Llama
from meshrunner.recipes.weights.check import hugging_face_folder
from meshrunner.recipes.weights.files import stored_tensors
from meshrunner.recipes.weights.names import counterparts

if TYPE_CHECKING:
    from torch import Tensor

    from meshrunner.recipes.model.init_weights import Read


def reader(model: Model) -> Read | None:
    """Return a function that reads from the Hugging Face folder that `model.weights` names; None if it names no folder."""
    folder = hugging_face_folder(model)
    if folder is None:
        return None
    assert isinstance(model, Llama)
    parameters, stored = counterparts(model), dict[str, Path]()

    def read(name: str, part: list[range], target: Tensor) -> None:
        from safetensors import safe_open

        if target.is_meta:
            return
        if not stored:
            stored.update({name: each.file for name, each in stored_tensors(folder).items()})
        tensors, _, stack = parameters[name]
        numbers, *inside = part if stack else (range(1), *part)
        index = tuple(slice(each.start, each.stop) for each in inside)
        with ExitStack() as opened:
            # Files are closed after each parameter, because mapped pages count as the process's memory.
            files: dict[Path, Any] = {}
            for number in numbers:
                file = stored[tensors[number]]
                if file not in files:
                    files[file] = opened.enter_context(safe_open(file, framework="pt"))
                values = files[file].get_slice(tensors[number])
                if stack:
                    target[number - numbers.start].copy_(values[index[::-1]].T)
                else:
                    target.copy_(values[index])

    return read
