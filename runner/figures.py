"""The table of all metrics. Each item of FIGURES determines a metric's keys in rows and summaries, how the metric is merged over
ranks, steps and repeats, and how it appears in tables, charts, the progress line and docs/figures.md.

    python -m meshrunner.runner.figures     prints the table of docs/figures.md
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Literal, NamedTuple

UNKNOWN = "-"


def speed(value: float) -> str:
    """Format a speed: `6,150`, or three significant digits below 100."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


PERCENT, SHARE = "{:.1f}%".format, "{:.2f}%".format
GIB, SECONDS, NUMBER = "{:.2f} GiB".format, "{:.3f} s".format, "{:.4g}".format
OVER_REPEATS: dict[str, Callable[[list[float]], float]] = {"median": median, "min": min, "max": max}


class Figure(NamedTuple):
    """A metric: its keys, its title and format, and how ranks, steps and repeats are merged into one value."""

    key: str
    """Key in events.jsonl, or in summary.json for a figure of the whole run (`once`)."""
    unit: str
    title: str
    """Title in tables, charts and the progress line; empty if the figure is not shown there."""
    format: Callable[[float], str]
    over_steps: Literal["median", "median p10 p90", "last", "last best", "final", "sum", "saves", "once", ""]
    """Statistic over a run's steps, stored in summary.json under `<key>` unless another key is given here.
    - `median`: median of the measured steps, stored under `<key>_median`
    - `median p10 p90`: also the 10th and 90th percentiles, stored under `<key>_p10` and `<key>_p90`
    - `last`: last value; `final`: the same, but under `<group>/final_<name>`; `best`: lowest value, under `<group>/best_<name>`
    - `sum`: sum over all steps of the last attempt
    - `saves`: median over checkpoints, computed by the meter because events.jsonl may lack the last checkpoint
    - `once`: value of the whole run, not of a step; empty: the figure is not in summary.json
    """
    over_repeats: Literal["median", "min", "max", "median min", "median min max", ""]
    """Statistic over repeats in `compare`, or `median min max` for a value with a range; empty if `compare` omits the figure."""
    why: str
    """Definition of the figure."""
    over_ranks: Literal["mean", "max", "sum", ""] = ""
    """Statistic that merges the ranks' values in a step; empty if the figure is computed in another way."""
    by_rank: bool = False
    """Whether summary.json also lists one value per rank: for a time, the mean over steps; for memory, the peak."""
    higher_is_better: bool = False
    optional: bool = False
    """Whether a run may lack this figure and its key, for example because the model has no experts."""
    beside: str = ""
    """Key of another figure that tables show in parentheses after this figure."""
    unless: str = ""
    """Key of another figure. Tables show this figure only if the other figure is unknown."""
    but: str = ""
    """Flag in summary.json, such as `cold`. Repeats with the flag are ignored. If all repeats have the flag, cells show it."""
    predicts: str = ""
    """Key of the measured figure that this figure predicts; the relative error is shown in parentheses."""

    @property
    def heading(self) -> str:
        """Title of the figure's table column: `WPS per device (p10-p90)`, `final loss`."""
        if self.over_steps == "final":
            return f"final {self.title}"
        ends = self.over_steps.split()[1:]
        return f"{self.title} ({'-'.join(ends)})" if ends else self.title

    @property
    def summary_keys(self) -> tuple[str, ...]:
        """Keys in summary.json: the key of the value, then the two keys of its range if it has a range."""
        group, _, name = self.key.partition("/")
        keys = dict.fromkeys(("last", "sum", "saves", "once"), self.key)
        keys |= {"final": f"{group}/final_{name}", "best": f"{group}/best_{name}"}
        return tuple(keys.get(statistic, f"{self.key}_{statistic}") for statistic in self.over_steps.split())

    def values(self, runs: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """Return the statistic over the summaries of repeats, and the lowest and highest value if the figure has a range."""
        how, keys = self.over_repeats.split(), self.summary_keys
        runs = [run for run in runs if not run.get(self.but)] or runs
        found: list[float | None] = []
        for key, statistic in zip(keys if len(keys) > 1 else keys * len(how), how, strict=True):
            values = [value for run in runs if (value := number(run.get(key))) is not None]
            found.append(OVER_REPEATS[statistic](values) if values else None)
        return found

    def text(self, value: float | None, unknown: str = UNKNOWN) -> str:
        """Return a value formatted for display."""
        return unknown if value is None else self.format(value)

    def cell(self, runs: Sequence[Mapping[str, Any]]) -> str:
        """Return the cell that merges `runs`: `6,150 (6,100-6,200)`; "" if the value is unknown or another figure replaces it."""
        if self.unless and figure_of(self.unless).cell(runs):
            return ""
        value, *ends = (self.text(value, "") for value in self.values(runs))
        if self.beside:
            ends = [figure_of(self.beside).cell(runs)]
        elif len(self.summary_keys) == 1 and ends[:1] == ends[1:]:  # all repeats agree
            ends = []
        if self.predicts:
            predicted, measured = self.values(runs)[0], figure_of(self.predicts).values(runs)[0]
            ends = [f"{100 * (predicted / measured - 1):+.1f}%"] if predicted is not None and measured else []
        if self.but and all(run.get(self.but) for run in runs):
            ends = [self.but]
        return f"{value} ({'-'.join(ends)})" if value and ends and all(ends) else value


# fmt: off
FIGURES: tuple[Figure, ...] = (
    Figure("perf/wps", "tok/s per device", "WPS per device", speed, "median p10 p90", "median min max",
           "tokens of the step / (its wall-clock time x devices). The wall-clock time from one reading of metrics to the next "
           "is divided among the steps in proportion to `perf/step_time_s`. This time includes reading metrics, but "
           "not evaluations or saving checkpoints", higher_is_better=True),
    Figure("perf/wps_error", "", "", NUMBER, "once", "", "relative standard error of `perf/wps_median`, computed from the "
           "scatter of the medians of eight successive parts of the run. A trend over the run and single slow steps have little "
           "effect on this error"),
    Figure("plan/perf/wps", "tok/s per device", "WPS, predicted", speed, "once", "median",
           "`perf/wps` as `sweep.preflight` predicted it before the run started", higher_is_better=True, predicts="perf/wps"),
    Figure("perf/tokens_per_cpu_s", "tokens / CPU second", "tokens per CPU-second", speed, "median", "median min max",
           "tokens of the step / `perf/cpu_time_s`, on CPUs only. Other programs on the machine affect CPU time less than "
           "they affect wall-clock time", higher_is_better=True),
    Figure("perf/tokens_per_cpu_s_error", "", "", NUMBER, "once", "",
           "relative standard error of `perf/tokens_per_cpu_s_median`, computed like `perf/wps_error`"),
    Figure("perf/joules_per_token", "J", "joules per token", NUMBER, "median", "median",
           "energy that NVML counts on all GPUs between two readings of metrics, divided by the tokens trained on in "
           "between. Evaluations and saving checkpoints are excluded. Unknown on CPUs and MIG slices, and for emulated ranks"),
    Figure("perf/mfu", "percent", "MFU", PERCENT, "median", "median", "`perf/wps` x `model/flops_per_token` / peak FLOP/s",
           higher_is_better=True),
    Figure("perf/mfu_causal", "percent", "", PERCENT, "median", "",
           "`perf/mfu` with half of the attention FLOPs, because the causal mask discards half of the scores",
           higher_is_better=True),
    Figure("perf/tflops", "TFLOP/s per device", "", NUMBER, "median", "", "`perf/wps` x `model/flops_per_token`",
           higher_is_better=True),
    Figure("memory/peak_active_gib", "GiB", "peak active", GIB, "last", "max",
           "peak memory of tensors since step `measure_after`, as the CUDA allocator counts it; maximum over ranks",
           over_ranks="max", by_rank=True, beside="memory/peak_active_pct"),
    Figure("memory/peak_active_pct", "percent", "", SHARE, "last", "max",
           "`memory/peak_active_gib` as a share of the device's memory"),
    Figure("plan/memory/peak_active_gib", "GiB", "peak active, predicted", GIB, "once", "median",
           "`memory/peak_active_gib` as `sweep.preflight` predicted it before the run started",
           predicts="memory/peak_active_gib"),
    Figure("memory/peak_reserved_gib", "GiB", "peak reserved", GIB, "last", "max",
           "peak of the memory that the CUDA allocator reserved on the device since step `measure_after`; maximum over ranks",
           over_ranks="max", by_rank=True, beside="memory/peak_reserved_pct"),
    Figure("memory/peak_reserved_pct", "percent", "", SHARE, "last", "max",
           "`memory/peak_reserved_gib` as a share of the device's memory"),
    Figure("memory/alloc_retries", "", "", NUMBER, "last", "", "number of times the allocator flushed its cache and tried again",
           over_ranks="max"),
    Figure("memory/peak_rss_gib", "GiB", "peak RSS", GIB, "last", "max",
           "peak resident host memory since step `measure_after`; maximum over ranks", over_ranks="max", by_rank=True,
           unless="memory/peak_active_gib"),
    Figure("perf/step_time_s", "s", "step time", SECONDS, "median", "median",
           "time from the end of the previous step to the end of this step on the slowest rank; on GPUs, the time between two "
           "CUDA events. The time includes waiting for data, but not evaluations, reading metrics or saving checkpoints",
           over_ranks="max", by_rank=True),
    Figure("perf/compute_step_time_s", "s", "compute step time", SECONDS, "median", "median",
           "with `launch.emulate`: the measured step time, in which collectives take no time", optional=True),
    Figure("perf/communication_s", "s", "exposed communication, predicted", SECONDS, "median", "median",
           "with `launch.emulate`: predicted seconds per step during which computation waits for communication. "
           "`perf/step_time_s` is the sum of this figure and `perf/compute_step_time_s`. If the device's rates are unknown, "
           "this figure and `perf/step_time_s` are null", optional=True),
    Figure("perf/data_time_s", "s", "", SECONDS, "median", "", "the part of the step spent waiting for the next batch",
           over_ranks="max", by_rank=True),
    Figure("perf/cpu_time_s", "s", "", SECONDS, "median", "", "user and system time of the step, summed over ranks",
           over_ranks="sum", by_rank=True),
    Figure("perf/compile_time_s", "s", "", SECONDS, "sum", "", "the part of the step spent compiling, on the slowest rank",
           over_ranks="max"),
    Figure("perf/checkpoint_time_s", "s", "checkpoint", SECONDS, "saves", "median",
           "time for which training paused to save a checkpoint before the step, on the slowest rank; 0 if none was "
           "saved. With `checkpoint=dcp_async`, training continues once the copy to host memory is complete and the "
           "previous checkpoint is on disk"),
    Figure("perf/comm_allocations", "buffers", "", "{:,.0f}".format, "median", "",
           "number of all-gather outputs and reduction inputs allocated in the step, mean over ranks. With "
           "`parallelism.buffers=max_pool` or `scheduled`, all buffers are allocated in the first step and none later",
           over_ranks="mean", optional=True),
    Figure("perf/time_to_first_step_s", "s", "time to first step", "{:.1f} s".format, "once", "median",
           "time from the start of the last attempt to the end of its first step on the device. `cold` marks a "
           "command's first run, which has no warm processes or caches. The median over repeats ignores cold "
           "runs, unless every repeat is cold",
           but="cold"),
    Figure("train/loss", "nats per token", "loss", "{:.4f}".format, "final", "median min max",
           "cross entropy in fp32, mean over all tokens of the step on all ranks", over_ranks="mean"),
    Figure("eval/loss", "nats per token", "held-out loss", "{:.4f}".format, "last best", "median min", "`eval=held_out`: mean "
           "cross entropy of the tokens of an evaluation, without auxiliary losses; in `evals.jsonl`", optional=True),
    Figure("train/mtp_loss", "nats per token", "", "{:.4f}".format, "final", "", "mean cross entropy of the `model.mtp.depth` "
           "tokens that follow the next token; not part of `train/loss`", over_ranks="mean", optional=True),
    Figure("train/grad_norm", "", "grad norm", "{:.3f}".format, "", "",
           "2-norm of the whole gradient before clipping, the same on every rank and in every layout"),
    Figure("train/skipped", "", "", "{:,.0f}".format, "sum", "", "with `optimizer.skip_above`: whether the update was skipped "
           "(1 or 0). The summary has the number of skipped updates", over_ranks="mean", optional=True),
    Figure("train/lr", "", "", NUMBER, "", "", "learning rate of the step"),
    Figure("train/tokens", "tokens", "", "{:,}".format, "", "", "tokens in all steps up to and including this one"),
    Figure("experts/max_violation", "", "expert imbalance", NUMBER, "median", "median",
           "(largest load of an expert / mean load in the same block) - 1, maximum over blocks. An expert's load is the number "
           "of its tokens in the step, over all ranks", over_ranks="mean", optional=True),
    Figure("experts/mean_violation", "", "", NUMBER, "median", "", "like `experts/max_violation`, but the mean over blocks",
           over_ranks="mean", optional=True),
    Figure("experts/unused", "experts", "", "{:,.0f}".format, "median", "", "number of experts without a token in the step",
           over_ranks="mean", optional=True),
    Figure("experts/balance_loss", "", "", NUMBER, "median", "",
           "balance loss x its weight, summed over blocks, mean over micro batches and ranks; not part of `train/loss`",
           over_ranks="mean", optional=True),
    Figure("experts/rank_violation", "", "", NUMBER, "median", "",
           "with expert parallelism: (largest load of a rank / mean load of the ranks) - 1, maximum over blocks",
           over_ranks="mean", optional=True),
    Figure("pipeline/idle_pct", "percent", "pipeline idle, computed", PERCENT, "once", "median",
           "with `parallelism.pipeline`: share of a step in which a device waits for other stages, computed from the schedule's "
           "order. Assumptions: all stages take equally long, and a backward pass takes twice as long as a forward pass"),
    Figure("pipeline/measured_idle_pct", "percent", "pipeline idle, measured", PERCENT, "once", "median",
           "`profiler=trace` with `parallelism.pipeline`: share of the profiled steps' time in which a device idles or only "
           "sends or receives; mean over the traced ranks. Unknown with all-to-all, which GPU traces show as sends"),
    Figure("trace/compute_pct", "percent", "compute", PERCENT, "once", "",
           "`profiler=trace`: share of the profiled steps' time in which a compute kernel runs; mean over the traced ranks",
           higher_is_better=True),
    Figure("trace/exposed_comm_pct", "percent", "exposed communication", PERCENT, "once", "",
           "share of the profiled steps' time in which only a collective runs"),
    Figure("trace/idle_pct", "percent", "idle", PERCENT, "once", "",
           "share of the profiled steps' time in which neither a compute kernel nor a collective runs"),
    Figure("memory/peak_live_gib", "GiB", "peak of live tensors", "{:.3f} GiB".format, "once", "",
           "`profiler=memory` on a CPU: peak bytes of live tensors in the profiled steps, on the traced rank with the highest "
           "peak. `memory/live_*_gib` splits the peak by purpose"),
)
# fmt: on
"""The figures, in the order of table columns and of docs/figures.md."""

PREDICTION = "plan/"
"""Prefix of the keys of figures that were predicted before a run started."""


def higher_is_better(key: str) -> bool:
    """Return whether higher values of a key in summary.json are better."""
    return any(key in (each.key, *each.summary_keys) for each in FIGURES if each.higher_is_better)


def summary_keys() -> list[str]:
    """Return the keys of figures in summary.json, including the memory peaks of the start-up."""
    keys = [key for each in FIGURES for key in each.summary_keys]
    peaks = [key for key in row_keys("memory/") if key.endswith("_gib")]
    return [*keys, *(key.replace("memory/", "memory/startup_") for key in peaks)]


def figure_of(key: str) -> Figure:
    return next(each for each in FIGURES if each.key == key)


def table_figures() -> list[Figure]:
    """Return the figures that have a column in comparisons."""
    return [each for each in FIGURES if each.title and each.over_repeats]


def speed_figure(summaries: Sequence[Mapping[str, Any]]) -> Figure:
    """Return the figure for comparing speeds: WPS, or tokens per CPU-second if all runs were on CPUs, where WPS is noisy."""
    on_cpus = figure_of("perf/tokens_per_cpu_s")
    return on_cpus if summaries and all(on_cpus.values([each])[0] for each in summaries) else figure_of("perf/wps")


def error_key(key: str) -> str:
    """Return the summary.json key of the relative standard error of a figure's median."""
    return f"{key}_error"


def by_rank(key: str) -> str:
    """Return the summary.json key under which a figure has one value per rank."""
    return f"{key}_by_rank"


def row_keys(group: str = "") -> list[str]:
    """Return the keys of figures in events.jsonl that begin with `group`, such as `memory/`."""
    return [each.key for each in FIGURES if each.over_steps != "once" and each.key.startswith(group)]


def merged(runs: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Merge the summaries of repeats into one mapping from keys of summary.json to values."""
    figures = [each for each in FIGURES if each.over_repeats]
    return {key: value for each in figures for key, value in zip(each.summary_keys, each.values(runs), strict=False)}


def number(value: Any) -> float | None:
    """Return a finite number unchanged, and None for anything else, such as an integer beyond the range of a float."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return value if known else None


def documentation() -> Iterator[str]:
    """Yield the lines of the table in docs/figures.md."""
    yield "| in `events.jsonl` | in `summary.json` | unit | column | over repeats | definition |"
    yield "|---|---|---|---|---|---|"
    for each in FIGURES:
        row = "" if each.over_steps == "once" else f"`{each.key}`"
        names = [*each.summary_keys, *([by_rank(each.key)] if each.by_rank else [])]
        summary = ", ".join(f"`{key}`" for key in names)
        column = each.heading if each in table_figures() else ""
        yield f"| {' | '.join([row, summary, each.unit, column, each.over_repeats.replace(' ', ', '), each.why])} |"


if __name__ == "__main__":
    print("\n".join(documentation()))
