"""Tokenizers of the library `tokenizers`: begin and end tokens, special tokens in a text, the cache and wrong files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrunner.recipes.data import tokenizer as tokenizers
from meshrunner.recipes.data.base import DataSpec
from meshrunner.recipes.data.local import Jsonl
from meshrunner.recipes.errors import ConfigError
from tests.tokenizer_files import BEGIN, END, write_tokenizer

SPEC = DataSpec(2000, 8, 0)
TEXTS = ["def f(x):\n    return x", f"a {END} b{BEGIN}{END}", "", "ünï 🎉\x00\r\n"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHRUNNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def data(tmp_path: Path, tokenizer: Path, **changes: Any) -> Jsonl:
    if not (file := tmp_path / "text.jsonl").exists():
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    keys = {"kind": "jsonl", "path": str(file), "field": "text", "vocab_size": "auto", "shuffle": 4}
    return Jsonl.model_validate(keys | {"tokenizer": str(tokenizer)} | changes)


def packed(one: Jsonl) -> list[int]:
    assert one.prepare(SPEC)
    one.produce(SPEC)
    progress = one.entry(SPEC).read()
    assert progress is not None and progress.complete and progress.vocab == 700
    return np.fromfile(one.entry(SPEC).tokens, dtype=progress.dtype).tolist()  # type: ignore[no-any-return]


def test_documents_cannot_contain_begin_and_end_tokens(tmp_path: Path, folder: Path) -> None:
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin, end = (library.token_to_id(token) for token in (BEGIN, END))
    assert library.encode("x").ids[0] == begin, "its post-processor adds the begin token"
    for one, before in ((data(tmp_path, folder), 0), (data(tmp_path, folder / "tokenizer.json", bos=True), 1)):
        tokens = packed(one)
        ends = [number for number, token in enumerate(tokens) if token == end]
        parts = [tokens[start + 1 + before : stop] for start, stop in pairwise([-1, *ends])]
        documents = library.decode_batch(parts, skip_special_tokens=False)
        assert documents == [text for text in TEXTS if text]
        assert tokens.count(end) == 3 and tokens[-1] == end
        assert tokens.count(begin) == 3 * before and (tokens[0] == begin) == bool(before)


def test_cache_depends_on_content_of_files(tmp_path: Path, folder: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).write_bytes((folder / name).read_bytes())
    same, first = data(tmp_path, copy).entry(SPEC).folder, data(tmp_path, folder).entry(SPEC).folder
    assert same == first != data(tmp_path, folder, bos=True).entry(SPEC).folder
    (copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": BEGIN}}))
    assert data(tmp_path, copy).entry(SPEC).folder != first
    text = json.loads((copy / "tokenizer.json").read_text())
    (copy / "tokenizer.json").write_text(json.dumps(text | {"truncation": TRUNCATION, "padding": None}))
    encode = tokenizers.load_tokenizer(tokenizers.read_model(str(copy)), "").encode
    assert len(*encode(["word " * 50], 1)) >= 50, "truncation in the file has no effect"


TRUNCATION = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}


def cases(folder: Path) -> Iterator[tuple[dict[str, str | None], dict[str, Any], str]]:
    """Yield (contents of files that change, changed keys, message)."""
    yield (
        {"tokenizer.json": None},
        {},
        "cannot read '{}/tokenizer.json' (No such file or directory); expected a sentence",
    )
    yield {"tokenizer.json": "{}"}, {}, "'{}' is not a tokenizer.json: "
    yield {"tokenizer.json": "\x00\x01"}, {}, "'{}' is not a tokenizer.json: "
    yield {"tokenizer_config.json": None}, {}, "'{}/tokenizer_config.json' does not exist, so documents cannot be sep"
    yield {"tokenizer_config.json": "{"}, {}, "'{}/tokenizer.json' or its tokenizer_config.json is not a JSON file: "
    yield {"tokenizer_config.json": "[]"}, {}, "'{}/tokenizer.json' or its tokenizer_config.json is not a JSON file: "
    yield {"tokenizer_config.json": '{"eos_token": null}'}, {}, "has no eos_token"
    yield (
        {"tokenizer_config.json": '{"eos_token": "<none>"}'},
        {},
        "does not contain the eos_token of its tokenizer_con",
    )
    yield {"tokenizer_config.json": f'{{"eos_token": "{END}"}}'}, {"bos": True}, "'{}' has no begin token; use data.bos"


def test_wrong_files_are_refused(tmp_path: Path, folder: Path) -> None:
    for number, (files, changes, message) in enumerate(cases(folder)):
        wrong = tmp_path / str(number)
        wrong.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            text = files.get(name, (folder / name).read_text())
            if text is not None:
                (wrong / name).write_text(text)
        with pytest.raises(ConfigError) as caught:
            data(tmp_path, wrong, **changes).prepare(SPEC)
        assert message.format(wrong) in str(caught.value)
    with pytest.raises(ConfigError, match=r"model.vocab_size\(699\) is smaller than the tokenizer's vocabulary of 700"):
        data(tmp_path, folder).prepare(DataSpec(699, 8, 0))
