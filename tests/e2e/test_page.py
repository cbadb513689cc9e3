"""The report page in a real browser: what it shows, and that table and charts follow one selection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.browser import CHROMIUM, DRIVER, Browser
from tests.e2e.command import meshrunner
from tests.pages import page_of
from tests.run_dirs import make_run

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromium-driver")

MEGABYTE = 10**6


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Figures as of GPUs, an `oom`, and text that must not become markup."""
    for i, (layout, ac) in enumerate((layout, ac) for ac in ("full", "none") for layout in ("fsdp1", "fsdp2")):
        out = (layout, ac) == ("fsdp2", "none")
        memory = {"memory/peak_active_gib": 20.0 + i, "memory/peak_reserved_gib": 30.0 + i, "device_memory_gib": 80.0}
        folder = make_run(
            tmp_path / "sweep" / f"{i}",
            f"parallelism={layout}",
            f"activation_checkpoint={ac}",
            "data.kind=<img src=x onerror=alert(1)>" if out else "data.kind=</script>|<b>",
            wps=None if out else 9000.0 + 1500 * i,
            losses=None if out else (6.0, 5.0 + 1e-5 * i, 4.0),
            state="oom" if out else "completed",
            reason="rank 1: <b>16 GiB</b> wanted" if out else "",
            summary={} if out else memory | {"perf/mfu_median": 40.0 + i},
            environment={"command": ["meshrunner", "run", "data.path=</script>"], "packages": {"torch": "2.13.0"}},
        )
        (folder / "logs").mkdir()
        (folder / "logs" / "rank0.log").write_text("<script>document.title = 'taken over'</script>\n")
    ended = meshrunner("compare", "sweep", "--baseline", "parallelism=fsdp1", "--html", "page.html", cwd=tmp_path)
    assert ended.code == 0, ended
    return tmp_path / "page.html"


@pytest.fixture(params=[(1300, False), (400, True)], ids=["laptop, light", "phone, dark"])
def browser(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Browser]:
    width, dark = request.param
    with Browser(tmp_path / "profile", width=width, dark=dark) as browser:
        yield browser


ROWS = """
return [...document.querySelectorAll('#table tbody tr')].filter((r) => !r.hidden)
  .map((r) => [...r.cells].map((c) => c.textContent))
"""
CLICK = "[...document.querySelectorAll('th button')].find((b) => b.textContent.startsWith(arguments[0])).click()"
FILTER = "const f = document.getElementById('filter'); f.value = arguments[0]; f.dispatchEvent(new Event('input'))"
DRAWN = """
return [...document.querySelectorAll('figure')].filter((f) => f.offsetHeight && f.querySelector('svg, table')).map((f) => f.id)
"""
MARKED = "return [...new Set([...document.querySelectorAll(`#${arguments[0]} [data-row]`)].map((m) => Number(m.dataset.row)))]"
CHOOSE = """
const s = [...document.querySelectorAll(`#${arguments[0]} select`)].find((s) => s.dataset.label === arguments[1]);
s.value = arguments[2];
s.dispatchEvent(new Event('change'));
"""
TEXT = "return document.getElementById(arguments[0]).textContent"
WIDTH = "return document.documentElement.scrollWidth"


def sound(browser: Browser) -> None:
    """Nothing sticks out, nothing is loaded, nothing is complained about."""
    assert browser.run(WIDTH) <= browser.width
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    assert browser.console() == []


def test_what_runs_say_stays_text_and_every_chart_is_drawn(page: Path, browser: Browser) -> None:
    browser.open(page)
    rows = browser.run(ROWS)
    assert len(rows) == 4 and "agrees" in rows[1][-1] and "oom" in rows[3], rows
    text = browser.run(
        "document.querySelectorAll('details').forEach((d) => d.open = true); return document.body.innerText"
    )
    for said in (
        "rank 1: <b>16 GiB</b> wanted",
        "data.path=</script>",
        "torch 2.13.0",
        "<script>document.title",
        "oom",
    ):
        assert said in text
    browser.run(CHOOSE, "difference", "against", "3")
    assert "<img src=x onerror=alert(1)>" in browser.run(TEXT, "difference")
    assert browser.run("return document.querySelectorAll('img, b b, script').length") == 2, "the page's own scripts"
    assert "| </script>\\|<b> " in browser.run("return markdown()"), "a bar does not end a cell"
    seen = "return [...document.querySelectorAll('#table tbody tr:first-child > *, #table .name')].map((c) => c.offsetWidth > 0)"
    phone = browser.width == 400
    assert browser.run(seen)[:3] == [True, phone, not phone], "the number; the name or else the keys"
    assert browser.run(DRAWN) == ["dots", "scatter", "heat", "parallel", "losses", "difference"]
    assert browser.run("return document.querySelectorAll('#losses polyline').length") == 4, "3 and a difference"
    assert 3 not in browser.run(MARKED, "dots") + browser.run(MARKED, "losses"), (
        "of a run that broke off there is nothing"
    )
    sound(browser)
    browser.screenshot(page.with_suffix(".png"))
    assert page.with_suffix(".png").stat().st_size > 50_000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_of(tmp_path_factory.mktemp("large"), 60, steps=50)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile"), width=1440) as browser:
        yield browser


@pytest.fixture
def opened(large: Path, wide: Browser) -> Browser:
    wide.open(large)
    return wide


def column(browser: Browser, title: str) -> list[str]:
    """The cells of a column, of the rows that are shown."""
    titles = browser.run("return [...document.querySelectorAll('#table thead th')].map((h) => h.textContent)")
    place = next(i for i, each in enumerate(titles) if each.startswith(title))
    return [row[place] for row in browser.run(ROWS)]


def speeds(browser: Browser) -> list[float]:
    return [float(cell.split()[0].replace(",", "")) for cell in column(browser, "WPS") if cell]


def test_a_click_sorts_and_what_is_unknown_stays_last(opened: Browser) -> None:
    opened.run(CLICK, "WPS")
    rising = speeds(opened)
    assert column(opened, "WPS")[-1] == ""
    opened.run(CLICK, "WPS")
    assert rising == sorted(rising) and speeds(opened) == rising[::-1] and len(rising) < 60
    assert column(opened, "WPS")[-1] == ""
    opened.run(CLICK, "optimizer.lr")
    assert column(opened, "optimizer.lr")[0] == "0.0003", "a number, not text"
    sound(opened)


@pytest.mark.parametrize(
    ("typed", "holds"),
    [
        ("parallelism=fsdp2", lambda row: row["parallelism"] == "fsdp2"),
        ("parall=FSDP2 completed", lambda row: row["parallelism"] == "fsdp2" and row["state"] == "completed"),
        ("nodes>2 lr=3e-4", lambda row: row["launch.nodes"] in ("4", "8", "16") and row["optimizer.lr"] == "0.0003"),
        ("launch.nodes=1,16", lambda row: row["launch.nodes"] in ("1", "16")),
        ("wps>8,000", lambda row: row["WPS"] != "" and float(row["WPS"].split()[0].replace(",", "")) > 8000),
        ("state!=completed", lambda row: row["state"] != "completed"),
        ("oom", lambda row: row["state"] == "oom"),
        (
            '"selective_op" fsdp1',
            lambda row: row["activation_checkpoint"] == "selective_op" and row["parallelism"] == "fsdp1",
        ),
    ],
)
def test_a_filter_chooses_rows_of_table_and_charts(typed: str, holds: Any, opened: Browser) -> None:
    names = ("parallelism", "activation_checkpoint", "launch.nodes", "optimizer.lr", "state", "WPS")
    rows = [
        dict(zip(names, cells, strict=True)) for cells in zip(*(column(opened, name) for name in names), strict=True)
    ]
    wanted = [i for i, row in enumerate(rows) if holds(row)]
    completed = [i for i in wanted if rows[i]["state"] == "completed"]
    assert 0 < len(wanted) < 60
    opened.run(FILTER, typed)
    assert opened.run(TEXT, "shown") == f"{len(wanted)} of 60 rows" and opened.run(TEXT, "problem") == ""
    assert len(opened.run(ROWS)) == len(wanted)
    assert sorted(opened.run(MARKED, "parallel")) == wanted
    assert sorted(opened.run(MARKED, "scatter")) == completed
    assert set(opened.run(MARKED, "dots")) <= set(completed) and set(opened.run(MARKED, "losses")) <= set(wanted)
    assert "dots" not in opened.run(DRAWN) or completed, "no empty chart"
    opened.open(Path(opened.run("return decodeURIComponent(location.pathname)")))
    opened.run(FILTER, "")
    assert len(opened.run(ROWS)) == 60
    sound(opened)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("paralelism=fsdp2", "no key paralelism; known keys: state, "),
        ("memory>3", "memory may be memory/peak_active_gib"),
        ("wps>fast", "fast is not a number"),
    ],
)
def test_a_filter_that_is_not_understood_is_said_and_filters_nothing(typed: str, said: str, opened: Browser) -> None:
    opened.run(FILTER, typed)
    assert said in opened.run(TEXT, "problem") and len(opened.run(ROWS)) == 60
    opened.run(FILTER, "wps>")
    assert opened.run(TEXT, "problem") == "", "it is still being typed"


def test_a_reload_keeps_the_filter(large: Path, opened: Browser) -> None:
    opened.run(FILTER, "parallelism=fsdp2 lr<5e-4")
    opened.run("location.reload()")
    assert opened.run("return document.getElementById('filter').value") == "parallelism=fsdp2 lr<5e-4"
    assert len(opened.run(ROWS)) == 15


def test_a_page_that_has_no_address_of_its_own_is_filtered_too(opened: Browser) -> None:
    opened.run("history.replaceState = () => { throw Error('in a frame of something else') }")
    opened.run(FILTER, "parallelism=fsdp2")
    assert len(opened.run(ROWS)) == 30
    sound(opened)


def test_the_best_rows_are_marked_among_those_that_are_shown(opened: Browser) -> None:
    marked = """
    return [...document.querySelectorAll(`#table [data-marks*="${arguments[0]}"]`)]
      .map((c) => c.textContent.trim().split(' ')[0])
    """

    def fastest() -> str:
        rows = {
            row[0].strip().split(" ")[0]: speed
            for row, speed in zip(opened.run(ROWS), column(opened, "WPS"), strict=True)
        }
        return max(rows, key=lambda name: float((rows[name] or "0").split()[0].replace(",", "")))

    for typed in ("", "activation_checkpoint=full"):
        opened.run(FILTER, typed)
        assert opened.run(marked, "▲") == [fastest()]
        assert len(opened.run(marked, "▼")) == 1 and opened.run(marked, "◆")
    assert "▲ fastest" in opened.run(TEXT, "marks") and "grey" in opened.run(TEXT, "marks")


def test_among_rows_that_do_other_work_for_a_token_none_is_the_fastest(tmp_path: Path, wide: Browser) -> None:
    wide.open(page_of(tmp_path, 12, steps=5))
    marked = "return document.querySelectorAll('#table [data-marks]:not([data-marks=\"\"])').length"
    assert wide.run(marked) == 0 and wide.run(TEXT, "marks") == ""
    wide.run(FILTER, "seq_len=2048")
    assert wide.run(marked) > 0 and "grey" not in wide.run(TEXT, "marks"), "of three runs each"


def test_every_chart_is_drawn_and_a_value_keeps_its_colour(opened: Browser) -> None:
    charts = ["dots", "scatter", "heat", "ranks", "scaling", "parallel", "losses", "times", "difference"]
    assert opened.run(DRAWN) == charts
    assert len(opened.run(MARKED, "dots")) == 20 and len(opened.run(MARKED, "times")) == 8
    assert opened.run("return document.querySelectorAll('#times polyline').length") == 16, "curves and histograms"
    assert "rank" in opened.run("return document.querySelector('#ranks .tick title').textContent")
    fill = """return document.querySelector("#scatter [data-row='4']").getAttribute('fill')"""
    before = opened.run(fill)
    opened.run(FILTER, "fsdp1")
    assert opened.run(fill) == before
    opened.run(FILTER, "no such row")
    assert opened.run(DRAWN) == ["difference"], "no empty boxes"
    sound(opened)


def test_head_and_keys_stay_while_the_table_is_scrolled(opened: Browser) -> None:
    opened.click("#fold")
    seen = """
    const box = document.querySelector('#rows .wide');
    box.scrollTo(arguments[0], arguments[0]);
    const cells = [document.querySelector('#table thead th'), ...document.querySelector('#table tbody').rows[20].cells];
    return cells.slice(0, 4).map((cell) => cell.getBoundingClientRect()).map((at, i) => i ? at.left : at.top);
    """
    assert opened.run(seen, 0) == pytest.approx(opened.run(seen, 300), abs=1), (
        "the head's height; number and two keys from the left"
    )


def test_the_page_says_how_old_it_is(opened: Browser) -> None:
    for minutes, said in ((0.5, ""), (5, " (5 min ago)"), (300, " (5 hours ago)"), (6000, " (4 days ago)")):
        opened.run(
            "document.getElementById('written').dateTime = new Date(Date.now() - arguments[0] * 60000).toISOString(); showAge()",
            minutes,
        )
        assert opened.run(TEXT, "age") == said


def test_any_two_figures_and_a_colour_are_an_axis(opened: Browser) -> None:
    before = opened.run("return [...document.querySelectorAll('#scatter path.point')].map((p) => p.getAttribute('d'))")
    opened.run(CHOOSE, "scatter", "x", "launch.nodes")
    opened.run(CHOOSE, "scatter", "y", "perf/step_time_s")
    after = opened.run("return [...document.querySelectorAll('#scatter path.point')].map((p) => p.getAttribute('d'))")
    assert len(after) == len(before) > 40 and after != before
    assert {"launch.nodes", "step time, s"} <= set(
        opened.run("return [...document.querySelectorAll('#scatter text.axis')].map((t) => t.textContent)")
    )
    fills = (
        "return new Set([...document.querySelectorAll('#scatter path.point')].map((p) => p.getAttribute('fill'))).size"
    )
    opened.run(CHOOSE, "scatter", "colour", "activation_checkpoint")
    assert opened.run(fills) == 3
    opened.run(CHOOSE, "scatter", "colour", "perf/wps")
    assert opened.run(fills) > 20
    sound(opened)


def test_a_rectangle_and_a_click_are_filters_and_a_click_on_a_point_emphasises_a_row(opened: Browser) -> None:
    opened.run(CHOOSE, "scatter", "x", "perf/mfu")
    opened.run("document.getElementById('scatter').scrollIntoView({ block: 'center' })")
    box = opened.run(
        "const b = document.querySelector('#scatter svg').getBoundingClientRect(); return [b.x, b.y, b.width, b.height]"
    )
    x, y, width, height = box
    opened.drag((x + width * 0.5, y + 30), (x + width * 0.6, y + 60), (x + width - 5, y + height * 0.5))
    typed = opened.run("return document.getElementById('filter').value")
    assert [term.split(">")[0].split("<")[0] for term in typed.split()] == ["perf/mfu"] * 2 + ["perf/wps"] * 2
    assert 0 < len(opened.run(ROWS)) < 52, "fewer than have a figure"

    opened.run(FILTER, "")
    opened.run("document.querySelector('#heat .cell').dispatchEvent(new MouseEvent('click', { bubbles: true }))")
    typed = opened.run("return document.getElementById('filter').value")
    assert len(opened.run(ROWS)) == 10 and typed.count("=") == 2
    opened.run("document.querySelector('#heat .cell').dispatchEvent(new MouseEvent('click', { bubbles: true }))")
    assert opened.run("return document.getElementById('filter').value") == "", "the same again takes it back"

    opened.run(
        "document.querySelector('#scatter [data-row]').dispatchEvent(new MouseEvent('click', { bubbles: true }))"
    )
    (row,) = opened.run("return [...document.querySelectorAll('#table tr.picked')].map((r) => Number(r.dataset.row))")
    assert opened.run(MARKED, "losses") == [row], "curves of what was clicked"
    sound(opened)


def test_a_hidden_column_is_gone_from_the_table_and_from_what_is_copied(opened: Browser) -> None:
    labels = "[...document.querySelectorAll('#columns label')]"
    hide = f"{labels}.find((l) => l.textContent.startsWith(arguments[0])).firstChild.click()"
    opened.run(hide, "WPS")
    visible = opened.run(
        "return [...document.querySelectorAll('#table thead th')].filter((h) => h.offsetWidth).map((h) => h.textContent)"
    )
    assert not any(title.startswith("WPS") for title in visible) and "parallelism" in visible
    assert "WPS" not in opened.run("return markdown()").split("\n|")[1]


def test_what_is_copied_is_the_selection_as_markdown(opened: Browser) -> None:
    opened.run("""
    window.pasted = [];
    document.addEventListener('copy', () => pasted.push(getSelection().toString() || document.activeElement.value));
    """)
    for clipboard in ("undefined", "{ writeText: () => Promise.reject(Error('denied')) }"):
        opened.run(f"Object.defineProperty(navigator, 'clipboard', {{ value: {clipboard}, configurable: true }})")
        opened.run(FILTER, "parallelism=fsdp2 nodes=1")
        opened.click("#copy")
    opened.run("Object.defineProperty(navigator, 'clipboard', { value: { writeText: async (t) => pasted.push(t) } })")
    opened.run("document.getElementById('copy').click()")
    copied = opened.run("return new Promise((done) => setTimeout(() => done(pasted), 100))")
    assert len(copied) == 3 and len(set(copied)) == 1, copied
    verdict, _, head, *_ = copied[0].split("\n\n")
    assert verdict.startswith("Of all 60 rows:")
    assert "The 6 of them with `parallelism=fsdp2 nodes=1`:" in copied[0]
    table = [line for line in copied[0].splitlines() if line.startswith("|")]
    assert len(table) == 8 and len({len(line) for line in table}) == 1 and table[1].strip("|-") == ""
    for said in (
        "- devices: 16 x NVIDIA H100",
        "torch 2.13.0",
        "- command: meshrunner run -m model=llama3_8b",
        "commit 6c0d4bf3",
    ):
        assert said in copied[0], said
    assert "activation_checkpoint" in head and "▲" not in copied[0]


def test_two_configurations_are_compared(opened: Browser) -> None:
    first, second = opened.run("return [...document.querySelectorAll('#difference select')].map((s) => s.value)")
    assert (first, second) == ("0", "1")
    cells = "return [...document.querySelectorAll('#difference tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    head, *lines = opened.run(cells)
    assert head[0] == "key" and ["parallelism.kind", "fsdp1", "fsdp2"] in lines
    opened.run(CHOOSE, "difference", "against", "2")
    assert opened.run(cells)[1:] == [["launch.nodes", "1", "2"]]
    opened.run(CHOOSE, "difference", "against", "0")
    assert "nothing differs" in opened.run(TEXT, "difference")


def test_more_devices_are_compared_with_the_fewest(opened: Browser) -> None:
    assert opened.run("return document.querySelectorAll('#scaling .ideal').length") >= 6
    told = opened.run("return [...document.querySelectorAll('#scaling title')].map((t) => t.textContent)")
    assert any("scaling: 100.0% relative to 8 devices" in each for each in told)
    fewest = [each.rpartition(" of ")[2] for each in told if ": none " in each]
    assert fewest and "8 devices" not in fewest, "those are out of memory on 8"


def test_the_number_of_a_row_leads_to_its_runs(opened: Browser) -> None:
    opened.run("document.querySelector('#table a[href=\"#row-3\"]').click()")
    assert opened.run("return document.getElementById('runs').open && document.querySelector('#row-3 details').open")
    links = opened.run("return [...document.querySelectorAll('#row-3 a')].map((a) => a.getAttribute('href'))")
    assert (
        links and all(link.startswith("./") for link in links) and any(link.endswith("/config.yaml") for link in links)
    )


def test_on_paper_everything_is_there_and_nothing_to_click(large: Path, opened: Browser, tmp_path: Path) -> None:
    on_screen = opened.run("return document.querySelector('#dots svg').getAttribute('viewBox')")
    opened.print(tmp_path / "page.pdf")
    assert 20_000 < (tmp_path / "page.pdf").stat().st_size < MEGABYTE
    assert opened.run("return document.querySelector('#dots svg').getAttribute('viewBox')") == on_screen
    opened.run("dispatchEvent(new Event('beforeprint'))")
    for chart, width in (("dots", 325), ("losses", 490), ("parallel", 1000)):
        drawn = opened.run("return document.querySelector(`#${arguments[0]} svg`).getAttribute('viewBox')", chart)
        assert drawn.split()[2] == str(width), "as wide as the paper has room"
    assert opened.run("return document.getElementById('reasons').open")
    opened.run("dispatchEvent(new Event('afterprint'))")
    opened.ask("/goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"media": "print"})
    try:
        seen = "return [...document.querySelectorAll(arguments[0])].filter((e) => e.offsetHeight).length"
        assert opened.run(seen, "button#copy, .menu, #table input") == 0
        assert opened.run("return getComputedStyle(document.querySelector('#rows .wide')).maxHeight") == "none"
        assert opened.run("return getComputedStyle(document.querySelector('#table thead th')).position") == "static"
    finally:
        opened.ask("/goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"media": ""})


@pytest.mark.slow
def test_two_hundred_rows_of_a_thousand_steps_fit_and_can_be_used(tmp_path: Path) -> None:
    page = page_of(tmp_path, 200, steps=1000)
    assert page.stat().st_size < 5 * MEGABYTE
    with Browser(tmp_path / "profile", width=400) as browser:
        browser.open(page)
        assert browser.run(TEXT, "shown") == "200 rows"
        browser.run(FILTER, "fsdp2 nodes=16")
        assert browser.run(TEXT, "shown") == "20 of 200 rows"
        sound(browser)
