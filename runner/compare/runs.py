"""Read finished and unfinished runs from disk, even if their files are damaged."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from meshrunner.recipes.config_keys import with_defaults
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.storage import read_regular
from meshrunner.runner.console import one_line, warn
from meshrunner.runner.figures import Figure, error_key, merged
from meshrunner.runner.rundir import (
    READERS,
    Environment,
    JsonFile,
    Layouts,
    Overrides,
    PlanRecord,
    Status,
    StepRow,
    Summary,
    inspect,
    measured_rows,
    only_of_completed,
    owner_is_alive,
    predicted,
    read_events,
    repeat_of,
    run_names,
    summarise,
    sweep_damage,
)
from meshrunner.runner.rundir.files import CONFIG, EVALS, OVERRIDES, RECORD_BYTES, is_run

EXCLUDED = "sweep.exclude: "
"""Beginning of the `reason` of runs that were skipped because `sweep.exclude` names them."""
LONGEST_REASON = 2000
"""Maximum length of the reason for a run's state, in characters. Longer reasons are truncated."""
MEASURED = "perf/wps_median"
"""Key of summary.json. If it is present, the run has written its figures."""
COUNTS = re.compile(rb"^(steps|measure_after): (\d{1,15})$", re.MULTILINE)
"""Pattern of the lines in config.yaml that set `steps` and `measure_after`. Every version of meshrunner writes them like this."""

R = TypeVar("R", bound=JsonFile)


@dataclass(frozen=True)
class Run:
    """The content of the readable files in one run directory."""

    path: Path
    state: str
    """The state in status.json, or `damaged`, `missing` or `stale` (recorded as running, but its process is gone)."""
    reason: str = ""
    records: Mapping[type[JsonFile], JsonFile] = field(default_factory=dict, repr=False)
    """Content of the run's files, keyed by class."""
    config: dict[str, Any] = field(default_factory=dict)
    """The configuration; {} if config.yaml cannot be read."""
    choices: dict[str, str] = field(default_factory=dict)
    """Name of the chosen option of each group."""
    task: tuple[str, ...] = ()
    """Overrides that the user typed."""
    directory: str = ""
    """The run or sweep directory that the user named, if the first named directory is the baseline; otherwise empty."""

    def record(self, kind: type[R]) -> R:
        """Return the record of class `kind`; return an empty record if the record's file is missing or damaged."""
        found = self.records.get(kind)
        return found if isinstance(found, kind) else kind()

    @cached_property
    def events(self) -> list[StepRow]:
        """Recorded steps, one row each; [] if no step is recorded or the run is damaged."""
        try:
            return [] if self.state == "damaged" else read_events(self.path)
        except OSError:
            return []

    @cached_property
    def evals(self) -> list[StepRow]:
        """Evaluations, one row each; [] if the run has none or is damaged."""
        try:
            return [] if self.state == "damaged" else read_events(self.path, EVALS)
        except OSError:
            return []

    @property
    def measured(self) -> list[StepRow]:
        """The steps that count towards the medians in summary.json."""
        return measured_rows(self.events, self.measure_after, self.record(Layouts).layouts)

    @property
    def measure_after(self) -> int:
        """Number of steps at the start of each attempt that do not count towards the throughput."""
        after = self.config.get("measure_after")
        return after if isinstance(after, int) else 0

    @property
    def environment(self) -> Environment:
        return self.record(Environment)

    @cached_property
    def summary(self) -> Summary:
        """Content of summary.json. Figures that the run has not written yet are computed from events.jsonl."""
        found = predicted(self.record(PlanRecord)) | self.record(Summary)
        if MEASURED not in found.figures and self.events:
            status, layouts = self.record(Status), self.record(Layouts).layouts
            attempt = status.started, status.attempt or 1
            found |= summarise(self.events, self.measure_after, *attempt, layouts, self.evals)
        return only_of_completed(found, self.state)

    @property
    def figures(self) -> dict[str, float | None]:
        return self.summary.figures

    @property
    def precision(self) -> str:
        """The `precision.kind` of the run, such as `bf16`. `auto` is replaced by the kind that the run chose when it started."""
        section = self.config.get("precision")
        kind = section.get("kind") if isinstance(section, dict) else None
        return str(self.environment.precision or kind if kind == "auto" else kind)

    @property
    def sweep(self) -> dict[str, Any]:
        section = self.config.get("sweep")
        return section if isinstance(section, dict) else {}

    @property
    def round(self) -> tuple[Path, str]:
        """The sweep and the round of the run; a unique value if the sweep has no rounds. A round executes every combination
        once. `sweep.repeat` and `sweep.seeds` add rounds, but `seed=0,1` does not."""
        several = self.sweep.get("repeat", 1) != 1 or self.sweep.get("seeds", 1) != 1
        repeat = repeat_of(self.path.name) if several else ""
        return (self.path.parent if repeat else self.path, repeat)

    @property
    def workload(self) -> dict[str, Any]:
        """The work of a step: the model, the sequence length, and the sequences per step (`batch`). Unknown values are None."""
        resolved = self.environment.resolved.get("global_batch")
        batch = self.config.get("global_batch") if resolved is None else resolved
        return {"model": self.config.get("model"), "seq_len": self.config.get("seq_len"), "batch": batch}

    @property
    def seed(self) -> Any:
        seed = self.config.get("seed")
        return seed if isinstance(seed, int) else str(seed)


@dataclass(frozen=True)
class Row:
    """The runs of one combination of settings."""

    values: dict[str, Any]
    """The varying keys of the row and their values."""
    runs: list[Run]

    @property
    def key(self) -> Path:
        """Key of the row in `Noise`."""
        return self.runs[0].path

    @property
    def completed(self) -> list[Run]:
        return [run for run in self.runs if run.state == "completed"]

    @property
    def counted(self) -> list[Run]:
        """The completed runs, or all runs if no run completed."""
        return self.completed or self.runs

    @cached_property
    def summaries(self) -> list[dict[str, float | None]]:
        """The figures of each run in `counted`."""
        return [run.figures for run in self.counted]

    @cached_property
    def figures(self) -> dict[str, float | None]:
        """The figures of the row, merged over the runs in `counted`."""
        return merged(self.summaries)

    @cached_property
    def plan(self) -> dict[str, Any]:
        """The prediction of the first run in `counted`, with the keys of plan.json; {} if that run was not predicted."""
        return self.counted[0].record(PlanRecord).as_json()

    @property
    def state(self) -> str:
        """The state that all runs share, or `2 completed, 1 oom` if the states of repeats differ."""
        counts = Counter(run.state for run in self.runs)
        return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n} {state}" for state, n in counts.items())

    @property
    def reason(self) -> str:
        return "; ".join(dict.fromkeys(run.reason for run in self.runs if run.reason))

    def measured(self, figure: Figure) -> list[float]:
        """Return the values of a figure in the completed runs. Skip runs without this figure."""
        return list(self.by_round(figure).values())

    def by_round(self, figure: Figure) -> dict[Any, float]:
        """Return the values of a figure in the completed runs, keyed by (round, number of the run within the round)."""
        runs = [run for run in self.completed if not run.figures.get(figure.but)] or self.completed
        found: dict[Any, float] = {}
        seen: Counter[Any] = Counter()
        for run in runs:
            seen[run.round] += 1
            if (value := run.figures.get(figure.summary_keys[0])) is not None:
                found[run.round, seen[run.round]] = value
        return found

    def errors(self, figure: Figure) -> list[float]:
        """Return the relative standard errors that completed runs have recorded for the median of a figure."""
        errors = (run.figures.get(error_key(figure.key)) for run in self.completed)
        return [error for error in errors if error is not None]


def read_runs(folders: Iterable[Path], read: Callable[[Path], Run] | None = None) -> list[Run]:
    """Return the runs in run and sweep directories, in the order given and without duplicates. Sort a sweep's runs by name.
    `read` reads one run: `read_run` (default) or `glance`. Raise ConfigError if a directory is missing or contains no run."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in _run_dirs(folder):
            found.setdefault(os.path.realpath(path), path)
    return [(read or read_run)(path) for path in found.values()]


def _run_dirs(folder: Path) -> Iterator[Path]:
    if not folder.exists():
        raise ConfigError(f"no such directory: {folder}")
    if is_run(folder):
        yield folder
        return
    try:
        below = {path for path in folder.iterdir() if is_run(path)} if folder.is_dir() else set()
        below |= {folder / name for name in run_names(folder)}
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from None
    if damage := sweep_damage(folder):
        warn(damage)
    if not below:
        raise ConfigError(
            f"{folder} is neither a run nor a sweep: no config.yaml in this directory or its subdirectories"
        )
    yield from sorted(below)


def glance(path: Path) -> Run:
    """Read a run faster than `read_run`: do not parse config.yaml, but search it for `steps` and `measure_after`."""
    return read_run(path, GLANCED)


def _counts(path: Path) -> dict[str, int]:
    found = COUNTS.findall(read_regular(path, RECORD_BYTES))
    if not found:
        raise ValueError("`steps` is missing or not a whole number")
    return {key.decode(): int(value) for key, value in found}


GLANCED = {name: read for name, read in READERS.items() if name != OVERRIDES} | {CONFIG: _counts}
"""Functions that read the files for `glance`, keyed by file name."""


def read_run(path: Path, readers: Mapping[str, Callable[[Path], object]] = READERS) -> Run:
    """Read a run directory. If a file is damaged, the state is `damaged` and the reason names the file."""
    if not path.is_dir():
        return Run(path, "missing", "sweep.json lists the run, but there is no such directory")
    if not is_run(path):
        return Run(path, "damaged", "it has no config.yaml")
    damage, files = inspect(path, readers)
    config = with_defaults(config) if "model" in (config := files.get(dict, {})) else config
    overrides = files.get(Overrides, Overrides()) if config else Overrides()
    run = Run(path, "damaged", _short(damage), files, config, overrides.choices, overrides.task)
    status = run.record(Status)
    if damage:
        return run
    if status.state is None:
        return replace(run, reason="status.json is missing or has no state")
    if status.state == "running" and not owner_is_alive(status):
        reason = "recorded as running, but its process is gone; `meshrunner resume` continues the run"
        return replace(run, state="stale", reason=reason)
    return replace(run, state=status.state, reason=_short(status.reason))


def _short(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON]} ..."
