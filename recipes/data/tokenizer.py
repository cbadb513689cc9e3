"""sentencepiece tokenizers: BPE with byte fallback, trained on the data itself.

They give every text back exactly, but for the character U+2581, with which sentencepiece marks spaces: it becomes one.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrunner.recipes.errors import ConfigError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

LARGEST_AUTO = 32000
"""`vocab_size: auto` goes no further: a few MB of text carry no more, and training stays a matter of a second."""
LONGEST_LINE = 2000
"""Characters; sentencepiece leaves out sentences over 4192 bytes, so longer lines are cut for the training."""

OPTIONS: dict[str, Any] = {
    "model_type": "bpe",
    "byte_fallback": True,  # no text is unknown
    "normalization_rule_name": "identity",  # this and the next two: exact round trip
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "allow_whitespace_only_pieces": True,  # an indent is one token
    "split_digits": True,
    "hard_vocab_limit": False,  # as many pieces as the text can carry, at most vocab_size
    "num_threads": 1,  # part of the model file, hence of its hash
    "minloglevel": 2,
}


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """A tokenizer model of at most `vocab_size` pieces; the same texts give the same bytes.

    Raises:
        ConfigError: the vocabulary is too small for the bytes and the characters of the texts.
    """
    from sentencepiece import SentencePieceTrainer

    lines = list(_lines(texts))  # read before: an exception inside of sentencepiece would come out as one of its own
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, vocab_size=vocab_size, **OPTIONS)
    except RuntimeError as error:
        why = str(error)
        if "smaller than required_chars" in why:  # "... required_chars. 256 vs 347. Increase ..."
            needed = why.partition(" vs ")[2].partition(".")[0]
            raise ConfigError(
                f"data: a vocabulary of {vocab_size} is too small for a tokenizer of this text: it needs at least "
                f"{needed} (256 bytes and its frequent characters); raise model.vocab_size (or data.vocab_size)"
            ) from None
        raise ConfigError(f"data: sentencepiece cannot train a tokenizer on this text: {why}") from None
    return model.getvalue()


def load_tokenizer(model: bytes, where: str) -> SentencePieceProcessor:
    """The tokenizer in the bytes of a model file; raises ConfigError when they are none, `where` says whose."""
    from sentencepiece import SentencePieceProcessor

    try:
        tokenizer = SentencePieceProcessor(model_proto=model)
    except RuntimeError:
        raise ConfigError(f"{where} is not a sentencepiece model") from None
    if tokenizer.eos_id() < 0:
        raise ConfigError(
            f"{where} has no end-of-sentence piece, which is needed between documents (train with eos_id)"
        )
    return tokenizer


def read_model(path: str) -> bytes:
    """The file that `data.tokenizer` names; raises ConfigError when it cannot be read."""
    file = Path(path).expanduser()
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"data.tokenizer: cannot read '{file.absolute()}' ({error.strerror}); expected a sentencepiece .model file"
        ) from None


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.splitlines():
            for start in range(0, len(line), LONGEST_LINE):
                yield line[start : start + LONGEST_LINE]
