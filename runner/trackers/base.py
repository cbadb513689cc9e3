"""The `tracker` group: the interface of a tracker, and the options `none` and `several`."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from pydantic import Field, SerializeAsAny, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.option import Affects, Option, chosen

if TYPE_CHECKING:
    from meshrunner.runner.rundir import StepRow
    from meshrunner.runner.trackers.description import RunRecord, SweepRecord


class Sink(Protocol):
    """A tracker that is open for one run. If a method raises an exception, the tracking ends, but the run continues."""

    def log(self, row: StepRow) -> None:
        """Log the figures of one step: a row of events.jsonl or evals.jsonl. Rows arrive in the order of steps. If a step has a
        row in both files, the row of events.jsonl comes first. Unknown figures are None."""

    def finish(self, summary: dict[str, Any], state: str, reason: str) -> None:
        """Log the state, reason and summary of the ended run. `summary` may be {}. Wait until all data is written or sent."""


class Tracker(Option):
    """A service or file format that stores a run's figures, such as loss and speed, in addition to the run directory."""

    kinds: ClassVar[dict[str, str]] = {
        "wandb": "meshrunner.runner.trackers.wandb:Wandb",
        "tensorboard": "meshrunner.runner.trackers.tensorboard:TensorBoard",
        "several": "meshrunner.runner.trackers.base:Several",
        "none": "meshrunner.runner.trackers.base:NoTracker",
    }

    affects: ClassVar[Affects] = Affects.NOTHING

    finish_timeout_s: float = Field(default=60, gt=0)
    """Maximum seconds to wait for the tracker after the run has ended."""

    @property
    def members(self) -> dict[str, Tracker]:
        """Trackers to start, each in its own process, keyed by name. A single tracker has the name ""."""
        return {"": self}

    @property
    def active(self) -> bool:
        """Whether to start a tracker process for each run."""
        return True

    def remarks(self) -> list[str]:
        """Return warnings to print before the run starts, if tracking will fail."""
        return []

    @abstractmethod
    def open(self, run: RunRecord) -> Sink:
        """Start to track a run. The caller then logs the rows of all steps from step 1 on, even if the run is resumed."""

    def compare(self, sweep: SweepRecord) -> None:
        """Record an ended sweep's comparison table, and wait until it is written or sent. The base class does nothing."""


class NoTracker(Tracker):
    """No tracker: the run directory is the only record."""

    active: ClassVar[bool] = False

    def open(self, run: RunRecord) -> Sink:
        raise NotImplementedError("tracker=none is never opened")


class Several(Tracker):
    """Several independent trackers. A tracker that fails or hangs does not affect the other trackers."""

    of: dict[str, Annotated[SerializeAsAny[Tracker], chosen(Tracker)]]
    """Trackers by name. `tracker=[wandb,tensorboard]` chooses two trackers; `tracker.of.wandb.mode=online` sets W&B's mode."""

    @model_validator(mode="after")
    def _check_members(self) -> Several:
        if not self.of:
            raise PydanticCustomError("several", "no tracker is named. Use, for example, tracker=[wandb,tensorboard]")
        kind, count = Counter(tracker.kind for tracker in self.of.values()).most_common(1)[0]
        if count > 1:
            raise PydanticCustomError(
                "several", f"{count} trackers of kind '{kind}' would write the same files. Remove all but one"
            )
        return self

    @property
    def members(self) -> dict[str, Tracker]:
        return dict(self.of)

    def open(self, run: RunRecord) -> Sink:
        raise NotImplementedError("open the members of this tracker instead")


def tracker_of(record: RunRecord | SweepRecord) -> Tracker:
    """Return the tracker that a run or sweep uses. Raise pydantic.ValidationError if the configuration is invalid."""
    option: TypeAdapter[Tracker] = TypeAdapter(Annotated[Tracker, chosen(Tracker)])
    return option.validate_python(record.config.get("tracker"))
