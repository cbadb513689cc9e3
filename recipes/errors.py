"""The exceptions that end a command in an orderly way, and the exit status of each.

    Exception
    ├── ConfigError          2   the configuration, or a file it names, is wrong; nothing was started
    │   ├── Incompatible     2   each setting is valid, the combination is not; in a sweep the row is `skipped`
    │   └── NotImported      2   a class that the configuration names cannot be imported here
    ├── AlreadyRunning       1   another live process is executing the run directory
    ├── Moved                1   a run or sweep directory was moved or removed while it was being executed
    ├── NotSaved             1   a checkpoint could not be written: the run has failed
    └── NotRecorded          1   a measured figure could not be written: the run has failed
    KeyboardInterrupt
    └── Interrupted        130   by Ctrl-C, SIGTERM, SIGHUP or scancel

Their messages are for the user and are shown without a traceback. In a worker each makes the run fail: exit status 1.
75, preempted, is a state of a run, not an error.
"""

from __future__ import annotations


class ConfigError(Exception):
    """The configuration, or a file it names, is wrong."""


class Incompatible(ConfigError):
    """Each setting is valid, the combination is not."""


class NotImported(ConfigError):
    """A class that the configuration names cannot be imported here. The configuration itself may be right."""


class AlreadyRunning(Exception):
    """Another live process is executing this run directory."""


class Moved(Exception):
    """A run or sweep directory was moved or removed while it was being executed."""


class NotSaved(Exception):
    """A checkpoint could not be written. The message says which, where and why."""


class NotRecorded(Exception):
    """A measured figure could not be written to events.jsonl."""


class Interrupted(KeyboardInterrupt):
    """The user or the system interrupted the command. It is not an Exception, so no error handler catches it."""
