"""
Compare predictions with runs that others measured and published.

`python -m bench published` predicts every run in ROWS, in about 10 minutes. It writes the tables in docs/measurements/plan.md.
It also writes the largest error of each kind of run to runner/predict/published.yaml. `plan` states the errors in this file.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.published_rows import ROWS, SOURCES, Row
from meshrunner.runner.config.compose import Composer
from meshrunner.runner.config.devices import expected_devices
from meshrunner.runner.config.experiment import check
from meshrunner.runner.config.hardware import GPU

REPOSITORY = Path(__file__).parent.parent
DOCS = REPOSITORY / "docs/measurements/plan.md"
REGIMES = REPOSITORY / "runner/predict/published.yaml"
BEGIN, END = "<!-- begin: python -m bench published -->\n", "<!-- end -->\n"
GIB = 2**30
SHORT = 8192
"""Tokens per sequence. Runs with longer sequences form separate groups, with separate errors of predictions."""
REGIMES_HEADER = """\
# The largest errors of predictions of published runs (docs/measurements/plan.md). `python -m bench published` writes this file.
# Each line covers runs with `shortest` to `longest` tokens per sequence on at most `devices` devices
"""


class Compared(NamedTuple):
    """A published run and its prediction."""

    row: Row
    hardware: str
    """`name` of the device."""
    precision: str
    seq_len: int
    devices: int
    wps: float
    reserved_gib: tuple[float, float] | None
    """Predictions with segments of fixed size and with expandable segments; None if no memory was published."""
    active_gib: float | None

    @property
    def speed_error_pct(self) -> float:
        """Percentage by which the predicted speed exceeds the middle of the published range."""
        return _error_pct(self.wps, sum(self.row.wps) / 2)


def predicted(row: Row) -> Compared:
    """Predict a published run."""
    from meshrunner.runner.predict.allocator.caching_allocator import CachingAllocator
    from meshrunner.runner.predict.replay.replay import replay
    from meshrunner.runner.predict.workload import trace_run

    composed = Composer("plan", list(row.overrides)).single_run()
    assert composed is not None
    experiment = check(composed.config).on("cuda")  # not `fit`, which refuses settings that user classes do not declare
    device, nodes = expected_devices(experiment), experiment.launch.nodes
    hardware = device.hardware
    assert isinstance(hardware, GPU)
    workload, traces = trace_run(experiment, device, shallow=row.reserved_gib is None)
    reserved = active = None
    if row.reserved_gib is not None:
        fixed, expandable = (
            [
                replay(trace.events, workload.clock(hardware), CachingAllocator(None, expandable=each))
                for (trace,) in traces.values()
            ]
            for each in (False, True)
        )
        reserved = tuple(max(rank.peak_reserved for rank in each) / GIB for each in (fixed, expandable))
        active = max(rank.peak.total for rank in fixed) / GIB
    return Compared(
        row,
        hardware.name,
        experiment.precision.kind,
        experiment.seq_len,
        nodes * device.workers,
        workload.wps(hardware),
        reserved,
        active,
    )


def memory_line(each: Compared) -> str:
    """Return a run's row in the table of memory."""
    row = each.row
    assert each.reserved_gib is not None and row.reserved_gib is not None and each.active_gib is not None
    active = [f"{each.active_gib:.2f}{_in_brackets(each.active_gib, row.active_gib)}", f"{row.active_gib or ''}"]
    reserved = [f"{gib:.2f}{_in_brackets(gib, row.reserved_gib)}" for gib in each.reserved_gib]
    name = f"{row.name}{' †' * row.other_program}"
    return _line(row.source, name, each.devices, *active, *reserved, row.reserved_gib)


def speed_line(each: Compared) -> str:
    """Return a run's row in the table of speeds."""
    low, high = each.row.wps
    published = f"{low:,.0f}" if low == high else f"{low:,.0f}-{high:,.0f}"
    name = f"{each.row.name}{' *' * each.row.fitted}{' †' * each.row.other_program}"
    wps = f"{each.wps:,.0f} ({each.speed_error_pct:+.1f}%)"
    return _line(each.row.source, name, f"{each.devices} {each.hardware}", f"{each.seq_len:,}", wps, published)


def tables(compared: Sequence[Compared]) -> Iterator[str]:
    """Yield the lines of both tables, and of the list of sources."""
    yield _line("source", "run", "devices", "tokens", "predicted", "published")
    yield "|---|---|---|---|---|---|"
    yield from map(speed_line, compared)
    yield ""
    yield _line("source", "run", "devices", "active", "published", "reserved, fixed", "expandable", "published")
    yield "|---|---|---|---|---|---|---|---|"
    yield from (memory_line(each) for each in compared if each.reserved_gib is not None)
    yield ""
    yield from (f"- {source}: {place}" for source, place in SOURCES.items())


def regimes(compared: Sequence[Compared]) -> Iterator[str]:
    """Yield the lines of published.yaml."""
    groups = defaultdict(list)
    for each in compared:
        if each.row.other_program:
            continue
        groups[each.hardware, each.precision, each.seq_len > SHORT].append(each)
    for (hardware, precision, _), group in groups.items():
        lengths = [each.seq_len for each in group]
        error = math.ceil(max(round(abs(each.speed_error_pct), 1) for each in group))  # as rounded in the table
        yield (
            f"- {{hardware: {hardware}, precision: {precision}, shortest: {min(lengths)}, longest: {max(lengths)}, "
            f"devices: {max(each.devices for each in group)}, runs: {len(group)}, speed_pct: {error}}}"
        )


def published() -> int:
    """Predict all runs, and write the docs and published.yaml. Return exit status 0."""
    compared = []
    for row in ROWS:
        compared.append(predicted(row))
        print(speed_line(compared[-1]), flush=True)
    REGIMES.write_text(REGIMES_HEADER + "".join(f"{line}\n" for line in regimes(compared)))
    before, _, rest = DOCS.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCS.write_text(before + BEGIN + "".join(f"{line}\n" for line in tables(compared)) + END + after)
    return 0


def _line(*cells: object) -> str:
    return f"| {' | '.join(str(cell).replace('|', ' ') for cell in cells)} |"


def _error_pct(value: float, measured: float) -> float:
    return 100 * (value / measured - 1)


def _in_brackets(value: float, measured: float | None) -> str:
    return "" if measured is None else f" ({_error_pct(value, measured):+.1f}%)"
