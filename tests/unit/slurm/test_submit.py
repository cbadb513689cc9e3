"""`meshrunner submit` and `cancel`, with a SLURM that answers from here."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner import cli
from meshrunner.runner.rundir.files import write_json
from meshrunner.runner.rundir.states import read_status, update_status
from meshrunner.runner.slurm import client, submit
from meshrunner.runner.slurm.client import SlurmJob
from meshrunner.runner.verbs.records import cancel
from tests.e2e.command import TINY


class Fake:
    """What the commands were called with, and what they answer."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.jobs: dict[str, SlurmJob] = {}
        self.refuses = ""

    def slurm(self, *command: str, timeout: float = 0) -> str:
        self.calls.append(command)
        if self.refuses:
            raise ConfigError(self.refuses)
        return "12\n"

    def known(self, ids: object) -> dict[str, SlurmJob]:
        return self.jobs


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    fake = Fake()
    for module in (client, submit, cancel):
        monkeypatch.setattr(module, "slurm", fake.slurm)
        monkeypatch.setattr(module, "jobs", fake.known)
    monkeypatch.chdir(tmp_path)
    return fake


def meshrunner(*arguments: str) -> int:
    return cli._dispatch(list(arguments))


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("placed") / "sweep"
    assert meshrunner("place", "-m", *TINY, "seed=1,2,3", f"hydra.sweep.dir={folder}") == 0
    return folder


@pytest.fixture
def sweep(fake: Fake, placed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(placed, tmp_path / "sweep"))


def tree(folder: Path) -> list[tuple[str, bytes]]:
    return [(str(path), path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()]


def test_a_dry_run_of_a_directory_writes_and_submits_nothing(
    sweep: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    update_status(sweep / "000_seed-1", state="completed")
    update_status(sweep / "001_seed-2", state="failed", reason="of old")
    before = tree(sweep)
    capsys.readouterr()
    assert meshrunner("submit", "sweep", "--dry-run") == 0
    assert tree(sweep) == before
    assert fake.calls == []
    said = capsys.readouterr()
    assert said.out.startswith("#!/usr/bin/env bash")
    assert "#SBATCH --array=1-2\n" in said.out
    assert said.err == ""
    assert meshrunner("submit", "-m", *TINY, "seed=1,2,3", "hydra.sweep.dir=sweep", "--dry-run") == 0
    assert capsys.readouterr() == said


def test_what_slurm_refused_is_submitted_again_with_the_same_settings(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.refuses = "no such partition"
    given = ("hydra.launcher.partition=gpuu", "hydra.launcher.account=llm")
    assert meshrunner("submit", *TINY, *given, "hydra.run.dir=one") == 2
    capsys.readouterr()
    fake.refuses = ""
    assert meshrunner("submit", "one", "hydra.launcher.partition=gpu") == 0
    text = Path("one/submit.sbatch").read_text()
    assert "#SBATCH --partition=gpu\n" in text
    assert "#SBATCH --account=llm\n" in text


def test_a_sweep_that_was_placed_again_with_more_runs_is_submitted_by_the_lines_of_its_list(
    sweep: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert meshrunner("place", "-m", *TINY, "seed=1,2,3,4", "objective=perf/wps_median", "hydra.sweep.dir=sweep") == 0
    names = [f"{seed - 1:03}_seed-{seed}" for seed in (1, 2, 3, 4)]
    assert (sweep / "runs.txt").read_text().splitlines() == names
    capsys.readouterr()
    assert meshrunner("submit", "sweep", "--dry-run") == 0
    assert "#SBATCH --array=0-3\n" in capsys.readouterr().out


def test_unfinished_runs_of_an_earlier_grid_are_submitted_with_the_new_ones(
    sweep: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    update_status(sweep / "000_seed-1", state="completed")
    (sweep / "001_seed-2" / "config.yaml").write_text("seed: [")
    grid = ("submit", "-m", *TINY, "seed=4,5", "hydra.sweep.dir=sweep")
    capsys.readouterr()
    assert meshrunner(*grid, "--dry-run") == 0
    assert "#SBATCH --array=2-4\n" in capsys.readouterr().out
    assert meshrunner(*grid) == 0
    said = capsys.readouterr()
    assert "000_seed-1 is completed" in said.out and "submitted job array 12: 3 runs" in said.out
    assert "001_seed-2" in said.err
    assert "#SBATCH --array=2-4\n" in (sweep / "submit.sbatch").read_text()
    jobs = {path.parent.name: json.loads(path.read_text())["job_id"] for path in sweep.glob("*/slurm.json")}
    assert jobs == {"002_seed-3": "12_2", "000_seed-4": "12_3", "001_seed-5": "12_4"}


def test_a_run_of_a_sweep_has_the_settings_of_the_sweep(
    sweep: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert meshrunner("submit", "sweep", "hydra.launcher.account=llm") == 0
    assert json.loads((sweep / "002_seed-3" / "slurm.json").read_text())["job_id"] == "12_2"
    capsys.readouterr()
    assert meshrunner("submit", "sweep/002_seed-3", "--dry-run") == 0
    assert "#SBATCH --account=llm\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("sweep", "-m"), "usage"),
        (("sweep", "sweep"), "usage"),
        (("nonesuch",), "no such directory: nonesuch"),
        (("sweep", "seed=1"), "only hydra.launcher.KEY=VALUE"),
        (("sweep", "hydra.launcher.nodes=2"), r"differs from launch.nodes\(1\) of the run directory"),
        (("hydra/launcher=local",), "hands runs over to SLURM"),
        (("-m", "seed=1,2", "hydra.launcher.extra=5"), "hydra.launcher.extra"),
        (("seed=1", r"hydra.launcher.preamble='module load a\nmodule load b'"), "is not a line break"),
        (("-m", "seed=1,2", "sweep.repeat=auto", "hardware=cpu"), "with SLURM, set sweep.repeat to a number"),
    ],
)
def test_what_cannot_be_submitted_changes_nothing(
    arguments: tuple[str, ...], says: str, sweep: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(sweep.parent)
    assert meshrunner("submit", *arguments) == 2
    assert re.search(says, capsys.readouterr().err)
    assert tree(sweep.parent) == before
    assert [path.name for path in sweep.parent.iterdir()] == ["sweep"]
    assert fake.calls == []


def test_flags_with_a_value_and_deletions_are_no_folders(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    Path("options").mkdir()
    assert meshrunner("submit", "--dry-run", "--config-dir", "options", "~tracker.project", "hardware=cpu") == 0
    assert capsys.readouterr().out.startswith("#!/usr/bin/env bash")


@pytest.mark.slow
def test_a_login_node_without_gpus_places_runs_for_nodes_that_have_them(fake: Fake) -> None:
    assert meshrunner("place", "hardware=h100_80gb", "parallelism.shard=8", "hydra.run.dir=one") == 0
    assert read_status(Path("one")).state == "pending"


def test_cancel_leaves_alone_what_has_ended(sweep: Path, fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.jobs = {"12_0": SlurmJob("COMPLETED", "", ""), "12_1": SlurmJob("RUNNING", "", "node1")}
    for number, run_dir in enumerate(sorted(sweep.glob("0*"))):
        write_json(run_dir / "slurm.json", {"job_id": f"12_{number}"})  # the third is forgotten
    capsys.readouterr()
    assert meshrunner("cancel", "sweep") == 0
    assert fake.calls == [("scancel", "12_1")]
    assert "cancelled 1 SLURM job and 0 runs on" in capsys.readouterr().out
    assert [(path / "slurm.json").exists() for path in sorted(sweep.glob("0*"))] == [True, False, True]


def test_waiting_outlives_a_controller_that_is_away(
    sweep: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = sweep / "000_seed-1"
    write_json(run_dir / "slurm.json", {"job_id": "12_0"})
    answers = [
        ConfigError("SLURM did not answer"),
        {"12_0": SlurmJob("RUNNING", "", "")},
        {"12_0": SlurmJob("COMPLETED", "", "")},
    ]

    def ask(ids: object) -> dict[str, SlurmJob]:
        answer = answers.pop(0)
        if isinstance(answer, ConfigError):
            raise answer
        return answer

    monkeypatch.setattr(submit, "jobs", ask)
    monkeypatch.setattr(submit, "POLL_S", 0.0)
    update_status(run_dir, state="preempted")
    assert submit.wait([run_dir]) == 75
    assert answers == []
    assert "did not answer" in capsys.readouterr().err
    assert read_status(run_dir).state == "preempted"
