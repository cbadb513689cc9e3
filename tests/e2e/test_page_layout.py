"""The layout of the report page in a real browser: what is visible without scrolling, on a phone, and on paper."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from meshrunner.runner.compare.comparison import compare_runs
from meshrunner.runner.compare.page.write import write_page
from meshrunner.runner.compare.runs import read_runs
from tests.e2e.browser import CHROMIUM, DRIVER, Browser
from tests.pages import page_of
from tests.run_dirs import make_run

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromium-driver")

LONG = "except_last_and_some_more_words_in_a_very_long_value"


def long_names(folder: Path) -> Path:
    """Write the page of 12 rows with long names, three runs each."""
    grid = product(("fsdp1", "fsdp2"), ("none", "full", "selective_op"), ("always", LONG))
    for i, (layout, ac, reshard) in enumerate(grid):
        for repeat in range(3):
            memory = {"memory/peak_active_gib": 20.0 + i, "memory/peak_reserved_gib": 30.0 + i, "perf/mfu_median": 40.0}
            make_run(
                folder / "sweep" / f"{i}_{repeat}",
                f"parallelism={layout}",
                f"activation_checkpoint={ac}",
                f"parallelism.reshard_after_forward={reshard}",
                wps=9000.0 + 10 * i + 7 * repeat,
                losses=(6.0, 5.0 + 1e-5 * i, 4.0),
                summary=memory,
            )
    return written(folder)


def short(folder: Path, steps: int) -> Path:
    """Write the page of two rows whose runs have few steps."""
    for layout in ("fsdp1", "fsdp2"):
        losses, times = [5.0 - 0.1 * step for step in range(steps)], [1.0 + 0.01 * step for step in range(steps)]
        make_run(folder / "sweep" / layout, f"parallelism={layout}", losses=losses, times=times)
    return written(folder)


def written(folder: Path) -> Path:
    page = folder / "page.html"
    write_page(compare_runs(read_runs([folder / "sweep"]), "parallelism=fsdp1"), page)
    return page


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    grids = {f"{rows} rows": page_of(folder, rows, steps=40) for rows in (4, 12, 60)}
    return grids | {"long names": long_names(folder / "long")}


@pytest.fixture(scope="module", params=[(1280, 800), (390, 844)], ids=["laptop", "phone"])
def browser(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    width, height = request.param
    with Browser(tmp_path_factory.mktemp("profile"), width=width, height=height) as browser:
        yield browser


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile"), width=1280, height=800) as browser:
        yield browser


HIDDEN = """
const places = [...document.querySelectorAll('#table thead th')].flatMap((h, n) => h.matches('.leads') ? [n] : []);
const lines = [...document.querySelectorAll('#table tr')];
const cells = lines.flatMap((line) => {
  line.scrollIntoView({ block: 'center' });
  return [0, ...places].map((n) => line.cells[n]).filter((cell) => {
    const { left, right, top, bottom } = cell.getBoundingClientRect(), height = (top + bottom) / 2;
    const at = (x) => cell.contains(document.elementFromPoint(x, height));
    return left < 0 || right > innerWidth || !at(left + 3) || !at(right - 3);
  });
});
return [places.length, cells.map((cell) => cell.textContent)];
"""
"""The number of leading columns, and their cells and row names that are cut off, covered or outside the window."""
TITLES = (
    "return [...document.querySelectorAll('#table thead th')].filter((h) => h.offsetWidth).map((h) => h.textContent)"
)


@pytest.mark.parametrize("name", ["4 rows", "12 rows", "60 rows", "long names"])
def test_compared_figure_and_loss_verdict_are_visible_without_scrolling(
    name: str, pages: dict[str, Path], browser: Browser
) -> None:
    browser.open(pages[name])
    assert browser.run(HIDDEN) == [3, []]
    shown = browser.run(TITLES)
    assert {"WPS per device (p10-p90)", "vs fsdp1", "loss vs fsdp1"} <= set(shown)
    names = "return [...document.querySelectorAll('#table .name')].filter((n) => n.offsetWidth).length"
    assert ("parallelism" in shown) != bool(browser.run(names)), "settings, or the names of rows instead"
    box = "const b = document.querySelector('#rows .wide'); return b.scrollWidth - b.clientWidth"
    assert browser.run(box) <= 0 and browser.run("return document.documentElement.scrollWidth") <= browser.width


def test_the_table_is_on_the_first_screen(pages: dict[str, Path], laptop: Browser) -> None:
    laptop.open(pages["4 rows"])
    assert laptop.run("return document.querySelector('#table').getBoundingClientRect().bottom") < 800


@pytest.mark.parametrize(("name", "folded"), [("12 rows", 3), ("long names", 2)])
def test_one_key_shows_the_folded_columns_and_the_leading_columns_stay(
    name: str, folded: int, pages: dict[str, Path], laptop: Browser
) -> None:
    laptop.open(pages[name])
    few = laptop.run(TITLES)
    assert laptop.run("return document.getElementById('fold').textContent") == f"{folded} more columns"
    laptop.run("document.getElementById('fold').focus()")
    keys = [{"type": kind, "value": "\ue007"} for kind in ("keyDown", "keyUp")]  # Enter
    laptop.ask("/actions", actions=[{"type": "key", "id": "keyboard", "actions": keys}])
    assert len(laptop.run(TITLES)) == len(few) + folded
    scroll = "const b = document.querySelector('#rows .wide'); b.scrollTo(arguments[0], 0); return b.scrollLeft"
    for left in (0, 10_000):
        scrolled = laptop.run(scroll, left)
        assert laptop.run(HIDDEN) == [3, []]
    assert name != "12 rows" or scrolled > 100
    laptop.click("#fold")
    assert laptop.run(TITLES) == few


@pytest.mark.parametrize("steps", [1, 3, 7, 300])
def test_ticks_of_steps_are_whole_numbers(steps: int, tmp_path: Path, browser: Browser) -> None:
    browser.open(short(tmp_path, steps))
    for chart in ("losses", "times"):
        texts = "return [...document.querySelectorAll(`#${arguments[0]} text[text-anchor=middle]`)].map((t) => t.firstChild.data)"
        ticks = browser.run(texts, chart)
        assert ticks and all(tick.isdigit() for tick in ticks), ticks
        assert len(set(ticks)) <= steps and max(map(int, ticks)) <= steps


@pytest.mark.parametrize("name", ["4 rows", "long names"])
def test_points_of_repeated_rows_have_their_intervals(name: str, pages: dict[str, Path], laptop: Browser) -> None:
    laptop.open(pages[name])
    rows = "return [...document.querySelectorAll(arguments[0])].map((p) => Number(p.closest('[data-row]').dataset.row))"
    completed = 2 if name == "4 rows" else 12
    for point, line in (("#dots circle", "#dots .range"), ("#scatter .point", "#scatter .range")):
        assert (
            sorted(laptop.run(rows, point)) == sorted(laptop.run(rows, line))
            and len(laptop.run(rows, line)) == completed
        )
    lengths = (
        "return [...document.querySelectorAll('#dots .range')].map((l) => l.x2.baseVal.value - l.x1.baseVal.value)"
    )
    assert min(laptop.run(lengths)) > 0
    assert "lowest p10 to highest p90" in laptop.run("return document.querySelector('#dots figcaption').textContent")
    assert "would have shown" in laptop.run("return document.querySelector('#rows .legend').innerText")


def test_points_of_single_runs_have_no_interval(pages: dict[str, Path], laptop: Browser) -> None:
    laptop.open(pages["60 rows"])
    assert laptop.run("return document.querySelectorAll('#scatter .point').length") > 40
    assert laptop.run("return document.querySelectorAll('#scatter .range, #scaling .range').length") == 0


def pages_of(pdf: bytes) -> int:
    """Count the pages of a PDF file."""
    found = pdf
    for stream in re.findall(rb"stream\r?\n(.*?)\r?\nendstream", pdf, re.DOTALL):
        try:
            found += zlib.decompress(stream)
        except zlib.error:
            continue
    return len(re.findall(rb"/Type\s*/Page\b", found))


def three_settings(folder: Path) -> Path:
    for i, (layout, length) in enumerate(product(("fsdp1", "fsdp2"), (1024, 2048))):
        for repeat in range(3):
            settings = (f"parallelism={layout}", f"seq_len={length}", f"optimizer.lr={1e-3 + 1e-4 * (i % 2)}")
            make_run(
                folder / "sweep" / f"{i}{repeat}", *settings, wps=900.0 + 100 * i + repeat, times=[1.0, 1.1, 1.0, 1.2]
            )
    return written(folder)


@pytest.mark.parametrize("kind", ["two settings", "three settings"])
def test_four_rows_print_on_two_pages(kind: str, pages: dict[str, Path], laptop: Browser, tmp_path: Path) -> None:
    laptop.open(pages["4 rows"] if kind == "two settings" else three_settings(tmp_path))
    laptop.print(tmp_path / "page.pdf")
    assert 1 <= pages_of((tmp_path / "page.pdf").read_bytes()) <= 2


def test_paper_shows_all_columns_whatever_is_folded(pages: dict[str, Path], laptop: Browser) -> None:
    laptop.open(pages["long names"])
    few: list[Any] = laptop.run(TITLES)
    laptop.ask("/goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"media": "print"})
    try:
        assert (
            len(laptop.run(TITLES))
            == laptop.run("return document.querySelectorAll('#table thead th').length")
            > len(few)
        )
        assert laptop.run("return document.querySelector('#setup').innerText").count("fsdp1") == 2
    finally:
        laptop.ask("/goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"media": ""})
