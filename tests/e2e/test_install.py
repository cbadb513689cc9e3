"""The wheel, installed into an empty environment and used from another directory, works like the editable install."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from meshrunner.runner.rundir.events import read_events
from meshrunner.runner.rundir.states import read_status

REPOSITORY = Path(__file__).parents[2]
TINY = ["model.dim=32", "model.n_layers=1", "seq_len=64", "steps=5", "tracker=none"]


def pip(python: Path, *arguments: str) -> None:
    """pip in an environment; the test fails with what it printed."""
    done = subprocess.run([python, "-m", "pip", "-q", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def check_installed(python: Path, folder: Path) -> None:
    """Run, show and resume from a folder that holds nothing but traps: a user's own packages of our names."""
    for name in ("conf", "runner", "recipes", "slurm"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise SystemExit('the wrong package was imported')\n")
    command = python.with_name("meshrunner")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def meshrunner(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )

    done = meshrunner("run", *TINY, "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr
    assert read_status(folder / "out")["state"] == "completed" and len(read_events(folder / "out")) == 5
    assert meshrunner("resume", "out").returncode == 0
    shown = meshrunner("show", "model=llama2_7b")
    assert shown.returncode == 0 and "6,738,415,616" in shown.stdout, shown.stderr
    script = meshrunner("submit", "--dry-run", *TINY)
    assert script.returncode == 0 and f"meshrunner=({command})" in script.stdout, script.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip(Path(sys.executable), "wheel", "--no-deps", "--wheel-dir", str(folder), str(REPOSITORY))
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_every_option_and_no_test(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for file in (REPOSITORY / "conf").rglob("*.yaml"):
        assert str(file.relative_to(REPOSITORY)) in names
    assert {f"slurm/{name}" for name in ("run.sbatch", "cluster/up.sh", "cluster/down.sh")} <= set(names)
    assert {f"runner/compare/page.{kind}" for kind in ("py", "html", "css", "js")} <= set(names)
    assert "hydra_plugins/meshrunner.py" in names and "hydra_plugins/__init__.py" not in names
    assert not [name for name in names if name.startswith(("tests", "bench"))]


def test_the_wheel_works_beside_the_packages_of_this_environment(wheel: Path, tmp_path: Path) -> None:
    """An environment with our wheel and, through a .pth file, everything else installed here but the editable install."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv" / "lib").glob("python3*/site-packages"))
    here = Path(sys.executable).parents[1] / "lib" / site.parent.name / "site-packages"
    (site / "others.pth").write_text(f"{here}\n")
    pip(Path(sys.executable), "--python", str(python), "install", "--no-deps", str(wheel))
    check_installed(python, tmp_path / "work")


@pytest.mark.slow
def test_pip_install_into_an_empty_environment(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip(python, "install", "--constraint", str(REPOSITORY / "constraints.txt"), str(REPOSITORY))
    check_installed(python, tmp_path / "work")
