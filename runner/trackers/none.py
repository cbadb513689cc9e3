"""tracker=none: the run directory is the only record."""

from __future__ import annotations

from typing import Any

from runner.events import Row
from runner.trackers.base import RunRecord, Sink, Tracker


class Nowhere:
    """Takes everything and keeps nothing."""

    def log(self, row: Row) -> None: ...

    def finish(self, summary: dict[str, Any], state: str, reason: str) -> None: ...


class NoTracker(Tracker):
    """No tracker."""

    @property
    def active(self) -> bool:
        return False

    def open(self, run: RunRecord) -> Sink:
        return Nowhere()
