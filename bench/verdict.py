"""Train identical runs while another process uses the CPU. Count how often `meshrunner compare` reports that speeds differ."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

MESHRUNNER = str(Path(sys.executable).with_name("meshrunner"))
TRIES = 10
TWINS = [
    *("experiment=fsdp1_vs_fsdp2", "parallelism=fsdp2", "steps=8", "tracker=none"),
    *("+launch.env.TWIN=a,b", "sweep.baseline=launch.env.TWIN=a"),
]
"""Overrides of a sweep over two configurations, which differ only in an environment variable that no code reads."""


def verdict(folder: Path) -> None:
    """Run the sweep TRIES times while another process keeps a core busy. Print how often `compare` finds no speed difference."""
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        wrong = sum(_told_apart(Path(tempfile.mkdtemp(dir=folder)) / "sweep") for _ in range(TRIES))
    finally:
        neighbour.kill()
        neighbour.wait()
    print(f"verdict: no difference between twins in {TRIES - wrong} of {TRIES} tries", flush=True)


def _told_apart(sweep: Path) -> bool:
    command = [MESHRUNNER, "run", "-m", *TWINS, f"hydra.sweep.dir={sweep}"]
    subprocess.run(command, cwd=sweep.parent, capture_output=True, check=True)
    compared = [MESHRUNNER, "compare", str(sweep), "--baseline", "launch.env.TWIN=a", "--json"]
    rows = json.loads(subprocess.run(compared, capture_output=True, check=True).stdout)
    found = [row for row in rows if row["speed_vs_baseline_pct"] is not None]
    assert found and all(row["within_noise"] is not None for row in found), "nothing was tested"
    print(
        *(f"twin {row['speed_vs_baseline_pct']:+.1f}%{'' if row['within_noise'] else ' DIFFERENT'}" for row in found),
        flush=True,
    )
    return not all(row["within_noise"] for row in found)
