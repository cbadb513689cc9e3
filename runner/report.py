"""What a single run says when it has ended: its row, or why there is none, and where everything lies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from runner.logs import last_lines
from runner.progress import warn
from runner.table import print_row

if TYPE_CHECKING:
    from runner.launch import Outcome

SHOWN = ("model", "parallelism", "precision")
"""Groups whose choice stands in the row of a single run."""


def report(run_dir: Path, outcome: Outcome, summary: dict[str, Any]) -> None:
    """Print the row to stdout; for a run that did not complete, the reason and the end of its log to stderr."""
    if summary.get("perf/wps_median") is not None:
        print()
        print_row(_choices(run_dir), summary)
        if summary.get("peak_tflops"):
            peak = f"{summary['peak_tflops']:,.4g} TFLOP/s, the {summary['peak_rate']} peak of {summary['device']}"
            print(f"MFU is of {peak}")
    for late in summary.get("compile/late_recompiles", ()):
        warn(
            f"step {late['step']}, inside the measured window, was compiled again (it does not count): {late['reason']}"
        )
    if outcome.state != "completed":
        print(f"\n{outcome.state}: {outcome.reason}", file=sys.stderr)
        if outcome.rank is not None:
            log = run_dir / "logs" / f"rank{outcome.rank}.log"
            print(f"from {log}:", file=sys.stderr)
            for line in last_lines(log):
                print(f"  {line}", file=sys.stderr)
    print(f"run directory: {_short(run_dir)}")


def _choices(run_dir: Path) -> dict[str, str]:
    chosen = OmegaConf.select(OmegaConf.load(run_dir / "overrides.yaml"), "choices") or {}
    return {group: str(chosen[group]) for group in SHOWN if group in chosen}


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
