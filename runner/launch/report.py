"""Report a single run after its end: print a row of measured figures and, if the run did not complete, the reason."""

from pathlib import Path

from meshrunner.runner.compare.cells import layout_remarks
from meshrunner.runner.compare.text_table import Column, lines_of
from meshrunner.runner.console import console, one_line, say, shown, warn
from meshrunner.runner.figures import UNKNOWN, figure_of, table_figures
from meshrunner.runner.launch.outcome import Outcome
from meshrunner.runner.rundir import Environment, Summary, TraceTable, last_lines, options_in_force, read_overrides
from meshrunner.runner.rundir.files import ENVIRONMENT, TRACE_TABLE, TRACES, rank_log

SHOWN = ("model", "parallelism", "precision")
"""Configuration groups whose chosen options are printed with the figures of a run."""


def report(run_dir: Path, outcome: Outcome, summary: Summary | None, *, row: bool = True) -> None:
    """Print figures to stdout if `row` is true. If the run did not complete, print to stderr the reason and the last lines of
    the log of the rank that failed first."""
    if summary is None:
        return
    environment = Environment.peek(run_dir / ENVIRONMENT)
    if row and (outcome.state == "completed" or summary.figures.get("perf/wps_median") is not None):
        chosen = options_in_force(read_overrides(run_dir).choices, environment)
        cells = {group: chosen[group] for group in SHOWN if group in chosen} | row_cells(summary)
        lines = lines_of([Column(title, [text]) for title, text in cells.items()])
        if len(lines[0]) > console().width:  # one figure per line
            width = max(map(len, cells))
            lines = [f"{title:{width}}  {one_line(text)}" for title, text in cells.items()]
        print("", *lines, "", sep="\n")
        if summary.figures.get("perf/mfu_median") is not None:
            peak = f"the {summary.peak_rate} peak of {summary.device}"
            say(f"MFU is relative to {summary.peak_tflops:,.4g} TFLOP/s, {peak}")
    for remark in filter(None, (*environment.remarks, summary.peak_remark)):
        warn(remark)
    for line in layout_remarks(summary):
        say(line)
    if empty := (summary.data or {}).get("empty_documents"):
        say(f"data: {empty:,} documents were skipped because their text is empty or null")
    for late in summary.late_recompiles:
        warn(f"step {late.step} is excluded from the measured window because torch recompiled code: {late.reason}")
    if summary.async_tp_fused == 0:
        warn("compile.async_tensor_parallel had no effect: inductor found no collective to fuse with a matmul")
    _print_profile(run_dir, summary)
    if outcome.state != "completed":
        say(f"\n{outcome.state}: {outcome.reason}", to_stderr=True)
        if outcome.rank is not None:
            log = rank_log(run_dir, outcome.rank)
            say(f"from {log}:", to_stderr=True)
            for line in last_lines(log):
                say(f"  {line}", to_stderr=True)


def row_cells(summary: Summary) -> dict[str, str]:
    """Return a run's cells, keyed by column title. An unknown median becomes a dash. Other unknown figures have no cell."""
    cells = {figure: figure.cell([summary.figures]) for figure in table_figures()}
    medians = {figure for figure in cells if "median" in figure.over_steps and not figure.optional}
    kept = {figure.heading: cell or UNKNOWN for figure, cell in cells.items() if cell or figure in medians}
    return {"state": summary.state or UNKNOWN} | kept


def _print_profile(run_dir: Path, summary: Summary) -> None:
    if traced := TraceTable.read(run_dir / TRACE_TABLE):
        first, last = traced.steps
        table = [Column(f"steps {first} to {last}", [f"rank {row.rank}" for row in traced.ranks])]
        for key in ("compute_pct", "exposed_comm_pct", "idle_pct"):
            share = figure_of(f"trace/{key}")
            table.append(Column(share.title, [share.text(getattr(row, key)) for row in traced.ranks]))
        print("", *lines_of(table), sep="\n")
    live, figures = figure_of("memory/peak_live_gib"), summary.figures
    if figures.get(live.key) is not None:
        print(f"\n{live.title}: {live.text(figures[live.key])}")
        for key in [key for key in figures if key.startswith("memory/live_")]:
            print(f"  {key.removeprefix('memory/live_').removesuffix('_gib'):16} {live.text(figures[key])}")
    for path in sorted((run_dir / TRACES).glob("memory_rank*")):
        say(f"memory profile: {shown(path)}")
