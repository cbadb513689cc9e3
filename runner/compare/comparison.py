"""Merge the runs that are repeats of each other into rows, and compare each row with its baseline."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from meshrunner.recipes.config_keys import flatten, same_value
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import did_you_mean
from meshrunner.runner.compare.keys import DIRECTORY, Keys, first_of, row_name, text
from meshrunner.runner.compare.noise import ALPHA, Noise, noise_of
from meshrunner.runner.compare.parity import HELD_OUT, Parity, verdict
from meshrunner.runner.compare.runs import EXCLUDED, Row, Run, read_runs
from meshrunner.runner.console import counted, warn
from meshrunner.runner.figures import Figure, figure_of, speed_figure
from meshrunner.runner.rundir import parse_yaml
from meshrunner.runner.rundir.files import is_sweep

WPS = figure_of("perf/wps")
FIRST_STEP = figure_of("perf/time_to_first_step_s")
MEMORY = ("memory/peak_reserved_gib", "memory/peak_active_gib", "memory/peak_rss_gib")
"""Memory figures, the preferred one first. Rows are compared by the first figure that all completed rows have."""
SCALES = ("launch.nodes", "launch.workers", "parallelism.shard", "parallelism.replicate", "world_size")
"""Keys that determine the number of devices. Rows that differ only in the number of devices show how a layout scales."""

NO_BASELINE = "no baseline row has the same values of the other keys that vary"
"""Reason why a row has no baseline to be compared with."""


@dataclass(frozen=True)
class Gain:
    """The difference of a figure between a row and its baseline."""

    percent: float | None
    """Percentage by which the row exceeds the baseline. Tested differences compare geometric means, others compare medians."""
    p_value: float | None
    """The p-value, adjusted for the number of tests of this figure in the table; None if the difference is not tested."""
    repeats: int
    """Number of completed runs with a known value, in the row or in its baseline, whichever has fewer."""
    interval: tuple[float, float] | None = None
    """Confidence interval of `percent`; None if not tested. The confidence is 95% for all intervals of a table together."""

    @property
    def within_noise(self) -> bool | None:
        return None if self.p_value is None else self.p_value >= ALPHA


@dataclass(frozen=True)
class Against:
    """A row compared with its baseline."""

    row: Row
    """The baseline row."""
    speed: Gain
    further: dict[str, Gain]
    """The gains in peak memory, in the time to the first step and in the figures that the user named, keyed by `Figure.key`."""
    verdict: Parity
    held_out: Parity
    """Verdict on the held-out losses. Its `kind` is empty if a run has no held-out losses."""
    other: str = ""
    """Part of `Run.workload` in which the row differs from its baseline: `model`, `seq_len` or `batch`; "" if none differs."""


@dataclass(frozen=True)
class Comparison:
    """The rows to compare, and the differences between each row and its baseline."""

    keys: list[str]
    """The varying keys, whose values name a row."""
    speed: Figure
    """The figure by which speeds are compared."""
    rows: list[Row]
    baseline: tuple[str, str] | None
    """The key and the value, as text, that define the baseline rows; None if there is no baseline."""
    against: list[Against | None]
    """The comparison of each row with its baseline; None for a row that has no baseline or is itself a baseline."""
    remarks: list[str]
    scaling: list[float | None] = field(default_factory=list)
    """WPS of each row in percent of the WPS of its reference row, which `_scaling` selects. None if unknown."""
    noises: dict[str, Noise] = field(default_factory=dict, repr=False)
    """The noise of each tested figure, keyed by `Figure.key`."""
    memory: Figure | None = None
    """The figure by which memory is compared."""
    every_row: list[Row] = field(default_factory=list, repr=False)
    """All rows, including rows that `--where` or `--top` excludes."""
    selection: str = ""
    """Description of the selected rows, such as `12 of 60 rows (parallelism=fsdp2)`; empty if nothing was selected."""
    best_by: list[str] = field(default_factory=list)
    """Keys whose values divide the rows into groups, to show the best row of each group (see `best.Cell`); may be empty."""

    @property
    def runs(self) -> list[Run]:
        return [run for row in self.rows for run in row.runs]

    @property
    def noise(self) -> Noise:
        return self.noises[self.speed.key]

    def is_baseline(self, row: Row) -> bool:
        return self.baseline is not None and text(row.values.get(self.baseline[0])) == self.baseline[1]

    def name(self, row: Row, without: Sequence[str] = ()) -> str:
        """Return the name of a row for sentences: its values of `keys` except `without`, or else its directory."""
        keys = [key for key in self.keys if key not in without]
        return row_name(row.values, keys) or row.runs[0].path.name


def compare_runs(
    runs: Sequence[Run], baseline: str | None = None, option: str = "--baseline", further: Sequence[Figure] = ()
) -> Comparison:
    """Merge repeats into rows, sort the rows, and compare each row with its baseline. Ignore combinations that `sweep.exclude`
    names, unless no other combinations remain.

    `baseline` is KEY=VALUE. The baseline of a row has VALUE for KEY, and has the same values as the row for all other varying
    keys. Raise ConfigError if KEY does not vary or no row has VALUE. `option`: name of `baseline` in error messages.
    `further`: figures to compare in addition to speed, memory and the time to the first step.
    """
    shown = [run for run in runs if not run.reason.startswith(EXCLUDED)] or runs
    keys = Keys(shown)
    merged: dict[str, list[Run]] = {}
    for run in shown:
        merged.setdefault(keys.identity(run), []).append(run)
    rows = [Row(keys.of(same[0]), same) for same in merged.values()]
    names, chosen = list(keys.names), None
    if baseline is not None:
        chosen = _parsed(baseline, names, rows, option)
        names.sort(key=chosen[0].__eq__)  # sort by the baseline's key last, so that compared rows are adjacent
    rows = _sorted(rows, names, chosen)
    partners = _partners(rows, *chosen) if chosen else {}
    speed = speed_figure([run.figures for row in rows for run in row.completed])
    done = [row.summaries for row in rows if row.completed]
    memory = next((each for each in map(figure_of, MEMORY) if all(each.values(row)[0] for row in done)), None)
    pairs = [(rows[i].key, rows[partner].key) for i, partner in partners.items()]
    compared = {each.key: each for each in (speed, memory, FIRST_STEP, *further) if each}
    noises = {key: noise_of(figure, rows, pairs) for key, figure in compared.items()}
    against: list[Against | None] = [None] * len(rows)
    for i, partner in partners.items():
        row, other = rows[i], rows[partner]
        gains = {key: _gain(row, other, figure, noises[key]) for key, figure in compared.items()}
        loss, held_out = verdict(row.runs, other.runs), verdict(row.runs, other.runs, [HELD_OUT])
        unlike = other_workload(row.runs[0], other.runs[0])
        against[i] = Against(other, gains.pop(speed.key), gains, loss, held_out, unlike)
    remarks = list(keys.remarks)
    if left_out := len(runs) - len(shown):
        remarks.append(f"sweep.exclude removed {counted(left_out, 'run')} from the table")
    rest = [name for name in names if chosen and name != chosen[0]]
    if chosen and not partners and rest:
        remarks.append(
            f"nothing is compared with {'='.join(chosen)}: all other rows also differ in other keys ({first_of(rest)})"
        )
    return Comparison(names, speed, rows, chosen, against, remarks, _scaling(rows, names), noises, memory, rows)


def compare_folders(
    folders: Sequence[Path], baseline: str | None, further: Sequence[Figure] = (), *, with_first: bool = False
) -> Comparison:
    """Compare the runs in run and sweep directories. The default baseline of a single sweep directory is `sweep.baseline`. If
    `with_first`, the default baseline of several directories is the first directory. `further` is as in `compare_runs`."""
    if baseline is None and with_first and len(folders) > 1:
        runs = [replace(run, directory=str(folder)) for folder in folders for run in read_runs([folder])]
        return compare_runs(runs, f"{DIRECTORY}={folders[0]}", further=further)
    if baseline is not None or len(folders) > 1 or not is_sweep(folders[0]):
        return compare_runs(read_runs(folders), baseline, further=further)
    comparison, problem = compare_sweep(folders[0], further)
    if problem is not None:
        warn(problem)
    return comparison


def compare_sweep(sweep_dir: Path, further: Sequence[Figure] = ()) -> tuple[Comparison, str | None]:
    """Compare the runs of a sweep with `sweep.baseline`. Return the comparison, and a message if `sweep.baseline` is wrong."""
    runs = read_runs([sweep_dir])
    baseline = next((run.sweep.get("baseline") for run in runs if run.sweep), None)
    try:
        if baseline is not None and not isinstance(baseline, str):
            raise ConfigError(f"sweep.baseline: expected KEY=VALUE, got {baseline!r}")
        return compare_runs(runs, baseline, "sweep.baseline", further), None
    except ConfigError as error:
        return compare_runs(runs, further=further), str(error)


def check_baseline(baseline: str, runs: Sequence[Run]) -> None:
    """Raise ConfigError if `sweep.baseline` matches no run. Accept a key that does not vary: the user may have overridden it."""
    keys = Keys(runs)
    key, separator, _ = baseline.partition("=")
    known = {name for run in runs for name in (*run.config, *flatten(run.config))}
    if not separator or key not in known or key in keys.names:
        _parsed(baseline, keys.names, [Row(keys.of(run), [run]) for run in runs], "sweep.baseline")


def _parsed(baseline: str, names: list[str], rows: list[Row], option: str) -> tuple[str, str]:
    """Parse a baseline's `key=value`. Return the key, and the value as the rows spell it: `0.001` for `1e-3`."""
    key, separator, value = baseline.partition("=")
    if not separator:
        raise ConfigError(f"{option}: expected KEY=VALUE, for example parallelism=fsdp1, got '{baseline}'")
    if key not in names:
        varying = ", ".join(names) or "nothing"
        raise ConfigError(f"{option}: '{key}' does not vary.{did_you_mean(key, names)} Varying keys: {varying}")
    known = {text(row.values[key]): row.values[key] for row in rows if key in row.values}
    try:
        given = parse_yaml(value)
    except ValueError:
        given = value
    for name, raw in known.items():
        if name == value or same_value(raw, given):  # 1e-3 equals 0.001
            return key, name
    raise ConfigError(f"{option}: no row has {key}={value}.{did_you_mean(value, known)} Known: {', '.join(known)}")


def _sorted(rows: list[Row], names: list[str], chosen: tuple[str, str] | None) -> list[Row]:
    """Sort rows by the values of `names`: baseline value first, others in order of appearance. Rows without a config are last."""
    order: dict[str, dict[str, int]] = {name: {} for name in names}
    if chosen:
        order[chosen[0]][chosen[1]] = 0
    for row in rows:
        for name in names:
            if name in row.values:
                order[name].setdefault(text(row.values[name]), len(order[name]))

    def place(row: Row) -> list[int]:
        given = [order[name][text(row.values[name])] if name in row.values else -1 for name in names]
        return [int(not row.runs[0].config), *given]

    return sorted(rows, key=place)


def _partners(rows: list[Row], key: str, value: str) -> dict[int, int]:
    """Return the index of each row's baseline, keyed by the index of the row. Skip rows without a baseline. Ignore settings
    that the baseline's option lacks, such as `model.experts` if the baseline is `model=llama_tiny`. If the baseline is a Python
    interpreter, also ignore the version of torch. If the baseline is a directory with a single row, this row is the baseline of
    all other rows."""
    there = {name for row in rows if text(row.values.get(key)) == value for name in row.values}
    own = {
        key,
        "torch" if key == "launch.python" else "",
        *(name for row in rows for name in row.values if name.startswith(f"{key}.") and name not in there),
    }
    rest = [tuple(f"{name}={text(each)}" for name, each in row.values.items() if name not in own) for row in rows]
    readable = [i for i, row in enumerate(rows) if row.runs[0].config]
    baselines = {rest[i]: i for i in reversed(readable) if text(rows[i].values.get(key)) == value}
    if key == DIRECTORY and len(baselines) == 1:
        (only,) = baselines.values()
        return {i: only for i in readable if i != only}
    return {i: baselines[rest[i]] for i in readable if baselines.get(rest[i], i) != i}


def _gain(row: Row, baseline: Row, figure: Figure, noise: Noise) -> Gain:
    mine, theirs, pair = row.measured(figure), baseline.measured(figure), (row.key, baseline.key)
    difference = noise.difference(*pair)
    percent = difference.percent if difference else percent_more(mine, theirs)
    return Gain(percent, noise.p_value(*pair), min(len(mine), len(theirs)), noise.interval(*pair))


def other_workload(run: Run, baseline: Run) -> str:
    """Return the value of `Against.other` for a run and its baseline."""
    pairs = zip(run.workload.items(), baseline.workload.values(), strict=True)
    return next((part for (part, mine), theirs in pairs if None not in (mine, theirs) and mine != theirs), "")


def _scaling(rows: Sequence[Row], names: Sequence[str]) -> list[float | None]:
    """Return `Comparison.scaling`. Among rows that differ only in SCALES, the reference is the first row with the fewest devices.
    WPS uses wall-clock time, even on CPUs. CPU time would omit the time that processes spend waiting for each other."""
    groups: dict[tuple[str, ...], dict[int, tuple[int, float]]] = {}
    for i, row in enumerate(rows):
        rest = tuple(f"{name}={text(row.values[name])}" for name in names if name not in SCALES and name in row.values)
        size = row.completed[0].summary.world_size if row.completed else None
        if size and (values := row.measured(WPS)):
            groups.setdefault(rest, {})[i] = size, median(values)
    found: list[float | None] = [None] * len(rows)
    for measured in groups.values():
        fewest, wps = min(measured.values(), key=lambda each: each[0])
        if any(size != fewest for size, _ in measured.values()) and wps > 0:
            for i, (_, value) in measured.items():
                found[i] = 100 * value / wps
    return found


def percent_more(values: Sequence[float], baseline: Sequence[float]) -> float | None:
    """Return by how many percent the median of `values` exceeds the median of `baseline`; None if undefined."""
    if not values or not baseline or median(baseline) <= 0:
        return None
    return 100 * (median(values) / median(baseline) - 1)
