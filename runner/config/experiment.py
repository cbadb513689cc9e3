"""The configuration of a run as a frozen `Experiment`, built from a plain dict. Validation does not import torch."""

import os
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.errors import NotImported
from meshrunner.recipes.option import NOT_IMPORTED, Affects, Auto, AutoCount, Section, chosen, did_you_mean, whole
from meshrunner.recipes.recipe import Recipe
from meshrunner.runner.config.hardware import Hardware
from meshrunner.runner.config.launch_env import THREADS, as_text, effective
from meshrunner.runner.config.validation import invalid
from meshrunner.runner.figures import summary_keys
from meshrunner.runner.profiler.base import ProfiledRun, Profiler
from meshrunner.runner.trackers.base import Tracker

Minutes = Annotated[float, Field(gt=0, le=366 * 24 * 60), Affects.NOTHING]  # at most a year


def _known_figure(key: str) -> str:
    if key not in (known := summary_keys()):
        raise PydanticCustomError("objective", f"no run has a figure '{key}'.{did_you_mean(key, known)}")
    return key


class Launch(Section):
    """Settings of the workers, the processes that train the model."""

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
    """Environment variables of the workers, such as allocator, NCCL and CUDA settings; these variables override exported ones."""
    bind: Literal["auto", "none"] = "auto"
    """CPUs that a worker may use; auto: its GPU's NUMA domain, if that domain has at least 2 CPUs per worker; none: all CPUs."""
    emulate: Annotated[int | None, whole(None, at_least=0)] = None
    """Rank to emulate on one device; null: emulate no rank."""
    python: str | None = None
    """Python interpreter for the run; null: meshrunner's own."""
    port: Annotated[int | None, whole(None, at_most=65535), Affects.NOTHING]
    """TCP port of the rendezvous on the first node; null: any free port."""
    host_memory_gib: float | None = Field(gt=0, le=1e6)
    """GiB of host memory a worker may allocate after the recipe starts; a run that needs more ends as `oom`; null: no limit."""
    start_timeout_minutes: Minutes
    """Maximum minutes until the first step is completed, including compilation; a slower run ends as `timeout`."""
    timeout_minutes: Minutes
    """Maximum minutes from one completed step to the next; a run with a slower step ends as `timeout`."""

    @property
    def nodes_used(self) -> int:
        """Number of nodes that start workers: `nodes`, or 1 if a rank is emulated."""
        return self.nodes if self.emulate is None else 1

    @property
    def given_threads(self) -> int | None:
        """Threads of each worker, or None if the configuration does not set them."""
        if self.threads != "auto":
            return self.threads
        return int(self.env[THREADS]) if THREADS in self.env else None

    @model_validator(mode="after")
    def _one_number_of_threads(self) -> Self:
        if THREADS in self.env and self.threads not in ("auto", int(self.env[THREADS])):
            raise PydanticCustomError(
                "threads",
                f"threads({self.threads}) and env.{THREADS}({self.env[THREADS]}) differ; set only one of them",
            )
        return self


class Sweep(Section):
    """Settings of a whole sweep, such as combinations to leave out, repeats and retries."""

    affects: ClassVar[Affects] = Affects.SWEEP

    exclude: list[str]
    """Combinations to leave out: each item lists conditions that must all match, such as `precision=bf16 micro_batch=8,16`."""
    baseline: str | None
    """Setting that makes a row a baseline, such as `parallelism=fsdp1`. A row and its baseline differ only in this setting."""
    best_by: list[str] = []
    """Keys. For each combination of their values, a table shows only the best row."""
    repeat: Annotated[int | Auto, whole("auto", at_most=1000)]
    """Number of times to run each combination with each seed; auto: 3, then more for combinations too close in speed to rank."""
    max_repeat: Annotated[int, whole(at_least=3, at_most=1000)] = 8
    """Maximum number of repeats if `repeat` is auto."""
    order: Literal["shuffled", "as_given"] = "shuffled"
    """Order in which a round runs the combinations, each of them once; shuffled: a new random order for each round."""
    seeds: Annotated[int, whole(at_most=1000)]
    """Number of seeds per combination: `seed`, `seed` + 1 and so on. The spread of results over the seeds shows the noise."""
    retry: Annotated[int, whole(at_least=0, at_most=1000)]
    """Maximum number of retries of a run that failed or timed out."""
    rerun: list[Literal["completed", "oom", "skipped"]]
    """Final states after which `meshrunner resume` executes a run of the sweep again and discards the run's earlier results."""
    devices: AutoCount
    """Number of this node's devices to divide among concurrent runs; auto: all visible GPUs, or one run at a time on CPUs."""
    explain: Annotated[bool, Affects.FILES | Affects.FIGURES] = False
    """Whether to trace the last steps of each run for `meshrunner why`."""
    fail_fast: bool
    """Whether to stop the sweep at the first run that does not complete."""
    preflight: Annotated[
        Literal["off", "warn", "skip"],
        BeforeValidator(lambda value: "off" if value is False else value),  # YAML reads `off` as False
        Affects.SWEEP | Affects.DISPLAY,
    ] = "warn"
    """Reaction to runs that are predicted to run out of memory; skip: do not start such runs. On CPUs, `warn` does nothing."""


class Tune(Section):
    """Settings of `meshrunner tune`."""

    affects: ClassVar[Affects] = Affects.SWEEP

    runs: Annotated[int, whole(at_most=1000)]
    """Maximum number of runs of the search, not counting the repeats that compare the fastest combinations at the end."""
    minutes: Annotated[float | None, Field(gt=0)]
    """Total running time, in minutes, after which the search starts no further runs; null: no limit."""
    tolerance: Annotated[float, Field(gt=0, lt=1)]
    """The search ends if, with 95% probability, no combination is faster than the best so far by more than this fraction."""
    steps: Annotated[int, whole(at_least=2)]
    """Number of optimizer steps of each run of the search; replaces the key `steps`."""


class Experiment(Recipe):
    """A recipe with its hardware, tracker, profiler and launch settings, for a single run or one run of a sweep."""

    hardware: Annotated[SerializeAsAny[Hardware], chosen(Hardware)]
    """Device type with its peak FLOP/s, memory and bandwidths, to which MFU and memory percentages are relative."""
    tracker: Annotated[SerializeAsAny[Tracker], chosen(Tracker)]
    """Destination of figures in addition to the run directory, such as Weights & Biases."""
    profiler: Annotated[SerializeAsAny[Profiler], chosen(Profiler)]
    """Detailed record of some steps: a trace, or the memory by category."""
    launch: Launch
    """Settings of the workers: nodes, workers per node, threads, environment, time limits."""
    sweep: Sweep
    """Settings of a sweep as a whole, such as combinations to leave out, repeats and retries."""
    tune: Tune = Tune.model_construct(runs=12, minutes=None, tolerance=0.02, steps=15)
    """Settings of the search for the fastest combination with `meshrunner tune`."""
    progress: Annotated[Literal["auto", "steps", "runs"], Affects.DISPLAY] = "auto"
    """Progress output of a sweep; steps: a line per step; runs: a line per run; auto: a live table on a terminal, else `runs`."""
    log_every: Annotated[AutoCount, Affects.FIGURES]
    """Steps between reads of metrics from all ranks; auto: 1 on CPU, 10 on CUDA. Reading metrics waits for the device."""
    measure_after: Annotated[int, whole(at_least=0), Affects.RESULT]
    """Number of initial steps to exclude from throughput and peak memory, because torch compiles and tunes in these steps."""
    objective: Annotated[
        str,
        AfterValidator(_known_figure),
        Field(json_schema_extra=lambda schema: schema.update(enum=[*summary_keys()])),
        Affects.SWEEP,
    ]
    """Key in summary.json whose value hydra/sweeper optimises. The default sweeper ignores this key."""

    def host_memory(self, workers: int) -> tuple[str, float]:
        """Return (description, GiB) of the memory available to one CPU worker. `workers`: number of workers on the node."""
        if (limit := self.launch.host_memory_gib) is not None:
            return "a worker (launch.host_memory_gib)", limit
        workers = workers if self.launch.emulate is None else 1
        memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / workers / 2**30
        return "this machine's memory" + (f" / {workers} workers" if workers > 1 else ""), memory_gib

    def sequences_per_step(self, workers: int) -> int:
        """Return the global batch in sequences, from `global_batch` or else from the layout. `workers`: number per node."""
        return self.accumulation(self.parallelism.degrees(self.launch.nodes, workers).data)[0]

    def host_bytes(self, ranks: int) -> int:
        return int(self.host_memory(ranks // self.launch.nodes)[1] * 2**30)

    @property
    def profiled(self) -> ProfiledRun:
        """The run's settings on which a profiler depends, such as the number of steps."""
        return ProfiledRun(self.steps, self.measure_after, self.compile.compiles, self.parallelism)

    def steps_between_read_outs(self, device_type: str) -> int:
        """Return `log_every`, or the device type's default for `auto`. Reading metrics every step would leave a GPU idle."""
        if self.log_every == "auto":
            return 10 if device_type == "cuda" else 1
        return self.log_every


def check(config: dict[str, Any]) -> Experiment:
    """Build an Experiment. Raise ConfigError if a key or its value is wrong, or NotImported if an option's class is missing."""
    try:
        return Experiment.model_validate(config)
    except ValidationError as error:
        found = invalid(error, Experiment, config)
        if any(each["type"] == NOT_IMPORTED for each in error.errors(include_url=False)):
            raise NotImported(str(found)) from None
        raise found from None
