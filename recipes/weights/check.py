"""Check the initial weights of a run before anything starts. This module imports neither torch nor safetensors."""

from __future__ import annotations

from pathlib import Path

from meshrunner.recipes.checkpoint.on_disk import holds_checkpoints, named_checkpoints
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.base import Model
from meshrunner.recipes.model.llama import Llama
from meshrunner.recipes.recipe import Recipe
from meshrunner.recipes.weights.files import StoredTensor, stored_tensors
from meshrunner.recipes.weights.names import counterparts

KEY = "model.weights"
DTYPES = ("F64", "F32", "F16", "BF16")
IGNORED = (".rotary_emb.inv_freq",)
"""Ends of the names of tensors that a folder may hold although the network computes them."""


def hugging_face_folder(model: Model) -> Path | None:
    """Return the Hugging Face folder that `model.weights` names; None if it is null or names a run directory or checkpoint."""
    path = Path(model.weights).expanduser().absolute() if model.weights is not None else None
    return None if path is None or holds_checkpoints(path) else path


def check_weights(recipe: Recipe) -> None:
    """Raise ConfigError if `model.weights` names no weights that fit the model and the tokenizer."""
    if recipe.model.weights is None:
        return
    trains_tokenizer = getattr(recipe.data, "tokenizer", "") is None
    folder = hugging_face_folder(recipe.model)
    if folder is None:
        record = named_checkpoints(recipe.model.weights, KEY)[0][0].record
        recipe.refuse_other_model(record)
        trains_tokenizer = trains_tokenizer and record.config["data"] != recipe.data.model_dump(mode="json")
    else:
        try:
            _check_tensors(recipe.model, folder)
        except ConfigError as error:
            raise ConfigError(f"{KEY}: {error}") from None
    if trains_tokenizer:
        raise ConfigError(
            f"{KEY}: data.tokenizer=null trains a tokenizer on the text, whose tokens mean nothing to these weights; set "
            "data.tokenizer to the weights' tokenizer, or use data=random"
        )


def _check_tensors(model: Model, folder: Path) -> None:
    if not isinstance(model, Llama):
        raise ConfigError(f"kind={model.kind} has no form in Hugging Face folders; use a run directory or a checkpoint")
    if not folder.is_dir():
        raise ConfigError(
            f"no such directory: {folder}; expected a Hugging Face folder, a run directory or a checkpoint"
        )
    stored, expected = stored_tensors(folder), counterparts(model)
    shapes = {name: each.shape for each in expected.values() for name in each.tensors}
    missing = [name for name in shapes if name not in stored]
    others = [name for name in stored if name not in shapes and not _is_ignored(name, model)]
    for what, names in (("lacks", missing), ("has unexpected", others)):
        if names:
            raise ConfigError(f"{folder} {what} {len(names)} tensors of this model, such as {names[0]}{HINT}")
    for name, shape in shapes.items():
        _check_tensor(name, stored[name], shape)


HINT = "; use model=hf model.path=FOLDER to take the shapes from the folder"


def _is_ignored(name: str, model: Llama) -> bool:
    return name.endswith(IGNORED) or (model.tie_embeddings and name == "lm_head.weight")


def _check_tensor(name: str, stored: StoredTensor, shape: tuple[int, ...]) -> None:
    if stored.shape != shape:
        raise ConfigError(f"{stored.file}: {name} has shape {list(stored.shape)}, the model needs {list(shape)}{HINT}")
    if stored.dtype not in DTYPES:
        raise ConfigError(f"{stored.file}: {name} has dtype {stored.dtype}; quantised weights are not supported")
