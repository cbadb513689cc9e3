"""Predicts and ranks the combinations of a grid for `meshrunner plan -m`. The fastest combination that fits comes first."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from omegaconf import DictConfig

from meshrunner.recipes.config_keys import flatten
from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.cells import OTHER, other_workloads
from meshrunner.runner.compare.comparison import other_workload
from meshrunner.runner.compare.keys import first_of, text
from meshrunner.runner.compare.runs import Run
from meshrunner.runner.config.compose import Composer, grid, resolve_config, warn_of_short_sequences
from meshrunner.runner.config.devices import expected_devices
from meshrunner.runner.config.hydra.overrides import as_typed
from meshrunner.runner.config.interpreter import refuse_others
from meshrunner.runner.console import counted, naming, one_line, paragraph
from meshrunner.runner.predict import (
    BORDERLINE,
    DOES_NOT_FIT,
    FITS,
    NOT_PLANNED,
    Forecast,
    Verdict,
    check_whole,
    largest_of_each,
    predict_all,
)
from meshrunner.runner.rundir import Environment, PlanRecord, key_of, short_override
from meshrunner.runner.sweep.combinations import Combination, Target, check_batch, pending, varying

SKIPPED = "skipped"
"""Verdict for a combination that the sweep would skip, for example because of `sweep.exclude`."""
ORDER = (FITS, BORDERLINE, NOT_PLANNED, DOES_NOT_FIT, SKIPPED)
WITHIN_ERROR = "within error"
"""Mark for a speed that differs from the speed of the first row by less than the error of predictions."""
SHOWN = (
    *("model", "hardware", "launch.nodes", "launch.workers", "parallelism", "activation_checkpoint", "compile"),
    *("precision", "seq_len", "micro_batch", "global_batch"),
)
"""Settings that are printed above the table if they are equal in all combinations."""
LEGEND = {
    "WPS": "tokens per second per device, with the error of the prediction",
    "active": "peak memory of tensors on the rank that needs the most memory, in GiB",
    "reserved": "peak memory of the allocator on the same rank, in GiB",
}
"""Explanations of columns, keyed by title."""
LEFT_OUT = ("step time", "MFU")
"""Columns that are omitted on a narrow terminal, in this order."""
SHORTEST_NAME = 24
"""Minimum width of the column `combination`, in characters. Longer names are wrapped."""
LISTED = 3
"""Maximum number of sentences that explain the error of predictions."""


class Ranked(NamedTuple):
    """A combination of a grid and its forecast."""

    overrides: list[str]
    varying: list[str]
    """Overrides of this combination that some other combinations of the grid do not have."""
    forecast: Forecast
    run: Run
    """The run, with the number of workers and the global batch that it would use."""
    ahead_pct: float | None = None
    """Difference in speed from the first combination, in percent; None if unknown or if the work per step differs."""
    mark: str = ""
    """WITHIN_ERROR if `ahead_pct` is within the error of predictions; a value of OTHER if the work of a step differs; else ""."""

    job: Sequence[str] = ()
    """The overrides as Hydra passes them to a launcher."""

    def as_json(self) -> dict[str, Any]:
        """Return the combination, its forecast, and its difference from the first combination as a flat dict."""
        batch = {"global_batch": self.run.workload["batch"]}
        against = {"perf/vs_first_pct": self.ahead_pct, "perf/vs_first_mark": self.mark}
        return {"overrides": self.overrides, **self.forecast.as_json(), **batch, **against}


def rank(composer: Composer, *, active_only: bool, key: str | None = None) -> list[Ranked]:
    """Predict and sort all combinations of a grid. If `key` is given, set this key in each combination to the largest value that
    fits. Raise ConfigError if `run -m` would reject the command line."""
    config, loader = composer.compose_sweep(), composer.hydra.config_loader
    target = Target(lambda experiment: expected_devices(experiment).workers)
    jobs = check_batch(loader, config, grid(loader, config), 0, target).combinations
    refuse_others(job.experiment.launch.python for job in jobs if not job.reason)
    if key is not None:
        given = _with_largest(loader, config, jobs, key, active_only=active_only)
        jobs = check_batch(loader, config, given, 0, target).combinations
    warn_of_short_sequences(job.runs[0] for job in jobs)
    possible = [job.runs[0].config for job in jobs if not job.reason]
    with naming(f"predicting {len(possible):,} combinations") as progress:
        predicted = iter(predict_all(possible, active_only=active_only, progress=progress))
    varied = varying([job.overrides for job in jobs])
    ranked = []
    for job in jobs:
        forecast = Forecast(Verdict(SKIPPED, job.reason)) if job.reason else next(predicted)
        own = as_typed([each for each in job.overrides if each in varied])
        ranked.append(Ranked(as_typed(job.overrides), own, forecast, _run(job, forecast), job=job.overrides))
    ranked.sort(key=_sort_key)
    return [_against(each, ranked[0]) for each in ranked]


def _with_largest(
    loader: Any, config: DictConfig, jobs: Sequence[Combination], key: str, *, active_only: bool
) -> list[list[str]]:
    """Return each job's overrides, plus `key` set to the largest value that fits, or to 1 if no value fits."""
    if any(key_of(each) == key for job in jobs for each in job.overrides):
        raise ConfigError(f"plan: --max finds the value of {key}; remove {key} from the command line")

    def composed(job: Combination, value: int) -> dict[str, Any]:
        return resolve_config(loader.load_sweep_config(config, [*job.overrides, f"{key}={value}"]), None).config

    check_whole(jobs[0].runs[0].config, key)
    possible = [job for job in jobs if not job.reason]
    with naming(f"finding the largest {key} for {counted(len(possible), 'combination')}"):
        searches = iter(largest_of_each([partial(composed, job) for job in possible], key, active_only=active_only))
    return [job.overrides if job.reason else [*job.overrides, f"{key}={next(searches).value or 1}"] for job in jobs]


def _run(job: Combination, forecast: Forecast) -> Run:
    run, experiment = pending(job.runs[0]), job.experiment
    if job.reason:  # the batch is undefined if the degrees of parallelism are impossible
        return replace(run, state=SKIPPED, reason=job.reason)
    workers = expected_devices(experiment).workers
    batch = experiment.sequences_per_step(workers)
    resolved = Environment(resolved={"launch.workers": workers, "global_batch": batch})
    answer, reason = forecast.verdict
    run = replace(run, state=answer, reason=reason if answer == NOT_PLANNED else "")
    return replace(run, records={Environment: resolved, PlanRecord: PlanRecord.model_validate(forecast.as_json())})


def _against(each: Ranked, first: Ranked) -> Ranked:
    """Compare the speed of a combination with the speed of the first combination, if the work per step is the same."""
    mine, best = each.forecast.speed, first.forecast.speed
    if each is first or mine is None or best is None:
        return each
    if other := other_workload(each.run, first.run):
        return each._replace(mark=OTHER[other])
    ahead = 100 * (mine.wps / best.wps - 1)
    near = abs(ahead) < max(mine.error_pct, best.error_pct)
    return each._replace(ahead_pct=ahead, mark=WITHIN_ERROR if near else "")


def _sort_key(each: Ranked) -> tuple[int, float, float]:
    forecast = each.forecast
    return (
        ORDER.index(forecast.verdict.answer),
        -forecast.speed.wps if forecast.speed is not None else 0.0,
        forecast.memory.peak_active_gib if forecast.memory is not None else float("inf"),
    )


def lines(ranked: Sequence[Ranked], width: int) -> Iterator[str]:
    """Yield the lines of a ranking: the settings that are equal in all combinations, the table, and explanations of marks."""
    yield paragraph("in all rows: " + " ".join(_same(ranked)), 0, width) + "\n"
    cells = columns(ranked)
    yield from _table(ranked, cells, width)
    bases = list(dict.fromkeys(each.forecast.speed.error_basis for each in ranked if each.forecast.speed))
    below = ["", *(f"{title}: {LEGEND[title]}" for title in cells if title in LEGEND)]
    below += [f"speed: {first_of(bases, LISTED, '; ')}"] * bool(bases)
    if any(each.mark == WITHIN_ERROR for each in ranked):
        below.append(f"~ {WITHIN_ERROR}: differs from the first row's speed by less than the error of predictions")
    parts = {part for part, mark in OTHER.items() for each in ranked if each.mark == mark}
    below += other_workloads(parts, [each.run for each in ranked])
    for line in below:
        yield paragraph(line, 0, width)


def _same(ranked: Sequence[Ranked]) -> list[str]:
    """Return the overrides that all combinations share, and the settings of SHOWN that are equal in all combinations."""
    typed = [each for each in ranked[0].overrides if each not in ranked[0].varying]
    rows = [flatten(each.run.config) | each.run.choices | each.run.environment.resolved for each in ranked]
    equal = [key for key in SHOWN if key in rows[0] and all(row.get(key) == rows[0][key] for row in rows)]
    return [*typed, *(f"{key}={text(rows[0][key])}" for key in equal if key not in map(key_of, typed))]


def columns(ranked: Sequence[Ranked]) -> dict[str, list[str]]:
    """Return the numeric columns, keyed by title, with a cell for each combination. Omit a column if all its cells are empty."""
    rows = [each.as_json() for each in ranked]

    def numbers(key: str, template: str) -> list[str]:
        return ["" if row[key] is None else template.format(row[key], row["perf/error_pct"]) for row in rows]

    gains = zip(numbers("perf/vs_first_pct", "{:+.1f}%"), (each.mark for each in ranked), strict=True)
    signs = {WITHIN_ERROR: " ~", "": "  "}
    found = {
        "WPS": numbers("perf/wps", "{:,.0f} ±{:g}%"),
        "vs first": [f"{gain}{signs.get(mark, mark)}" if gain or mark else "" for gain, mark in gains],
        "MFU": numbers("perf/mfu", "{:.1f}%"),
        "step time": numbers("perf/step_time_s", "{:.3f} s"),
        "active": numbers("memory/peak_active_gib", "{:.2f}"),
        "reserved": numbers("memory/peak_reserved_gib", "{:.2f}"),
    }
    return {title: cells for title, cells in found.items() if any(cells)}


def _table(ranked: Sequence[Ranked], cells: dict[str, list[str]], width: int) -> Iterator[str]:
    """Yield the table's lines, with a heading per verdict. Below combinations whose verdict is not FITS, yield the reason."""
    names = [" ".join(map(short_override, each.varying or each.overrides)) or "defaults" for each in ranked]
    widths = {title: max(map(len, [title, *column])) + 2 for title, column in cells.items()}
    longest = 2 + max(map(len, ["combination", *names]))
    for title in LEFT_OUT:
        if longest + sum(widths.values()) > width:
            widths.pop(title, None)
    room = max(min(width - sum(widths.values()), longest), SHORTEST_NAME)

    def line(name: str, figures: Iterable[str]) -> str:
        return "".join([f"  {name}".ljust(room), *map(str.rjust, figures, widths.values())]).rstrip()

    yield line("combination", widths)
    for answer, group in groupby(range(len(ranked)), lambda i: ranked[i].forecast.verdict.answer):
        rows = list(group)
        yield f"{answer}: {len(rows)} of {len(ranked)}"
        for reason, alike in groupby(rows, lambda i: ranked[i].forecast.verdict.reason):
            for i in alike:
                first, *rest = textwrap.wrap(names[i], room - 2, subsequent_indent="  ", break_on_hyphens=False)
                yield line(first, [cells[title][i] for title in widths])
                yield from (line(part, []) for part in rest)
            if answer != FITS:
                yield paragraph(one_line(reason), 4, width)
