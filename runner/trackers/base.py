"""
The `tracker` group: the interface of a tracker and the records that it receives.

Every command that checks a configuration imports this module, so the records of run directories are imported on first use.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from pydantic import Field, TypeAdapter

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import Affects, Option, chosen
from meshrunner.runner.rundir.files import is_sweep, tracking

if TYPE_CHECKING:
    from meshrunner.runner.rundir import StepRow, Tracking


@dataclass(frozen=True)
class RunRecord:
    """A run directory as a tracker sees it."""

    run_dir: Path
    config: dict[str, Any]
    """The resolved configuration, nested as in config.yaml."""
    choices: dict[str, str]
    """Group -> chosen option: {"parallelism": "fsdp2", ...}."""
    name: str
    """The run directory's name."""
    group: str | None
    """Date and varying keys of the sweep, `2026-01-31 14:05 parallelism x lr`; None for a single run."""
    attempt: int
    """Number of the attempt, from 1; a later attempt resumes the run."""
    run_id: str
    """Hexadecimal id, the same for all attempts."""

    @classmethod
    def load(cls, run_dir: Path) -> RunRecord:
        """Read a run directory. If tracker.json has no `run_id`, write a new one."""
        from meshrunner.runner.rundir import read_config, read_overrides, read_status, sweep_title

        run_dir = run_dir.resolve()
        return cls(
            run_dir=run_dir,
            config=read_config(run_dir),
            choices=read_overrides(run_dir).choices,
            name=run_dir.name,
            group=sweep_title(run_dir.parent) if is_sweep(run_dir.parent) else None,
            attempt=read_status(run_dir).attempt or 1,
            run_id=ensure_run_id(run_dir),
        )

    @property
    def tags(self) -> list[str]:
        """Options that are not the default, as `group=option`, at most 64 characters each."""
        from meshrunner.runner.trackers.description import tags

        return tags(self.choices)

    def describe(self) -> dict[str, Any]:
        """Return `description.described` of the run. It is complete once this attempt has written its first row."""
        from meshrunner.runner.trackers.description import described

        return described(self.config, self.choices, self.run_dir)


@dataclass(frozen=True)
class SweepRecord:
    """A sweep directory as a tracker sees it, at the end of the sweep."""

    sweep_dir: Path
    group: str
    """Group of the sweep's runs."""
    config: dict[str, Any]
    """The resolved configuration of the first run."""
    shared: dict[str, Any]
    """Facts of `RunRecord.describe` that all started runs share, with `varies`, `baseline` and the number of `runs`."""
    tags: list[str]
    """Tags that all runs have."""
    rows: list[dict[str, Any]]
    """Rows of the table as in `meshrunner compare --json`."""
    findings: list[str]
    """Sentences above the table."""
    run_id: str
    """Id of the tracker's run with the table, kept when the sweep is resumed."""

    @classmethod
    def load(cls, sweep_dir: Path) -> SweepRecord:
        """Read a sweep directory; raises ConfigError if none of its runs is readable."""
        from meshrunner.runner.compare.comparison import compare_sweep
        from meshrunner.runner.compare.export import records
        from meshrunner.runner.compare.findings import findings
        from meshrunner.runner.rundir import sweep_title
        from meshrunner.runner.trackers.description import described, in_common, tags

        sweep_dir = sweep_dir.resolve()
        comparison, _ = compare_sweep(sweep_dir)
        readable = [run for row in comparison.rows for run in row.runs if run.config]
        if not readable:
            raise ConfigError(f"{sweep_dir} contains no readable run")
        first = min(readable, key=lambda run: run.path)
        started = [run for run in readable if run.environment] or readable  # skipped runs resolve no `auto`
        shared = in_common([described(run.config, run.choices, run.path) for run in started])
        shared |= {"varies": comparison.keys, "runs": sum(len(row.runs) for row in comparison.rows)}
        shared |= {"baseline": "=".join(comparison.baseline)} if comparison.baseline else {}
        return cls(
            sweep_dir=sweep_dir,
            group=sweep_title(sweep_dir),
            config=first.config,
            shared=shared,
            tags=[tag for tag in tags(first.choices) if all(tag in tags(run.choices) for run in readable)],
            rows=records(comparison),
            findings=findings(comparison),
            run_id=ensure_run_id(sweep_dir),
        )


def ensure_run_id(folder: Path) -> str:
    """Return the id of a run or of a sweep's table from tracker.json. If there is none, write a new one."""
    run_id = read_tracking(folder).run_id
    if run_id is None:
        run_id = secrets.token_hex(4)
        update_tracking(folder, run_id=run_id)
    return run_id


def read_tracking(folder: Path, member: str = "") -> Tracking:
    """Read the state of a tracker of a run or sweep directory; `member` names one of several trackers."""
    from meshrunner.runner.rundir import Tracking

    return Tracking.read(tracking(folder, member))


def update_tracking(folder: Path, member: str = "", **changes: Any) -> None:
    """Change some keys of the state of a tracker."""
    (read_tracking(folder, member) | changes).write(tracking(folder, member))


class Sink(Protocol):
    """An open tracker. Its exceptions end the tracking but never the run."""

    def log(self, row: StepRow) -> None:
        """Log one row of events.jsonl. `step` increases from call to call; unknown figures are None."""

    def finish(self, summary: dict[str, Any], state: str, reason: str) -> None:
        """
        Finish the run and return once everything is written or sent.

        Args:
            summary: content of summary.json, or {}.
            state: the run's final state, e.g. `completed` or `oom`.
            reason: the reason for the state, or an empty string.
        """


class Tracker(Option):
    """A destination for the figures of a run in addition to its directory."""

    kinds: ClassVar[dict[str, str]] = {
        "wandb": "meshrunner.runner.trackers.wandb:Wandb",
        "tensorboard": "meshrunner.runner.trackers.tensorboard:TensorBoard",
        "several": "meshrunner.runner.trackers.several:Several",
        "none": "meshrunner.runner.trackers.base:NoTracker",
    }

    affects: ClassVar[Affects] = Affects.NOTHING

    finish_timeout_s: float = Field(default=60, gt=0)
    """Longest wait for the tracker after the end of the run, in seconds."""

    @property
    def members(self) -> dict[str, Tracker]:
        """Name -> tracker, each in its own process; a single tracker has the name ""."""
        return {"": self}

    @property
    def active(self) -> bool:
        """Whether runs are tracked; if not, no process is started."""
        return True

    @abstractmethod
    def open(self, run: RunRecord) -> Sink:
        """Start tracking. This runs in the tracker process, which logs all rows from step 1, also for a resumed run."""

    @property
    def compares(self) -> bool:
        """Whether the table of a sweep is tracked; if not, no process is started at its end."""
        return False

    def compare(self, sweep: SweepRecord) -> None:
        """Track the table of a sweep that has ended and return once it is written or sent."""


class NullSink:
    """A sink that discards everything."""

    def log(self, row: StepRow) -> None: ...

    def finish(self, summary: dict[str, Any], state: str, reason: str) -> None: ...


class NoTracker(Tracker):
    """No tracker: the run directory is the only record."""

    @property
    def active(self) -> bool:
        return False

    def open(self, run: RunRecord) -> Sink:
        return NullSink()


def tracker_of(record: RunRecord | SweepRecord) -> Tracker:
    """Return the tracker of a configuration; raises pydantic.ValidationError."""
    option: TypeAdapter[Tracker] = TypeAdapter(Annotated[Tracker, chosen(Tracker)])
    return option.validate_python(record.config.get("tracker"))
