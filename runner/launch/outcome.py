"""The outcome of a run, or of one node's part in it."""

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
    """Exit code of that rank; a negative one is the signal that killed it."""
    collateral: bool = False
    """Whether another rank's failure may have caused this one."""
    interrupted: bool = False
    """Whether the user interrupted a run that then ended by itself, so that a sweep should stop."""

    @classmethod
    def from_error(cls, error: BaseException) -> Outcome:
        """Return the outcome of an exception in the launcher."""
        if isinstance(error, KeyboardInterrupt):
            return cls("interrupted", str(error))
        return cls("failed", str(error) or type(error).__name__)
