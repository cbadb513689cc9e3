"""Searches whose runs are real: they are killed at any moment, and some of their runs end as nobody predicted."""

from __future__ import annotations

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
            command.process.kill()
            assert command.process.wait() in (0, -signal.SIGKILL), command.wait()
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
    words = ("model.kind=faulty:FatedByLayout", "parallelism=fsdp1,fsdp2", "micro_batch=2,4,8", "global_batch=16")
    limits = ("launch.timeout_minutes=0.1", "launch.start_timeout_minutes=0.3", "tune.runs=8")
    with Command("tune", *SEARCH, *words, *limits, cwd=folder) as command:
        done = command.wait()
        command.check_nobody_left()
    assert ": oom: " in done.out and ": timeout: " in done.out, done
    found = yaml.safe_load((folder / "tuned" / "experiment" / "best.yaml").read_text())
    assert found.get("micro_batch", 4) in (2, 4) and {"override /parallelism": "fsdp1"} not in found["defaults"]
    assert all("fsdp2" in name and "micro-batch-8" not in name for name in completed(folder / "tuned"))
