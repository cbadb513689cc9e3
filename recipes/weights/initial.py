"""Check the initial weights of a run before anything starts, and read each rank's shard of them. Checking imports neither torch
nor safetensors."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from meshrunner.recipes.checkpoint.on_disk import holds_checkpoints, named_checkpoints
from meshrunner.recipes.config_keys import differences, with_defaults
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.base import Model
from meshrunner.recipes.model.llama import Llama
from meshrunner.recipes.recipe import Recipe
from meshrunner.recipes.weights.files import has_weights, stored_tensors
from meshrunner.recipes.weights.hugging_face import counterparts

if TYPE_CHECKING:
    from torch import Tensor

    from meshrunner.recipes.model.init_weights import Read

KEY = "model.weights"
DTYPES = ("F64", "F32", "F16", "BF16")


def hugging_face_folder(model: Model) -> Path | None:
    """Return the Hugging Face folder that `model.weights` names; None if it is null or names a run directory or checkpoint."""
    path = Path(model.weights).expanduser().absolute() if model.weights is not None else None
    return path if path is not None and (has_weights(path) or not holds_checkpoints(path)) else None


def loads_checkpoint(recipe: Recipe) -> bool:
    """Return whether a run starts from a checkpoint, with the optimizer (`checkpoint.load`) or without (`model.weights`)."""
    weights = recipe.model.weights is not None and hugging_face_folder(recipe.model) is None
    return weights or recipe.checkpoint.load is not None


def check_weights(recipe: Recipe) -> None:
    """Raise ConfigError if the weights that `model.weights` names are missing, or do not fit the model or the tokenizer."""
    if recipe.model.weights is None:
        return
    trains_tokenizer = getattr(recipe.data, "tokenizer", "") is None
    if folder := hugging_face_folder(recipe.model):
        try:
            _check_tensors(recipe.model, folder)
        except ConfigError as error:
            raise ConfigError(f"{KEY}: {error}") from None
    else:
        record = named_checkpoints(recipe.model.weights, KEY)[0][0].record
        recipe.refuse_other_model(record)
        saved = with_defaults(record.config)["data"]
        changed = {key for key, *_ in differences(saved, recipe.data.model_dump(mode="json"))}
        trains_tokenizer = trains_tokenizer and not changed <= {"shuffle", "documents", "bos"}
    if trains_tokenizer:
        raise ConfigError(
            f"{KEY}: data.tokenizer=null trains a new tokenizer, but these weights were trained with another one; set "
            "data.tokenizer to the weights' tokenizer, or use data=random"
        )


def _check_tensors(model: Model, folder: Path) -> None:
    if not isinstance(model, Llama):
        raise ConfigError(f"a Hugging Face folder cannot hold a kind={model.kind} model; use a run or checkpoint")
    stored = stored_tensors(folder)
    shapes = {name: each.shape for each in counterparts(model).values() for name in each.tensors}
    # Some folders also hold tensors that the network shares between layers or computes itself.
    shared = ["lm_head.weight"] if model.tie_embeddings else []
    wrong = [f"lacks {name}" for name in shapes if name not in stored]
    for name, (_, dtype, shape) in stored.items():
        if name in shapes and shape != shapes[name]:
            wrong.append(f"has {name} with shape {list(shape)}, but the model needs {list(shapes[name])}")
        elif name in shapes and dtype not in DTYPES:
            wrong.append(f"has {name} with dtype {dtype}, but quantised weights are not supported")
        elif name not in shapes and name not in shared and not name.endswith(".rotary_emb.inv_freq"):
            wrong.append(f"has {name}, which the model lacks")
    if wrong:
        others = f" (tensors that differ: {len(wrong)})" if len(wrong) > 1 else ""
        hint = (
            "model=hf model.path=FOLDER takes the shapes from FOLDER/config.json, which must belong to the same model"
        )
        raise ConfigError(f"{folder} {wrong[0]}{others}; {hint}")


def reader(model: Model) -> Read | None:
    """Return a function that reads from the Hugging Face folder that `model.weights` names; None if it names no folder."""
    folder = hugging_face_folder(model)
    if folder is None:
        return None
    assert isinstance(model, Llama)
    parameters, stored = counterparts(model), cache(partial(stored_tensors, folder))

    def read(name: str, part: list[range], target: Tensor) -> None:
        from safetensors import safe_open

        if target.is_meta:
            return
        tensors, _, stack = parameters[name]
        numbers, *inside = part if stack else (range(1), *part)
        index = tuple(slice(each.start, each.stop) for each in inside)
        with ExitStack() as opened:
            # Files are closed after each parameter, because mapped pages count as the process's memory.
            opener = cache(lambda file: opened.enter_context(safe_open(file, framework="pt")))
            for number in numbers:
                values = opener(stored()[tensors[number]].file).get_slice(tensors[number])
                if stack:
                    target[number - numbers.start].copy_(values[index[::-1]].T)
                else:
                    target.copy_(values[index])

    return read
