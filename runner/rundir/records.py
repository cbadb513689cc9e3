"""Pydantic models (records) of the JSON files in a run directory. A file that does not match its model is damaged."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, ValidationError

from meshrunner.recipes.storage import read_regular
from meshrunner.runner.figures import number
from meshrunner.runner.rundir.files import RECORD_BYTES, write_json

T = TypeVar("T")

Text = InstanceOf[str]
"""A string. Unlike pydantic's `str`, this type also accepts file names that are not UTF-8 (surrogate escapes)."""
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 53)]
"""An integer of at least 0, such as a step, an attempt or a process id."""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Measured = Annotated[Annotated[float, Field(strict=True)] | None, AfterValidator(number)]
"""A measured number (figure), or None if it is unknown or not finite."""


def null_as(default: T) -> BeforeValidator:
    return BeforeValidator(lambda value: default if value is None else value)


def under(key: str, default: Any = None) -> Any:
    """Return a field with a default. Its key in the file is `key`, because `model/params` is not a valid attribute name."""
    return Field(default, validation_alias=key, serialization_alias=key)


def unreadable(name: str | Path, error: Exception) -> str:
    """Return a clause such as `status.json cannot be read: Permission denied`. `error` is the exception that reading raised."""
    return f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"


class JsonFile(BaseModel):
    """Base class of the records. If a file is rewritten, it retains keys that this version of meshrunner does not define."""

    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file; return an empty record if it is missing. Raise ValueError if it is damaged, OSError if reading fails."""
        try:
            content = read_regular(path, RECORD_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return cls()
        try:
            return cls.model_validate(json.loads(content))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            key = ".".join(map(str, first["loc"])) or "its content"
            raise ValueError(f"{key}: {first['msg']}, got {first['input']!r:.60}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is not JSON: {error}") from None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file; return an empty record if the file is missing or damaged. Raise OSError if reading is not permitted."""
        try:
            return cls.load(path)
        except ValueError:
            return cls()

    @classmethod
    def peek(cls, path: Path) -> Self:
        """Read a file; return an empty record if the file is missing, damaged or unreadable."""
        try:
            return cls.load(path)
        except (OSError, ValueError):
            return cls()

    def write(self, path: Path) -> None:
        """Replace a file atomically."""
        write_json(path, self.as_json())

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file, without the keys that were never set."""
        return self.model_dump(by_alias=True, exclude_unset=True)

    def __bool__(self) -> bool:
        """Return whether any key is set: an empty record counts as False in conditions."""
        return bool(self.model_fields_set)

    def __or__(self, changes: Self | Mapping[str, Any]) -> Self:
        """Return a copy of this record, updated with the keys of another record or of a mapping."""
        given = changes.as_json() if isinstance(changes, JsonFile) else changes
        return self.model_validate(self.as_json() | dict(given))


class Environment(JsonFile):
    """The content of `environment.json`: a run's software and hardware, and the values chosen for settings that are `auto`."""

    host: Text | None = None
    command: list[Text] = []
    python: Text | None = None
    system: Text | None = None
    packages: dict[str, Text | None] = {}
    """Version of each package, or null if the package is not installed."""
    git_commit: Text | None = None
    device_type: Text | None = None
    workers: Count | None = None
    """Number of workers per node."""
    threads: Count | None = None
    """Number of threads per worker."""
    launch_env: Annotated[dict[Text, Any], null_as({})] = under("launch.env", {})
    environment: dict[Text, Any] = {}
    """Environment variables that may affect measurements."""
    attention_backend: Text | None = None
    """Kernels that torch chose for the model's attention, such as `cudnn_attention`."""
    resolved: dict[str, Any] = {}
    """Value that the run chose for each key that is `auto` or null in the configuration."""
    cpus: list[Text] = []
    """CPUs that each worker may run on, such as `0-31`: one element per worker, in the order of ranks."""
    remarks: list[Text] = []
    """Warnings of the workers, which are printed at the end of the run."""

    @property
    def precision(self) -> str | None:
        """The `precision.kind` that the run chose for `precision=auto`, or None if no choice is recorded."""
        kind = self.resolved.get("precision.kind")
        return str(kind) if kind else None


class PlanRecord(JsonFile):
    """The content of `plan.json`: the prediction made before the run began, in the format of `meshrunner plan --json`."""

    verdict: Text | None = None
    reason: Text | None = None
    communication_s: Measured = under("perf/exposed_communication_s")
    """Seconds per step in which compute waits for communication; None if unknown."""


class RankError(JsonFile):
    """The content of `logs/rank<N>.error.json`: the error that ended a worker."""

    time: Number | None = None
    rank: Count | None = None
    oom: bool = False
    """Whether the worker failed because an allocator ran out of memory."""
    message: Text = ""
    plain: bool = False
    """Whether the message is written for users and should be shown without a traceback."""
    traceback: Text | None = None


class Failure(RankError):
    """The content of `error.json`: exit code of the rank that failed first, and the error that the rank recorded, if any."""

    exit_code: int | None = None
    state: Text | None = None
    reason: Text | None = None


class Tracking(JsonFile):
    """The content of `tracker.json`: the state of a tracker, which reports a run to a service such as W&B."""

    run_id: Annotated[str, Field(pattern="^[0-9A-Za-z]{1,64}$")] | None = None
    """Id of the run, shared by its attempts and trackers. File names contain the id, so only letters and digits are valid."""
    phase: Text | None = None
    """Current activity of the tracker: `starting`, `opening`, `following`, `finishing` or `finished`."""
    warning: Text | None = None
    """Message of the error that ended the tracker."""


class Submission(JsonFile):
    """The content of `slurm.json`: the newest SLURM job of a run."""

    job_id: Annotated[str, Field(pattern="^[0-9]{1,18}(_[0-9]{1,18})?$", coerce_numbers_to_str=True)] | None = None
    """Id of the job: `12`, or `12_3` for a task of an array."""
    submitted: Number | None = None
    """Unix time of the submission."""
    script: Text | None = None


class TraceShares(JsonFile):
    """The shares of compute, exposed communication and idle time of one profiled rank, in percent."""

    rank: Count
    compute_pct: Measured = None
    exposed_comm_pct: Measured = None
    idle_pct: Measured = None


class TraceTable(JsonFile):
    """The content of `trace/table.json`: the time shares of every profiled rank."""

    steps: tuple[Count, Count] = (0, 0)
    """First and last profiled step."""
    ranks: list[TraceShares] = []


class Explanation(JsonFile):
    """The content of `explain.json`: the time that each kind of work takes in the traced steps of a run."""

    steps: tuple[Count, Count] = (0, 0)
    """First and last traced step."""
    seconds: dict[str, Annotated[list[Number], Field(min_length=1)]] = {}
    """Seconds in each traced step on rank 0, keyed by kind of work, such as `forward matmul` (see `profiler/step_lines.py`)."""
    modules: dict[str, Number] = {}
    """Mean seconds of compute per traced step on rank 0, keyed by module; empty for compiled models."""
