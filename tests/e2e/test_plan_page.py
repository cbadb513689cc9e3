"""`meshrunner plan --html`: the page in a real browser, what it draws and what it says where one points."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.browser import CHROMIUM, DRIVER, Browser
from tests.e2e.command import meshrunner

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromium-driver"),
]

COMMANDS = {
    "cpu": ("model=llama_tiny", "hardware=cpu", "launch.workers=2"),
    "gpu": ("model=llama_tiny", "hardware=h100_80gb"),
    "tight": ("model=llama_tiny", "hardware=cpu", "launch.workers=2", "launch.host_memory_gib=0.1"),
    "not planned": ("model=llama_tiny", "hardware=h100_80gb", "parallelism.cpu_offload=true"),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Pages, and what the terminal said beside each."""
    folder, found = tmp_path_factory.mktemp("pages"), {}
    for name, overrides in COMMANDS.items():
        page = folder / f"{name}.html"
        ended = meshrunner("plan", *overrides, "--html", page.name, cwd=folder)
        assert ended.code == int(name == "tight") and ended.err == f"page: {page.name}\n", ended
        found[name] = page, ended.out
    assert {path.name for path in folder.iterdir() if path.suffix} == {f"{name}.html" for name in COMMANDS}
    return found


@pytest.fixture(scope="module", params=[(1400, False), (400, True)], ids=["laptop, light", "phone, dark"])
def browser(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    width, dark = request.param
    with Browser(tmp_path_factory.mktemp("profile"), width=width, dark=dark) as browser:
        yield browser


TEXTS = "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)"
BOX = (
    "const b = document.querySelector(arguments[0]).getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]"
)
SCALE = (
    "const s = document.querySelector('#memory select'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))"
)


def point(browser: Browser, x: float, y: float) -> None:
    """Move the mouse there, pressing nothing."""
    moved = {"type": "pointerMove", "x": round(x), "y": round(y)}
    browser.ask("/actions", actions=[{"type": "pointer", "id": "mouse", "actions": [moved]}])


def sound(browser: Browser) -> None:
    """Nothing sticks out, nothing is loaded, nothing is complained about."""
    assert browser.run("return document.documentElement.scrollWidth") <= browser.width
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    assert browser.console() == []


def held(browser: Browser) -> dict[str, float]:
    """GiB of each entry below the chart."""
    entries = [each.rsplit(" ", 2) for each in browser.run(TEXTS, "#memory .key-list > span")]
    assert all(unit == "GiB" for _, _, unit in entries)
    return {name: float(gib) for name, gib, _ in entries}


def moment(browser: Browser) -> tuple[str, float]:
    """What is said above the chart: the phase, and the GiB of all categories."""
    (said,) = browser.run(TEXTS, "#memory .moment")
    found = re.fullmatch(r"(?:peak: )?([\d.]+) GiB, (.*)", said)
    assert found is not None, said
    return found[2], float(found[1])


@pytest.mark.parametrize("name", ["cpu", "gpu", "tight"])
def test_the_chart_is_drawn_and_says_what_is_held_where_one_points(
    name: str, pages: dict[str, tuple[Path, str]], browser: Browser
) -> None:
    page, terminal = pages[name]
    browser.open(page)
    reserved, tight = name == "gpu", name == "tight"
    areas = browser.run("return [...document.querySelectorAll('#memory .area')].map((each) => each.dataset.name)")
    known = held(browser)
    lines = ["reserved"] * reserved + ["limit"] + ["device"] * reserved
    assert set(known) == {*areas, *lines} and len(areas) >= 7
    at_peak = moment(browser)
    assert at_peak[1] == pytest.approx(sum(known[each] for each in areas), abs=0.0005)
    assert f"peak active {at_peak[1]:.2f} GiB" in " ".join(terminal.split()) and f"in {at_peak[0]}, rank 0" in terminal
    assert browser.run(TEXTS, "#memory .peak title") == [f"peak: {at_peak[1]:.4f} GiB, {at_peak[0]}"]
    words = " ".join(browser.run("return document.querySelector('header').innerText").split())
    verdict, _, reason = terminal.splitlines()[0].partition(": ")
    assert words.startswith(f"{verdict} {reason}") and ("does not fit" in words) == tight
    for row in terminal.splitlines()[1:4]:
        assert " ".join(row.split()) in words
    parts = browser.run(TEXTS, "#memory svg > text:not(.axis):not(.moment):not([text-anchor])")
    assert {"forward", "loss", "backward", "end of backward", "update", "optimizer"} == set(parts)

    assert browser.run("return document.querySelector('#memory select').value") == ("device" if tight else "step")
    browser.run(SCALE, "device")
    browser.run("document.querySelector('#memory').scrollIntoView({ block: 'end' })")
    assert browser.run("return document.querySelectorAll('#memory svg > .limit').length") == len(lines) - reserved
    limit, peak, area = (browser.run(BOX, f"#memory {each}") for each in (".limit", ".peak", ".area"))
    assert (limit[1] > peak[3]) if tight else (limit[1] < peak[1]), "below the peak where it does not fit"
    seen = []
    for share in (0.02, 0.5, 0.95):
        point(browser, area[0] + share * (area[2] - area[0]), area[3] - 20)
        phase, total = moment(browser)
        seen.append(phase.partition(" of ")[0])
        assert total < at_peak[1] and total == pytest.approx(sum(held(browser)[each] for each in areas), abs=0.0005)
    assert seen == ["forward", "backward", "update"]
    point(browser, 5, 5)
    assert moment(browser) == at_peak, "what is shown while nobody points"
    sound(browser)
    browser.screenshot(page.with_suffix(".png"))
    assert page.with_suffix(".png").stat().st_size > 20_000


def test_a_page_without_a_step_has_no_chart(pages: dict[str, tuple[Path, str]], browser: Browser) -> None:
    browser.open(pages["not planned"][0])
    words = browser.run("return document.body.innerText")
    assert "not planned" in words and "cpu_offload moves parameters" in words
    assert browser.run("return document.querySelector('#memory').offsetHeight") == 0
    sound(browser)


def test_on_paper_the_chart_has_the_width_of_the_paper(pages: dict[str, tuple[Path, str]], browser: Browser) -> None:
    browser.open(pages["gpu"][0])
    size = "return document.querySelector('#memory svg').getAttribute('viewBox').split(' ')[2]"
    on_screen = browser.run(size)
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run(size) == "1000"
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.run(size) == on_screen
    sound(browser)
