"""Runs that share a node: which devices and how many cores each has."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config import devices
from meshrunner.runner.config.devices import CORES, node_devices, visible_gpus
from meshrunner.runner.sweep import execute_all
from meshrunner.runner.sweep.execute_all import _Parallel, _shared
from tests.composed import config, experiment

GPUS = ("launch.workers=1",)
CPUS = ("launch.workers=1", "hardware=cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with 16 cores on which torch sees as many GPUs as CUDA_VISIBLE_DEVICES names, 8 at most."""

    def count() -> int:
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        return 8 if named is None else len(named.split(",")) if named else 0

    for name in ("CUDA_VISIBLE_DEVICES", CORES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices, "gpu_count", count)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


def placed(folder: Path, number: int, *overrides: str) -> list[Path]:
    run_dirs = [folder / str(i) for i in range(number)]
    for run_dir in run_dirs:
        (run_dir / "logs").mkdir(parents=True)
        (run_dir / "config.yaml").write_text(yaml.safe_dump(config(*overrides)))
    return run_dirs


def shared(folder: Path, *overrides: str, runs: int = 3) -> list[str]:
    return _shared(placed(folder, runs, *overrides), experiment(*overrides).sweep)[0]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["0", "1", "2", "3", "4", "5", "6", "7"]),
        ("", []),
        ("4,5, 6", ["4", "5", "6"]),
        ("GPU-8932f937,GPU-1f0a", ["GPU-8932f937", "GPU-1f0a"]),
    ],
)
@pytest.mark.usefixtures("gpus")
def test_gpus_keep_the_names_of_cuda_visible_devices(
    visible: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == expected


def test_names_that_torch_rejects_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_count", lambda: 2)  # torch stops at the first that is none
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,-1,6")
    assert visible_gpus() == ["4", "5"]


@pytest.mark.slow
@pytest.mark.usefixtures("gpus")
def test_sweep_devices_counts_visible_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-1f,7")
    assert shared(tmp_path / "all", *GPUS) == ["4", "5", "GPU-1f", "7"]
    assert shared(tmp_path / "some", *GPUS, "sweep.devices=3") == ["4", "5", "GPU-1f"]
    with pytest.raises(ConfigError, match=r"^sweep.devices: 8 is more than the 4 visible GPUs: 4, 5, GPU-1f, 7$"):
        shared(tmp_path / "many", *GPUS, "sweep.devices=8")
    assert shared(tmp_path / "cpu", *CPUS, "sweep.devices=6") == ["0", "1", "2", "3", "4", "5"]


@pytest.mark.slow
@pytest.mark.usefixtures("gpus")
def test_runs_are_sequential_if_two_do_not_fit(tmp_path: Path) -> None:
    assert shared(tmp_path / "whole") == [], "each takes all GPUs"
    assert shared(tmp_path / "one", *GPUS, runs=1) == []
    assert shared(tmp_path / "turns", *GPUS, "sweep.devices=1") == []


@pytest.mark.parametrize(("overrides", "sees"), [(GPUS, "4"), (CPUS, "")])
@pytest.mark.usefixtures("gpus")
def test_each_run_gets_its_devices_and_its_share_of_cores(
    overrides: tuple[str, ...], sees: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5" if sees else "")
    run_dirs = placed(tmp_path, 2, *overrides)
    names, needs = _shared(run_dirs, experiment(*overrides, "sweep.devices=2").sweep)
    started: list[dict[str, str]] = []
    monkeypatch.setattr(execute_all.subprocess, "Popen", lambda *_, env, **__: started.append(env))
    display: Any = SimpleNamespace(run_started=lambda _: None)
    unused: Any = None
    parallel = _Parallel(names, needs, unused, display, unused)
    for run_dir in run_dirs:
        parallel._start(run_dir)
    seen = [each["CUDA_VISIBLE_DEVICES"] for each in started]
    assert seen == (["4", "5"] if sees else ["", ""]), "a run on CPUs must not see a GPU that the user has hidden"
    monkeypatch.setenv(CORES, started[0][CORES])
    assert node_devices(experiment(*overrides)).threads == 8, "half of 16 cores"
