"""The data group: its YAML, its imports, the cache directory, and the text of the Python installation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrunner.recipes.data import stdlib as stdlib_module
from meshrunner.recipes.data import tokenizer as tokenizers
from meshrunner.recipes.data.base import Data, DataSpec
from meshrunner.recipes.data.stdlib import Stdlib
from meshrunner.recipes.data.text import PackedText
from meshrunner.recipes.data.token_cache import CacheEntry
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.storage import cache_dir
from tests.composed import CONF, option

YAML = sorted((CONF / "data").glob("*.yaml"))
SPEC = DataSpec(1024, 32, 0)
PROSE = {"kind": "stdlib", "text": "prose", "tokenizer": None, "vocab_size": "auto", "shuffle": None}


def prose(**changes: Any) -> Stdlib:
    return Stdlib.model_validate(PROSE | changes)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHRUNNER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.stem)
def test_yaml_lists_every_key(path: Path) -> None:
    config = option("data", path.stem)
    cls = Data.resolve(config["kind"])
    assert list(config) == ["kind", *(key for key in config if key != "kind")]
    assert set(config) == set(cls.model_fields)
    placeholders = {key: "x" for key, value in config.items() if value == "???"}
    cls.model_validate(config | placeholders)


def test_every_kind_has_its_yaml() -> None:
    assert {path.stem for path in YAML} == {*Data.kinds, "minipile", "c4"}


def test_checking_a_configuration_imports_nothing_heavy() -> None:
    script = (
        "import sys; import meshrunner.runner.launch.data; from meshrunner.recipes.data.base import Data; "
        "[Data.resolve(kind) for kind in Data.kinds]; "
        "print([name for name in ('torch', 'numpy', 'datasets', 'sentencepiece', 'tokenizers', 'pyarrow') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHRUNNER_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "meshrunner"
    monkeypatch.setenv("MESHRUNNER_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own" and (tmp_path / "own").is_dir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("MESHRUNNER_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match=r"cannot write to .*file/below \(Not a directory\); set MESHRUNNER_CACHE"):
        cache_dir()


def stored(entry: CacheEntry) -> np.ndarray[Any, Any]:
    progress = entry.read()
    assert progress is not None and progress.complete
    return np.fromfile(entry.tokens, dtype=progress.dtype)


def test_prose_comes_back_exactly(cache: Path) -> None:
    data = prose()
    assert data.prepare(SPEC) is False
    entry = data.entry(SPEC)
    tokenizer = tokenizers.load_sentencepiece(entry.tokenizer.read_bytes(), "")
    documents, document = [], []
    for token in stored(entry).tolist():
        if token == tokenizer.eos_id():
            documents.append(tokenizer.decode(document))
            document = []
        else:
            document.append(token)
    assert not document and documents == [text for text, _ in data.read_documents({})]


@pytest.mark.parametrize(
    "text", ["", " ", "\n\n  a\t\tb \r\n", "  two  spaces  ", "日本語 🎉 \x00 ﬁ ①", "x" * 9000, "007 42"]
)
def test_round_trip_of_any_text(text: str) -> None:
    model = tokenizers.train_tokenizer(["some text to learn from\n" * 3, "x" * 5000, "a b c d e f g"], 300)
    tokenizer = tokenizers.load_sentencepiece(model, "")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_exception_of_the_source_comes_through_the_training() -> None:
    def texts() -> Iterator[str]:
        yield "some text"
        raise ConfigError("data.path: 'x' line 3 is not JSON")

    with pytest.raises(ConfigError, match=r"^data.path: 'x' line 3 is not JSON$"):
        tokenizers.train_tokenizer(texts(), 300)


def test_training_is_deterministic(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prose().prepare(SPEC)
    monkeypatch.setenv("MESHRUNNER_CACHE", str(tmp_path / "other"))
    prose().prepare(SPEC)
    first, second = (next((folder / "tokens").iterdir()) for folder in (cache, tmp_path / "other"))
    for name in ("tokenizer.model", "tokens.bin", "progress.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_the_vocabulary_follows_the_model(cache: Path) -> None:
    for vocab in (500, 1024):
        spec = DataSpec(vocab, 32, 0)
        prose().prepare(spec)
        described = prose().open(spec).describe()
        assert described["tokenizer_vocab"] == vocab
        assert prose().open(spec).rows(0, 100).max() < vocab
        assert set(described) >= {"corpus_hash", "tokens", "sequences", "tokenizer_hash"}
    prose(vocab_size=700).prepare(spec)
    assert prose(vocab_size=700).open(spec).describe()["tokenizer_vocab"] == 700
    prose().prepare(DataSpec(100_000, 32, 0))
    assert (
        10_000 < prose().open(DataSpec(100_000, 32, 0)).describe()["tokenizer_vocab"] < 32_000
    )  # what the text carries


def test_what_is_cached_is_not_made_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prose().prepare(SPEC)
    monkeypatch.setattr(PackedText, "_pack", None)
    assert prose().prepare(SPEC) is False
    assert prose().prepare(DataSpec(1024, 64, 7)) is False  # neither seq_len nor seed is part of what is cached


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def garble(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, garble, Path.unlink, lambda path: path.write_text("[]")])
@pytest.mark.parametrize("name", ["tokens.bin", "tokenizer.model", "progress.json"])
def test_a_damaged_cache_is_made_again(cache: Path, name: str, damage: Any) -> None:
    prose().prepare(SPEC)
    entry = prose().entry(SPEC)
    files = {path.name: path.read_bytes() for path in entry.folder.iterdir()}
    damage(entry.folder / name)
    assert prose().prepare(SPEC) is False
    assert {path.name: path.read_bytes() for path in entry.folder.iterdir()} == files


def test_a_changed_record_is_noticed(cache: Path) -> None:
    prose().prepare(SPEC)
    path = prose().entry(SPEC).folder / "progress.json"
    content = path.read_bytes()
    for change in ({"documents": 5}, {"complete": False, "state": {"read": 79}}, {"tokens": 1000}):
        path.write_text(json.dumps(json.loads(content) | change))
        prose().prepare(SPEC)
        assert path.read_bytes() == content


def test_an_interrupted_preparation_is_continued(cache: Path) -> None:
    prose().prepare(SPEC)
    entry = prose().entry(SPEC)
    files = {path.name: path.read_bytes() for path in entry.folder.iterdir()}
    for path in entry.folder.iterdir():
        path.unlink()
    script = (
        "import os, signal; from meshrunner.recipes.data.base import DataSpec\n"
        "from meshrunner.recipes.data.stdlib import Stdlib\n"
        "import meshrunner.recipes.data.text as text; text.RECORD_INTERVAL_S = 0; text.BATCH_CHARACTERS = 50_000\n"
        "from meshrunner.recipes.data.token_cache import CacheEntry; write = CacheEntry.write\n"
        "def kill(self, progress):\n"
        "    os.kill(os.getpid(), signal.SIGKILL) if progress.documents > 40 else write(self, progress)\n"
        f"CacheEntry.write = kill; Stdlib.model_validate({PROSE!r}).prepare(DataSpec(1024, 32, 0))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    progress = entry.read()
    assert progress is not None and 0 < progress.documents <= 40
    assert entry.tokens.stat().st_size > progress.tokens * 2  # killed between writing and recording
    prose().prepare(SPEC)
    assert {path.name: path.read_bytes() for path in entry.folder.iterdir()} == files


def test_two_processes_want_the_same_cache(cache: Path) -> None:
    script = (
        "import sys, json; from meshrunner.recipes.data.base import DataSpec; from meshrunner.recipes.data.stdlib import Stdlib\n"
        "import meshrunner.recipes.data.text as text\n"
        "before = text.pack\n"
        "def pack(*args): print('packed', flush=True); return before(*args)\n"
        "text.pack = pack\n"
        f"data = Stdlib.model_validate({PROSE!r}); spec = DataSpec(4096, 32, 0); print('ready', flush=True); sys.stdin.read(1)\n"
        "data.prepare(spec); print(data.open(spec).rows(0, 50).sum())"
    )
    command = [sys.executable, "-c", script]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env={**os.environ}, **pipes) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    outputs = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        outputs.append(process.communicate(timeout=60)[0])
        assert process.returncode == 0
    assert sum(output.count("packed") for output in outputs) == 1
    assert len({output.split()[-1] for output in outputs}) == 1
    assert sorted(path.name for path in next((cache / "tokens").iterdir()).iterdir()) == [
        ".lock",
        "progress.json",
        "tokenizer.model",
        "tokens.bin",
    ]


def test_library_files_are_sorted_and_hold_no_tests() -> None:
    files = stdlib_module.library_files()
    names = [name for name, _ in files]
    assert names == sorted(names) and "argparse.py" in names and "json/decoder.py" in names
    assert not [name for name in names if set(name.split("/")[:-1]) & stdlib_module.EXCLUDED_FOLDERS]
    assert all((stdlib_module.library() / name).stat().st_size == size for name, size in files[::50])


def test_sources_are_sampled_for_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 500_000 < sum(map(len, prose(text="sources").sample())) < 2_500_000
    assert sum(map(len, prose(text="all").sample())) > sum(map(len, prose(text="sources").sample()))
    monkeypatch.setattr(stdlib_module, "library", lambda: Path(__file__).parent / "nothing-here")
    with pytest.raises(ConfigError, match=r"no library sources in .*nothing-here; use data.text=prose"):
        stdlib_module.library_files()


def refused(data: PackedText, spec: DataSpec = SPEC) -> str:
    with pytest.raises(ConfigError) as caught:
        data.prepare(spec)
    return str(caught.value)


def test_errors_of_tokenizer_and_vocabulary(cache: Path, tmp_path: Path) -> None:
    message = refused(prose(vocab_size=2000))
    assert (
        "model.vocab_size(1024) is smaller than the tokenizer's vocabulary of 2000 tokens (data.vocab_size)" in message
    )
    assert "vocabulary of 200 is too small" in refused(prose(), DataSpec(200, 32, 0))
    assert "seq_len(900000) + 1 is more than the" in refused(prose(), DataSpec(1024, 900_000, 0))

    missing = tmp_path / "none.model"
    assert f"data.tokenizer: cannot read '{missing}' (No such file" in refused(prose(tokenizer=str(missing)))
    missing.write_bytes(b"no model" * 20)
    assert f"data.tokenizer: '{missing}' is not a sentencepiece model" in refused(prose(tokenizer=str(missing)))

    missing.write_bytes(tokenizers.train_tokenizer(prose().sample(), 800))
    data = prose(tokenizer=str(missing))
    data.prepare(SPEC)
    assert data.open(SPEC).describe()["tokenizer_vocab"] == 800
    for small in (DataSpec(799, 32, 0), DataSpec(400, 32, 0)):
        assert f"model.vocab_size({small.vocab_size}) is smaller than the tokenizer's vocabulary" in refused(
            data, small
        )


def test_wrong_types_are_refused() -> None:
    for changes in ({"shuffle": 0}, {"shuffle": True}, {"vocab_size": "big"}, {"text": "news"}, {"more": 1}):
        with pytest.raises(ValueError):
            prose(**changes)
