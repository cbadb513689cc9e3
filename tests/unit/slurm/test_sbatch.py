"""The text that is submitted to SLURM, compared with what a person has read: tests/unit/sbatch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config import devices
from meshrunner.runner.config.devices import NodeDevices, too_few_cores
from meshrunner.runner.rundir.files import CONFIG, STATUS, STOP_REQUEST, SWEEP_RUNS, TUNE
from meshrunner.runner.rundir.states import Owner
from meshrunner.runner.slurm.client import SlurmJob
from meshrunner.runner.slurm.script import sbatch_script
from meshrunner.runner.slurm.settings import Nodes, Slurm
from tests.composed import experiment

GOLDEN = Path(__file__).with_name("sbatch")
SHIPPED = Path(__file__).parents[3] / "slurm"
NONE: dict[str, Any] = {
    "partition": None, "account": None, "qos": None, "constraint": None, "nodes": None, "gpus_per_node": None,
    "cpus_per_task": None, "cpus_per_gpu": 8, "time": None, "max_parallel": None, "max_requeues": 10, "notice_s": 120,
    "extra": [], "srun": [], "preamble": "", "command": "meshrunner", "wait": False, "dry_run": False,
}  # fmt: skip
ALL = NONE | {
    "partition": "gpu", "account": "llm", "qos": "high", "constraint": "h100", "cpus_per_task": 96, "time": "2-00:00:00",
    "max_parallel": 4, "max_requeues": 3, "notice_s": 300, "extra": ["--exclusive", "--mail-type END"],
    "srun": ["--container-image=my image.sqsh"], "command": "apptainer exec --nv image.sif meshrunner",
    "preamble": "module load cuda/13.0\nexport NCCL_IB_HCA=mlx5\n",
}  # fmt: skip
SCRIPTS = {
    "run": sbatch_script(Path("/shared/runs/a b"), Slurm(**NONE), Nodes(1, None, whole=False)),
    "run_all": sbatch_script(Path("/shared/runs/one"), Slurm(**ALL), Nodes(4, 8, whole=True)),
    "run_all_gpus": sbatch_script(Path("/shared/runs/one"), Slurm(**NONE), Nodes(2, 8, whole=True)),
    "run_some_gpus": sbatch_script(Path("/shared/runs/one"), Slurm(**NONE), Nodes(1, 2, whole=False)),
    "sweep": sbatch_script(Path("/shared/sweeps/one"), Slurm(**NONE), Nodes(1, 8, whole=True), [0, 1, 2, 5, 7, 8]),
    "sweep_all": sbatch_script(Path("/shared/sweeps/one"), Slurm(**ALL), Nodes(2, 8, whole=True), [3]),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_text_is_the_one_that_was_read(name: str) -> None:
    """After a change that is meant: `python -m tests.unit.slurm.test_sbatch` writes the files anew, and one reads them."""
    assert SCRIPTS[name] == (GOLDEN / f"{name}.sbatch").read_text()


def options(**settings: Any) -> list[str]:
    """What a run on all 8 GPUs of a node asks for beside them."""
    text = sbatch_script(Path("/shared/runs/one"), Slurm(**NONE | settings), Nodes(1, 8, whole=True))
    return re.findall(r"^#SBATCH '?(--(?:cpus|mem|exclusive)[^'\n]*)", text, re.MULTILINE)


def test_what_the_user_says_of_cpus_and_memory_is_all_that_is_said() -> None:
    assert options() == ["--exclusive", "--mem=0"]
    assert options(cpus_per_task=96) == ["--cpus-per-task=96"]
    for extra in ("--mem=500G", "--cpus-per-gpu=12", "'--mem-per-gpu=60G'", "--exclusive=user"):
        assert options(extra=["--mail-type=END", extra]) == [extra.strip("'")]


@pytest.mark.parametrize("extra", ["--gres=gpu:h100:8", "-G 8", "'--gpus-per-task=8'"])
def test_gpus_are_asked_for_once(extra: str) -> None:
    text = sbatch_script(Path("/shared/runs/one"), Slurm(**NONE | {"extra": [extra]}), Nodes(1, 8, whole=True))
    assert f"#SBATCH {extra}" in text and "#SBATCH --gpus-per-node" not in text
    disk = sbatch_script(
        Path("/shared/runs/one"), Slurm(**NONE | {"extra": ["--gres=lscratch:200"]}), Nodes(1, 8, whole=True)
    )
    assert "#SBATCH --gpus-per-node=8" in disk


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [
        (["hardware=h100_80gb"], Nodes(1, 8, whole=True)),
        (["hardware=h100_80gb", "launch.workers=8", "launch.nodes=2"], Nodes(2, 8, whole=True)),
        (["hardware=h100_80gb", "launch.workers=2"], Nodes(1, 2, whole=False)),
        (["hardware=h100_80gb", "hardware.devices_per_node=4", "launch.workers=4"], Nodes(1, 4, whole=True)),
        (["hardware=h100_80gb", "launch.nodes=16", "launch.emulate=127"], Nodes(1, 1, whole=False)),
        (["hardware=cpu"], Nodes(1, None, whole=False)),
        ([], Nodes(1, None, whole=False)),
    ],
)
def test_what_a_run_asks_for(overrides: list[str], asked: Nodes) -> None:
    assert Slurm(**NONE).request(experiment(*overrides)) == asked


def test_how_many_gpus_a_node_has_is_not_known_without_hardware() -> None:
    assert Slurm(**NONE | {"gpus_per_node": 8}).request(experiment()) == Nodes(1, 8, whole=False)


def test_workers_of_gpus_that_share_a_core_are_remarked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cores", lambda: 1)
    assert "1 CPU core for 8 GPU workers: with fewer than 2" in str(too_few_cores(NodeDevices("cuda", 8, 1)))
    assert too_few_cores(NodeDevices("cpu", 8, 1)) is None
    assert str(too_few_cores(NodeDevices("cuda", 8, 1, emulated=True))).startswith("1 CPU core for 1 GPU worker: ")
    monkeypatch.setattr(devices, "cores", lambda: 16)
    assert too_few_cores(NodeDevices("cuda", 8, 1)) is None


@pytest.mark.parametrize("path", [*SHIPPED.glob("*.sbatch"), *SHIPPED.glob("*/*.sh"), *GOLDEN.iterdir()], ids=str)
@pytest.mark.parametrize("checker", [("bash", "-n"), ("shellcheck",)], ids=lambda words: words[0])
def test_the_shell_finds_no_fault(checker: tuple[str, ...], path: Path) -> None:
    program = shutil.which(checker[0], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program, f"{checker[0]} is not installed"
    done = subprocess.run([program, *checker[1:], str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_script_names_files_and_keys_as_the_run_directory_does() -> None:
    text = (SHIPPED / "run.sbatch").read_text()
    assert set(re.findall(r"\$(?:run_dir|given)/([\w.]+)", text)) == {CONFIG, STATUS, STOP_REQUEST, SWEEP_RUNS, TUNE}
    assert set(re.findall(r"\b(slurm_\w+)", text)) == {key for key in Owner.model_fields if key.startswith("slurm_")}


def test_all_wrong_settings_are_listed() -> None:
    wrong = NONE | {"time": 3600, "nodes": 0, "partiton": "gpu"}
    with pytest.raises(ConfigError) as caught:
        Slurm.read(wrong)
    for part in (
        "launcher.time: expected quoted text like '1:00:00'",
        "launcher.nodes",
        "Did you mean 'partition'?",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("state", "active"), [("RUNNING", True), ("PENDING", True), ("COMPLETING", True), ("TIMEOUT", False)]
)
def test_which_jobs_are_active(state: str, active: bool) -> None:
    assert SlurmJob(state, "", "").active is active


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, text in SCRIPTS.items():
        (GOLDEN / f"{name}.sbatch").write_text(text)
