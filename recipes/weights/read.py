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


class FolderWeights:
    """The parameters of a network, stored in a Hugging Face folder. Files are mapped into memory, not read as a whole."""

    def __init__(self, folder: Path, model: Llama) -> None:
        self.counterparts, self.stored = counterparts(model), stored_tensors(folder)

    def read(self, name: str, part: list[range], target: Tensor) -> None:
        """See `Weights.read`. Values are converted to the target's dtype."""
        counterpart = self.counterparts[name]
        own = range(len(counterpart.tensors)) if not counterpart.stack else part[0]
        inside = tuple(slice(each.start, each.stop) for each in (part[1:] if counterpart.stack else part))
        with ExitStack() as opened:
            # A file is closed after each parameter, because its pages count as the process's memory while it is mapped.
            files: dict[Path, Any] = {}
            for number in own:
                tensor = counterpart.tensors[number]
                file = self.stored[tensor].file
                if file not in files:
                    files[file] = opened.enter_context(_open(file))
                values = files[file].get_slice(tensor)
                if counterpart.stack:
                    target[number - own.start].copy_(values[inside[::-1]].T)
                else:
                    target.copy_(values[inside])


def _open(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(file, framework="pt")


class NoValues:
    """The weights of a network on the meta device, which has no values to read."""

    def read(self, name: str, part: list[range], target: Tensor) -> None:
        """Leave `target` as it is."""


def folder_weights(model: Model, device_type: str) -> FolderWeights | NoValues | None:
    """Return the weights of the Hugging Face folder that `model.weights` names, or None if it names no such folder."""
    folder = hugging_face_folder(model)
    if folder is None:
        return None
    if device_type == "meta":
        return NoValues()
    assert isinstance(model, Llama)
    return FolderWeights(folder, model)
