"""A sweep directory written while `runner` and `recipes` were packages at the top: it is read, and what it lacks is run."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from shutil import rmtree

import pytest

from meshrunner.runner.rundir.events import read_events
from tests.e2e.command import meshrunner, status

ARCHIVE = Path(__file__).parents[1] / "data" / "old_sweep.tar.xz"
"""Of `meshrunner run -m parallelism=fsdp1,fsdp2,single,ddp ...` on two ranks, killed in the second run, saved every 5 steps."""
FSDP1, FSDP2, SINGLE, DDP = (
    "000_parallelism-fsdp1",
    "001_parallelism-fsdp2",
    "002_parallelism-single",
    "003_parallelism-ddp",
)
STEPS = 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A current directory with the sweep in it."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python up to 3.11.3 has none
        archive.extractall(tmp_path)
    return tmp_path


def losses(run_dir: Path) -> dict[int, float]:
    """Step -> loss."""
    return {row["step"]: row["train/loss"] for row in read_events(run_dir)}


def test_its_states_and_figures_are_shown(folder: Path) -> None:
    shown = meshrunner("status", "old_sweep", cwd=folder)
    assert shown.code == 0 and not shown.err, shown
    cells = [[cell.strip() for cell in line.split("|")] for line in shown.out.splitlines() if "parallelism-" in line]
    assert [(name, state, step) for _, name, state, step, *_ in cells] == [
        (FSDP1, "completed", "30/30"),
        (FSDP2, "stale", "12/30"),
        (SINGLE, "skipped", "0/30"),
        (DDP, "pending", "0/30"),
    ]
    compared = meshrunner("compare", "old_sweep", "--json", cwd=folder)
    assert compared.code == 0 and not compared.err, compared
    rows = json.loads(compared.out)
    assert [(row["parallelism"], row["state"]) for row in rows] == [
        ("fsdp1", "completed"),
        ("fsdp2", "stale"),
        ("single", "skipped"),
        ("ddp", "pending"),
    ]
    assert rows[0]["perf/wps_median"] == 709.8210192943094
    assert rows[0]["train/final_loss"] == 4.428357362747192


@pytest.mark.slow
def test_what_is_left_is_run_and_a_checkpoint_of_another_format_refused(folder: Path) -> None:
    """The checkpoint would not continue the same losses: it is refused, kept, and without it the run begins again."""
    sweep = folder / "old_sweep"
    before = {name: (sweep / name / "events.jsonl").read_bytes() for name in (FSDP1, FSDP2)}
    begun = losses(sweep / FSDP2)
    assert list(begun) == list(range(1, 13))
    ended = meshrunner("resume", "old_sweep", cwd=folder)
    assert ended.code == 1, ended
    assert f"\n{FSDP1} is completed\n" in ended.out and f"\n{SINGLE} is skipped: " in ended.out, ended
    assert {name: status(sweep / name)["state"] for name in (FSDP1, FSDP2, SINGLE, DDP)} == {
        FSDP1: "completed",
        FSDP2: "failed",
        SINGLE: "skipped",
        DDP: "completed",
    }
    reason, checkpoint = status(sweep / FSDP2)["reason"], sweep / FSDP2 / "checkpoints" / "step-00000010"
    assert f"cannot continue from the checkpoint {checkpoint}: its format is 1" in reason and checkpoint.is_dir()
    assert {name: (sweep / name / "events.jsonl").read_bytes() for name in before} == before

    rmtree(checkpoint)
    again = meshrunner("resume", f"old_sweep/{FSDP2}", cwd=folder)
    assert again.code == 0, again
    rows = read_events(sweep / FSDP2)
    assert [row["attempt"] for row in rows] == [2] * STEPS
    # The same function of other rows of the same initial weights: near what it was, and what ddp computes now.
    assert losses(sweep / FSDP2) == pytest.approx(losses(sweep / DDP), rel=1e-5)
    assert losses(sweep / FSDP2) == pytest.approx(losses(sweep / FSDP1), rel=1e-2)
    compared = meshrunner("compare", "old_sweep", "--baseline", "parallelism=ddp", cwd=folder)
    assert compared.out.count("| identical ") + compared.out.count("| agrees ") == 1, compared
