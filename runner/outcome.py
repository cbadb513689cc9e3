"""How a run ends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """How a run, or one node's part of it, ended."""

    state: str
    reason: str
    rank: int | None = None
    """The rank that failed first."""
    exit_code: int | None = None
    """Of that rank; negative: the signal that ended it."""
    collateral: bool = False
    """Whether this is what a rank says when another one has gone."""


class Interrupted(KeyboardInterrupt):
    """The user, or the system in their name, ended the run: Ctrl-C, SIGTERM, SIGHUP. No handler of errors may take it for one."""
