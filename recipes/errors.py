"""The exceptions that end a command with a message but no traceback. If a worker raises one of them, the run fails."""

from __future__ import annotations


class ConfigError(Exception):
    """Exit status 2: the configuration, or a file it names, is wrong. Nothing was started."""


class Incompatible(ConfigError):
    """Exit status 2: each setting is valid, but the combination is invalid. In a sweep, the row is `skipped`."""


class NotImported(ConfigError):
    """Exit status 2: a class that the configuration names cannot be imported here. The configuration may be right."""


class AlreadyRunning(Exception):
    """Exit status 1: another live process is executing the run directory."""


class Moved(Exception):
    """Exit status 1: a run or sweep directory was moved or removed while it was being executed."""


class NotSaved(Exception):
    """Exit status 1: a checkpoint could not be written. The message names the checkpoint, the path and the cause."""


class NotRecorded(Exception):
    """Exit status 1: a measured figure could not be written to events.jsonl."""


class Interrupted(KeyboardInterrupt):
    """Exit status 130: Ctrl-C, SIGTERM, SIGHUP or scancel. It is not an Exception, so no error handler catches it."""
