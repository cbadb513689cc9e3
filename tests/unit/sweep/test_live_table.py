"""The live table of a sweep."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from meshrunner.runner.sweep.live_table import LiveTable
from tests.run_dirs import make_run


def test_runs_that_ended_before_a_resume_keep_their_figures(tmp_path: Path) -> None:
    done = make_run(tmp_path / "0_parallelism-fsdp1", "parallelism=fsdp1", wps=4321.0, times=(1.0,) * 4)
    due = make_run(tmp_path / "1_parallelism-fsdp2", "parallelism=fsdp2", wps=9876.0, times=(1.0,) * 4)
    screen = Console(file=io.StringIO(), force_terminal=True, width=120, height=40)
    with LiveTable(screen, [done, due], [due]):
        drawn = screen.file.getvalue()  # type: ignore[attr-defined]
    first, second = (next(line for line in drawn.splitlines() if name in line) for name in (done.name, due.name))
    assert "completed" in first and "4/4" in first
    assert "pending" in second and "4/4" not in second
