"""`meshrunner sync`: what W&B recorded offline, found and uploaded once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb

from meshrunner.runner import cli
from meshrunner.runner.rundir.files import write_json
from meshrunner.runner.rundir.states import claim, update_status
from meshrunner.runner.trackers.follow import run_tracker
from tests.e2e.wandb_stub import Stub
from tests.run_dirs import make_run

NOBODY = "http://127.0.0.1:9"
"""Nobody listens there."""
Output = pytest.CaptureFixture[str]


def sync(*arguments: str) -> int:
    return cli._dispatch(["sync", *arguments])


@pytest.fixture(autouse=True)
def settings_are_read_again() -> Iterator[None]:
    """W&B reads them once in a process, which here has several environments."""
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs with a record each, in a sweep with one of its own; nobody is logged in. What is recorded is not W&B's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", NOBODY)
    folder = tmp_path / "sweep"
    for name in ("000_a", "001_b"):
        make_run(folder / name)
        claim(folder / name)
        update_status(folder / name, state="completed")
    write_json(folder / "sweep.json", {"jobs": [{"name": "000_a"}, {"name": "001_b"}]})
    for place in (folder, folder / "000_a", folder / "001_b"):
        recorded(place)
    return folder


def recorded(place: Path) -> Path:
    segment = place / "wandb" / "offline-run-20260131_140509-abcd1234"
    segment.mkdir(parents=True)
    (segment / "run-abcd1234.wandb").write_bytes(b"")
    return segment / "run-abcd1234.wandb"


def uploaded(record: Path) -> None:
    """As W&B marks it."""
    record.with_name(f"{record.name}.synced").touch()


def test_what_would_be_uploaded(sweep: Path, capsys: Output) -> None:
    recorded(sweep / "000_a" / "checkpoints" / "step-1")  # not looked into: a checkpoint has thousands of files
    (sweep / "link").symlink_to(sweep / "000_a")
    (record,) = (sweep / "001_b").glob("wandb/*/*.wandb")
    uploaded(record)
    assert sync("sweep", "--dry-run") == 0
    out = capsys.readouterr().out.splitlines()
    assert out == [f"would upload 2 runs to {NOBODY}:", "  sweep", "  sweep/000_a", "1 already uploaded"]
    later = time.time() + 60  # it was tracked again since
    os.utime(record, (later, later))
    assert sync("sweep/001_b", "--dry-run") == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["  sweep/001_b"]


def test_a_run_that_is_being_executed_waits(sweep: Path, capsys: Output) -> None:
    claim(sweep / "000_a")
    assert sync("sweep/000_a") == 0
    out, err = capsys.readouterr()
    assert "skipping sweep/000_a: it is still running, so its record is incomplete" in err
    assert out == "nothing to upload: 1 still running\n"


def test_nothing_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run")
    assert sync("run") == 0
    assert capsys.readouterr().out == "nothing to upload: no offline W&B run was found\n"


@pytest.mark.parametrize("arguments", [[], ["--dry-run"], ["sweep", "--all"], ["nowhere"]])
def test_wrong_arguments(sweep: Path, capsys: Output, arguments: list[str]) -> None:
    assert sync(*arguments) == 2
    assert "usage: meshrunner sync" in (err := capsys.readouterr().err) or "no such directory: nowhere" in err


def test_without_a_network_nothing_is_uploaded(sweep: Path, capsys: Output) -> None:
    assert sync("sweep") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"meshrunner: nothing was uploaded: {NOBODY} does not answer: ")


def test_without_a_login_nothing_is_uploaded(
    sweep: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    assert sync("sweep") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "uploaded 0 of 3 runs; wandb reported: " in line and "wandb login" in line


@pytest.mark.slow
def test_offline_runs_are_uploaded_once(
    tmp_path: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """By wandb itself, to a server on this machine."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        make_run(tmp_path / "runs" / name, "tracker=wandb")
        claim(tmp_path / "runs" / name)
        update_status(tmp_path / "runs" / name, state="completed")
        assert run_tracker(tmp_path / "runs" / name) == 0
    assert not stub.runs
    capsys.readouterr()
    assert sync("runs") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"uploading 2 runs to {stub.url} ..." and out[-1] == "uploaded 2 runs"
    assert sorted(out[1:-1]) == ["  runs/a", "  runs/b"]
    assert [len(run.rows) for run in stub.runs.values()] == [4, 4]
    assert sync("runs") == 0
    assert capsys.readouterr().out == "nothing to upload: 2 already uploaded\n"


def test_what_wandb_refuses_is_said(sweep: Path, stub: Stub, capsys: Output) -> None:
    """The records are empty files."""
    assert sync("sweep/000_a") == 1
    assert "uploaded 0 of 1 run; wandb reported: " in capsys.readouterr().err
