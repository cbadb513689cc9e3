"""What a sweep ends with: its table, the report page beside its runs, and the table at its tracker."""

from __future__ import annotations

from pathlib import Path

from runner.compare.page import write_page
from runner.compare.sweep import compare_sweep
from runner.compare.table import print_table
from runner.execute import signals
from runner.experiment import check
from runner.outcome import Interrupted
from runner.progress import warn
from runner.report import shown
from runner.rundir import read_config, read_json
from runner.trackers.following import Following


def conclude(sweep_dir: Path) -> None:
    """Print and write all that; what cannot be written costs a warning. Raises Interrupted."""
    with signals():
        tracking = _tracking(sweep_dir)  # it loads its library while the page is written
        try:
            _answer(sweep_dir)
        finally:
            _finish(tracking)


def _answer(sweep_dir: Path) -> None:
    comparison, problem = compare_sweep(sweep_dir)
    if problem is not None:
        warn(problem)
    print()
    print_table(comparison)
    page = sweep_dir / "report.html"
    try:
        write_page(comparison, page)
    except OSError as error:
        warn(f"the report page could not be written: {error.strerror}")
        return
    print(f"\nsweep directory: {shown(sweep_dir)}\nreport page: {shown(page)}", flush=True)


def _tracking(sweep_dir: Path) -> Following:
    """The tracker of the first run, for all: runs may have settings of their own, a table has one place."""
    first = read_json(sweep_dir / "sweep.json")["jobs"][0]["name"]
    return Following.start(sweep_dir, check(read_config(sweep_dir / first)).tracker)


def _finish(tracking: Following) -> None:
    try:
        warning = tracking.finish()
    except Interrupted:
        warning = "the sweep is complete; its tracker was not waited for"
    if warning is not None:
        warn(warning)
