"""The time limit of a job that has none."""

from __future__ import annotations

from typing import Any

import pytest

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.slurm import client
from meshrunner.runner.slurm.submit import STEP, predicted_limit
from tests.composed import experiment

PARTITIONS = "debug 30:00\ngpu* 2-00:00:00\nlong infinite\n"


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def sinfo(*command: str) -> str:
        chosen = {each.removeprefix("--partition=") for each in command if each.startswith("--partition=")}
        return "".join(
            line for line in PARTITIONS.splitlines(True) if not chosen or line.split()[0].strip("*") in chosen
        )

    monkeypatch.setattr(client, "slurm", sinfo)


def limit(seconds: float | None, *more: tuple[str, dict[str, Any]], partition: str | None = None) -> str | None:
    plans = [("steps=1000", {} if seconds is None else {STEP: seconds}), *more]
    return predicted_limit([(experiment(steps), plan) for steps, plan in plans], partition)


def test_twice_the_predicted_time_and_the_time_until_the_first_step() -> None:
    assert limit(1.8) == "1:30:00"
    assert limit(1.81) == "1:31:00"


def test_tasks_of_an_array_share_the_longest_limit() -> None:
    assert limit(1.8, ("steps=4000", {STEP: 1.8}), ("steps=1", {STEP: 60.0})) == "4:30:00"
    assert limit(1.8, ("steps=4", {})) is None


def test_a_run_without_prediction_has_the_limit_of_its_partition() -> None:
    assert limit(None) is None


def test_a_partition_that_allows_less_keeps_its_limit() -> None:
    assert limit(1.8, partition="debug") is None
    assert limit(90.0) is None
    assert limit(90.0, partition="long") == "50:30:00"


def test_without_slurm_the_prediction_alone_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: str) -> str:
        raise ConfigError("sinfo: not found")

    monkeypatch.setattr(client, "slurm", missing)
    assert limit(90.0) == "50:30:00"
