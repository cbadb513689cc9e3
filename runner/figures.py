"""
The one table of metrics. A metric is a line of FIGURES; from it follow the keys of rows and summaries, medians, how repeats
are merged, the columns and cells of every table, the progress line, the charts' titles and the table in docs/figures.md.

    python -m meshrunner.runner.figures     the table of docs/figures.md
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Literal, NamedTuple

UNKNOWN = "-"


def speed(value: float) -> str:
    """`6,150`; three digits below 100."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


PERCENT, SHARE = "{:.1f}%".format, "{:.2f}%".format
GIB, SECONDS, NUMBER = "{:.2f} GiB".format, "{:.3f} s".format, "{:.4g}".format
OVER_REPEATS: dict[str, Callable[[list[float]], float]] = {"median": median, "min": min, "max": max}


class Figure(NamedTuple):
    """A metric: where it is kept, what it is called, how it is written, and how steps and repeats become one value."""

    key: str
    """In a row of events.jsonl; of what no step has (`once`), in summary.json."""
    unit: str
    title: str
    """As a person reads it everywhere; empty where no person does."""
    format: Callable[[float], str]
    over_steps: Literal["median", "median p10 p90", "last", "final", "sum", "saves", "once", ""]
    """
    What summary.json holds. Of the steps that count: `median` as `<key>_median`, with `p10` and `p90` their range. The
    `last` step's value as `<key>`, or as `<group>/final_<name>`; the `sum` over all steps of the last attempt. The median
    over its `saves`, which the meter adds: the last one is followed by no step. `once`: what the meter, the profiler or the end
    of the run adds. Empty: nothing.
    """
    over_repeats: Literal["median", "min", "max", "median min max", ""]
    """How repeats become one value, for `compare` and its --json; of three the last two are a range. Empty: it is left out."""
    why: str
    """Its definition."""
    beside: str = ""
    """Key of the figure that stands in parentheses beside it."""
    unless: str = ""
    """Key of the figure beside which it has no place: it is shown where that one is not known."""
    but: str = ""
    """Key in summary.json that marks runs whose value does not count as long as there are others; it is written beside it."""
    predicts: str = ""
    """Key of the figure that it is a prediction of: how far it is off stands in parentheses beside it, where that is known."""
    by_rank: bool = False
    """Whether summary.json lists it for every rank, too: the mean of times, the peak of memory."""

    @property
    def of_some_recipes(self) -> bool:
        """Whether only some recipes have it: with experts, multi-token prediction, a pool. Elsewhere it is meaningless."""
        return self.key.startswith(("experts/", "train/mtp_", "perf/comm_allocations"))

    @property
    def heading(self) -> str:
        """Title of its column: `WPS per device (p10-p90)`, `final loss`."""
        if self.over_steps == "final":
            return f"final {self.title}"
        ends = self.over_steps.split()[1:]
        return f"{self.title} ({'-'.join(ends)})" if ends else self.title

    @property
    def summary_keys(self) -> tuple[str, ...]:
        """Its keys in summary.json: of the value, then of its range if it has one."""
        group, _, name = self.key.partition("/")
        keys = dict.fromkeys(("last", "sum", "saves", "once"), self.key) | {"final": f"{group}/final_{name}"}
        return tuple(keys.get(statistic, f"{self.key}_{statistic}") for statistic in self.over_steps.split())

    def values(self, runs: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """The value over the summaries of some repeats, and its range if it has one: lowest, highest."""
        how, keys = self.over_repeats.split(), self.summary_keys
        runs = [run for run in runs if not run.get(self.but)] or runs
        found: list[float | None] = []
        for key, statistic in zip(keys if len(keys) > 1 else keys * len(how), how, strict=True):
            values = [value for run in runs if (value := number(run.get(key))) is not None]
            found.append(OVER_REPEATS[statistic](values) if values else None)
        return found

    def text(self, value: float | None, unknown: str = UNKNOWN) -> str:
        """One value, as it is written everywhere."""
        return unknown if value is None else self.format(value)

    def cell(self, runs: Sequence[Mapping[str, Any]]) -> str:
        """`6,150 (6,100-6,200)`: its cell in a row of some repeats; empty where it is not known or another stands for it."""
        if self.unless and figure_of(self.unless).cell(runs):
            return ""
        value, *ends = (self.text(value, "") for value in self.values(runs))
        if self.beside:
            ends = [figure_of(self.beside).cell(runs)]
        elif len(self.summary_keys) == 1 and ends[:1] == ends[1:]:  # the repeats agree
            ends = []
        if self.predicts:
            ends = [_error(self.values(runs)[0], figure_of(self.predicts).values(runs)[0])]
        if self.but and all(run.get(self.but) for run in runs):
            ends = [self.but]
        return f"{value} ({'-'.join(ends)})" if value and ends and all(ends) else value


# fmt: off
FIGURES: tuple[Figure, ...] = (
    Figure("perf/wps", "tok/s per device", "WPS per device", speed, "median p10 p90", "median min max",
           "tokens of the step / (its share of the time between two read-outs x devices): shares are as `perf/step_time_s`, and "
           "the time is the clock's, reading out included, saving excluded"),
    Figure("plan/perf/wps", "tok/s per device", "WPS, predicted", speed, "once", "median",
           "what `sweep.preflight` predicted of `perf/wps` before the run began", predicts="perf/wps"),
    Figure("perf/tokens_per_cpu_s", "tokens / CPU second", "tokens per CPU-second", speed, "median", "median min max",
           "tokens of the step / `perf/cpu_time_s`, where the device is a CPU: neighbours take time, and less of CPU time"),
    Figure("perf/mfu", "percent", "MFU", PERCENT, "median", "median", "`perf/wps` x `model/flops_per_token` / peak FLOP/s"),
    Figure("perf/mfu_causal", "percent", "", PERCENT, "median", "",
           "the same with half of the attention term: the part of the scores that a causal mask needs"),
    Figure("perf/tflops", "TFLOP/s per device", "", NUMBER, "median", "", "`perf/wps` x `model/flops_per_token`"),
    Figure("memory/peak_active_gib", "GiB", "peak active", GIB, "last", "max",
           "most that tensors held since step `measure_after`, as the CUDA allocator counts; maximum over ranks",
           beside="memory/peak_active_pct", by_rank=True),
    Figure("memory/peak_active_pct", "percent", "", SHARE, "last", "max", "the same, of the device's memory"),
    Figure("plan/memory/peak_active_gib", "GiB", "peak active, predicted", GIB, "once", "median",
           "what `sweep.preflight` predicted of `memory/peak_active_gib` before the run began",
           predicts="memory/peak_active_gib"),
    Figure("memory/peak_reserved_gib", "GiB", "peak reserved", GIB, "last", "max",
           "most that the CUDA allocator had taken from the device since step `measure_after`; maximum over ranks",
           beside="memory/peak_reserved_pct", by_rank=True),
    Figure("memory/peak_reserved_pct", "percent", "", SHARE, "last", "max", "the same, of the device's memory"),
    Figure("memory/alloc_retries", "", "", NUMBER, "last", "", "times the allocator had to free its cache and try again"),
    Figure("memory/peak_rss_gib", "GiB", "peak RSS", GIB, "last", "max",
           "peak resident host memory since step `measure_after`, maximum over ranks", unless="memory/peak_active_gib",
           by_rank=True),
    Figure("perf/step_time_s", "s", "step time", SECONDS, "median", "median",
           "from the end of the step before to the end of this one, waiting for data included, reading out and saving excluded; "
           "the slowest rank's; on CUDA between events", by_rank=True),
    Figure("perf/data_time_s", "s", "", SECONDS, "median", "", "part of it spent waiting for the next batch", by_rank=True),
    Figure("perf/cpu_time_s", "s", "", SECONDS, "median", "", "user and system time of the step, summed over ranks",
           by_rank=True),
    Figure("perf/compile_time_s", "s", "", SECONDS, "sum", "", "part of the step spent compiling, the slowest rank's"),
    Figure("perf/checkpoint_time_s", "s", "checkpoint", SECONDS, "saves", "median",
           "time that training stood still before the step, for a checkpoint; the slowest rank's; 0 where none was saved. With "
           "`checkpoint=dcp_async` until the copy to host memory is made, and the checkpoint before is on disk"),
    Figure("perf/comm_allocations", "buffers", "", "{:,.0f}".format, "median", "",
           "`parallelism.buffers=max_pool` or `scheduled`: outputs of all-gathers and inputs of reductions that were allocated "
           "in the step, mean over ranks: all of them in the first, later none"),
    Figure("perf/time_to_first_step_s", "s", "time to first step", "{:.1f} s".format, "once", "median",
           "from the start of the last attempt until the device has done its first step; `cold`: in the first run that a command "
           "starts, which finds no process and no cache warm and counts only where it is alone", but="cold"),
    Figure("train/loss", "nats per token", "loss", "{:.4f}".format, "final", "median min max",
           "cross entropy in fp32, mean over all tokens of the step on all ranks"),
    Figure("train/mtp_loss", "nats per token", "", "{:.4f}".format, "final", "",
           "cross entropy of the tokens after the next, mean over `model.mtp.depth` of them; no part of `train/loss`"),
    Figure("train/grad_norm", "", "grad norm", "{:.3f}".format, "", "",
           "2-norm of the whole gradient before clipping, the same on every rank and in every layout"),
    Figure("train/lr", "", "", NUMBER, "", "", "learning rate of the step"),
    Figure("train/tokens", "tokens", "", "{:,}".format, "", "", "all that were trained on up to and including this step"),
    Figure("experts/max_violation", "", "expert imbalance", NUMBER, "median", "median",
           "largest load of an expert / mean load of the experts of its block - 1, the block with the largest; loads are the "
           "tokens of a step on all ranks"),
    Figure("experts/mean_violation", "", "", NUMBER, "median", "", "the same, mean over blocks"),
    Figure("experts/unused", "experts", "", "{:,.0f}".format, "median", "", "experts of all blocks without a token in the step"),
    Figure("experts/balance_loss", "", "", NUMBER, "median", "",
           "balance loss x its weight, sum over blocks, mean over micro batches and ranks; no part of `train/loss`"),
    Figure("experts/rank_violation", "", "", NUMBER, "median", "",
           "with expert parallelism: largest load of the experts of a rank / mean - 1, the block with the largest"),
    Figure("trace/compute_pct", "percent", "compute", PERCENT, "once", "",
           "`profiler=trace`: of the profiled steps' time, where something is computed; mean over the traced ranks"),
    Figure("trace/exposed_comm_pct", "percent", "exposed communication", PERCENT, "once", "",
           "of the same time, where only a collective runs"),
    Figure("trace/idle_pct", "percent", "idle", PERCENT, "once", "", "of the same time, where neither does"),
    Figure("memory/peak_live_gib", "GiB", "peak of live tensors", "{:.3f} GiB".format, "once", "",
           "`profiler=memory` on a CPU: most bytes that tensors held at a time in the profiled steps, and, as "
           "`memory/live_*_gib`, what they were for; of the traced rank with the highest peak"),
)
# fmt: on
"""In the order of the columns of tables and of docs/figures.md."""


PREDICTION = "plan/"
"""Beginning of the keys of what was predicted before a run began."""
HIGH = ("perf/wps", "plan/perf/wps", "perf/mfu", "perf/tflops", "perf/tokens", "trace/compute")
"""Beginnings of the keys of which more is better."""


def higher_is_better(key: str) -> bool:
    """Whether more is better of a key in summary.json."""
    return key.startswith(HIGH)


def summary_keys() -> list[str]:
    """The keys of figures in summary.json, with the peaks of the start-up."""
    keys = [key for each in FIGURES for key in each.summary_keys]
    peaks = [key for key in row_keys("memory/") if key.endswith("_gib")]
    return [*keys, *(key.replace("memory/", "memory/startup_") for key in peaks)]


def figure_of(key: str) -> Figure:
    """The figure of a key in rows (or of `once`)."""
    return next(each for each in FIGURES if each.key == key)


def table_figures() -> list[Figure]:
    """Figures that have a column where runs are compared."""
    return [each for each in FIGURES if each.title and each.over_repeats]


def speed_figure(summaries: Sequence[Mapping[str, Any]]) -> Figure:
    """The figure that speeds are compared by: on CPUs, where wall-clock time is also the neighbours', tokens per CPU-second."""
    on_cpus = figure_of("perf/tokens_per_cpu_s")
    return on_cpus if summaries and all(on_cpus.values([each])[0] for each in summaries) else figure_of("perf/wps")


def by_rank(key: str) -> str:
    """The key in summary.json of the list of a figure's values, one for each rank."""
    return f"{key}_by_rank"


def row_keys(group: str = "") -> list[str]:
    """The keys of figures in a row of events.jsonl, all or those of a group (`memory/`)."""
    return [each.key for each in FIGURES if each.over_steps != "once" and each.key.startswith(group)]


def merged(runs: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The summaries of some repeats as one: key in summary.json -> value."""
    figures = [each for each in FIGURES if each.over_repeats]
    return {key: value for each in figures for key, value in zip(each.summary_keys, each.values(runs), strict=False)}


def _error(predicted: float | None, measured: float | None) -> str:
    """`+3.1%`; empty where one of the two is not known."""
    return f"{100 * (predicted / measured - 1):+.1f}%" if predicted is not None and measured else ""


def number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond the range of a float
        return None


def documentation() -> Iterator[str]:
    """Lines of the table in docs/figures.md."""
    yield "| in `events.jsonl` | in `summary.json` | unit | column | of repeats | definition |"
    yield "|---|---|---|---|---|---|"
    for each in FIGURES:
        row = "" if each.over_steps == "once" else f"`{each.key}`"
        names = [*each.summary_keys, *([by_rank(each.key)] if each.by_rank else [])]
        summary = ", ".join(f"`{key}`" for key in names)
        column = each.heading if each in table_figures() else ""
        yield f"| {' | '.join([row, summary, each.unit, column, each.over_repeats.replace(' ', ', '), each.why])} |"


if __name__ == "__main__":
    print("\n".join(documentation()))
