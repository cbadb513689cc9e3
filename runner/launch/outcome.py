"""How a run, or one node's part of it, ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """The end of a run, as far as one node can know it."""

    state: str
    """One of `rundir.states.FINAL`."""
    reason: str
    rank: int | None = None
    """The rank that failed first."""
    exit_code: int | None = None
    """Exit code of that rank; negative: the signal that killed it."""
    collateral: bool = False
    """Whether this is what a rank says when another one has gone."""

    @classmethod
    def of(cls, error: BaseException) -> Outcome:
        """The outcome of an exception in the launching process."""
        if isinstance(error, KeyboardInterrupt):
            return cls("interrupted", str(error))
        return cls("failed", str(error) or type(error).__name__)
