"""Write the weights of a checkpoint and the run's tokenizer as files that transformers loads. One process reads the checkpoint
tensor by tensor, so it needs memory for one file and one tensor, whatever the size of the model and the layout of the run."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from meshrunner.recipes.checkpoint.on_disk import StoredCheckpoint
from meshrunner.recipes.data.base import DataSpec
from meshrunner.recipes.data.text import PackedText
from meshrunner.recipes.data.tokenizer import BEGINNING, CONFIG, FILE, Tokenizer, load_sentencepiece, locate, read_model
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.base import Model
from meshrunner.recipes.model.llama import Llama
from meshrunner.recipes.weights.files import INDEX, SINGLE
from meshrunner.recipes.weights.hugging_face import counterparts

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer as Library

PROBE = "  If x:\n\t\tprint('ä ﬁ Å 日本 🎉\x00')\r\n    Return   007 "
"""Text whose tokens change if a sentencepiece model normalises text, adds a space in front, or is not BPE."""


def write_weights(stored: StoredCheckpoint, model: Model, folder: Path, dtype: str, file_bytes: int) -> tuple[int, int]:
    """Write safetensors files. Each has at most `file_bytes` bytes of tensors, or one tensor. If there are several files, add
    an index. Return the number of tensors and their bytes. Raise OSError, or ConfigError if the checkpoint is unreadable."""
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
            # torch warns of the missing process group.
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                load({f"model.{name}": value}, storage_reader=reader, no_dist=True)
        except (CheckpointException, OSError) as error:
            raise ConfigError(f"export: cannot read {name} in the checkpoint {stored.path}: {error}") from error
        parts: Iterable[Tensor] = (matrix.T for matrix in value) if counterpart.stack else (value,)
        for tensor, part in zip(counterpart.tensors, parts, strict=True):
            yield tensor, part.to(dtype).contiguous()


def tokenizer_files(data: PackedText, spec: DataSpec, sha256: str | None) -> tuple[Tokenizer, dict[str, bytes]]:
    """Return a run's tokenizer and the contents of its files, keyed by name. Raise ConfigError if the tokenizer is missing or has
    changed. sha256: hash that the run recorded, or None if it is unknown."""
    cached = data.entry(spec).tokenizer
    if data.tokenizer is None and not cached.exists():
        raise ConfigError(f"the tokenizer of this run is not in the cache (MESHRUNNER_CACHE): no such file: {cached}")
    model = cached.read_bytes() if data.tokenizer is None else read_model(data.tokenizer)
    if sha256 not in (None, hashlib.sha256(model).hexdigest()):
        raise ConfigError("data.tokenizer has changed since this run trained")
    tokenizer = data.load_tokenizer(model, data.tokenizer or str(cached))
    if model.startswith(BEGINNING):
        file = locate(str(data.tokenizer))
        return tokenizer, {name: file.with_name(name).read_bytes() for name in (FILE, CONFIG)}
    processor = load_sentencepiece(model, "")
    library = equivalent(processor, tokenizer.bos)
    if library.encode(PROBE, add_special_tokens=False).ids != processor.encode(PROBE):
        raise ConfigError(
            f"'{data.tokenizer}' has no equivalent tokenizer.json, because the tokenizer normalises text or is not BPE; "
            "copy the model's Hugging Face tokenizer files into the folder"
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None if tokenizer.bos is None else processor.id_to_piece(tokenizer.bos),
        "eos_token": processor.id_to_piece(tokenizer.eos),
        "model_max_length": spec.seq_len,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # as in training, where a special token's name is ordinary text
    }
    return tokenizer, {"tokenizer.model": model, FILE: library.to_str().encode(), CONFIG: json.dumps(config).encode()}


def equivalent(processor: SentencePieceProcessor, bos: int | None) -> Library:
    """Convert a BPE model of sentencepiece to the library `tokenizers`. bos: token id that begins every text, or None."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    pieces = {processor.id_to_piece(number): number for number in range(len(processor))}
    special = [piece for piece, each in pieces.items() if processor.is_control(each) or processor.is_unknown(each)]
    merges = []  # as in sentencepiece, a merge whose result has a higher score comes first
    for piece, number in pieces.items():
        cuts = () if piece in special or processor.is_byte(number) else range(1, len(piece))
        parts = ((piece[:cut], piece[cut:]) for cut in cuts)
        score = processor.get_score(number)
        merges += [(-score, pieces[a], pieces[b], (a, b)) for a, b in parts if a in pieces and b in pieces]
    pairs, unknown = [pair for *_, pair in sorted(merges)], processor.id_to_piece(processor.unk_id())
    library = Tokenizer(models.BPE(pieces, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Replace(" ", "▁")
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    if bos is not None:
        begin = processor.id_to_piece(bos)
        library.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, bos)])
    return library
