"""The exceptions that end a command with a message but no traceback. A run fails if a worker raises such an exception."""


class ConfigError(Exception):
    """Exit status 2: the configuration, or a file it names, is wrong. Nothing was started."""


class Incompatible(ConfigError):
    """Exit status 2: each setting is valid, but the settings cannot be combined. A sweep records such a run as `skipped`."""


class NotImported(ConfigError):
    """Exit status 2: a class in the configuration cannot be imported. The class may be importable from another directory."""


class AlreadyRunning(Exception):
    """Exit status 1: the run is already being executed by another live process."""


class Moved(Exception):
    """Exit status 1: a run or sweep directory was moved or removed while it was being executed."""


class TooLarge(MemoryError):
    """Exit status 1: a rank's parameters and optimizer state take more host memory than it has. The run ends as `oom`."""


class NotSaved(Exception):
    """Exit status 1: a checkpoint could not be written. The message names the checkpoint, the path and the cause."""


class NotRecorded(Exception):
    """Exit status 1: the metrics of a step could not be written to events.jsonl."""


class Interrupted(KeyboardInterrupt):
    """Exit status 130: Ctrl-C, SIGTERM, SIGHUP or scancel. A KeyboardInterrupt, so `except Exception` does not catch it."""
