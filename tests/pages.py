"""
Take pictures of report pages of 4, 12, 60 and 200 rows in a real browser, and one on paper.

    python -m tests.pages docs/pages       those that the documentation shows
    python -m tests.pages FOLDER all       every page wide and as on a phone, light and dark, and on paper
    python -m tests.pages docs/report.png PAGE     the first charts of the page of a real sweep, for the README
"""

from __future__ import annotations

import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from meshrunner.runner.compare.comparison import compare_runs
from meshrunner.runner.compare.page.write import write_page
from meshrunner.runner.compare.runs import read_runs
from tests.e2e.browser import Browser
from tests.sweeps import GRIDS, make_sweep

WIDE, PHONE = 1280, 390
SHOWN = ((4, WIDE, False), (12, WIDE, True), (60, PHONE, False), (200, WIDE, False))
"""(rows, width in CSS pixels, dark) of the pictures in the documentation."""
PRINTED = 60
STEPS = 200
SHADES = 48
"""Colours of a picture: enough for charts, and a fraction of the bytes."""


def page_of(folder: Path, rows: int, steps: int = STEPS) -> Path:
    """Write a sweep of that many rows and its page; returns the page."""
    sweep = make_sweep(folder / f"{rows}-rows", rows, repeats=3 if rows <= 12 else 1, steps=steps)
    page = folder / f"{rows}-rows.html"
    write_page(compare_runs(read_runs([sweep]), "parallelism=fsdp1"), page)
    return page


def take(folder: Path, *, everything: bool) -> None:
    """Write the pictures; everything: not those of the documentation alone."""
    from PIL import Image

    wanted = tuple(product(GRIDS, (WIDE, PHONE), (False, True))) if everything else SHOWN
    with tempfile.TemporaryDirectory() as scratch:
        pages = {rows: page_of(Path(scratch), rows) for rows in GRIDS}
        for rows, width, dark in wanted:
            file = folder / f"{rows}-rows{'-phone' * (width == PHONE)}{'-dark' * dark}.png"
            with Browser(Path(scratch) / file.stem, width=width, dark=dark) as browser:
                browser.open(pages[rows])
                browser.screenshot(file)
                if (everything or rows == PRINTED) and not dark:
                    browser.print(folder / f"{rows}-rows.pdf")
            _with_few_colours(Image.open(file)).save(file, optimize=True)


def take_one(file: Path, page: Path) -> None:
    """Write the picture of a page, from its head to the losses."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as scratch, Browser(Path(scratch), width=WIDE) as browser:
        browser.open(page)
        browser.run("document.getElementById('age').hidden = true")
        bottom = browser.run("return document.getElementById('losses').getBoundingClientRect().bottom + 16")
        browser.screenshot(file)
    picture = Image.open(file)
    _with_few_colours(picture.crop((0, 0, picture.width, round(bottom)))).save(file, optimize=True)


def _with_few_colours(picture: Any) -> Any:
    from PIL import Image

    return picture.convert("RGB").quantize(SHADES, Image.Quantize.FASTOCTREE, 4, dither=Image.Dither.NONE)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if target.suffix == ".png":
        take_one(target, Path(sys.argv[2]))
    else:
        target.mkdir(parents=True, exist_ok=True)
        take(target, everything="all" in sys.argv[2:])
