"""The `tracker` group: the records that a tracker receives, and the interface that it implements."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import Field, TypeAdapter

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import Option, chosen
from meshrunner.runner.rundir.damage import RUN_ID
from meshrunner.runner.rundir.events import StepRow
from meshrunner.runner.rundir.files import TRACKING, is_sweep, read_json, write_json
from meshrunner.runner.rundir.run import read_config, read_overrides
from meshrunner.runner.rundir.states import read_status


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
    """The sweep directory's name; None for a single run."""
    attempt: int
    """Counts from 1; above 1 the run is resumed."""
    run_id: str
    """Letters and digits; the same for all attempts."""

    @classmethod
    def load(cls, run_dir: Path) -> RunRecord:
        """Read a run directory; the first time, write its `run_id` to tracker.json."""
        run_dir = run_dir.resolve()
        return cls(
            run_dir=run_dir,
            config=read_config(run_dir),
            choices=read_overrides(run_dir).choices,
            name=run_dir.name,
            group=run_dir.parent.name if is_sweep(run_dir.parent) else None,
            attempt=int(read_status(run_dir).get("attempt") or 1),
            run_id=_run_id(run_dir),
        )

    @property
    def tags(self) -> list[str]:
        """The chosen options as `group=option`, at most 64 characters each (W&B refuses longer ones)."""
        return [f"{group}={option}"[:64] for group, option in self.choices.items()]


@dataclass(frozen=True)
class SweepRecord:
    """A sweep directory as a tracker sees it, at the end of the sweep."""

    sweep_dir: Path
    config: dict[str, Any]
    """The resolved configuration of the first run."""
    rows: list[dict[str, Any]]
    """Rows of the table, as `meshrunner compare --json` prints them."""
    findings: list[str]
    """The sentences above the table."""
    run_id: str
    """Id of the entry with the table; the same whenever the sweep is resumed."""

    @classmethod
    def load(cls, sweep_dir: Path) -> SweepRecord:
        """Read a sweep directory; raises ConfigError when it contains no run."""
        from meshrunner.runner.compare.export import records
        from meshrunner.runner.compare.findings import findings
        from meshrunner.runner.compare.rows import compare_sweep

        sweep_dir = sweep_dir.resolve()
        comparison, _ = compare_sweep(sweep_dir)
        readable = [run for row in comparison.rows for run in row.runs if run.config]
        if not readable:
            raise ConfigError(f"{sweep_dir} holds no run that can be read")
        first = min(readable, key=lambda run: run.path)
        return cls(sweep_dir, first.config, records(comparison), findings(comparison), _run_id(sweep_dir))


def _run_id(folder: Path) -> str:
    run_id = read_tracking(folder).get("run_id")
    if not isinstance(run_id, str) or not RUN_ID.fullmatch(run_id):  # it becomes part of paths
        run_id = secrets.token_hex(4)
        update_tracking(folder, run_id=run_id)
    return run_id


def read_tracking(run_dir: Path) -> dict[str, Any]:
    """The content of tracker.json in a run or sweep directory; {} where there is none."""
    return read_json(run_dir / TRACKING)


def update_tracking(run_dir: Path, **changes: Any) -> None:
    """Change some keys of tracker.json."""
    write_json(run_dir / TRACKING, read_tracking(run_dir) | changes)


class Sink(Protocol):
    """An open tracker. An exception ends the tracking, never the run."""

    def log(self, row: StepRow) -> None:
        """Log one row of events.jsonl; `step` increases from call to call, unknown figures are None."""

    def finish(self, summary: dict[str, Any], state: str, reason: str) -> None:
        """
        Finish the run; returns when everything is written or sent.

        Args:
            summary: summary.json, {} where there is none.
            state: the run's final state, e.g. `completed` or `oom`.
            reason: the reason for the state; may be empty.
        """


class Tracker(Option):
    """A destination for the figures of a run, in addition to its directory."""

    kinds: ClassVar[dict[str, str]] = {
        "wandb": "meshrunner.runner.trackers.wandb:Wandb",
        "tensorboard": "meshrunner.runner.trackers.tensorboard:TensorBoard",
        "none": "meshrunner.runner.trackers.base:NoTracker",
    }

    finish_timeout_s: float = Field(default=60, gt=0)
    """Seconds that the command waits for the tracker after the end of the run."""

    @property
    def active(self) -> bool:
        """Whether a run is tracked; False starts no process."""
        return True

    @abstractmethod
    def open(self, run: RunRecord) -> Sink:
        """Start tracking, in the tracker process. All rows from step 1 on follow, in a resumed run, too."""

    @property
    def compares(self) -> bool:
        """Whether the table of a sweep is tracked; False starts no process at the end of a sweep."""
        return False

    def compare(self, sweep: SweepRecord) -> None:
        """Track the table of a sweep that has ended; returns when it is written or sent."""


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
    """The tracker that a configuration names; raises pydantic.ValidationError."""
    option: TypeAdapter[Tracker] = TypeAdapter(Annotated[Tracker, chosen(Tracker)])
    return option.validate_python(record.config.get("tracker"))
