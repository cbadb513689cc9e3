"""Documents that are held out for evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshrunner.recipes.data import tokenizer as tokenizers
from meshrunner.recipes.data.base import DataSpec, Random
from meshrunner.recipes.data.local import Jsonl
from meshrunner.recipes.data.stdlib import Stdlib
from meshrunner.recipes.data.text import PackedText
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.evaluation.base import Evaluation, HeldOut, HeldOutLoss
from tests.composed import experiment, option

SPEC = DataSpec(1024, 32, 0, share=0.2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHRUNNER_CACHE", str(tmp_path / "cache"))


def evaluation(**changes: Any) -> HeldOutLoss:
    found = HeldOutLoss.model_validate(option("eval", "held_out") | changes)
    assert isinstance(found, Evaluation)
    return found


def jsonl(path: Path, texts: list[str], **changes: Any) -> Jsonl:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Jsonl.model_validate(option("data", "jsonl") | {"path": str(path)} | changes)


def documents(data: PackedText, spec: DataSpec) -> list[str]:
    """Decode the packed documents."""
    if data.prepare(spec):
        data.produce(spec)
    entry = data.entry(spec)
    progress, tokens = entry.read(), data.open(spec).rows(0, 1)
    assert progress is not None and tokens.shape == (1, spec.seq_len + 1)
    import numpy as np

    tokenizer = tokenizers.load_sentencepiece(entry.tokenizer.read_bytes(), "")
    found: list[list[int]] = [[]]
    for token in np.fromfile(entry.tokens, dtype=progress.dtype).tolist():
        if token == tokenizer.eos_id():
            found.append([])
        else:
            found[-1].append(token)
    return [tokenizer.decode(each) for each in found[:-1]]


def test_no_held_out_document_of_the_default_text_is_trained_on() -> None:
    data = Stdlib.model_validate(option("data", "stdlib") | {"text": "prose"})
    trained = documents(data, SPEC)
    held_out = evaluation(share=0.2, sequences=100_000).held_out(data, SPEC, 8)
    assert isinstance(held_out.data, Stdlib)
    evaluated = documents(held_out.data, held_out.spec)
    every = [text for text, _ in data.read_documents({})]
    assert evaluated and not set(trained) & set(evaluated)
    assert sorted(trained + evaluated) == sorted(every)
    assert data.entry(SPEC).tokenizer.read_bytes() == held_out.data.entry(held_out.spec).tokenizer.read_bytes()


def test_without_evaluation_the_cache_entry_is_the_same_as_before() -> None:
    data = Stdlib.model_validate(option("data", "stdlib") | {"text": "prose"})
    assert data.entry(DataSpec(1024, 32, 0)).folder != data.entry(SPEC).folder
    assert experiment().data_spec == DataSpec(4096, 256, 0)
    assert experiment("eval=held_out", "data@eval.data=jsonl", "eval.data.path=x").data_spec.share == 0


def test_packing_stops_when_the_evaluation_has_enough_and_continues_for_a_longer_one(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "x.jsonl", [f"{i} " + "some words to read " * 40 for i in range(4000)])
    data.produce(SPEC)
    short, long = (evaluation(sequences=each).held_out(data, SPEC, 4) for each in (10, 12_000))
    found = []
    for each in (short, long):
        assert each.data.prepare(each.spec)
        each.data.produce(each.spec)
        assert each.data.started(each.spec) and not each.data.prepare(each.spec)
        found.append((each.data.entry(each.spec).read(), each.data.open(each.spec).rows(0, 12)))
    (first, rows), (second, same) = found
    assert short.data.entry(short.spec).folder == long.data.entry(long.spec).folder
    assert first is not None and second is not None and not first.complete
    assert 0 < first.tokens < second.tokens
    assert rows.tolist() == same.tolist()


def test_number_of_sequences_is_rounded_to_global_batches_and_limited_by_the_text(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "x.jsonl", [f"{i} some words to read" for i in range(200)], vocab_size=400)
    own = jsonl(tmp_path / "y.jsonl", ["some words to read"] * 50)
    spec = DataSpec(1024, 16, 0)
    data.produce(spec)

    def judged(batch: int, **changes: Any) -> tuple[int, str | None]:
        held_out = evaluation(data=own, **changes).held_out(data, spec, batch)
        if held_out.data.prepare(held_out.spec):
            held_out.data.produce(held_out.spec)
        sequences = held_out.data.open(held_out.spec)
        return held_out.global_batches(sequences), held_out.remark(sequences)

    assert judged(2, sequences=4) == (2, None)
    batches, remark = judged(3, sequences=4)
    assert batches == 2 and remark is not None and "4 is rounded up to 6" in remark
    batches, remark = judged(5, sequences=1000)
    assert batches > 1 and remark is not None and f"has only {5 * batches} of 1000 sequences" in remark
    with pytest.raises(ConfigError, match=r"one global batch has 1000; raise eval\.share"):
        judged(1000, sequences=1)


def test_random_data_is_evaluated_on_sequences_of_another_seed() -> None:
    data = Random(kind="random")
    held_out = evaluation().held_out(data, SPEC, 8)
    assert held_out.data.open(held_out.spec).rows(0, 4).tolist() != data.open(SPEC).rows(0, 4).tolist()
    assert isinstance(held_out, HeldOut) and held_out.spec.held_out == 128


def test_data_that_cannot_be_evaluated_is_refused(tmp_path: Path) -> None:
    text, noise = jsonl(tmp_path / "x.jsonl", ["a"]), Random(kind="random")
    with pytest.raises(ConfigError, match=r"no tokenizer; use eval\.data=null"):
        evaluation(data=text).held_out(noise, SPEC, 8)
    with pytest.raises(ConfigError, match=r"use eval\.data\.tokenizer=null"):
        evaluation(data=jsonl(tmp_path / "y.jsonl", ["a"], tokenizer="x.model")).held_out(text, SPEC, 8)
