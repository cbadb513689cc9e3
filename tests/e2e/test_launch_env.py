"""`launch.env` has its effect, whoever reads the variable and when: what a worker found is compared with what was set."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.command import TINY, meshrunner, own_classes, read, run

KINDS = {
    "TORCHINDUCTOR_SPLIT_REDUCTIONS=0": "inductor's settings: False",
    "TORCHDYNAMO_VERBOSE=1": "dynamo's settings: True",
    "TORCH_LOGS=+dynamo": "logging: True",
    "TORCH_CPP_LOG_LEVEL=INFO": "[c10d] ",
    "TORCH_DISTRIBUTED_DEBUG=INFO": "c10d: INFO",
    "PYTHONHASHSEED=0": "interpreter: 0",
    "OMP_DYNAMIC=true": "OpenMP: True",
    "OMP_NUM_THREADS=3": "threads: 3",
    "NCCL_DEBUG=WARN": "process: WARN",
}
"""Variables that different things read, most while they are loaded, and what the log of a worker has then, but not without."""
SHOWS = ("model.kind=faulty:ShowsSettings", "launch.threads=auto")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    own_classes(tmp_path)
    return tmp_path


def log(run_dir: Path) -> str:
    return (run_dir / "logs" / "rank1.log").read_text()


@pytest.mark.slow
def test_each_kind_of_variable_has_its_effect(folder: Path) -> None:
    plain = run(*SHOWS, cwd=folder, run_dir="plain")
    ended = run(*SHOWS, *(f"launch.env.{each}" for each in KINDS), cwd=folder)
    assert plain.code == ended.code == 0, f"{plain}{ended}"
    for variable, effect in KINDS.items():
        assert effect in log(folder / "out"), variable
        assert effect not in log(folder / "plain"), f"{variable}: the test would show nothing"
    assert read(folder / "out" / "environment.json")["threads"] == 3


@pytest.mark.slow
def test_runs_of_one_command_have_each_their_own(folder: Path) -> None:
    grid = ("launch.env.TORCHINDUCTOR_SPLIT_REDUCTIONS=0,1", "hydra.sweep.dir=sweep")
    ended = meshrunner("run", "-m", *TINY, *SHOWS, *grid, cwd=folder)
    assert ended.code == 0, ended
    first, second = sorted((folder / "sweep").glob("0*"))
    assert "inductor's settings: False" in log(first) and "inductor's settings: True" in log(second)


@pytest.mark.slow
def test_caches_are_where_the_user_says(folder: Path) -> None:
    """Exported in the shell or a SLURM preamble, or in `launch.env`, which wins."""
    inductor, triton = str(folder / "inductor"), str(folder / "triton")
    exported = {"TORCHINDUCTOR_CACHE_DIR": inductor, "TRITON_CACHE_DIR": str(folder / "not_here")}
    ended = run(*SHOWS, f"launch.env.TRITON_CACHE_DIR={triton}", cwd=folder, **exported)
    assert ended.code == 0, ended
    assert f"inductor's cache: {inductor}\n" in log(folder / "out")
    assert f"Triton's cache: {triton}\n" in log(folder / "out")
    recorded = read(folder / "out" / "environment.json")["environment"]
    assert (recorded["TORCHINDUCTOR_CACHE_DIR"], recorded["TRITON_CACHE_DIR"]) == (inductor, triton)
