"""The producer: killed and resumed, waiting for another, failing; and the runner around it. Without `datasets`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from meshrunner.recipes.data.base import Data, DataSpec
from meshrunner.recipes.data.token_cache import CacheEntry, PackProgress
from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.launch.data import prepare_data

TOY = '''
"""A source of numbered texts for the tests: slow, endless, failing or killing itself on demand."""
import os, signal, time
import meshrunner.recipes.data.text
from meshrunner.recipes.data.text import PackedText
from meshrunner.recipes.errors import ConfigError

meshrunner.recipes.data.text.BATCH_CHARACTERS = 500

class Toy(PackedText):
    count: int = 400
    fail_at: int = -1
    break_at: int = -1
    kill_at: int = -1
    pause: float = 0.0
    identity: str = "toy"
    def source(self): return {"toy": self.identity}
    def documents(self, position):
        for number in range(position.get("next", 0), self.count):
            if number == self.fail_at: raise ConfigError("data: text 70 is burnt")
            if number == self.break_at: raise ZeroDivisionError("a fault of the program")
            if number == self.kill_at: os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(self.pause)
            yield " ".join(str(number * k * k) for k in range(1, 40)) + "\\n" if number % 7 else "", {"next": number + 1}
    def sample(self):
        if self.fail_at >= 0: return iter(["0 1 2 3"])
        return (text for text, _ in self.documents({"next": max(0, self.count - 40)}))
'''
SPEC = DataSpec(300, 16, 0)
KEYS = {"kind": "meshrunner_toy:Toy", "tokenizer": None, "vocab_size": "auto", "shuffle": 8}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "meshrunner_toy.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("meshrunner_toy", None)
    monkeypatch.setattr("meshrunner.recipes.data.text.BATCH_CHARACTERS", 500)
    monkeypatch.setattr("meshrunner.recipes.data.text.RECORD_INTERVAL_S", 0.0)
    monkeypatch.setenv("MESHRUNNER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def toy(**changes: Any) -> Any:
    option = Data.resolve(KEYS["kind"])
    return option.model_validate(KEYS | changes)


def produce_elsewhere(**changes: Any) -> subprocess.Popen[bytes]:
    """Start a producer in another process."""
    script = (
        "import meshrunner_toy, meshrunner.recipes.data.text as text; from meshrunner.recipes.data.base import DataSpec\n"
        f"text.RECORD_INTERVAL_S = 0.0; meshrunner_toy.Toy.model_validate({KEYS | changes!r}).produce(DataSpec(300, 16, 0))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", script], env=environment)


def whole(monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[bytes, PackProgress]:
    """Return what an uninterrupted producer makes of the toy text, in another cache."""
    with monkeypatch.context() as patch:
        patch.setenv("MESHRUNNER_CACHE", str(folder))
        toy().produce(SPEC)
        entry = toy().entry(SPEC)
        progress = entry.read()
        assert progress is not None and progress.complete and progress.documents == 342
        return entry.tokens.read_bytes(), progress


def test_a_killed_producer_is_continued_exactly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected, progress = whole(monkeypatch, tmp_path / "other")
    entry: CacheEntry = toy().entry(SPEC)
    tokens = 0
    for kill_at in (20, 100, 110, 255):
        killed = produce_elsewhere(kill_at=kill_at)
        assert killed.wait(60) == -signal.SIGKILL
        partly = entry.read()
        assert partly is not None and not partly.complete and tokens < partly.tokens < progress.tokens
        tokens = partly.tokens
        with entry.tokens.open("ab") as file:  # written, but not recorded
            file.write(b"half a batch that does not count")
        assert toy().prepare(SPEC) is True and entry.read() == partly  # not thrown away and started anew
    toy().produce(SPEC)
    assert entry.tokens.read_bytes() == expected and entry.read() == progress
    assert toy().prepare(SPEC) is False


@pytest.mark.parametrize("damage", ["tokens", "tokenizer"])
def test_a_damaged_part_is_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str) -> None:
    expected, progress = whole(monkeypatch, tmp_path / "other")
    assert produce_elsewhere(kill_at=255).wait(60) == -signal.SIGKILL
    entry = toy().entry(SPEC)
    path: Path = getattr(entry, damage)
    content = path.read_bytes()
    path.write_bytes(b"\xff" * 50 + content[50:])
    toy().produce(SPEC)
    assert entry.tokens.read_bytes() == expected and entry.read() == progress


@pytest.mark.slow
def test_a_second_producer_waits_and_takes_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected, _ = whole(monkeypatch, tmp_path / "other")
    entry = toy().entry(SPEC)
    first = produce_elsewhere(pause=0.02)
    wait_for(lambda: (entry.read() or PackProgress()).tokens > 0)
    second = produce_elsewhere()
    time.sleep(0.5)
    assert first.poll() is None and second.poll() is None
    first.kill()
    first.wait()
    assert second.wait(60) == 0
    assert entry.tokens.read_bytes() == expected


def test_a_failure_is_recorded_and_forgotten_by_the_next_run() -> None:
    with pytest.raises(ConfigError):
        toy(fail_at=70).produce(SPEC)
    with pytest.raises(ConfigError, match="data: text 70 is burnt"):
        toy().started(SPEC)
    assert toy().prepare(SPEC) is True
    assert toy().started(SPEC) in (True, False)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@dataclass
class Model:
    vocab_size: int = 300


@dataclass
class Experiment:
    data: Any
    model: Model
    seq_len: int = 16
    seed: int = 0
    parallelism: Any = Mock()  # noqa: RUF009
    launch: Any = Mock()  # noqa: RUF009

    @property
    def data_spec(self) -> DataSpec:
        return DataSpec(self.model.vocab_size, self.seq_len, self.seed)

    def held_out(self, data_ranks: int) -> None:
        return None


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    return tmp_path / "run"


def test_prepared_starts_with_the_first_block_and_ends_the_producer(run_dir: Path) -> None:
    data = toy(pause=0.002, count=1_000_000, identity="endless")
    entry = data.entry(SPEC)
    with prepare_data(Experiment(data, Model()), run_dir, 1):
        assert not (entry.read() or PackProgress()).complete
        sequences = data.open(SPEC)
        assert sequences.rows(0, 8).shape == (8, 17)
        assert entry.is_locked()
        sequences.rows(40, 4)  # waits for what is read meanwhile
    assert not entry.is_locked()
    assert (run_dir / "logs" / "data.log").read_text() == ""


def test_prepared_leaves_no_producer_behind_an_exception(run_dir: Path) -> None:
    data = toy(pause=0.002, count=1_000_000, identity="endless")
    with pytest.raises(KeyError), prepare_data(Experiment(data, Model()), run_dir, 1):
        raise KeyError
    assert not data.entry(SPEC).is_locked()


def test_prepared_needs_no_producer_for_what_is_complete(run_dir: Path) -> None:
    toy().produce(SPEC)
    with prepare_data(Experiment(toy(), Model()), run_dir, 1):
        assert not (run_dir / "logs" / "data.log").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fail_at": 3}, "data: text 70 is burnt"),
        ({"break_at": 3}, "data: ZeroDivisionError: a fault of the program"),
        ({"kill_at": 3}, r"data: reading failed \(exit status -9\)"),
        ({"count": 1}, "data: the source contains no text"),
        (
            {"count": 400, "shuffle": None, "tokenizer": "/nowhere/x.model"},
            "data.tokenizer: cannot read '/nowhere/x.model'",
        ),
    ],
)
def test_prepared_says_why_not(run_dir: Path, changes: dict[str, Any], message: str) -> None:
    experiment = Experiment(toy(**changes), Model())
    with pytest.raises(ConfigError, match=message), prepare_data(experiment, run_dir, 1):
        raise AssertionError("the data was not there")
    log = run_dir / "logs" / "data.log"
    assert ("Traceback" in log.read_text() if log.exists() else False) == ("break_at" in changes)


def test_prepared_checks_the_length_of_what_was_read(run_dir: Path) -> None:
    experiment = Experiment(toy(), Model(), seq_len=10_000_000)
    with (
        pytest.raises(ConfigError, match=r"seq_len\(10000000\) \+ 1 is more than"),
        prepare_data(experiment, run_dir, 1),
    ):
        raise AssertionError("the data was not there")
