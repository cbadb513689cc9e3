"""Format a comparison for people: the columns of the table and the lines below the table."""

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from meshrunner.runner.compare.comparison import WPS, Against, Comparison
from meshrunner.runner.compare.keys import emulated, first_of, option_of, row_name, text
from meshrunner.runner.compare.noise import ALPHA, REPEATS
from meshrunner.runner.compare.parity import LOSS, NORM, TOLERANCE, short
from meshrunner.runner.compare.runs import Row, Run
from meshrunner.runner.compare.text_table import Column
from meshrunner.runner.figures import table_figures
from meshrunner.runner.rundir import FITTING, PlacedSweep, Summary
from meshrunner.runner.rundir.files import SWEEP

UNTESTED = "(not tested)"
"""Grey text after a difference that is not tested, because the row or its baseline has fewer than REPEATS runs."""
OTHER = {"model": "other model", "seq_len": "other length", "batch": "other batch"}
"""Text after a speed difference between rows with different workloads, keyed by the differing part of `Run.workload`."""
UNREMARKABLE = ("completed", *FITTING)
"""States of rows that need no reason: the row completed, or it was only planned and is predicted to fit."""
FACT_VALUES = 3
"""Maximum number of values to list if runs differ in a fact, such as the devices."""
FEWEST_STEPS = 3
"""Minimum number of measured steps for a reliable speed. A single outlier shifts the median of one or two steps."""
LONGEST_VALUE = 500
"""Maximum length of a setting in the table, in characters. --json and --csv do not shorten settings."""


def columns(comparison: Comparison) -> list[Column]:
    """Return the columns of the table: first the varying keys, then the figures. A figure without any value has no column."""
    rows = comparison.rows
    named = [Column(key, [_value(row, key) for row in rows]) for key in comparison.keys]
    named = named or [Column("run", [row.runs[0].path.name for row in rows])]
    found = []
    if any(row.state != "completed" for row in rows):
        found.append(Column("state", [row.state for row in rows]))
    found.append(Column("emulated", [emulated(row.runs[0]) for row in rows]))
    found.append(Column("parameters", _parameters(rows)))
    for figure in table_figures():
        found.append(Column(figure.heading, [figure.cell(row.summaries) for row in rows], figure == comparison.speed))
        if comparison.baseline and figure == comparison.speed:
            found.append(Column(f"vs {comparison.baseline[1]}", [_delta(each) for each in comparison.against], True))
        if figure == WPS:
            scaling = ["" if each is None else f"{each:.1f}%" for each in comparison.scaling]
            found.append(Column("scaling", scaling))
    if comparison.baseline:
        verdicts = ["" if each is None else str(each.verdict) for each in comparison.against]
        found.append(Column(f"loss vs {comparison.baseline[1]}", verdicts, True))
        verdicts = ["" if each is None else str(each.held_out) for each in comparison.against]
        found.append(Column(f"held-out loss vs {comparison.baseline[1]}", verdicts))
    if len({len(row.runs) for row in rows}) > 1:
        found.append(Column("runs", [str(len(row.runs)) for row in rows]))
    found.append(Column("measured", [_measured_from(row) for row in rows]))
    return [*named, *(column for column in found if any(column.cells))]


def row_label(comparison: Comparison, row: Row) -> str:
    """Return the name of a row, followed by its state unless the row completed: `full fsdp2 (oom)`."""
    return comparison.name(row) + (f" ({row.state})" if row.state not in UNREMARKABLE else "")


def _parameters(rows: Sequence[Row]) -> list[str]:
    """Return each row's number of parameters, such as `7.21 M`, or empty cells if all rows have the same number."""
    sizes = [row.counted[0].summary.params for row in rows]
    if len({size for size in sizes if size is not None}) < 2:
        return [""] * len(rows)
    return ["" if size is None else f"{size / 1e9:,.2f} B" if size >= 1e9 else f"{size / 1e6:.2f} M" for size in sizes]


def _value(row: Row, key: str) -> str:
    value = text(row.values[key]) if key in row.values else ""
    return value if len(value) <= LONGEST_VALUE else f"{value[:LONGEST_VALUE]}..."


def _delta(against: Against | None) -> str:
    if against is None or against.speed.percent is None:
        return ""
    marks = {None: f" {UNTESTED}", True: " ~", False: ""}
    other = f" ({OTHER[against.other]})" if against.other else ""
    return f"{against.speed.percent:+.1f}%{marks[against.speed.within_noise]}{other}"


def legend(comparison: Comparison) -> Iterator[str]:
    """Yield the lines that explain the marks and words in the table."""
    against = [each for each in comparison.against if each is not None]
    tested = [each.speed.within_noise for each in against if each.speed.percent is not None]
    if True in tested:
        yield (
            f"~ within noise: the speeds do not differ significantly at the {ALPHA:.0%} level, Holm-corrected for the "
            "whole table"
        )
    if None in tested:
        yield f"not tested: a test for noise needs {REPEATS} completed runs of each row"
    if (visible := comparison.noise.visible()) is not None:
        repeats = max(len(row.measured(comparison.speed)) for row in comparison.rows)
        more = comparison.noise.visible(times=2)
        yield f"differences of {visible:.1f}% and more would have shown; {2 * repeats} repeats would show {more:.1f}%"
    compared = [row.runs[0] for row in comparison.every_row]
    yield from other_workloads({each.other for each in against}, compared)
    if tested and comparison.speed.key != WPS.key:
        title = comparison.speed.title
        yield f"on CPUs, speeds are compared by {title}, because other processes distort wall-clock time"
    if any(each is not None for each in comparison.scaling):
        yield (
            f"scaling: {WPS.title} by wall-clock time, relative to the row with the same settings on the fewest "
            "devices; 100% is ideal"
        )
    kinds = {parity.kind for each in against for parity in (each.verdict, each.held_out)}
    if kinds & {"agrees", "differs"}:
        losses, norms = (
            ", ".join(f"{short(f'{limit[curve]:.0e}')} in {name}" for name, limit in TOLERANCE.items())
            for curve in (LOSS, NORM)
        )
        yield f"agrees: in every step, losses differ by at most {losses} (relative), gradient norms by at most {norms}"
    if "within seeds" in kinds:
        yield "within seeds: in every step, mean losses differ by at most the standard deviation of the baseline's seeds"
    if any(each.verdict.why == "different model" for each in against):
        yield (
            "losses are checked for agreement only between runs of the same model; compare losses of different models in the "
            "table"
        )
    if any(len(row.runs) > 1 for row in comparison.rows):
        yield (
            "a row of several runs shows the median of the runs, the lowest p10, the highest p90 and the highest "
            "memory peaks"
        )
    if any(emulated(row.runs[0]) for row in comparison.rows):
        yield (
            "emulated: one device executed only the named rank. Its compute and memory are measured, its "
            "communication is predicted, and there is no loss"
        )
    completed = [run for row in comparison.rows for run in row.completed]
    yield from dict.fromkeys(filter(None, map(_few_steps, completed)))


def other_workloads(parts: set[str], runs: Iterable[Run]) -> Iterator[str]:
    """Yield an explanation of each mark in OTHER that a table of `runs` shows. `parts`: the values of `Against.other`."""
    for part in sorted(parts & {"model", "seq_len"}):
        yield f"{OTHER[part]}: speeds of rows that differ in {part} cannot be compared; use a single {part}"
    if "batch" in parts:
        found = [run.workload["batch"] for run in runs]
        batches = sorted({batch for batch in found if isinstance(batch, int) and batch > 0})
        yield (
            f"{OTHER['batch']}: the global batch differs ({first_of([*map(str, batches)])} sequences), which affects "
            f"the speed; global_batch={math.lcm(*batches)} makes the batch equal in all rows"
        )


def _few_steps(run: Run) -> str:
    left = run.summary.measured_steps
    if left is None or left >= FEWEST_STEPS:
        return ""
    after, steps = (text(run.config.get(key)) for key in ("measure_after", "steps"))
    return (
        f"measure_after={after} leaves {left or 'none'} of {steps} steps to measure, too few for a reliable speed; "
        "raise steps"
    )


def reasons(comparison: Comparison) -> list[str]:
    """Explain why rows did not complete, and which steps before a resume do not count. Rows with equal reasons share a line."""
    alike: dict[tuple[str, str], list[str]] = {}
    for row in comparison.rows:
        name = row_name(row.values, comparison.keys)
        if row.state not in UNREMARKABLE:
            alike.setdefault((row.state, row.reason), []).append(name or str(row.key))
        for run in row.runs:
            for line in layout_remarks(run.summary):
                alike.setdefault(("resumed", line), []).append(name or str(run.path))
    parts = ((kind, first_of(names, between="; "), why) for (kind, why), names in alike.items())
    return [": ".join(filter(None, each)) for each in parts]


def layout_remarks(summary: Summary) -> list[str]:
    """Return a line for each earlier layout of a run that was resumed under another layout."""
    found = []
    for earlier in summary.earlier_layouts:
        first, last = earlier.steps
        under = "an unrecorded layout"
        if earlier.settings is not None:
            under = ", ".join(f"{key}={text(value)}" for key, value in earlier.settings.items())
        found.append(f"steps {first} to {last} are not in the figures, because they ran with {under}")
    return found


def _measured_from(row: Row) -> str:
    """Return a phrase such as `from step 101 on` for runs that were resumed under another layout; "" for other runs."""
    resumed = [earlier for run in row.counted if (earlier := run.summary.earlier_layouts)]
    return ", ".join(dict.fromkeys(f"from step {earlier[-1].steps[1] + 1} on" for earlier in resumed))


@cache
def _sweep_command(folder: Path) -> list[str]:
    return PlacedSweep.peek(folder / SWEEP).command


def _facts(run: Run) -> dict[str, str]:
    """Return facts about a run, such as its model and devices, keyed by title. An unknown fact is ""."""
    config, summary, environment = run.config, run.summary, run.environment
    length, batch = config.get("seq_len"), config.get("micro_batch")
    versions = [f"{name} {version}" for name in ("torch", "meshrunner") if (version := environment.packages.get(name))]
    versions += [f"commit {environment.git_commit[:8]}"] if environment.git_commit else []
    return {
        "model": option_of(run, "model") or "",
        "devices": f"{summary.world_size} x {summary.device}" if summary.device and summary.world_size else "",
        "precision": run.precision if "precision" in config and run.precision != "auto" else "",
        "sequences": f"{batch} per device, {length} tokens each" if length and batch else "",
        "versions": ", ".join(versions),
        # Prefer the sweep's command, because the run's own command may be just `resume`.
        "command": shlex.join(_sweep_command(run.path.parent) or environment.command),
    }


def facts(comparison: Comparison) -> dict[str, str]:
    """Return the known facts, keyed by title. If runs differ in a fact, list its first FACT_VALUES values."""
    known = [_facts(run) for run in comparison.runs]
    found = {title: list(dict.fromkeys(each[title] for each in known if each[title])) for title in known[0]}
    return {title: first_of(values, FACT_VALUES, "; ") for title, values in found.items() if values}
