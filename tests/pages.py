"""
Pictures of report pages of 4, 12, 60 and 200 rows, in a real browser: wide and as a phone shows them, light and dark, on paper.

    python -m tests.pages FOLDER
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from meshrunner.runner.compare.page.write import write_page
from meshrunner.runner.compare.rows import compare_runs
from meshrunner.runner.compare.runs import read_runs
from tests.e2e.browser import Browser
from tests.sweeps import GRIDS, make_sweep

STEPS = 400


def page_of(folder: Path, rows: int, steps: int = STEPS) -> Path:
    """Write a sweep of that many rows and its page; returns the page."""
    sweep = make_sweep(folder / f"{rows}-rows", rows, repeats=3 if rows <= 12 else 1, steps=steps)
    page = folder / f"{rows}-rows.html"
    write_page(compare_runs(read_runs([sweep]), "parallelism=fsdp1"), page)
    return page


def take(folder: Path) -> None:
    """All pictures, and the paper of the largest page."""
    with tempfile.TemporaryDirectory() as scratch:
        pages = {rows: page_of(Path(scratch), rows) for rows in GRIDS}
        for width, dark in ((1440, False), (1440, True), (400, False), (400, True)):
            with Browser(Path(scratch) / f"profile-{width}-{dark}", width=width, dark=dark) as browser:
                for rows, page in pages.items():
                    browser.open(page)
                    browser.screenshot(folder / f"{rows}-rows-{width}{'-dark' * dark}.png")
                    if (width, dark) == (1440, False):
                        browser.print(folder / f"{rows}-rows.pdf")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    take(target)
