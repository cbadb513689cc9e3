"""Sweepers other than Hydra's own: they decide as they go, and return nothing."""

from __future__ import annotations

import json
import os
from enum import Enum
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from meshrunner.runner.sweep.hydra_launchers import minimizes
from tests.e2e.command import TINY, Ended, meshrunner, read, status


def sweep(*overrides: str, cwd: Path) -> Ended:
    plugins = [str(Path(__file__).with_name("own_sweeper")), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = ("run", "-m", *TINY, "hydra/sweeper=tells", "hydra.sweep.dir=sweep", *overrides)
    return meshrunner(*command, cwd=cwd, PYTHONPATH=os.pathsep.join(plugins))


def runs(folder: Path) -> list[Path]:
    return sorted((folder / "sweep").glob("0*"))


def table(ended: Ended) -> list[str]:
    """The rows of the table at the end, which the report page follows."""
    assert "report page: sweep/report.html" in ended.out, ended
    rows = [line for line in ended.out.splitlines() if line.startswith("|")]
    return rows[max(i for i, row in enumerate(rows) if row.startswith("|--")) + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_a_failed_job_has_the_worst_value_and_the_table_all_jobs(folder: Path, direction: str) -> None:
    faulty = ("model.kind=faulty:Raises", "hydra.sweeper.key=+model.step", "hydra.sweeper.batches=[[9,2],[8]]")
    ended = sweep(*faulty, f"hydra.sweeper.direction={direction}", cwd=folder)
    assert ended.code == 1, ended
    assert [run.name for run in runs(folder)] == ["000_step-9", "001_step-2", "002_step-8"]
    assert [status(run)["state"] for run in runs(folder)] == ["completed", "failed", "completed"]
    assert [row.split("|")[2].strip() for row in table(ended)] == ["completed", "failed", "completed"]
    assert (folder / "sweep" / "report.html").exists()
    first, second, third = json.loads((folder / "told.json").read_text())
    assert second == float("inf" if direction == "minimize" else "-inf")
    assert [first, third] == [read(runs(folder)[i] / "summary.json")["perf/wps_median"] for i in (0, 2)]


@pytest.mark.slow
def test_jobs_that_all_complete_end_with_0(folder: Path) -> None:
    ended = sweep("objective=train/final_loss", cwd=folder)
    assert ended.code == 0 and len(table(ended)) == 1, ended  # three seeds are one row
    finals = [read(run / "summary.json")["train/final_loss"] for run in runs(folder)]
    assert json.loads((folder / "told.json").read_text()) == finals


@pytest.mark.slow
def test_fail_fast_hands_over_no_more_jobs(folder: Path) -> None:
    faulty = ("model.kind=faulty:Raises", "hydra.sweeper.key=+model.step", "hydra.sweeper.batches=[[2],[9]]")
    ended = sweep(*faulty, "sweep.fail_fast=true", cwd=folder)
    assert ended.code == 1 and len(table(ended)) == 1, ended
    assert [status(run)["state"] for run in runs(folder)] == ["failed"]


@pytest.mark.slow
def test_a_job_that_is_wrong_after_others_have_run(folder: Path) -> None:
    ended = sweep("hydra.sweeper.key=micro_batch", "hydra.sweeper.batches=[[1],[0]]", cwd=folder)
    assert ended.code == 2 and "micro_batch" in ended.err and len(table(ended)) == 1, ended


@pytest.mark.parametrize(
    ("sweeper", "expected"),
    [
        ({"direction": "minimize"}, True),
        ({"direction": "maximize"}, False),
        ({"optim": {"maximize": False}}, True),
        ({"optim": {"maximize": True}}, False),
        ({"ax_config": {"experiment": {"minimize": True}}}, True),
        ({"ax_config": {"experiment": {"minimize": False}}}, False),
        ({"params": {"seed": "1,2"}}, False),
    ],
)
def test_what_is_worst_is_asked_in_the_words_of_the_sweeper(sweeper: dict[str, object], expected: bool) -> None:
    assert minimizes(OmegaConf.create({"hydra": {"sweeper": sweeper}})) == expected


class Direction(Enum):
    """As Optuna's, whose default is not a word."""

    minimize = 1


def test_the_direction_may_be_a_member_of_an_enumeration() -> None:
    assert minimizes(OmegaConf.create({"hydra": {"sweeper": {"direction": Direction.minimize}}}))
