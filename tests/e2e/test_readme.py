"""Every command in the README and in the guides of docs/ works."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
README, MAKEFILE = ((REPOSITORY / name).read_text() for name in ("README.md", "Makefile"))
GUIDES = (
    "compare",
    "regressions",
    "runs",
    "plan",
    "tune",
    "slurm",
    "data",
    "weights",
    "evaluation",
    "own_code",
    "environment",
    "experts",
    "hybrid",
    "context",
    "pipeline",
    "buffers",
    "optimizers",
    "add_a_model",
)


def commands(text: str) -> list[str]:
    """Return the commands in the bash blocks of a Markdown document."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]


COMMANDS = commands(README)


def test_the_readme_begins_with_the_two_commands() -> None:
    assert COMMANDS[:2] == ["make demo", "make test"]
    assert COMMANDS[2] == "pip install ."  # tests/e2e/test_install.py does that
    targets = re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE)
    assert {"demo", "test"} <= set(targets)


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 1500


def meshrunner(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("meshrunner"), *arguments],
        cwd=folder,
        env=os.environ | {"MESHRUNNER_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow(sampled=True)
@pytest.mark.parametrize("further", [["sweep.repeat=1"], []])
def test_the_demo_compares_four_combinations_and_names_their_page(further: list[str], folder: Path) -> None:
    (arguments,) = re.findall(r"^demo:.*\n\t\$\(BIN\)/meshrunner (.*)$", MAKEFILE, re.MULTILINE)
    done = meshrunner(folder, *arguments.split(), "steps=4", "seq_len=64", "model.n_layers=2", *further)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) < 60
    assert ("Fastest so far (one run per row): " in done.stdout) == bool(further)
    title, _, *rows = [line.split("|")[1:-1] for line in lines if line.startswith("|")]
    assert [[cell.strip() for cell in row[:2]] for row in rows] == [
        [recompute, layout] for recompute in ("none", "full") for layout in ("fsdp1", "fsdp2")
    ]
    column = [cell.strip() for cell in title].index("loss vs fsdp1")
    assert {row[column].split()[0] for row in rows[1::2]} <= {"agrees", "identical"}
    page = lines[-1].removeprefix("report page: ")
    assert (folder / page).is_file()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the repository that the README's commands need."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(REPOSITORY / "examples", folder / "examples")
    return folder


@pytest.mark.slow(sampled=True)
def test_the_commands_of_the_readme_work(folder: Path) -> None:
    """The commands run in order, because later ones use the files of earlier ones, and so does the Python code."""
    for command in COMMANDS[3:]:
        works(command, folder)
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        python_works(code, folder)


def works(command: str, folder: Path) -> None:
    """Run a command in a folder and assert that it exits with 0."""
    program, *arguments = shlex.split(command)
    assert program == "meshrunner"
    done = meshrunner(folder, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("guide", GUIDES)
def test_the_commands_of_a_guide_work(guide: str, tmp_path: Path) -> None:
    """The commands run in order, because later ones use what earlier ones have written."""
    text = (REPOSITORY / "docs" / f"{guide}.md").read_text()
    found = commands(text)
    assert found
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples")
    for command in found:
        works(command, tmp_path)
    for code in re.findall(r"```python\n(from (?:meshrunner|transformers) import .*?)```", text, re.DOTALL):
        python_works(code, tmp_path)


def test_every_guide_with_commands_is_tested() -> None:
    guides = (REPOSITORY / "docs").rglob("*.md")
    assert {guide.stem for guide in guides if commands(guide.read_text())} == set(GUIDES)


def python_works(code: str, folder: Path) -> None:
    """Run Python code in a folder and assert that it exits with 0."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
