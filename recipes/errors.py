"""Exceptions that end a command, or a worker and therefore its run. The user gets the message without a traceback."""


class ConfigError(Exception):
    """Exit status 2: the configuration or a file that it names is invalid. Nothing was started."""


class Incompatible(ConfigError):
    """Exit status 2: each setting is valid, but the settings cannot be combined. A sweep skips runs with conflicting settings."""


class NotImported(ConfigError):
    """Exit status 2: a class in the configuration cannot be imported. The class may be importable from another directory."""


class AlreadyRunning(Exception):
    """Exit status 1: the run is already being executed by another live process."""


class Moved(Exception):
    """Exit status 1: the directory of a run or sweep was moved or removed before the run or sweep ended."""


class TooLarge(MemoryError):
    """Exit status 1: a rank's parameters and optimizer state exceed the rank's host memory. The run's status is `oom`."""


class NotSaved(Exception):
    """Exit status 1: a checkpoint could not be written. The message names the checkpoint, the path and the cause."""


class NotRecorded(Exception):
    """Exit status 1: the metrics of a step could not be written to events.jsonl."""


class Interrupted(KeyboardInterrupt):
    """Exit status 130: Ctrl-C, SIGTERM, SIGHUP or scancel ended the command. `except Exception` does not catch Interrupted."""
