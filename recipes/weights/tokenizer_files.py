"""Tokenizer files of an exported model. transformers reads tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from meshrunner.recipes.data.base import DataSpec
from meshrunner.recipes.data.text import PackedText
from meshrunner.recipes.data.tokenizer import BEGINNING, CONFIG, FILE, Tokenizer, load_sentencepiece, locate, read_model
from meshrunner.recipes.errors import ConfigError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer as Library

PROBE = "  If x:\n\t\tprint('ä ﬁ Å 日本 🎉\x00')\r\n    Return   007 "
"""Text whose tokens change if a sentencepiece model normalises text, adds a space in front, or is not BPE."""


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
            f"'{data.tokenizer}' has no equivalent tokenizer.json, because it normalises text or is not BPE; copy the files "
            "of its tokenizer for transformers to the folder"
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None if tokenizer.bos is None else processor.id_to_piece(tokenizer.bos),
        "eos_token": processor.id_to_piece(tokenizer.eos),
        "model_max_length": spec.seq_len,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # in training, too, the text of a special token is text
    }
    return tokenizer, {"tokenizer.model": model, FILE: library.to_str().encode(), CONFIG: json.dumps(config).encode()}


def equivalent(processor: SentencePieceProcessor, bos: int | None) -> Library:
    """Return a BPE model of sentencepiece as a tokenizer of the library `tokenizers`. bos: begin token of every text, or None."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    pieces = {processor.id_to_piece(number): number for number in range(len(processor))}
    special = [piece for piece, each in pieces.items() if processor.is_control(each) or processor.is_unknown(each)]
    merges = []  # sorted as sentencepiece prefers them: by the score of the result
    for piece, number in pieces.items():
        cuts = () if piece in special or processor.is_byte(number) else range(1, len(piece))
        parts = ((piece[:cut], piece[cut:]) for cut in cuts)
        score = processor.get_score(number)
        merges += [(-score, pieces[a], pieces[b], (a, b)) for a, b in parts if a in pieces and b in pieces]
    library = Tokenizer(
        models.BPE(
            vocab=pieces,
            merges=[pair for *_, pair in sorted(merges)],
            unk_token=processor.id_to_piece(processor.unk_id()),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    library.normalizer = normalizers.Replace(" ", "▁")
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    if bos is not None:
        begin = processor.id_to_piece(bos)
        library.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, bos)])
    return library
