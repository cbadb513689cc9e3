"""Every command in the README does what it says it does."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
COMMANDS = [line.partition("  #")[0].strip() for block in BLOCKS for line in block.splitlines()]


def test_the_readme_begins_with_the_two_commands() -> None:
    assert COMMANDS[:2] == ["make demo", "make test"]
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test"} <= set(targets)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the README's reader is in: the repository, as far as the commands need it."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(REPOSITORY / "examples", folder / "examples")
    return folder


@pytest.mark.parametrize("command", COMMANDS[2:])
def test_a_command_of_the_readme_works(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = command.split()
    assert program == "meshrunner"
    monkeypatch.setenv("MESHRUNNER_CACHE", str(folder / "cache"))
    done = subprocess.run(
        [Path(sys.executable).with_name("meshrunner"), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
