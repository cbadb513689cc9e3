"""The report page of a sweep that goes on: rewritten when a run has ended, seldom enough to cost next to nothing."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from meshrunner.recipes.storage.durable import check_regular
from meshrunner.runner.compare.page.write import write_page
from meshrunner.runner.compare.rows import Comparison, compare_sweep
from meshrunner.runner.rundir.files import MULTIRUN, REPORT

LEAST_S = 10.0
"""Seconds between two pages, at least."""
SHARE = 0.01
"""Of the sweep's time that its pages may take."""
SECONDS_PER_RUN = 0.01
"""What the first page is expected to take; of the others, the one before tells."""


class LivePage:
    """The page of one sweep directory."""

    def __init__(self, sweep_dir: Path, runs: int) -> None:
        self.sweep_dir = sweep_dir
        self.cost = SECONDS_PER_RUN * runs
        self.written = _age(sweep_dir / REPORT) or _age(sweep_dir / MULTIRUN) or time.time()

    def run_ended(self) -> None:
        """Write the page if it is time."""
        if time.time() - self.written < max(LEAST_S, self.cost / SHARE):
            return
        began = time.monotonic()
        # No page is worth a sweep; the last one, at its end, fails in the same way, and says so.
        with suppress(Exception):
            write_report(self.sweep_dir, compare_sweep(self.sweep_dir)[0])
        self.cost = time.monotonic() - began
        self.written = time.time()


def write_report(sweep_dir: Path, comparison: Comparison) -> Path:
    """Return the page of a comparison of a sweep's runs, in its directory; raises ConfigError, OSError, ValueError."""
    page = sweep_dir / REPORT
    with suppress(FileNotFoundError):
        check_regular(page)  # a link would lead elsewhere
    write_page(comparison, page)
    return page


def _age(path: Path) -> float | None:
    """When a file was written; None where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
