"""The key `documents` of options with text: the token that ends a document, and the mean length of documents."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from meshrunner.recipes.data.base import DataSpec
from meshrunner.recipes.data.local import Jsonl
from meshrunner.recipes.data.sequences import mean_length
from meshrunner.runner import cli

SPEC = DataSpec(300, 16, 0)
SETTINGS = {"kind": "jsonl", "field": "text", "tokenizer": None, "vocab_size": "auto", "shuffle": 4}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MESHRUNNER_CACHE", str(tmp_path / "cache"))
    texts = ["word " * (number % 9 + 1) for number in range(60)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(tmp_path / "texts.jsonl")


def test_the_key_changes_the_end_and_the_description_but_not_the_tokens(path: str) -> None:
    joined, separate = (
        Jsonl.model_validate(SETTINGS | {"path": path} | keys) for keys in ({}, {"documents": "separate"})
    )
    assert (joined.separates_documents, separate.separates_documents) == (False, True)
    entry = joined.entry(SPEC)
    assert separate.entry(SPEC).folder == entry.folder
    joined.produce(SPEC)
    progress = entry.read()
    assert progress is not None
    tokens = np.fromfile(entry.tokens, dtype=progress.dtype)
    assert (tokens == separate.document_end(SPEC)).sum() == progress.documents == 60
    plain, described = (data.open(SPEC).describe() for data in (joined, separate))
    beginning = tokens[: SETTINGS["shuffle"] * SPEC.seq_len + 1]  # type: ignore[operator]
    assert described.pop("document_length") == mean_length(beginning, separate.document_end(SPEC), SPEC.seq_len)
    assert described == plain


@pytest.mark.parametrize(
    ("tokens", "lengths"),
    [
        ([1, 1, 0, 1, 1, 1, 1, 1], [3, 1, 4]),  # cut at the end of the first sequence
        ([0, 0, 1, 0, 1, 1, 1, 0, 1, 1], [1, 1, 2, 4]),  # the rest is shorter than a sequence
        ([1, 0, 1], [2, 1]),  # less than a sequence
    ],
)
def test_length_is_the_mean_over_tokens(tokens: list[int], lengths: list[int]) -> None:
    assert mean_length(np.array(tokens, np.uint16), 0, 4) == sum(each**2 for each in lengths) / sum(lengths)


def test_random_tokens_have_no_documents(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._dispatch(["show", "data=random", "data.documents=separate"]) == 2
    assert "data.documents: unknown key. Did you mean data.documents (with data=stdlib," in capsys.readouterr().err


def test_a_method_in_place_of_the_key_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Mine.documents is a key, not a method; rename the method to read_documents"):

        class Mine(Jsonl):
            def documents(self) -> None: ...  # type: ignore[assignment, override]
