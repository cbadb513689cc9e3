"""Hydra's own conformance tests for launchers, run against the local launcher as far as they apply.

The tests are Hydra's, and so are their configurations: `{foo: 10, bar: 100}` and the like. A launcher that checks an
experiment would refuse them, so the check, and the execution that follows it, are replaced here. What is tested is what lies
between them and Hydra: that every combination of every batch is composed, placed on disk and reported back as Hydra expects.

These do not apply:

- the last line of `test_sweep_2_jobs`: it wants run directories named 0 and 1; ours are named after what varies (000_a-0).
- `test_sweep_with_custom_resolver`: it reads what the task function returns. Ours is never called for a job: a job's value is
  the objective of its run (tests/e2e/test_sweepers.py).
- all of `IntegrationTestSuite`: it starts programs with `@hydra.main` and reads what their functions print, in folders made by
  Hydra (`hydra.job.chdir`). This launcher starts workers on a run directory, not functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn
from hydra.test_utils import launcher_common_tests
from hydra.test_utils.launcher_common_tests import BatchedSweeperTestSuite, LauncherTestSuite
from hydra.test_utils.test_utils import TSweepRunner

from meshrunner.runner.rundir.files import SUMMARY, write_json
from meshrunner.runner.rundir.states import read_state
from meshrunner.runner.sweep import combinations, hydra_launchers
from tests.composed import experiment


def executed(run_dirs: Sequence[Path], _: Any) -> tuple[int, bool]:
    """Every run is placed, and completes."""
    for run_dir in run_dirs:
        assert read_state(run_dir) == "pending"
        write_json(run_dir / SUMMARY, {"state": "completed", "perf/wps_median": 100.0})
    return 0, False


def check_run_directory(job: JobReturn, overrides: Sequence[str] = ()) -> None:
    """What Hydra's launchers leave in `.hydra`, ours has in the run directory itself; of a log there is none yet."""
    run_dir = Path(job.working_dir)
    assert job.task_name is not None and job.hydra_cfg is not None and job.return_value == 100.0
    assert yaml.safe_load((run_dir / "config.yaml").read_text()) == job.cfg
    assert yaml.safe_load((run_dir / "overrides.yaml").read_text())["task"] == list(overrides)


@pytest.fixture(autouse=True)
def any_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = experiment()
    GlobalHydra.instance().clear()
    monkeypatch.setattr(combinations, "check", lambda _: chosen)
    monkeypatch.setattr(combinations, "fit_continuing", lambda *_: None)
    monkeypatch.setattr(combinations, "_repeated", lambda composed, _: [composed])
    monkeypatch.setattr(hydra_launchers, "execute_all", executed)
    monkeypatch.setattr(launcher_common_tests, "verify_dir_outputs", check_run_directory)


@pytest.mark.parametrize(("launcher_name", "overrides"), [("local", [])])
class TestLocalLauncher(LauncherTestSuite):
    test_sweep_with_custom_resolver = None

    def test_sweep_2_jobs(
        self, hydra_sweep_runner: TSweepRunner, launcher_name: str, overrides: list[str], tmpdir: Path
    ) -> None:
        with pytest.raises(AssertionError, match=r"/0' does not exist, dirs: .*/000_a-0"):
            super().test_sweep_2_jobs(hydra_sweep_runner, launcher_name, overrides, tmpdir)


@pytest.mark.parametrize(("launcher_name", "overrides"), [("local", ["hydra.sweeper.max_batch_size=2"])])
class TestBatches(BatchedSweeperTestSuite):
    pass
