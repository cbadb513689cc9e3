"""Train pairs of runs that are twins, or differ by 4% more work, while other processes use the CPU. Count correct verdicts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

MESHRUNNER = str(Path(sys.executable).with_name("meshrunner"))
ROOT = Path(__file__).parents[1]
"""Directory from which `bench.planted` can be imported."""
BUSY = 2
"""Number of other processes, each of which keeps a core busy."""
TWIN_TRIES, PLANTED_TRIES = 20, 10
PLANTED = 0.04
"""Additional time of a step with planted (extra) matmuls, as a fraction."""
CALIBRATION = 300
"""Number of extra matmuls in the calibration: many, so that the time of one matmul is measured accurately."""
MODEL = [
    "hardware=cpu",
    *("launch.workers=1", "launch.threads=1", "parallelism=single"),
    *(
        "model.kind=bench.planted:Planted",
        "model.dim=128",
        "model.n_layers=2",
        "model.ffn_dim=384",
        "model.vocab_size=512",
    ),
    *("data=random", "seq_len=128", "micro_batch=2", "steps=240", "tracker=none", "sweep.devices=2"),
    "sweep.max_repeat=20",
]
"""Overrides of all runs. The two runs of a round execute at the same time, so that other processes slow both runs equally."""


def verdict(folder: Path) -> None:
    """Count the sweeps of twins in which `compare` finds no difference, and the other sweeps in which it finds a difference."""
    with ExitStack() as stack:
        for _ in range(BUSY):
            stack.callback(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
        alike = 0
        for i in range(1, TWIN_TRIES + 1):
            row, _ = sweep(folder, "TWIN=a,b", 3)
            alike += row["within_noise"]
            print(f"twins {i}: {_said(row)}; no difference in {alike} of {i} tries", flush=True)
        _, ratios = sweep(folder, f"EXTRA=0,{CALIBRATION}", 5)
        count = round(CALIBRATION * PLANTED / math.expm1(fmean(ratios)))
        slower = 100 * math.expm1(fmean(ratios))
        print(f"calibration: {CALIBRATION} matmuls take {slower:.1f}% of a step, so {count} are planted", flush=True)
        found, all_ratios = 0, list[float]()
        for i in range(1, PLANTED_TRIES + 1):
            row, ratios = sweep(folder, f"EXTRA=0,{count}", "auto")
            all_ratios += ratios
            found += not row["within_noise"] and row["speed_vs_baseline_pct"] < 0
            print(f"planted {i}: {_said(row)} after {len(ratios)} rounds; found in {found} of {i} tries", flush=True)
    error = 100 * stdev(all_ratios) / math.sqrt(len(all_ratios))
    print(
        f"verdict: no difference between twins in {alike} of {TWIN_TRIES} tries; planted difference found in {found} of"
    )
    print(
        f"{PLANTED_TRIES}. Planted runs took {100 * math.expm1(fmean(all_ratios)):.2f}% longer (standard error {error:.2f}%),"
    )
    print(
        f"and the ratio of two runs of a round varied by {100 * stdev(all_ratios):.1f}% (standard deviation)",
        flush=True,
    )


def sweep(folder: Path, varied: str, repeat: int | str) -> tuple[dict[str, Any], list[float]]:
    """
    Run a sweep over two values of an environment variable. The first value is the baseline.

    Return the second row of `compare --json`, and for each round log(CPU time of the second run / CPU time of the first run).
    """
    sweep = Path(tempfile.mkdtemp(dir=folder)) / "sweep"
    baseline = f"launch.env.{varied.partition(',')[0]}"
    command = [MESHRUNNER, "run", "-m", *MODEL, f"+launch.env.{varied}", f"sweep.repeat={repeat}"]
    subprocess.run(
        [*command, f"sweep.baseline={baseline}", f"hydra.sweep.dir={sweep}"], cwd=ROOT, capture_output=True, check=True
    )
    rows = json.loads(
        subprocess.run([MESHRUNNER, "compare", str(sweep), "--json"], capture_output=True, check=True).stdout
    )
    assert rows[1]["within_noise"] is not None, "nothing was tested"
    speeds = [
        {run["directory"].rpartition("-")[2]: _cpu_time(Path(run["directory"])) for run in row["runs"]} for row in rows
    ]
    return rows[1], [math.log(speeds[1][repeat] / speeds[0][repeat]) for repeat in speeds[1]]


def _cpu_time(run: Path) -> float:
    return float(json.loads((run / "summary.json").read_text())["perf/cpu_time_s_median"])


def _said(row: dict[str, Any]) -> str:
    return f"{row['speed_vs_baseline_pct']:+.1f}%{' (within noise)' if row['within_noise'] else ''}"
