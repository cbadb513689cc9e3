"""A single run is predicted while its workers start on GPUs, and before they start on CPUs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from meshrunner.recipes.errors import Interrupted
from meshrunner.runner.config import devices
from meshrunner.runner.launch import execute
from meshrunner.runner.launch.outcome import Outcome
from meshrunner.runner.predict import Forecast, Verdict
from meshrunner.runner.process import forkserver
from meshrunner.runner.rundir import PlanRecord, Summary, read_state
from meshrunner.runner.rundir.files import PLAN, SUMMARY
from meshrunner.runner.sweep import preflight
from meshrunner.runner.sweep.preflight import save_prediction
from meshrunner.runner.verbs.launching import run as verb
from tests.composed import config, experiment
from tests.run_dirs import make_run

GPU = "hardware=h100_96gb"


@pytest.fixture
def collecting() -> Iterator[None]:
    """Garbage collection as it was before the command froze all objects."""
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.usefixtures("collecting")
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_workers_on_gpus_do_not_wait_for_the_prediction(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    started = Event()

    def predict(run_dir: Path, config: dict[str, Any], experiment: Any, workers: int) -> None:
        assert (read_state(run_dir), config["steps"], experiment.steps, workers) == ("pending", 7, 7, 3)
        # On a CPU, a command that does not wait would start the workers within this time.
        assert started.wait(20 if kind == "cuda" else 0.3) == (kind == "cuda")
        done.append("predicted")

    def train(run_dir: Path, prediction: Thread) -> int:
        done.append("started")
        started.set()
        prediction.join(20)
        return 0

    monkeypatch.setattr(forkserver, "warm", lambda variables=None: done.append(f"warm {variables}"))
    monkeypatch.setattr(preflight, "save_prediction", predict)
    monkeypatch.setattr(verb, "execute_and_report", train)
    monkeypatch.setattr(devices, "expected_device_type", lambda _: kind)
    overrides = ("steps=7", "launch.workers=3", "launch.env.A=1", f"hydra.run.dir={tmp_path / 'run'}")
    assert verb.run([*overrides]) == 0
    warmed = ["warm None", "warm {'A': '1'}"]
    assert done == warmed + (["started", "predicted"] if kind == "cuda" else ["predicted", "started"])


def test_the_summary_waits_for_the_prediction(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", "seq_len=1")

    def predict() -> None:
        PlanRecord.model_validate({"verdict": "does not fit"}).write(run_dir / PLAN)

    def recorded(state: str, join: Callable[[object], None] = lambda _: predict()) -> str | None:
        for name in (PLAN, SUMMARY):
            (run_dir / name).unlink(missing_ok=True)
        prediction = type("Prediction", (), {"join": join})()
        found = execute._record(run_dir, experiment(), Outcome(state, "why"), prediction, cold=False)
        assert Summary.read(run_dir / SUMMARY).verdict == found.verdict and read_state(run_dir) == state
        return found.verdict

    def ctrl_c(_: object) -> None:
        raise Interrupted("by SIGINT")

    assert recorded("completed") == recorded("oom") == "does not fit"
    assert recorded("interrupted") is None
    assert recorded("completed", ctrl_c) is None


def test_a_prediction_that_crashes_does_not_hurt_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer: Any = [Forecast(Verdict("does not fit", "2 GiB too much"))]

    def predict_all(*_: Any, **__: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(preflight, "predict_all", predict_all)
    save_prediction(tmp_path, config(GPU), experiment(GPU), 8)
    assert PlanRecord.read(tmp_path / PLAN).verdict == "does not fit"
    save_prediction(tmp_path / "removed", config(GPU), experiment(GPU), 8)
    assert capsys.readouterr().err == "meshrunner: predicted not to fit: 2 GiB too much\n" * 2
    (tmp_path / PLAN).unlink()
    answer = OSError("no process could be started")
    save_prediction(tmp_path, config(GPU), experiment(GPU), 8)
    record = PlanRecord.read(tmp_path / PLAN)
    assert (record.verdict, record.reason) == ("not planned", "OSError: no process could be started")
    assert "could not be predicted" in capsys.readouterr().err
