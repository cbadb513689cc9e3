"""Tab completion in a real bash."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest

from tests.e2e.command import BOUND_S, PROGRAM, until

INSTALL = 'eval "$(meshrunner run -sc install=bash)"'
COMPLETE = """
for line in "$@"; do
    COMP_LINE=$line COMP_POINT=${#line}
    words=($line)
    _meshrunner_complete meshrunner "${words[-1]}" "${words[-2]}"
    printf '%s|' "${COMPREPLY[@]}"
    echo
done
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "config.yaml").touch()
    monkeypatch.setenv("PATH", f"{Path(PROGRAM).parent}:{os.environ['PATH']}")
    return tmp_path


def test_what_is_installed_works(folder: Path) -> None:
    lines = ["meshrunner resu", "meshrunner resume a", "meshrunner run checkpoint=dcp_", "meshrunner doctor x"]
    command = ["bash", "--norc", "-c", f"{INSTALL}\n{COMPLETE}", "bash", *lines]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=BOUND_S)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == ["resume |", "a\\ run/|", "checkpoint=dcp_async |", "|"]


@pytest.mark.slow
def test_at_a_prompt(folder: Path) -> None:
    """The Tab key of an interactive shell: what stands in the line afterwards is what is executed."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"PS1": "$ ", "TERM": "dumb", "INPUTRC": "/dev/null"}
    command = ["bash", "--norc", "--noprofile", "-i"]
    shell = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    # A shell function of that name records what would be executed.
    recorder = (
        """meshrunner() { if [ "$1" = -sc ]; then command meshrunner "$@"; else printf '<%s>' "$@" >> said; fi; }"""
    )
    os.write(ours, f"{INSTALL}; {recorder}\n".encode())
    keys = ["resu\ta\t", "run checkpoint=dc\t_a\t", "run parallelism=hsdp1 model=llama_\t"]
    for i, typed in enumerate(keys, 1):
        os.write(ours, f"meshrunner {typed} end{i}\n".encode())
        until(lambda: (folder / "said").exists() and f"<end{i}>" in (folder / "said").read_text(), 60)  # noqa: B023
    os.write(ours, b"exit\n")
    shell.kill()
    shell.wait()
    os.close(ours)
    said = (folder / "said").read_text()
    assert "<resume><a run/><end1>" in said, said
    assert "<run><checkpoint=dcp_async><end2>" in said, said
    assert "<model=llama_tiny><end3>" in said, said
