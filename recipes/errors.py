"""Everything that can end a command in an orderly way, and the exit status that it ends with.

    Exception
    ├── ConfigError          2   the configuration, or what it points to, is wrong; nothing was started
    │   └── Incompatible     2   every part is right, their combination is not; in a sweep the row is `skipped`
    ├── AlreadyRunning       1   another living process executes the run directory
    ├── NotSaved             1   a checkpoint could not be written: the run has failed
    └── NotRecorded          1   a figure that was measured could not be written: the run has failed
    KeyboardInterrupt
    └── Interrupted        130   by Ctrl-C, SIGTERM, SIGHUP or scancel

Their texts are written for the user and are never shown as a traceback. 75, preempted, is no error but the state of a run.
"""

from __future__ import annotations


class ConfigError(Exception):
    """A mistake in the configuration or in what it points to."""


class Incompatible(ConfigError):
    """Every part of the configuration is right, their combination is not."""


class AlreadyRunning(Exception):
    """Another living process executes this run directory."""


class NotSaved(Exception):
    """A checkpoint could not be written; the text says which, where and why."""


class NotRecorded(Exception):
    """A figure that was measured cannot be written to events.jsonl."""


class Interrupted(KeyboardInterrupt):
    """The user, or the system in their name, interrupted the command. No handler of errors may take it for an error."""
