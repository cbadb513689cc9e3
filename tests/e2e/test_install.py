"""Installed as a wheel or editable, the command works beside others' packages and a user's folders of the same names."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from shutil import rmtree

import pytest

import meshrunner
from meshrunner.runner.rundir.events import read_events
from meshrunner.runner.rundir.states import read_status
from tests.e2e.command import TINY as TINIEST

REPOSITORY = Path(__file__).parents[2]
TINY = ["model.dim=32", "model.n_layers=1", "seq_len=64", "steps=5", "tracker=none"]
OURS = ("conf", "runner", "recipes", "slurm")
"""Folders at the top of the repository, inside the package once installed."""
TORCHTUNE_RECIPES = 'raise ModuleNotFoundError("The torchtune recipes directory isn\'t a package")\n'
"""The top-level `recipes/__init__.py` that torchtune 0.6.1 installs raises this, with a longer text."""
MINE = """\
from meshrunner.recipes.optim.lr_schedule import LRSchedule
from recipes.shape import HALF

class Mine(LRSchedule):
    times: float

    def factor(self, step):
        return self.times * HALF
"""


def pip(python: Path, *arguments: str) -> None:
    """pip in an environment; the test fails with what it printed."""
    done = subprocess.run([python, "-m", "pip", "-q", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def start(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """A command of an environment, run in a folder without what this environment adds to the path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def check_installed(python: Path, folder: Path) -> None:
    """Run, show and resume from a folder that holds nothing but traps: a user's own packages of our names."""
    for name in OURS:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise SystemExit('the wrong package was imported')\n")
    command = python.with_name("meshrunner")
    done = start(folder, command, "run", *TINY, "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr
    assert read_status(folder / "out").state == "completed" and len(read_events(folder / "out")) == 5
    assert start(folder, command, "resume", "out").returncode == 0
    shown = start(folder, command, "show", "model=llama2_7b")
    assert shown.returncode == 0 and "6,738,415,616" in shown.stdout, shown.stderr
    script = start(folder, command, "submit", "--dry-run", *TINY)
    assert script.returncode == 0 and f"meshrunner=({command})" in script.stdout, script.stderr


def check_own_class(python: Path, folder: Path, *, packages: bool) -> None:
    """
    A run and sweeps with a user's `kind: recipes.mine:Mine`, from a folder in which names of ours and of libraries are taken.

    Args:
        packages: whether the user's folders have an `__init__.py`.
    """
    for name in (*OURS, "types", "json", "yaml", "torch"):
        (folder / name).mkdir(parents=True)
        if packages:
            (folder / name / "__init__.py").write_text(f"raise SystemExit('{name} was imported')\n")
        (folder / name / "__main__.py").write_text(f"raise SystemExit('{name} was run')\n")
    if packages:
        (folder / "recipes" / "__init__.py").write_text("")
    (folder / "recipes" / "mine.py").write_text(MINE)
    (folder / "recipes" / "shape.py").write_text("HALF = 0.5\n")
    (folder / "options" / "lr_schedule").mkdir(parents=True)
    (folder / "options" / "lr_schedule" / "mine.yaml").write_text("kind: recipes.mine:Mine\ntimes: 0.5\n")
    command = (python.with_name("meshrunner"), "run", "--config-dir=options", *TINIEST, "lr_schedule=mine")
    for more in (
        ["hydra.run.dir=out/run"],
        ["-m", "seed=1,2", "hydra.sweep.dir=out/sweep", "launch.workers=1"],
        ["-m", "seed=1,2", "hydra.sweep.dir=out/packed", "launch.workers=1", "sweep.devices=2"],
    ):
        done = start(folder, *command, *more)
        assert done.returncode == 0, done.stdout + done.stderr
    runs = sorted(file.parent for file in (folder / "out").rglob("events.jsonl"))
    assert len(runs) == 5
    for run in runs:
        assert read_status(run).state == "completed"
        assert [row["train/lr"] for row in read_events(run)] == [0.00025] * 3


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip(Path(sys.executable), "wheel", "--no-deps", "--wheel-dir", str(folder), str(REPOSITORY))
    return next(folder.glob("*.whl"))


def environment(folder: Path, *install: str) -> Path:
    """The Python of an environment with this project and, through a .pth file, all that is installed here but the project."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = next((folder / "lib").glob("python3*/site-packages"))
    here = Path(sys.executable).parents[1] / "lib" / site.parent.name / "site-packages"
    (site / "others.pth").write_text(f"{here}\n")
    pip(Path(sys.executable), "--python", str(python), "install", "--no-deps", *install)
    return python


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("installed"), str(wheel))


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("editable"), "--editable", str(REPOSITORY))


@pytest.mark.slow
def test_the_wheel_holds_every_option_and_no_test(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for file in (REPOSITORY / "conf").rglob("*.yaml"):
        assert f"meshrunner/{file.relative_to(REPOSITORY)}" in names
    scripts = {f"meshrunner/slurm/{name}" for name in ("run.sbatch", "cluster/up.sh", "cluster/down.sh")}
    assert scripts <= set(names)
    page = {f"meshrunner/runner/compare/page/{file.name}" for file in (REPOSITORY / "runner/compare/page").glob("*.*")}
    assert (
        {f"meshrunner/runner/compare/page/{name}" for name in ("write.py", "page.html", "main.js")}
        <= page
        <= set(names)
    )
    assert {f"meshrunner/runner/predict/replay/page/{name}" for name in ("page.html", "page.css", "memory.js")} <= set(
        names
    )
    assert {"meshrunner/py.typed", "meshrunner/__main__.py"} <= set(names)
    assert "hydra_plugins/meshrunner.py" in names and "hydra_plugins/__init__.py" not in names
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"meshrunner", "hydra_plugins", f"meshrunner-{meshrunner.__version__}.dist-info"}
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name or "/bench/" in name]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["installed", "editable"])
def test_one_package_is_installed(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    python = request.getfixturevalue(kind)
    program = (
        "import importlib.util, meshrunner; print(meshrunner.__version__); "
        f"print([name for name in {OURS} if importlib.util.find_spec(name)])"
    )
    assert start(tmp_path, python, "-c", program).stdout.splitlines() == [meshrunner.__version__, "[]"]
    helped = start(tmp_path, python, "-m", "meshrunner", "--help")
    assert helped.returncode == 0 and helped.stdout.startswith("usage: meshrunner VERB"), helped.stderr


@pytest.mark.slow
def test_the_wheel_works_beside_the_packages_of_this_environment(installed: Path, tmp_path: Path) -> None:
    check_installed(installed, tmp_path / "work")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "packages"), [("installed", False), ("editable", True)])
def test_own_folders_of_our_names_beside_torchtune(
    kind: str, packages: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    python = request.getfixturevalue(kind)
    site = next((python.parents[1] / "lib").glob("python3*/site-packages"))
    (site / "recipes").mkdir()
    (site / "recipes" / "__init__.py").write_text(TORCHTUNE_RECIPES)
    try:
        clash = start(tmp_path, python, "-c", "import recipes")
        assert clash.returncode == 1 and "torchtune" in clash.stderr
        check_own_class(python, tmp_path / "work", packages=packages)
    finally:
        rmtree(site / "recipes")


@pytest.mark.slow
def test_pip_install_of_the_source_archive_into_an_empty_environment(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip(python, "install", "hatchling")
    made = start(REPOSITORY, python, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path))
    assert made.returncode == 0, made.stderr
    (source,) = tmp_path.glob("meshrunner-*.tar.gz")
    pip(python, "install", "--constraint", str(REPOSITORY / "constraints.txt"), str(source))
    check_installed(python, tmp_path / "work")
    pip(python, "install", "--no-deps", "torchtune==0.6.1")
    clash = start(tmp_path, python, "-c", "import recipes")
    assert clash.returncode == 1 and "torchtune" in clash.stderr
    for packages in (False, True):
        check_own_class(python, tmp_path / f"own_{packages}", packages=packages)
