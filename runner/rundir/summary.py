"""Compute summary.json, the figures (measured numbers) of a whole run, from the figures of each step in events.jsonl."""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

from meshrunner.recipes.config_keys import affecting, differences, flatten
from meshrunner.recipes.option import Affects
from meshrunner.runner import figures
from meshrunner.runner.rundir.events import StepRow, read_events
from meshrunner.runner.rundir.files import EVALS, LAYOUTS, PLAN, SUMMARY
from meshrunner.runner.rundir.records import Count, JsonFile, Measured, PlanRecord, Text, null_as, under
from meshrunner.runner.rundir.states import Status


def _deciles(values: list[float]) -> list[float]:
    return quantiles(values, n=10, method="inclusive") if len(values) > 1 else values


PARTS = 8
"""Number of parts into which `relative_error` splits a run."""
UPPER_QUARTILE = 0.6745
"""Upper quartile of the standard normal distribution: the median absolute value of its samples."""
VERDICT = "plan/verdict"
"""Key in summary.json for the predicted verdict: whether the run fits in memory."""
FITTING = ("fits", "borderline")
"""Predicted verdicts that allow a run to be executed, best first. `meshrunner plan` shows the verdict as the run's state."""
OVER_STEPS: dict[str, Callable[[list[float]], float]] = {
    "median": median,
    "p10": lambda values: _deciles(values)[0],
    "p90": lambda values: _deciles(values)[-1],
    "last": lambda values: values[-1],
    "final": lambda values: values[-1],
    "best": min,
    "sum": sum,
}
"""Functions that reduce a figure's values from all steps to a single value, keyed by the words in `Figure.over_steps`."""
PREDICTED = [each.key for each in figures.FIGURES if each.predicts]
FINAL_FIGURES = [
    key for figure in figures.FIGURES if figure.over_steps in ("final", "last best") for key in figure.summary_keys
]


class Layout(JsonFile):
    """The settings that affect a step's time or memory. Consecutive attempts with the same settings share a Layout."""

    attempt: Count
    """The first attempt with this layout."""
    settings: dict[str, Any]
    """Settings keyed by dotted name, such as `wrap.kind`, plus `device`, `world_size`, `threads` and the version of `torch`."""


class Layouts(JsonFile):
    """The content of `layouts.json`: the layouts of a run, in the order of attempts."""

    layouts: list[Layout] = []


class EarlierLayout(JsonFile):
    """Steps that a run completed under an earlier layout. The run's figures exclude these steps."""

    steps: tuple[Count, Count]
    """First and last step."""
    settings: dict[str, Any] | None = None
    """Earlier values of the settings that differ from the last layout; null if the earlier layout was not recorded."""


class Recompilation(JsonFile):
    """A step, after the first `measure_after` steps, in which torch.compile compiled again."""

    step: Count
    reason: Text


class Summary(JsonFile):
    """The content of `summary.json`. The file also holds the figures, under the keys in `Figure.summary_keys`."""

    state: Text | None = None
    reason: Text | None = None
    steps: Count | None = None
    measured_steps: Count | None = None
    """Number of steps that count towards the throughput figures."""
    earlier_layouts: Annotated[list[EarlierLayout], null_as([])] = []
    """Steps under earlier layouts, if the run was resumed with other settings. Figures cover only steps under the last layout."""
    device: Text | None = None
    device_memory_gib: Measured = None
    world_size: Count | None = None
    params: Count | None = under("model/params")
    peak_tflops: Measured = None
    """The device's peak TFLOP/s. MFU is relative to this peak."""
    peak_rate: Text | None = None
    """Data type of the matmuls whose peak speed is `peak_tflops`, such as `bf16`."""
    peak_remark: Text | None = None
    """Reason why MFU is unknown for steps that were faster than the CPU's measured peak; null if no step was that fast."""
    data: dict[str, Any] | None = None
    """Description of the training data: tokenizer, hashes and size."""
    late_recompiles: Annotated[list[Recompilation], null_as([])] = under("compile/late_recompiles", [])
    async_tp_fused: Count | None = under("compile/async_tp_fused")
    """Number of operators in compiled code that overlap a tensor-parallel collective with matmuls."""
    verdict: Text | None = under(VERDICT)
    cold: bool | None = None
    """Whether the run was the first run of its command. Later runs of a command can reuse warm processes and caches."""

    @cached_property
    def figures(self) -> dict[str, float | None]:
        """Figures keyed by name; an unknown figure is None. `cold` is also a key, because `Figure.but` may name `cold`."""
        extra = (self.model_extra or {}).items()
        found = {key: figures.number(value) for key, value in extra if isinstance(value, int | float | None)}
        return found | {"cold": self.cold}

    def by_rank(self, key: str) -> list[float | None]:
        """Return the values of a figure on all ranks, in the order of ranks, or [] if the values are unknown."""
        values = (self.model_extra or {}).get(figures.by_rank(key))
        return list(map(figures.number, values)) if isinstance(values, list) else []


def summarise(
    rows: list[StepRow],
    measure_after: int,
    started: float | None,
    attempt: int,
    layouts: Sequence[Layout] = (),
    evals: Sequence[StepRow] = (),
) -> Summary:
    """Return the summary of a run. A figure that no row contains is null, or 0 if the figure is a sum.

    If the run was resumed under another layout, the figures cover only the steps under the last layout, and
    `earlier_layouts` lists the earlier steps. The first `measure_after` steps of each attempt do not count towards throughput,
    nor do steps during which torch compiled or a profiler ran. `started`: Unix time at which the last attempt began.
    """
    measured, (_, earlier) = measured_rows(rows, measure_after, layouts), split_by_layout(rows, layouts)
    this_attempt = [row for row in rows if row.attempt == attempt]
    chosen = {"last": rows[-1:], "final": rows[-1:], "sum": this_attempt}
    found: dict[str, Any] = {
        "steps": rows[-1].step if rows else 0,
        "measured_steps": len(measured),
        "earlier_layouts": [each.as_json() for each in earlier],
    }
    for figure in figures.FIGURES:
        own = evals if figure.key.startswith("eval/") else rows
        if figure.optional and not any(figure.key in row for row in own):
            continue
        for key, statistic in zip(figure.summary_keys, figure.over_steps.split(), strict=True):
            if statistic in OVER_STEPS:
                counted = evals if own is evals else chosen.get(statistic, measured)
                known = [value for row in counted if (value := row.get(figure.key)) is not None]
                found[key] = OVER_STEPS[statistic](known) if known or statistic == "sum" else None
    for key in ("perf/wps", "perf/tokens_per_cpu_s"):
        known = [value for row in measured if (value := row.get(key)) is not None]
        found[figures.error_key(key)] = relative_error(known)
    first = this_attempt[0].get("time") if this_attempt else None
    early = [row for row in evals if row.attempt == attempt and this_attempt and row.step < this_attempt[0].step]
    excluded = sum(row.get("eval/time_s") or 0.0 for row in early)  # the evaluation before the first step
    found["perf/time_to_first_step_s"] = None if first is None or started is None else first - started - excluded
    return Summary.model_validate(found)


def relative_error(values: Sequence[float]) -> float | None:
    """Return the relative standard error of the median of successive values; None for fewer than 2 values or a value <= 0.

    Split the values into PARTS parts. The differences between the medians of successive parts show the noise (von Neumann 1941).
    A trend adds little: a trend of 10% over the run counts as an error of 0.5%. If differences are normally distributed, their
    standard deviation is the median absolute difference / UPPER_QUARTILE. Outliers have no effect if a part has several values.
    """
    parts = min(PARTS, len(values))
    if parts < 2 or min(values) <= 0:
        return None
    cuts = [len(values) * i // parts for i in range(parts + 1)]
    logs = [math.log(median(values[begin:end])) for begin, end in pairwise(cuts)]
    return median(abs(after - before) for before, after in pairwise(logs)) / UPPER_QUARTILE / math.sqrt(2 * parts)


def measured_rows(rows: list[StepRow], measure_after: int, layouts: Sequence[Layout]) -> list[StepRow]:
    """Return the rows that count towards the medians in summary.json. `summarise` explains the arguments."""
    begin: dict[int, int] = {}  # attempt -> its first step, because every attempt warms up again
    for row in rows:
        begin.setdefault(row.attempt, row.step)
    return [
        row
        for row in split_by_layout(rows, layouts)[0]
        if row.step >= begin[row.attempt] + measure_after
        and not row.get("perf/compile_time_s")
        and not row.get("profiled")
    ]


def only_of_completed(summary: Summary, state: str | None) -> Summary:
    """Return the summary. If the run did not complete, set the figures of its final step, such as the final loss, to null."""
    return summary if state == "completed" else summary | dict.fromkeys(FINAL_FIGURES)


def predicted(plan: PlanRecord) -> Summary:
    """Return the figures predicted in plan.json, under keys that begin with `plan/`. The result is empty if `plan` is empty."""
    known = plan.model_extra or {}
    keys = {key: figures.number(known.get(key.removeprefix(figures.PREDICTION))) for key in PREDICTED}
    return Summary.model_validate(keys | {VERDICT: plan.verdict}) if plan else Summary()


def write_summary(run_dir: Path, measure_after: int, status: Status, **facts: Any) -> Summary:
    """Add predictions, figures of events.jsonl and `facts` (more keys) to the summary that workers wrote. Return the summary."""
    rows, layouts = read_events(run_dir), Layouts.read(run_dir / LAYOUTS).layouts
    summary = Summary.read(run_dir / SUMMARY) | predicted(PlanRecord.read(run_dir / PLAN))
    summary |= summarise(rows, measure_after, status.started, status.attempt, layouts, read_events(run_dir, EVALS))
    summary = only_of_completed(summary, status.state) | facts | {"state": status.state, "reason": status.reason}
    summary.write(run_dir / SUMMARY)
    return summary


def add_layout(run_dir: Path, attempt: int, config: dict[str, Any], facts: dict[str, Any]) -> None:
    """Record an attempt's layout, unless it equals the last recorded layout. `facts`: other settings, such as `device`."""
    settings = affecting(flatten(config), Affects.SPEED) | facts
    known = Layouts.read(run_dir / LAYOUTS).layouts
    if not known or known[-1].settings != settings:
        Layouts(layouts=[*known, Layout(attempt=attempt, settings=settings)]).write(run_dir / LAYOUTS)


def split_by_layout(
    rows: Sequence[StepRow], layouts: Sequence[Layout]
) -> tuple[Sequence[StepRow], list[EarlierLayout]]:
    """Return the rows under the last layout, and an EarlierLayout for each earlier layout. Ignore layouts without rows."""
    # The key is the number of the layout, or 0 if the layout was not recorded.
    by_layout = groupby(rows, key=lambda row: sum(layout.attempt <= row.attempt for layout in layouts))
    groups = [(number, list(each)) for number, each in by_layout]
    if len(groups) < 2:
        return rows, []
    last, current = groups.pop()
    earlier = []
    for number, before in groups:
        settings = None
        if number:
            changed = differences(layouts[number - 1].settings, layouts[last - 1].settings)
            settings = {key: None if value is ... else value for key, value, _ in changed}
        earlier.append(EarlierLayout(steps=(before[0].step, before[-1].step), settings=settings))
    return current, earlier
