"""Reports the results of a sweep. Updates report.html during the sweep. Prints the final table and sends it to the tracker."""

import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.best import by
from meshrunner.runner.compare.comparison import compare_folders, compare_sweep
from meshrunner.runner.compare.page.write import write_page
from meshrunner.runner.compare.table import print_table
from meshrunner.runner.config.resumable import first_experiment
from meshrunner.runner.config.validation import listed
from meshrunner.runner.console import say, shown, warn
from meshrunner.runner.process.signals import interruptible
from meshrunner.runner.rundir.files import REPORT
from meshrunner.runner.trackers.handle import Trackers

MAX_REASONS = 5
LEAST_S = 10.0
"""Minimum seconds between two updates of the page report.html."""
SHARE = 0.01
"""Maximum fraction of a sweep's duration that is spent on updates of the page."""
SECONDS_PER_RUN = 0.01
"""Estimated seconds per run for the first update of the page. A later update is assumed to take as long as the previous one."""


def finish_sweep(sweep_dir: Path) -> None:
    """Print a sweep's table, write its page and update the tracker. Warn if the page or tracker fails. May raise Interrupted."""
    with interruptible():
        # The first run's tracker receives the table. The tracker loads its library while the page is written.
        tracking = Trackers(sweep_dir, first_experiment(sweep_dir).tracker)
        try:
            _compare(sweep_dir)
        finally:
            tracking.finish_or_warn("the sweep is complete")


def _compare(sweep_dir: Path) -> None:
    comparison = by(compare_folders([sweep_dir], None))
    print()
    print_table(comparison)
    runs = comparison.runs
    if all(run.state == "skipped" for run in runs):
        reasons = Counter(run.reason for run in runs).most_common(MAX_REASONS)
        lines = [f"{count} x {reason}" for reason, count in reasons]
        warn(listed(f"nothing ran: all {len(runs)} runs were skipped:", lines))
    page = sweep_dir / REPORT
    try:
        write_page(comparison, page)
    except (OSError, ValueError, ConfigError) as error:
        warn(f"the report page could not be written: {page}: {getattr(error, 'strerror', None) or error}")
        return
    say(f"\nreport page: {shown(page)}")


class LivePage:
    """Writes the report page of a sweep directory while the sweep is running."""

    def __init__(self, sweep_dir: Path, runs: int) -> None:
        self.sweep_dir = sweep_dir
        self.page = sweep_dir / REPORT
        self.cost = SECONDS_PER_RUN * runs
        # An adaptive sweeper creates a LivePage for each batch. An earlier batch may have written the page.
        self.written = self.page.stat().st_mtime if self.page.exists() else time.time()

    def run_ended(self) -> None:
        """Update the page if the last update is long enough ago (see LEAST_S and SHARE)."""
        if time.time() - self.written < max(LEAST_S, self.cost / SHARE):
            return
        began = time.monotonic()
        # A failure here must not end the sweep. `finish_sweep` warns if the final page fails, too.
        with suppress(Exception):
            write_page(by(compare_sweep(self.sweep_dir)[0]), self.page)
        self.cost = time.monotonic() - began
        self.written = time.time()
