"""`launch.python`: runs are executed by another interpreter, with its packages."""

from __future__ import annotations

import json
import sys
import venv
from pathlib import Path

import pytest

from meshrunner.runner.config.interpreter import is_other, unsuitable
from tests.e2e.command import TINY, meshrunner, read, run

SITE = next(Path(sys.executable).parents[1].glob("lib/python3*/site-packages"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the interpreter of an environment that has all packages of this one, but says that it has torch 2.12.0."""
    folder = tmp_path_factory.mktemp("other")
    venv.create(folder, with_pip=False)
    site = next(folder.glob("lib/python3*/site-packages"))
    (site / "others.pth").write_text(f"{SITE}\n")
    (site / "torch-2.12.0.dist-info").mkdir()
    (site / "torch-2.12.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.0\n")
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the interpreter of an environment without packages."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    return str(folder / "bin" / "python")


def test_an_interpreter_that_cannot_execute_runs_is_refused(bare: str, other: str) -> None:
    assert "has no datasets, no hydra-core, " in unsuitable(bare) and unsuitable(bare).endswith(
        "install the required packages for this interpreter"
    )
    assert unsuitable("/nonexistent/python").startswith("launch.python: cannot execute /nonexistent/python: ")
    assert unsuitable(sys.executable) == unsuitable(other) == ""
    assert is_other(other) and not is_other(sys.executable) and not is_other(None)


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_versions_are_an_axis_of_a_sweep(tmp_path: Path, other: str, bare: str) -> None:
    pythons = f"launch.python={sys.executable},{other},{bare}"
    ended = meshrunner("run", "-m", *TINY, "launch.workers=1", pythons, "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert ended.code == 0, ended
    rows = json.loads(
        meshrunner("compare", "sweep", "--baseline", f"launch.python={sys.executable}", "--json", cwd=tmp_path).out
    )
    found = {row["launch.python"]: row for row in rows}
    states = {python: row["state"] for python, row in found.items()}
    assert states == {sys.executable: "completed", other: "completed", bare: "skipped"}
    assert found[other]["torch"] == "2.12.0" != found[sys.executable]["torch"]
    assert found[other]["loss_verdict"] == "identical", found[other]
    alone = run(f"launch.python={bare}", cwd=tmp_path)
    assert alone.code == 2 and "no hydra-core" in alone.err and len(alone.err.splitlines()) < 5, alone
    alone = run(f"launch.python={other}", "hydra.run.dir=alone", cwd=tmp_path)
    assert alone.code == 0 and read(tmp_path / "alone" / "environment.json")["packages"]["torch"] == "2.12.0"
    planned = meshrunner("plan", "-m", *TINY, pythons, cwd=tmp_path)
    assert planned.code == 2 and "cannot be predicted together with other runs" in planned.err, planned
    assert meshrunner("lock", *TINY, f"launch.python={other}", cwd=tmp_path).code == 0
    assert read(tmp_path / "meshrunner.lock.json")["torch"] == "2.12.0"
