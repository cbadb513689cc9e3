"""Load tokenizers from the `tokenizer.json` files of the Hugging Face library `tokenizers`. Their bytes, as `read_model` returns
them, are a JSON object with the text of tokenizer.json and with the begin and end tokens that tokenizer_config.json names."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from meshrunner.recipes.errors import ConfigError

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
BEGINNING = f'{{"{FILE}": "'.encode()
"""First bytes of the JSON object that `read_tokenizer_json` returns. A sentencepiece model does not begin with a brace."""


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


def located(name: str) -> Path:
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
            f"data.tokenizer: '{config}' {lack}, so documents cannot be separated; it must name the eos_token"
        )
    return json.dumps({FILE: text, "bos": bos, "eos": eos}).encode()


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
            f"{where} does not contain the eos_token of its {CONFIG}, {content['eos']!r}; correct one file"
        )
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True  # or a document could contain the text of the end token, and so end early

    def encode(texts: list[str], threads: int) -> list[list[int]]:
        if threads == 1:  # in the process that packs in the background
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        return [each.ids for each in library.encode_batch_fast(texts, add_special_tokens=False)]

    return Tokenizer(max(ids.values()) + 1, ids.get(content["bos"]), ids[content["eos"]], encode)
