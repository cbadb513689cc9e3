"""Output on small and large terminals: no line is wider than the terminal, and no word or figure is cut in two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshrunner.runner.compare.comparison import compare_runs
from meshrunner.runner.compare.runs import read_runs
from meshrunner.runner.compare.table import markdown
from tests.e2e.command import TINY
from tests.e2e.terminal import Terminal
from tests.run_dirs import make_run, write

TIME = r"(\d+m)?\d+s"
SIZES = ((80, 24), (120, 40))
sizes = pytest.mark.parametrize(("columns", "lines"), SIZES)


@pytest.fixture(scope="module")
def sixty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of sixty runs on GPUs: every figure that a table can have, and some that ran out of memory."""
    folder = tmp_path_factory.mktemp("terminal") / "sweep"
    jobs = []
    for i in range(60):
        layout, ac = ("fsdp1", "fsdp2")[i % 2], ("none", "full", "selective_op")[i // 2 % 3]
        lr = 0.001 * (1 + i // 6)
        overrides = [f"parallelism={layout}", f"activation_checkpoint={ac}", f"optimizer.lr={lr:g}"]
        name = f"{i:03}_parallelism-{layout}_activation_checkpoint-{ac}_lr-{lr:g}"
        oom = i % 10 == 4
        figures = {
            "world_size": 8,
            "device": "NVIDIA H100 80GB HBM3",
            "steps": 12_000,
            "perf/wps_p10": 6100.0 + i,
            "perf/wps_p90": 6300.0 + i,
            "perf/mfu_median": 26.7,
            "memory/peak_active_gib": 23.58,
            "memory/peak_active_pct": 24.81,
            "memory/peak_reserved_gib": 32.14,
            "memory/peak_reserved_pct": 33.82,
            "perf/step_time_s_median": 0.321,
            "perf/time_to_first_step_s": 31.0,
            "train/final_loss": 3.1415,
        }
        make_run(
            folder / name,
            *overrides,
            "steps=12000",
            wps=None if oom else 6200.0 + i,
            losses=None if oom else (6.0, 4.0),
            state="oom" if oom else "completed",
            reason="rank 3: CUDA out of memory. Tried to allocate 2.00 GiB of 79.11 GiB, of which 1.32 GiB is free"
            * oom,
            summary={} if oom else figures,
        )
        jobs.append({"name": name, "overrides": overrides})
    write(folder / "sweep.json", {"command": [], "jobs": jobs})
    return folder


def shown(folder: Path, columns: int, lines: int, *arguments: str) -> list[str]:
    """What a command leaves on a terminal."""
    terminal = Terminal(*arguments, cwd=folder, columns=columns, lines=lines)
    assert terminal.wait() == 0, terminal.page
    return terminal.page


@sizes
def test_status_of_sixty_runs(columns: int, lines: int, sixty: Path) -> None:
    page = shown(sixty.parent, columns, lines, "status", "sweep")
    rows = [line for line in page if re.match(r"#\d+ .* \d*/12000 ", line)]
    assert len(rows) == 60, page
    share = "" if columns == 80 else r" \(33\.82%\)"
    for i, row in enumerate(rows):
        wanted = (
            r"\boom +0/12000 +- +- +-"
            if i % 10 == 4
            else rf"completed +12000/12000 +{6200 + i:,} +32\.14 GiB{share} +-"
        )
        assert re.search(wanted + "$", row), row
    reason = " ".join(page[page.index(rows[-1]) :])
    assert "CUDA out of memory. Tried to allocate 2.00 GiB of 79.11 GiB" in reason and "54 completed, 6 oom" in reason


@sizes
def test_compare_of_sixty_runs(columns: int, lines: int, sixty: Path) -> None:
    page = shown(sixty.parent, columns, lines, "compare", "sweep", "--baseline", "parallelism=fsdp1")
    heads = [line for line in page if re.match(r" *# ", line)]
    assert len(heads) > 1
    keys = r"# +activation_checkpoint +optimizer\.lr +parallelism\b"
    assert all(re.search(rf"{keys}|# +row\b", head) for head in heads), heads
    assert any(re.search(keys, head) for head in heads)
    assert "vs" in heads[0] or columns > 80, "the difference stands in the first part"
    rows = [line for line in page if re.match(r" +60 +", line)]
    assert len(rows) == len(heads) and all("fsdp2" in row for row in rows), "a row is named in every part"
    text = " ".join(" ".join(page).split())
    for figure in ("6,259 (6,159-6,359)", "23.58 GiB (24.81%)", "32.14 GiB (33.82%)", "3.1415"):
        assert figure in text
    assert "60 rows: `meshrunner compare DIR --top N` shows the N fastest" in " ".join(" ".join(page[-lines:]).split())
    assert "2 oom: activation_checkpoint=none with" in " ".join(page[-lines:]), "the verdict is on the last screen, too"
    whole = markdown(compare_runs(read_runs([sixty]), "parallelism=fsdp1")).splitlines()
    sentences = {word for line in whole if not line.startswith("|") for word in line.removeprefix("- ").split()}
    assert not sentences - set(text.split()), "a word is cut in two"


@sizes
def test_some_rows_of_many(columns: int, lines: int, sixty: Path) -> None:
    page = shown(sixty.parent, columns, lines, "compare", "sweep", "--where", "parallelism=fsdp2", "--top", "3")
    text = " ".join(" ".join(page).split())
    assert "Shown: 3 of 60 rows (parallelism=fsdp2, the 3 fastest)." in text
    found = [match[1] for row in page if (match := re.match(r" [123] +fsdp2 +(\w+) +(?:lr=)?0\.01\b", row))]
    assert found[:3] == ["selective_op", "full", "none"]


@sizes
def test_ls_never_cuts_a_path(columns: int, lines: int, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "2026-11-22" / "05-20-01-d4e5f6", "steps=5", f"data.kind={'x' * 120}")
    sweep = tmp_path / "sweeps" / "2026-11-22" / "05-13-22-a1b2c3"
    for i, ac in enumerate(("none", "full", "selective_op")):
        make_run(sweep / f"{i}", f"activation_checkpoint={ac}", wps=12345.6, state="completed" if i else "oom")
    jobs = [{"name": f"{i}", "overrides": [f"activation_checkpoint={i}", f"optimizer.lr={i}"]} for i in range(3)]
    write(sweep / "sweep.json", {"command": [], "jobs": jobs})
    page = shown(tmp_path, columns, lines, "ls")
    text = "\n".join(page)
    assert "runs/2026-11-22/05-20-01-d4e5f6" in text and "sweeps/2026-11-22/05-13-22-a1b2c3" in text
    assert "3 runs: activation_checkpoint, lr" in text and "12,346" in text
    assert re.search(r"1 oom(, |[^\n]*\n.*)2 completed", text) and "…" in text, "what was typed yields"


@pytest.mark.slow
@sizes
def test_the_table_of_a_sweep_that_runs(columns: int, lines: int, folder: Path) -> None:
    grid = ("activation_checkpoint=none,full", "optimizer.lr=1e-3,2e-3")
    slow = ("optimizer.kind=faulty:SlowAdamW", "steps=12", "hydra.sweep.dir=sweep")
    terminal = Terminal("run", "-m", *TINY, *slow, *grid, cwd=folder, columns=columns, lines=lines)
    assert terminal.wait(180) == 0, terminal.page
    assert terminal.page[0] == "sweep directory: sweep", "it comes before the work"
    tables = [screen for screen in terminal.screens if any(line.startswith("run ") for line in screen)]
    middle = [
        " ".join(screen)
        for screen in tables
        if any(re.match(r"#0 none lr=0.001 +completed +12/12 +[\d.,]+ +\d\.\d\d GiB host +-$", line) for line in screen)
        and any(
            re.match(rf"#1 none lr=0.002 +running +\d+/12 +[\d.,]+ +\d\.\d\d GiB host +{TIME}$", line)
            for line in screen
        )
        and any(re.match(r"#3 full lr=0.002 +pending +- +- +- +-$", line) for line in screen)
    ]
    assert middle, tables
    best = rf"1/4 done, about {TIME} left, best so far: #0 none lr=0.001 [\d.,]+ tokens per CPU-second"
    assert any(re.search(best, screen) and "1 completed, 1 running, 2 pending" in screen for screen in middle), middle[
        0
    ]
    for phase in ("preparing the data", "starting the workers", "the first step"):
        assert any(re.search(rf"#\d \w+ lr=0\.00\d: {phase}", " ".join(screen)) for screen in tables), phase
    assert not any(line.startswith("run ") for line in terminal.screens[-1])


@pytest.mark.slow_cases("120-40", "80-24")
@sizes
def test_the_line_of_a_single_run_fits(columns: int, lines: int, folder: Path) -> None:
    slow = ("optimizer.kind=faulty:SlowAdamW", "steps=20", "hydra.run.dir=out")
    terminal = Terminal("run", *TINY, *slow, cwd=folder, columns=columns, lines=lines)
    assert terminal.wait() == 0, terminal.page
    shown = [[line for line in screen if line] for screen in terminal.screens]
    going = [screen for screen in shown if screen[-1].startswith("step ")]
    norm = r"  grad norm \d\.\d{3}" if columns == 120 else ""
    line = rf"step \d+/20  loss \d\.\d{{4}}{norm}  [\d.,]+ WPS  MFU \d+\.\d%  \d\.\d\d GiB host  ({TIME} left|done)$"
    assert going and all(len(screen) == 2 and re.match(line, screen[-1]) for screen in going), going


def test_a_single_run_says_where_it_is_and_what_it_does(folder: Path) -> None:
    terminal = Terminal("run", *TINY, "hydra.run.dir=out", "checkpoint=dcp", cwd=folder, columns=80, lines=24)
    assert terminal.wait() == 0, terminal.page
    assert terminal.page[0] == "run directory: out" and "\n".join(terminal.page).count("run directory") == 1
    for said in ("composing the configuration ...", "checking the configuration ...", "starting the workers"):
        assert terminal.frame(said), terminal.frames
    assert not re.search("composing|starting|first step$", "\n".join(terminal.page)), "they are wiped"


@pytest.mark.slow
def test_a_grid_is_counted_and_ranked(folder: Path) -> None:
    grid = ("micro_batch=1,2", "parallelism=fsdp1,fsdp2", "hardware=h100_80gb", "launch.workers=8")
    terminal = Terminal("plan", "-m", *TINY, *grid, "--active", cwd=folder, columns=80, lines=40)
    assert terminal.wait() == 0, terminal.page
    assert terminal.frame("predicting 4 combinations ... 3 of 4, about"), terminal.frames
    page = terminal.page
    assert page[0].startswith("in all rows: ") and max(map(len, page)) <= 80 and "predicting" not in "".join(page)
    assert sum(line.startswith("  micro_batch=") for line in page) == 4 and "fits: 4 of 4" in page
