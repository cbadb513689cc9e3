"""The outcome of a run, or of one node's part of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run, as far as one node knows it."""

    state: str
    """One of `rundir.states.FINAL`."""
    reason: str
    rank: int | None = None
    """The rank that failed first."""
    exit_code: int | None = None
    """Exit code of that rank; negative: killed by that signal."""
    collateral: bool = False
    """Whether this failure may be the consequence of another rank's."""
    interrupted: bool = False
    """Whether the user has interrupted a run that then ended by itself: a sweep is to stop."""

    @classmethod
    def from_error(cls, error: BaseException) -> Outcome:
        """Return the outcome of an exception in the launcher."""
        if isinstance(error, KeyboardInterrupt):
            return cls("interrupted", str(error))
        return cls("failed", str(error) or type(error).__name__)
