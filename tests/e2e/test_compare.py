"""`meshrunner compare` on what `meshrunner run -m` has left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

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
        (("nowhere",), "no such directory: nowhere"),
        (("sweep", "--baseline", "paralelism=fsdp1"), "Did you mean 'parallelism'?"),
        (("sweep", "--html", "nowhere/page.html"), "nowhere/page.html cannot be written"),
        ((), "usage: meshrunner compare"),
    ],
)
def test_a_mistake_ends_with_2_and_is_said(sweep: Path, arguments: tuple[str, ...], said: str) -> None:
    ended = meshrunner("compare", *arguments, cwd=sweep)
    assert ended.code == 2 and said in ended.err and not ended.out, ended


@pytest.mark.slow
def test_a_thousand_runs_are_compared(tmp_path: Path) -> None:
    for layout in ("fsdp1", "fsdp2"):
        source = make_run(tmp_path / layout, f"parallelism={layout}", losses=[6.0] * 30)
        text = (source / "config.yaml").read_text()
        for i in range(MANY // 2):
            folder = shutil.copytree(source, tmp_path / "sweep" / f"{layout}-{i}")
            (folder / "config.yaml").write_text(text.replace("steps: 4", f"steps: {i + 4}"))
    ended = meshrunner("compare", "sweep", "--baseline", "parallelism=fsdp1", "--csv", cwd=tmp_path)
    assert ended.code == 0 and len(ended.out.splitlines()) == MANY + 1
