"""The report page of a running sweep, rewritten after runs so seldom that it costs almost nothing."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from meshrunner.recipes.storage.durable import check_regular
from meshrunner.runner.compare.page.write import write_page
from meshrunner.runner.compare.rows import Comparison, compare_sweep
from meshrunner.runner.rundir.files import MULTIRUN, REPORT

LEAST_S = 10.0
"""Minimum seconds between two pages."""
SHARE = 0.01
"""Largest fraction of the sweep's time that pages may take."""
SECONDS_PER_RUN = 0.01
"""Expected cost of the first page. Later pages are expected to cost as much as the previous one."""


class LivePage:
    """Writes the report page of a sweep directory while the sweep is running."""

    def __init__(self, sweep_dir: Path, runs: int) -> None:
        self.sweep_dir = sweep_dir
        self.cost = SECONDS_PER_RUN * runs
        self.written = _age(sweep_dir / REPORT) or _age(sweep_dir / MULTIRUN) or time.time()

    def run_ended(self) -> None:
        """Write the page unless the last one is too recent."""
        if time.time() - self.written < max(LEAST_S, self.cost / SHARE):
            return
        began = time.monotonic()
        # A page must not end the sweep. The one at the end fails in the same way, with a warning.
        with suppress(Exception):
            write_report(self.sweep_dir, compare_sweep(self.sweep_dir)[0])
        self.cost = time.monotonic() - began
        self.written = time.time()


def write_report(sweep_dir: Path, comparison: Comparison) -> Path:
    """Write the report page into a sweep directory and return its path; raises ConfigError, OSError or ValueError."""
    page = sweep_dir / REPORT
    with suppress(FileNotFoundError):
        check_regular(page)  # a symbolic link would lead elsewhere
    write_page(comparison, page)
    return page


def _age(path: Path) -> float | None:
    """Return the time a file was written, or None if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
