"""Load tokenizers from files, and train sentencepiece tokenizers (BPE with byte fallback) on the training text. Decoding with a
trained tokenizer restores the original text with one exception: U+2581 becomes a space, because sentencepiece uses U+2581 for
spaces. The bytes of a tokenizer are either a sentencepiece model or a JSON object. The JSON object contains the text of a
`tokenizer.json` (a file of the library `tokenizers`), and the begin and end tokens that tokenizer_config.json names."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshrunner.recipes.errors import ConfigError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
BEGINNING = f'{{"{FILE}": "'.encode()
"""First bytes of the JSON object that `read_tokenizer_json` returns. A sentencepiece model does not begin with a brace."""
MAX_AUTO_VOCAB = 32000
"""Maximum vocabulary size if `data.vocab_size` is auto. A few MB of text are too little to train a larger vocabulary."""
MAX_LINE = 2000
"""Maximum characters per line of training text. Longer lines are split, because sentencepiece skips lines over 4192 bytes."""

OPTIONS: dict[str, Any] = {
    "model_type": "bpe",
    "byte_fallback": True,  # no unknown tokens
    "normalization_rule_name": "identity",  # with this option and the next two, decoding is lossless
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "allow_whitespace_only_pieces": True,  # an indent is one token
    "split_digits": True,
    "hard_vocab_limit": False,  # a short text may yield fewer pieces than vocab_size
    "num_threads": 1,  # stored in the model file, so the number changes the file's hash
    "minloglevel": 2,
}


class Tokenizer(NamedTuple):
    """A loaded tokenizer."""

    vocab: int
    """Largest token id plus 1."""
    bos: int | None
    """Id of the begin token, or None if the tokenizer has none."""
    eos: int
    """Id of the end token, which separates documents."""
    encode: Callable[[list[str], int], list[list[int]]]
    """(texts, number of threads or -1 for all cores) -> token ids of each text, without begin and end tokens."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train a tokenizer with at most `vocab_size` tokens. Return the model file's bytes, which are equal for equal texts."""
    from sentencepiece import SentencePieceTrainer

    # Read all texts before training, because sentencepiece would hide an exception raised by `texts`.
    lines = [line for text in texts for line in text.splitlines()]
    short = [line[start : start + MAX_LINE] for line in lines for start in range(0, len(line), MAX_LINE)]
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(sentence_iterator=iter(short), model_writer=model, vocab_size=vocab_size, **OPTIONS)
    except RuntimeError as error:
        why = str(error)
        if "smaller than required_chars" in why:  # "... required_chars. 256 vs 347. Increase ..."
            needed = why.partition(" vs ")[2].partition(".")[0]
            raise ConfigError(
                f"data: a vocabulary of {vocab_size} is too small, because a tokenizer of this text needs "
                f"at least {needed} tokens for the 256 byte values and the frequent characters; "
                "raise model.vocab_size (or data.vocab_size)"
            ) from None
        raise ConfigError(
            f"data: sentencepiece cannot train a tokenizer on this text: {why}; set data.tokenizer to a .model file"
        ) from None
    return model.getvalue()


def read_model(path: str) -> bytes:
    """Return the tokenizer in `path`, the value of `data.tokenizer`. Raise ConfigError if a file cannot be read."""
    file = locate(path)
    try:
        return read_tokenizer_json(file) if file.suffix == ".json" else file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"data.tokenizer: cannot read '{error.filename}' ({error.strerror}); expected a sentencepiece .model file, "
            "a tokenizer.json or a folder with a tokenizer.json"
        ) from None


def locate(name: str) -> Path:
    """Return the absolute path of the file that `data.tokenizer` names. For a folder, return the path of its tokenizer.json."""
    path = Path(name).expanduser().absolute()
    return path / FILE if path.is_dir() else path


def read_tokenizer_json(path: Path) -> bytes:
    """Return the bytes for `load_tokenizer_json`. Raise OSError or ConfigError if the file or its config is unusable."""
    config = path.with_name(CONFIG)
    try:
        text, settings = path.read_bytes().decode(), json.loads(config.read_bytes()) if config.exists() else {}
        bos, eos = (
            each.get("content") if isinstance(each := settings.get(key), dict) else each
            for key in ("bos_token", "eos_token")
        )
    except (ValueError, AttributeError) as error:  # AttributeError: the JSON is not an object
        raise ConfigError(f"data.tokenizer: '{path}' or its {CONFIG} is not a JSON file: {error}") from None
    if eos is None:
        lack = "has no eos_token" if config.exists() else "does not exist"
        raise ConfigError(
            f"data.tokenizer: '{config}' {lack}, so documents cannot be separated; this file must name the eos_token"
        )
    return json.dumps({FILE: text, "bos": bos, "eos": eos}).encode()


def load_tokenizer(model: bytes, where: str) -> Tokenizer:
    """Load a tokenizer from the bytes that `read_model` or `train_tokenizer` returned. where: name of the file for messages."""
    if model.startswith(BEGINNING):
        return load_tokenizer_json(model, where)
    processor = load_sentencepiece(model, where)

    def encode(texts: list[str], threads: int) -> list[list[int]]:
        return processor.encode(texts, num_threads=threads)  # type: ignore[no-any-return]

    bos = processor.bos_id()
    return Tokenizer(len(processor), bos if bos >= 0 else None, processor.eos_id(), encode)


def load_sentencepiece(model: bytes, where: str) -> SentencePieceProcessor:
    """Load a sentencepiece model; raise ConfigError if the bytes are no model, or the model has no end token."""
    from sentencepiece import SentencePieceProcessor

    try:
        tokenizer = SentencePieceProcessor(model_proto=model)
    except RuntimeError:
        raise ConfigError(f"{where} is not a sentencepiece model; expected a .model file or a tokenizer.json") from None
    if tokenizer.eos_id() < 0:
        raise ConfigError(f"{where} has no end-of-sentence piece to separate documents; retrain it with eos_id")
    return tokenizer


def load_tokenizer_json(model: bytes, where: str) -> Tokenizer:
    """Load a tokenizer. Raise ConfigError if tokenizer.json is unusable or does not contain the end token."""
    from tokenizers import Tokenizer as Library

    content = json.loads(model)
    try:
        library = Library.from_str(content[FILE])
    except Exception as error:  # tokenizers raises Exception itself
        raise ConfigError(f"{where} is not a tokenizer.json: {error}") from None
    ids = library.get_vocab()
    if content["eos"] not in ids:
        raise ConfigError(
            f"{where} does not contain the eos_token of its {CONFIG}, {content['eos']!r}; correct one of the two files"
        )
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True  # otherwise a document that contains the end token's text would end there

    def encode(texts: list[str], threads: int) -> list[list[int]]:
        if threads == 1:  # in the process that packs in the background
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        return [each.ids for each in library.encode_batch_fast(texts, add_special_tokens=False)]

    return Tokenizer(max(ids.values()) + 1, ids.get(content["bos"]), ids[content["eos"]], encode)
