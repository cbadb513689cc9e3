"""`meshrunner compare` on what `meshrunner run -m` has left, and the page in a real browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.browser import CHROMIUM, DRIVER, Browser
from tests.e2e.command import TINY, meshrunner
from tests.run_dirs import make_run

MANY = 1000


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FSDP1, FSDP2 and DDP with two batch sizes, one of them impossible."""
    folder = tmp_path_factory.mktemp("sweep")
    layouts = ("parallelism=fsdp1,fsdp2,ddp", "micro_batch=1,3", "global_batch=2")
    overrides = [each for each in TINY if not each.startswith("micro_batch")]
    meshrunner("run", "-m", *overrides, *layouts, "hydra.sweep.dir=sweep", cwd=folder)
    return folder


def test_a_sweep_becomes_a_table(sweep: Path) -> None:
    ended = meshrunner("compare", "sweep", "--baseline", "parallelism=fsdp1", "--json", cwd=sweep)
    assert ended.code == 0, ended
    rows = json.loads(ended.out)
    assert [(row["micro_batch"], row["parallelism"], row["state"]) for row in rows] == [
        (batch, layout, state)
        for batch, state in ((1, "completed"), (3, "skipped"))
        for layout in ("fsdp1", "fsdp2", "ddp")
    ]
    assert [row["loss_verdict"] in ("identical", "agrees") for row in rows] == [False, True, True, False, False, False]
    assert rows[1]["wps_vs_baseline_pct"] is not None and rows[1]["within_noise"] is None
    assert "not a multiple" in rows[3]["reason"]


def test_what_is_piped_is_not_cut(sweep: Path) -> None:
    ended = meshrunner("compare", "sweep", "--baseline", "parallelism=fsdp1", cwd=sweep, COLUMNS="80")
    lines = [line for line in ended.out.splitlines() if line.startswith("|")]
    assert ended.code == 0 and len(lines) == 8 and len(set(map(len, lines))) == 1 and len(lines[0]) > 100, ended


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "there is no folder nowhere"),
        (("sweep", "--baseline", "paralelism=fsdp1"), "Did you mean 'parallelism'?"),
        (("sweep", "--html", "nowhere/page.html"), "nowhere/page.html cannot be written"),
        ((), "usage: meshrunner compare"),
    ],
)
def test_a_mistake_ends_with_2_and_is_said(sweep: Path, arguments: tuple[str, ...], said: str) -> None:
    ended = meshrunner("compare", *arguments, cwd=sweep)
    assert ended.code == 2 and said in ended.err and not ended.out, ended


def test_a_thousand_runs_are_compared(tmp_path: Path) -> None:
    for layout in ("fsdp1", "fsdp2"):
        source = make_run(tmp_path / layout, f"parallelism={layout}", losses=[6.0] * 30)
        text = (source / "config.yaml").read_text()
        for i in range(MANY // 2):
            folder = shutil.copytree(source, tmp_path / "sweep" / f"{layout}-{i}")
            (folder / "config.yaml").write_text(text.replace("steps: 4", f"steps: {i + 4}"))
    ended = meshrunner("compare", "sweep", "--baseline", "parallelism=fsdp1", "--csv", cwd=tmp_path)
    assert ended.code == 0 and len(ended.out.splitlines()) == MANY + 1


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


@pytest.fixture(params=[(1300, False), (390, True)], ids=["laptop, light", "phone, dark"])
def browser(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Browser]:
    width, dark = request.param
    with Browser(tmp_path / "profile", width=width, dark=dark) as browser:
        yield browser


ROWS = "return [...document.querySelectorAll('#table tbody tr')].filter((r) => !r.hidden).map((r) => r.innerText)"
CLICK = "[...document.querySelectorAll('th button')].find((b) => b.innerText.startsWith(arguments[0])).click()"
FILTER = "const f = document.getElementById('filter'); f.value = arguments[0]; f.dispatchEvent(new Event('input'))"


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromium-driver")
def test_the_page(page: Path, browser: Browser) -> None:
    browser.open(page)
    rows = browser.run(ROWS)
    assert len(rows) == 4 and "agrees" in rows[1] and "oom" in rows[3], rows

    speeds = ["9,000 (9,000-9,000)", "10,500 (10,500-10,500)", "12,000 (12,000-12,000)"]
    for expected in (speeds, speeds[::-1]):
        browser.run(CLICK, "WPS")
        assert [row.split("\t")[3] for row in browser.run(ROWS)] == [*expected, ""], "what is unknown stays last"

    browser.run(FILTER, "fsdp2 full")
    assert len(browser.run(ROWS)) == 1
    browser.run(FILTER, "")
    assert len(browser.run(ROWS)) == 4

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
    drawn = browser.run(
        "return [...document.querySelectorAll('figure')].filter((f) => f.querySelector('.main-svg')).length"
    )
    assert drawn == 5, "WPS, MFU, memory, Pareto front, losses"
    assert browser.run("return document.querySelectorAll('#losses .scatterlayer .trace').length") == 4, (
        "3 and a difference"
    )

    assert browser.run("return document.documentElement.scrollWidth") <= browser.width, "nothing sticks out"
    assert browser.run("return performance.getEntriesByType('resource').length") == 0, "nothing is loaded"
    assert browser.console() == []
    browser.screenshot(page.with_suffix(".png"))
    assert page.with_suffix(".png").stat().st_size > 50_000
