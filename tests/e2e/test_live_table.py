"""A sweep in front of a person: one table of all runs that lives while they run."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.e2e.command import TINY, meshrunner, status, until
from tests.e2e.terminal import Terminal

SLOW = ("optimizer.kind=faulty:SlowAdamW", "steps=40")
"""A run of four seconds."""


def sweep(*overrides: str, cwd: Path, lines: int = 40) -> Terminal:
    return Terminal("run", "-m", *TINY, "hydra.sweep.dir=sweep", *overrides, cwd=cwd, lines=lines)


def line_of(name: str, frame: str) -> str:
    """The row of a run, empty where it has none."""
    return next((line.strip() for line in frame.splitlines() if line.startswith(f"{name} ")), "")


def rows_of(frame: str) -> list[str]:
    """Names and states in one frame."""
    return re.findall(r"^(#\d seed=\d +(?:pending|starting|running|completed))\b", frame, re.MULTILINE)


@pytest.mark.slow
def test_all_runs_in_one_table_one_by_one(folder: Path) -> None:
    terminal = sweep(*SLOW, "seed=1,2,3", cwd=folder)
    assert terminal.wait(120) == 0
    running = [
        frame
        for frame in terminal.frames
        if re.match(r"#\d \S+ +completed +40/40 ", line_of("#0 seed=1", frame))
        and re.match(r"#\d \S+ +running +\d+/40 +[\d.,]+ +\d.\d\d GiB host +(?:\d+m)?\d+s", line_of("#1 seed=2", frame))
        and re.match(r"#\d \S+ +pending", line_of("#2 seed=3", frame))
        and "1 completed, 1 running, 1 pending" in frame
    ]
    assert running, terminal.frames
    steps = set(re.findall(r"#1 seed=2 +running +(\d+)/40", "\n".join(terminal.frames)))
    assert len(steps) > 1, steps
    assert not any(len(re.findall("^#0 seed=1 ", frame, re.MULTILINE)) > 1 for frame in terminal.frames), (
        "two tables at once"
    )
    assert not terminal.frame("grad norm"), "the line of a single run would fight with the table"
    last = terminal.frames[-1]
    assert "report page: sweep/report.html" in last and "pending" not in last, last


@pytest.mark.slow
def test_all_runs_in_one_table_side_by_side(folder: Path) -> None:
    terminal = sweep(*SLOW, "seed=1,2,3", "sweep.devices=4", cwd=folder)
    assert terminal.wait(120) == 0
    assert any(
        re.match(r"#\d \S+ +running +\d+/40 ", line_of("#0 seed=1", frame))
        and re.match(r"#\d \S+ +running +\d+/40 ", line_of("#1 seed=2", frame))
        and re.match(r"#\d \S+ +pending", line_of("#2 seed=3", frame))
        for frame in terminal.frames
    ), terminal.frames
    assert terminal.frame("000_seed-1: started on 0, 1")


@pytest.mark.slow
def test_a_screen_that_is_too_small_shows_what_happens(folder: Path) -> None:
    """Nine runs on eleven lines: what ended last, what is running, what is next, and how many there are of each."""
    terminal = sweep("steps=4", "seed=1,2,3,4,5,6,7,8,9", cwd=folder, lines=11)
    assert terminal.wait(180) == 0
    tables = [rows_of(frame) for frame in terminal.frames if rows_of(frame)]
    assert max(map(len, tables)) == 5
    middle = next(rows for frame in terminal.frames if (rows := rows_of(frame)) and "4 completed, 1 starting" in frame)
    assert [row.split()[2] for row in middle] == ["completed", "completed", "starting", *["pending"] * 2]
    assert [row.split()[0] for row in middle] == ["#2", "#3", "#4", "#5", "#6"]
    assert [row.split()[2] for row in tables[-1]].count("completed") == 5


@pytest.mark.slow
def test_a_failure_is_told_above_the_table_and_an_interrupt_restores_the_terminal(folder: Path) -> None:
    terminal = sweep("model.kind=faulty:Raises", "+model.step=2,900", *SLOW[:1], "steps=1000", cwd=folder)
    until(lambda: terminal.frame("failed: rank", "the user's own mistake"))
    until(lambda: any(re.match(r"#\d \S+ +running +[1-9]", line_of("#1 step=900", frame)) for frame in terminal.frames))
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.wait() == 130
    assert "interrupted by SIGINT" in terminal.frames[-1]
    assert terminal.shows_cursor
    assert [status(run)["state"] for run in sorted((folder / "sweep").glob("0*"))] == ["failed", "interrupted"]


@pytest.mark.slow
def test_what_is_piped_has_plain_lines(folder: Path) -> None:
    ended = meshrunner("run", "-m", *TINY, "seed=1,2", "hydra.sweep.dir=sweep", cwd=folder)
    assert ended.code == 0 and "\x1b" not in ended.out and "step 3/3" not in ended.out, ended
    # On a busy machine there are lines of what takes long, too: "#0 seed=1: loading torch ...".
    first, second = [line for line in ended.out.splitlines() if line.startswith("#") and not line.endswith(" ...")]
    assert first.startswith("#0 seed=1: completed, ") and "(1 of 2, about " in first and "the fastest so far)" in first
    assert second.startswith("#1 seed=2: completed, ") and "(2 of 2, " in second and "left" not in second
    ended = meshrunner("run", "-m", *TINY, "seed=3,4", "hydra.sweep.dir=sweep2", "progress=steps", cwd=folder)
    assert ended.code == 0 and ended.out.count("step 3/3") == 2, ended
    assert re.findall(r"^#. seed=.(?=: completed|$)", ended.out, re.MULTILINE) == ["#0 seed=3"] * 2 + ["#1 seed=4"] * 2
