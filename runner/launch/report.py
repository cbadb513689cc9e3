"""What a single run says when it has ended: its row, or why there is none, and where everything lies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrunner.runner.console import shown, warn
from meshrunner.runner.figures import cell, print_row
from meshrunner.runner.rundir.files import TRACE_TABLE, TRACES, rank_log, read_json
from meshrunner.runner.rundir.logs import last_lines
from meshrunner.runner.rundir.run import read_overrides

if TYPE_CHECKING:
    from meshrunner.runner.launch.outcome import Outcome

SHOWN = ("model", "parallelism", "precision")
"""Groups whose choice stands in the row of a single run."""


def report(run_dir: Path, outcome: Outcome, summary: dict[str, Any], *, row: bool = True) -> None:
    """
    Print the row to stdout; for a run that did not complete, the reason and the end of its log to stderr.

    Args:
        row: False where a table of all runs shows it and where it lies.
    """
    if row and summary.get("perf/wps_median") is not None:
        print()
        print_row(_choices(run_dir), summary)
        if summary.get("peak_tflops"):
            peak = f"{summary['peak_tflops']:,.4g} TFLOP/s, the {summary['peak_rate']} peak of {summary['device']}"
            print(f"MFU is of {peak}")
    for late in summary.get("compile/late_recompiles", ()):
        warn(
            f"step {late['step']}, inside the measured window, was compiled again (it does not count): {late['reason']}"
        )
    print_profile(run_dir, summary)
    if outcome.state != "completed":
        print(f"\n{outcome.state}: {outcome.reason}", file=sys.stderr)
        if outcome.rank is not None:
            log = rank_log(run_dir, outcome.rank)
            print(f"from {log}:", file=sys.stderr)
            for line in last_lines(log):
                print(f"  {line}", file=sys.stderr)
    if row:
        print(f"run directory: {shown(run_dir)}")


def print_profile(run_dir: Path, summary: dict[str, Any]) -> None:
    """What the profiler found; nothing where there was none."""
    traced = read_json(run_dir / TRACE_TABLE)
    if traced:
        first, last = traced["steps"]
        print(f"\nsteps {first} to {last}      compute  exposed communication  idle")
        for row in traced["ranks"]:
            shares = [f"{cell(row, key, '.1f')}%" for key in ("compute_pct", "exposed_comm_pct", "idle_pct")]
            print(f"  rank {row['rank']:<8} {shares[0]:>12} {shares[1]:>22} {shares[2]:>5}")
    if summary.get("memory/peak_live_gib") is not None:
        parts = [key for key in summary if key.startswith("memory/live_")]
        print(f"\npeak of live tensors: {cell(summary, 'memory/peak_live_gib', '.3f')} GiB")
        for key in parts:
            print(f"  {key.removeprefix('memory/live_').removesuffix('_gib'):16} {cell(summary, key, '.3f')} GiB")
    for path in sorted((run_dir / TRACES).glob("memory_rank*")):
        print(f"what held memory: {shown(path)}")


def _choices(run_dir: Path) -> dict[str, str]:
    chosen = read_overrides(run_dir).choices
    return {group: chosen[group] for group in SHOWN if group in chosen}
