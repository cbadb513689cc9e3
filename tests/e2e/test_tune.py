"""Searches whose runs are real: they are killed at any moment, and some of their runs end as nobody predicted."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import yaml

from tests.e2e.command import TINY, Command, meshrunner, status

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cache")]

SEARCH = (*TINY, "global_batch=8", "tune.steps=6", "measure_after=2", "sweep.max_repeat=3", "hydra.sweep.dir=tuned")
KILLS = 10


def completed(folder: Path) -> dict[str, bytes]:
    """The content of summary.json of each completed run, by name."""
    runs = [path.parent for path in folder.glob("*/status.json")]
    return {run.name: (run / "summary.json").read_bytes() for run in runs if status(run)["state"] == "completed"}


def test_a_search_that_is_killed_at_ten_moments_measures_nothing_twice(folder: Path) -> None:
    search = (
        "tune",
        *SEARCH,
        "parallelism=fsdp1,fsdp2",
        "micro_batch=1,2",
        "activation_checkpoint=none,full",
        "tune.runs=6",
    )
    generator, known = random.Random(0), dict[str, bytes]()
    for number in range(KILLS):
        words = search if number % 2 == 0 or not (folder / "tuned" / "tune.json").exists() else ("resume", "tuned")
        with Command(*words, cwd=folder) as command:
            end = time.monotonic() + generator.uniform(1.0, 14.0)
            while time.monotonic() < end and command.process.poll() is None:
                time.sleep(0.05)
            os.kill(command.pid, signal.SIGKILL)
            command.process.wait()
            command.check_nobody_left()
        found = completed(folder / "tuned")
        assert found.items() >= known.items()
        known = found
    done = meshrunner(*search, cwd=folder)
    assert done.code == 0 and "No combination of this space is " in done.out, done
    found = completed(folder / "tuned")
    assert found.items() >= known.items()
    assert len(found) == len([*(folder / "tuned").glob("*/status.json")])
    best = (folder / "tuned" / "experiment" / "best.yaml").read_bytes()
    again = meshrunner("resume", "tuned", cwd=folder)
    assert again.code == 0 and completed(folder / "tuned") == found
    assert (folder / "tuned" / "experiment" / "best.yaml").read_bytes() == best


def test_runs_that_end_as_nobody_predicted_are_named_and_left_out(folder: Path) -> None:
    done = meshrunner(
        *("tune", *SEARCH, "model.kind=faulty:FatedByBatch", "parallelism=fsdp1,fsdp2", "micro_batch=1,2,4"),
        *("launch.timeout_minutes=0.1", "tune.runs=6"),
        cwd=folder,
    )
    assert ": oom " in done.out and ": timeout " in done.out, done
    found = yaml.safe_load((folder / "tuned" / "experiment" / "best.yaml").read_text())
    assert found["micro_batch"] == 2
    assert {path.parent.name for path in (folder / "tuned").glob("*micro-batch-2*/status.json")} == {
        *completed(folder / "tuned")
    }
