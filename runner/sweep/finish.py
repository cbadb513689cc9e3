"""Reports the results of a sweep: the table on stdout and in the tracker, and the report page."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.rows import Comparison, compare_sweep
from meshrunner.runner.compare.table import print_table
from meshrunner.runner.config.placed import first_experiment
from meshrunner.runner.config.validation import listed
from meshrunner.runner.console import say, shown, warn
from meshrunner.runner.process.signals import interruptible
from meshrunner.runner.rundir import find_obstacle, run_names
from meshrunner.runner.rundir.files import REPORT
from meshrunner.runner.sweep.live_page import write_report
from meshrunner.runner.trackers.base import NoTracker
from meshrunner.runner.trackers.handle import Trackers

MAX_REASONS = 5


def finish_sweep(sweep_dir: Path) -> None:
    """Print, write and track the results of a sweep; warn if that fails. Raises Interrupted."""
    with interruptible():
        # The first run's tracker receives the table. It is started early, to load its library while the page is written.
        tracker = first_experiment(sweep_dir, run_names(sweep_dir)).tracker
        obstacle = find_obstacle(sweep_dir)
        if obstacle and tracker.compares:
            warn(f"the table of the sweep is not tracked: {sweep_dir}: {obstacle}")
        tracking = Trackers.start(sweep_dir, NoTracker(kind="none") if obstacle else tracker)
        try:
            _compare(sweep_dir)
        finally:
            tracking.finish_or_warn("the sweep is complete")


def _why_all_are_skipped(comparison: Comparison) -> str:
    """Return a warning with the most frequent reasons if every run of a sweep was skipped, else an empty string."""
    runs = [run for row in comparison.rows for run in row.runs]
    if any(run.state != "skipped" for run in runs):
        return ""
    reasons = Counter(run.reason for run in runs)
    lines = [f"{count} x {reason}" for reason, count in reasons.most_common(MAX_REASONS)]
    lines += [f"and {len(reasons) - MAX_REASONS} other reasons"] * (len(reasons) > MAX_REASONS)
    return listed(f"nothing ran: all {len(runs)} runs were skipped:", lines)


def _compare(sweep_dir: Path) -> None:
    comparison, problem = compare_sweep(sweep_dir)
    if problem is not None:
        warn(problem)
    print()
    print_table(comparison)
    if skipped := _why_all_are_skipped(comparison):
        warn(skipped)
    try:
        page = write_report(sweep_dir, comparison)
    except (OSError, ValueError, ConfigError) as error:
        warn(f"the report page could not be written: {sweep_dir / REPORT}: {getattr(error, 'strerror', None) or error}")
        return
    say(f"\nreport page: {shown(page)}")
