"""Text from files and from the hub, read through `datasets`: exact resume, and messages about bad input."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from meshrunner.recipes.data.base import Data, DataSpec, different_data
from meshrunner.recipes.data.text import PackedText
from meshrunner.recipes.errors import ConfigError

SPEC = DataSpec(400, 16, 0)
SHARED = {"tokenizer": None, "vocab_size": "auto", "shuffle": 4}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHRUNNER_CACHE", str(tmp_path / "cache"))


def option(kind: str, path: Path | str, field: str = "text", **changes: Any) -> PackedText:
    made = Data.resolve(kind).model_validate({"kind": kind, "path": str(path), "field": field, **SHARED, **changes})
    assert isinstance(made, PackedText)
    return made


def text(number: int) -> str:
    return f"document {number}: " + " ".join(str(number * k) for k in range(20)) + "\n  end\n"


def write_jsonl(path: Path, numbers: range) -> None:
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.writelines(json.dumps({"id": n, "text": text(n)}) + "\n" for n in numbers)


def write_parquet(path: Path, numbers: range) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"id": list(numbers), "text": [text(n) for n in numbers]})
    pyarrow.parquet.write_table(table, path, row_group_size=7)


@pytest.fixture(params=["jsonl", "parquet"])
def three_files(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    folder = tmp_path / "da[1]ta"  # brackets: a name is not a pattern
    (folder / "sub").mkdir(parents=True)
    write: Callable[[Path, range], None] = {"jsonl": write_jsonl, "parquet": write_parquet}[request.param]
    write(folder / f"a.{request.param}", range(30))
    write(folder / f"b.{request.param}", range(30, 31))
    write(folder / "sub" / f"c.{request.param}", range(31, 60))
    (folder / "readme.md").write_text("not data")
    return request.param, folder


def texts(data: PackedText, position: dict[str, Any] | None = None) -> list[str]:
    return [found for found, _ in data.read_documents(position or {})]


def test_a_directory_is_read_in_name_order(three_files: tuple[str, Path]) -> None:
    kind, folder = three_files
    data = option(kind, folder)
    assert texts(data) == [text(n) for n in range(60)]
    assert data.prepare(SPEC) is True
    data.produce(SPEC)
    assert data.prepare(SPEC) is False and data.started(SPEC)
    described = data.open(SPEC).describe()
    assert described["documents"] == 60 and described["complete"]
    assert different_data(described, described) == ""
    assert data.open(SPEC).rows(0, 100).max() < 400


@pytest.mark.parametrize("cut", [1, 29, 30, 31, 45])
def test_reading_resumes_exactly_from_a_state(three_files: tuple[str, Path], cut: int) -> None:
    data = option(*three_files)
    first = list(islice(data.read_documents({}), cut))
    position = json.loads(json.dumps(first[-1][1]))
    assert [found for found, _ in first] + texts(data, position) == [text(n) for n in range(60)]


def test_patterns_files_and_gzip(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", range(3))
    write_jsonl(tmp_path / "b.jsonl.gz", range(3, 5))
    assert texts(option("jsonl", tmp_path / "*.jsonl*")) == [text(n) for n in range(5)]
    assert texts(option("jsonl", tmp_path / "b.jsonl.gz")) == [text(3), text(4)]


def test_local_files_need_no_network(three_files: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("socket.getaddrinfo", lambda host, *rest, **more: asked.append(host))
    assert texts(option(*three_files))
    assert asked == []


def test_reading_makes_no_semaphore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tqdm

    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", range(3))
    monkeypatch.delattr(tqdm.tqdm, "_lock", raising=False)
    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", None)  # a killed producer would leave it behind
    assert texts(hub(tmp_path / "set"))


def test_one_json_array_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "x"},\n {"text": "y"}]')
    assert texts(option("jsonl", tmp_path)) == ["x", "y"]
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n{"text": \n')
    assert "b.jsonl' line 2 is not a JSON object" in refused(option("jsonl", tmp_path))


def test_other_files_or_options_use_another_cache_entry(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", range(3))

    def folder(**changes: Any) -> Path:
        return option("jsonl", tmp_path / "a.jsonl", **changes).entry(SPEC).folder

    first = folder()
    assert first == folder(shuffle=1)  # the order is not part of what is packed
    assert len({first, folder(field="id"), folder(vocab_size=300)}) == 3
    os.utime(tmp_path / "a.jsonl", ns=(1, 1))
    assert folder() != first


def refused(data: PackedText) -> str:
    with pytest.raises(ConfigError) as caught:
        if data.prepare(SPEC):
            data.produce(SPEC)
    recorded = data.entry(SPEC).read() if data.entry else None
    assert recorded is None or recorded.error == str(caught.value)
    return str(caught.value)


def test_missing_paths_are_refused(tmp_path: Path) -> None:
    for kind in ("jsonl", "parquet"):
        for path, message in (
            (
                tmp_path / "none",
                f"data.path: no such file: '{tmp_path / 'none'}'; expected a file, a directory or a glob",
            ),
            (tmp_path, f"data.path: no file in the directory '{tmp_path}' ends in .{kind}"),
            (tmp_path / "*.x", f"data.path: no file matches '{tmp_path / '*.x'}'"),
        ):
            with pytest.raises(ConfigError) as caught:
                option(kind, path).prepare(SPEC)
            assert message in str(caught.value)
    for missing in (None, "???", ""):
        with pytest.raises(ValueError, match="this key is missing; expected a file, a directory or a glob pattern"):
            Data.resolve("jsonl").model_validate({"kind": "jsonl", "path": missing, "field": "text", **SHARED})


GOOD = json.dumps({"text": text(1), "title": "x"}) + "\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "data.path: no text in '{path}', column 'text'"),
        (b'{"text": ""}\n{"text": null}\n', "data.path: no text in '{path}', column 'text'"),
        (GOOD.encode() * 3 + b'{"text": "cut o\n', "data.path: '{path}' line 4 is not a JSON object ("),
        (b"\x89PNG\r\n\x1a\n\x00\xff" * 50, "data.path: '{path}' line 1 is not UTF-8 text; expected one JSON object"),
        ('{"text": "\xe9"}\n'.encode("latin-1"), "data.path: '{path}' line 1 is not UTF-8 text"),
        (b'{"txt": "a", "id": 1}\n', "data.field: no column 'text'. Did you mean 'txt'? Columns: txt, id"),
        (b'{"text": 5}\n', "data.field: the column 'text' must contain text, not int: '5'"),
        (b'{"text": {"en": "x"}}\n', "data.field: the column 'text' must contain text, not dict"),
    ],
)
def test_bad_json_lines(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    assert message.format(path=path) in refused(option("jsonl", path))


def test_a_bad_file_among_good_ones_is_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", range(40))
    (tmp_path / "b.jsonl").write_text(GOOD + "no json\n")
    (tmp_path / "c.jsonl.gz").write_bytes(b"no gzip")
    assert f"'{tmp_path / 'b.jsonl'}' line 2 is not a JSON object" in refused(option("jsonl", tmp_path))
    assert f"'{tmp_path / 'c.jsonl.gz'}' cannot be read" in refused(option("jsonl", tmp_path / "c.jsonl.gz"))


def test_bad_parquet(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", range(20))
    assert refused(option("parquet", tmp_path, "texts")) == (
        "data.field: no column 'texts'. Did you mean 'text'? Columns: id, text"
    )
    assert "column 'id' must contain text, not int: '0'" in refused(option("parquet", tmp_path, "id"))
    write_parquet(tmp_path / "a.parquet", range(0))
    assert "no text in" in refused(option("parquet", tmp_path))
    for content in (b"", b"garbage" * 100):
        (tmp_path / "a.parquet").write_bytes(content)
        assert f"data.path: '{tmp_path / 'a.parquet'}' is not a parquet file" in refused(option("parquet", tmp_path))


def test_a_file_without_the_column_is_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", range(40))
    (tmp_path / "b.jsonl").write_text('{"txt": "a"}\n')
    assert f"no column 'text' in '{tmp_path / 'b.jsonl'}'. Did you mean 'txt'?" in refused(option("jsonl", tmp_path))
    (tmp_path / "b.jsonl").write_text('{"text": [1]}\n')
    assert f"'{tmp_path / 'b.jsonl'}'" in refused(option("jsonl", tmp_path))


@pytest.mark.parametrize(
    ("columns", "says"), [({"txt": ["a"]}, "Did you mean 'txt'"), ({"text": [1]}, "must contain text, not int")]
)
def test_parquet_files_of_different_columns(columns: dict[str, list[Any]], says: str, tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    write_parquet(tmp_path / "a.parquet", range(20))
    parquet.write_table(pa.table(columns), tmp_path / "b.parquet")
    message = refused(option("parquet", tmp_path))
    assert f"'{tmp_path / 'b.parquet'}'" in message and says in message


def test_truncated_or_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(GOOD.encode() * 2000, mtime=0)
    for content in (whole[: len(whole) // 2], whole[:20] + b"\xff" * 20 + whole[40:], whole[:-8] + b"\0" * 8):
        path.write_bytes(content)
        assert f"'{path}'" in refused(option("jsonl", path))


def test_json_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text(GOOD + '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    message = refused(option("jsonl", path))
    assert f"'{path}' line 2 is not a JSON object (recursion limit exceeded" in message and len(message) < 500


def test_rows_without_text_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "gaps.jsonl"
    path.write_text(GOOD * 40 + '{"text": null}\n' * 3 + '{"text": ""}\n' + GOOD * 20 + '{"text": null}\n')
    data = option("jsonl", path)
    data.produce(SPEC)
    described = data.open(SPEC).describe()
    assert (described["documents"], described["empty_documents"]) == (60, 5)


def hub(name: Path | str, **changes: Any) -> PackedText:
    keys = {"kind": "hf", "name": str(name), "subset": None, "split": "train", "revision": None, "field": "text"}
    made = Data.resolve("hf").model_validate(keys | SHARED | changes)
    assert isinstance(made, PackedText)
    return made


def test_a_data_set_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", range(30))
    data = hub(folder)
    data.produce(SPEC)
    assert data.open(SPEC).describe()["documents"] == 30
    assert "data.split" in refused(hub(folder, split="valid")) and "train" in refused(hub(folder, split="valid"))
    assert "BuilderConfig 'de' not found. Available: ['default']" in refused(hub(folder, subset="de"))
    assert "Did you mean 'text'?" in refused(hub(folder, field="texts"))


def test_an_unreachable_hub_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    message = refused(hub("allenai/c4", subset="en"))
    assert message.startswith("data: cannot reach the Hugging Face hub for 'allenai/c4' (")
    assert message.endswith("; use local files with data=jsonl data.path=... or data=parquet data.path=...")
    assert "\n" not in message and "Connection refused" in message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "(HF_HUB_OFFLINE is set)" in refused(hub("allenai/c4", subset="en"))


def test_a_broken_stream_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __iter__(self) -> Iterator[dict[str, str]]:
            yield {"text": text(1)}
            raise ConnectionError("Couldn't reach the file\nand more")

        def state_dict(self) -> dict[str, Any]:
            return {}

    monkeypatch.setattr("meshrunner.recipes.data.hf.HuggingFace.load", lambda _: Broken())
    assert "cannot reach the Hugging Face hub for 'a/b' (Couldn't reach the file)" in refused(hub("a/b"))


def test_the_beginning_hash_does_not_depend_on_how_much_is_read(tmp_path: Path) -> None:
    """Compare a run that begins while a producer reads, one that finds everything read, and one with another text."""
    described = []
    for name, numbers in (("one", range(60)), ("other", range(59, -1, -1))):
        write_jsonl(tmp_path / f"{name}.jsonl", numbers)
        data = option("jsonl", tmp_path / f"{name}.jsonl", shuffle=2)
        data.prepare(SPEC)
        data.produce(SPEC)
        described.append(data.open(SPEC).describe())
    entry = data.entry(SPEC)
    progress = entry.read()
    assert progress is not None
    half = progress.tokens // 2
    assert half > 2 * SPEC.seq_len
    entry.write(replace(progress, tokens=half, corpus="as far as it was read", complete=False))
    early = data.open(SPEC).describe()
    assert different_data(early, described[1]) == ""
    assert different_data(described[0], described[1]) in ("text", "tokenizer")
