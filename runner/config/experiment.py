"""The configuration of a run as a frozen `Experiment`, built from a plain dict. The checks do not import torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, SerializeAsAny, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.config_keys import flatten
from meshrunner.recipes.errors import NotImported
from meshrunner.recipes.option import (
    NOT_IMPORTED,
    Affects,
    Auto,
    AutoCount,
    Option,
    Section,
    chosen,
    did_you_mean,
    whole,
)
from meshrunner.recipes.recipe import Recipe
from meshrunner.runner.config.hardware import Hardware
from meshrunner.runner.config.launch_env import THREADS, as_text, effective
from meshrunner.runner.config.validation import invalid
from meshrunner.runner.figures import summary_keys
from meshrunner.runner.profiler.base import ProfiledRun, Profiler
from meshrunner.runner.trackers.base import Tracker

YEAR_MINUTES = 366 * 24 * 60
Minutes = Annotated[float, Field(gt=0, le=YEAR_MINUTES), Affects.NOTHING]
READ_OUT_EVERY = {"cpu": 1, "cuda": 10}
"""Value of `log_every: auto` for each device type."""


def _known_figure(key: str) -> str:
    if key not in (known := summary_keys()):
        raise PydanticCustomError("objective", f"no run has a figure '{key}'.{did_you_mean(key, known)}")
    return key


class Launch(Section):
    """Settings of the workers of a run."""

    affects: ClassVar[Affects] = Affects.SPEED

    nodes: Annotated[int, whole(at_most=2**17)]
    """Number of machines that a run uses."""
    workers: Annotated[int | Auto, whole("auto", at_most=1024)]
    """Processes on each node, one per device; auto: the number of GPUs, or 2 on a node without GPUs."""
    threads: Annotated[int | Auto, whole("auto", at_most=4096)]
    """CPU threads of each worker; auto: OMP_NUM_THREADS in launch.env, or else the run's CPU cores divided by launch.workers."""
    env: Annotated[
        dict[str, Annotated[str, BeforeValidator(as_text, json_schema_input_type=str | int | float | bool)]],
        AfterValidator(effective),
    ]
    """Environment variables of the workers, such as allocator, NCCL and CUDA settings. They override exported variables."""
    bind: Literal["auto", "none"] = "auto"
    """CPUs that a worker may use; auto: the CPUs in its GPU's NUMA domain if they suffice; none: all CPUs of the node."""
    port: Annotated[int | None, whole(None, at_most=65535), Affects.NOTHING]
    """TCP port of the rendezvous on the first node; null: any free port."""
    host_memory_gib: float | None = Field(gt=0, le=1e6)
    """GiB of host memory that a worker may allocate after the recipe starts; null: no limit. Runs that need more end as `oom`."""
    start_timeout_minutes: Minutes
    """Maximum minutes until the first step is done, compilation included. A run that takes longer ends as `timeout`."""
    timeout_minutes: Minutes
    """Maximum minutes from one completed step to the next. A run that takes longer ends as `timeout`."""

    @property
    def given_threads(self) -> int | None:
        """Threads of each worker, or None if the configuration does not set them."""
        if self.threads != "auto":
            return self.threads
        return int(self.env[THREADS]) if THREADS in self.env else None

    @model_validator(mode="after")
    def _one_number_of_threads(self) -> Launch:
        if THREADS in self.env and self.threads not in ("auto", int(self.env[THREADS])):
            raise PydanticCustomError(
                "threads",
                f"threads({self.threads}) and env.{THREADS}({self.env[THREADS]}) differ; set only one of them",
            )
        return self


class Sweep(Section):
    """Settings of a sweep as a whole."""

    affects: ClassVar[Affects] = Affects.SWEEP

    exclude: list[str]
    """Combinations to leave out. Each entry lists conditions: `activation_checkpoint=full micro_batch=8,16`."""
    baseline: str | None
    """Setting that identifies the baseline, such as `parallelism=fsdp1`. The table compares all other rows with it."""
    repeat: Annotated[int, whole(at_most=1000)]
    """Number of runs per combination. All combinations run once before any is repeated. Repeats show the noise between runs."""
    seeds: Annotated[int, whole(at_most=1000)]
    """Number of seeds per combination, counting up from `seed`. Differences between the seeds estimate the noise."""
    retry: Annotated[int, whole(at_least=0, at_most=1000)]
    """Maximum retries of a run that failed or timed out."""
    rerun: list[Literal["completed", "oom", "skipped"]]
    """Final states of runs that a resumed sweep executes again. The earlier results of these runs are discarded."""
    devices: AutoCount
    """Number of this node's devices that concurrent runs share; auto: all visible GPUs; on CPUs, one run executes at a time."""
    fail_fast: bool
    """Stop the sweep at the first run that does not complete."""
    preflight: Annotated[
        Literal["off", "warn", "skip"],
        BeforeValidator(lambda value: "off" if value is False else value),  # YAML reads `off` as False
        Affects.SWEEP | Affects.DISPLAY,
    ] = "warn"
    """Before any run begins, warn about runs predicted not to fit in memory, or skip them. On CPUs, `warn` predicts nothing."""


class Experiment(Recipe):
    """A recipe with its hardware, tracker, profiler and launch settings, for a single run or one run of a sweep."""

    hardware: Annotated[SerializeAsAny[Hardware], chosen(Hardware)]
    """Peak FLOP/s, memory and bandwidths of the device. MFU and memory percentages are relative to them."""
    tracker: Annotated[SerializeAsAny[Tracker], chosen(Tracker)]
    """Destination of figures in addition to the run directory, such as Weights & Biases."""
    profiler: Annotated[SerializeAsAny[Profiler], chosen(Profiler)]
    """Detailed record of some steps: a trace, or the memory by category."""
    launch: Launch
    """Settings of the workers: nodes, workers per node, threads, environment, time limits."""
    sweep: Sweep
    """Settings of a sweep as a whole: combinations to leave out, repeats, retries."""
    progress: Annotated[Literal["auto", "steps", "runs"], Affects.DISPLAY] = "auto"
    """Progress output; auto: a live line or table on a terminal, else a line per step of a single run, or per run of a sweep."""
    log_every: Annotated[AutoCount, Affects.FIGURES]
    """Interval in steps at which metrics are read from all ranks; auto: 1 on CPU, 10 on CUDA. Reading waits for the device."""
    measure_after: Annotated[int, whole(at_least=0), Affects.RESULT]
    """Number of steps at the start of a run that throughput and peak memory leave out, because torch compiles and tunes then."""
    objective: Annotated[
        str,
        AfterValidator(_known_figure),
        Field(json_schema_extra=lambda schema: schema.update(enum=[*summary_keys()])),
        Affects.SWEEP,
    ]
    """Key of summary.json that a sweeper optimises."""

    @property
    def profiled(self) -> ProfiledRun:
        """Facts about the run that a profiler needs."""
        return ProfiledRun(self.steps, self.measure_after, self.compile.compiles)

    def steps_between_read_outs(self, device_type: str) -> int:
        """Return `log_every` with `auto` resolved. Reading metrics at every step would leave a GPU idle, but not a CPU."""
        return READ_OUT_EVERY[device_type] if self.log_every == "auto" else self.log_every


def check(config: dict[str, Any]) -> Experiment:
    """Build an Experiment, checking each key on its own. Raise ConfigError for wrong keys, NotImported for a missing class."""
    try:
        return Experiment.model_validate(config)
    except ValidationError as error:
        found = invalid(error, lambda path: _fields_at(path, config), keys=flatten(config))
        if any(each["type"] == NOT_IMPORTED for each in error.errors(include_url=False)):
            raise NotImported(str(found)) from None
        raise found from None


def _fields_at(loc: tuple[int | str, ...], config: dict[str, Any]) -> list[str]:
    """Return the keys that exist at a configuration path. An error message suggests one of them in place of an unknown key."""
    here: Any = Experiment
    for part in loc:
        field = here.model_fields.get(str(part)) if isinstance(here, type) and issubclass(here, BaseModel) else None
        here = field.annotation if field else None
        if isinstance(here, type) and issubclass(here, Option):
            here = here.resolve(config[str(part)]["kind"])
    return list(here.model_fields) if isinstance(here, type) and issubclass(here, BaseModel) else []
