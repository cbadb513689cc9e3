"""Workers replace kernels of packages that a rank cannot import, and record this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.hybrid import hybrid
from meshrunner.recipes.model.hybrid.hybrid import Hybrid
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.launch import worker
from meshrunner.runner.launch.outcome import Outcome
from meshrunner.runner.launch.report import report
from meshrunner.runner.launch.worker import _record_environment
from meshrunner.runner.process.worker_context import Node, SharedIntegers, WorkerContext
from meshrunner.runner.rundir import Environment, Summary
from meshrunner.runner.rundir.files import ENVIRONMENT
from tests.composed import experiment
from tests.run_dirs import make_run

BROKEN = {"mamba_ssm": "ImportError: undefined symbol"}


@pytest.fixture
def run_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a run directory. On this machine, mamba_ssm can be found; on rank 1, it cannot be imported."""

    def gather(everyone: list[Any], own: Any) -> None:
        everyone[:] = [own, ("8-15", None, BROKEN)]

    monkeypatch.setattr(hybrid, "find_spec", lambda name: object() if name == "mamba_ssm" else None)
    monkeypatch.setattr(Hybrid, "import_errors", lambda _: {})
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(worker, "sdpa_backend", lambda *_: None)
    folder = make_run(tmp_path / "run")
    before = Environment(resolved={"model.mamba.kernel": "fused", "log_every": 1})
    before.write(folder / ENVIRONMENT)
    return folder


def recorded(run_dir: Path, kernel: str, rank: int = 0) -> Experiment:
    shared = [SharedIntegers(2) for _ in range(3)]
    context = WorkerContext(rank, rank, 2, Node(0, 1, "", 0, ""), "cuda", 1, 1, *shared, None)
    chosen = experiment("model=hybrid_tiny", f"model.mamba.kernel={kernel}").on("cuda")
    return _record_environment(run_dir, context, chosen, None)


def test_all_ranks_replace_a_package_that_one_rank_cannot_import(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        assert recorded(run_dir, "auto", rank).model.resolved() == {"mamba.kernel": "torch"}
    found = Environment.read(run_dir / ENVIRONMENT)
    assert found.resolved == {"model.mamba.kernel": "torch", "log_every": 1}
    assert len(found.cpus) == 2 and found.cpus[1] == "8-15"
    report(run_dir, Outcome("completed", ""), Summary(state="completed"), row=False)
    said = " ".join(capsys.readouterr().err.split())
    assert "mamba_ssm: cannot be imported, so plain torch replaces it: ImportError: undefined symbol" in said


def test_a_kernel_that_the_configuration_names_is_not_replaced(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.mamba\.kernel: mamba_ssm cannot be imported"):
        recorded(run_dir, "fused")
