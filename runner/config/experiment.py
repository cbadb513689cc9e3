"""Check a configuration: a plain dict becomes an `Experiment`. All problems are reported at once, without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    SerializeAsAny,
    ValidationError,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from meshrunner.recipes import compatibility
from meshrunner.recipes.config_diff import flatten
from meshrunner.recipes.errors import ConfigError, Incompatible, NotImported
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
from meshrunner.runner.config.validation import invalid, listed
from meshrunner.runner.figures import summary_keys
from meshrunner.runner.profiler.base import ProfiledRun, Profiler
from meshrunner.runner.trackers.base import Tracker

if TYPE_CHECKING:
    from meshrunner.recipes.model.network import Network
    from meshrunner.recipes.parallelism.wrap_plan import WrapPlan

YEAR_MINUTES = 366 * 24 * 60
Minutes = Annotated[float, Field(gt=0, le=YEAR_MINUTES), Affects.NOTHING]
READ_OUT_EVERY = {"cpu": 1, "cuda": 10}
"""Device type -> the value of `log_every: auto`."""
MAX_REPEATS = 10_000
"""Most runs of one combination of a sweep."""


def _known_figure(key: str) -> str:
    if key not in (known := summary_keys()):
        raise PydanticCustomError("objective", f"no run has a figure '{key}'.{did_you_mean(key, known)}")
    return key


def _figures(schema: JsonDict) -> None:
    schema["enum"] = [*summary_keys()]


class Launch(Section):
    """Settings of the workers of a run."""

    affects: ClassVar[Affects] = Affects.SPEED

    nodes: Annotated[int, whole(at_most=2**17)]
    """Number of machines of a run."""
    workers: Annotated[int | Auto, whole("auto", at_most=1024)]
    """Processes on each node, one for each device; auto: the node's GPUs, or 2 without any."""
    threads: Annotated[int | Auto, whole("auto", at_most=4096)]
    """CPU threads of a worker; auto: OMP_NUM_THREADS of launch.env, else the cores of the run / workers."""
    env: Annotated[
        dict[str, Annotated[str, BeforeValidator(as_text, json_schema_input_type=str | int | float | bool)]],
        AfterValidator(effective),
    ]
    """Environment variables of the workers, such as allocator, NCCL, CUDA and torch settings. They override exported ones."""
    bind: Literal["auto", "none"] = "auto"
    """CPUs of a worker; auto: those in its GPU's NUMA domain, if there are enough; none: all CPUs of the node."""
    port: Annotated[int | None, whole(None, at_most=65535), Affects.NOTHING]
    """TCP port of the rendezvous on the first node; null: any free port."""
    host_memory_gib: float | None = Field(gt=0, le=1e6)
    """Host memory a worker may take beyond what it holds when the recipe starts; null: no limit. Exceeding it is `oom`."""
    start_timeout_minutes: Minutes
    """Most minutes until the first step is done, compilation included. A run that takes longer ends as `timeout`."""
    timeout_minutes: Minutes
    """Most minutes without a completed step, after the first. A run that takes longer ends as `timeout`."""

    @property
    def given_threads(self) -> int | None:
        """Threads of a worker, None if the configuration does not say."""
        if self.threads != "auto":
            return self.threads
        return int(self.env[THREADS]) if THREADS in self.env else None

    @model_validator(mode="after")
    def _one_number_of_threads(self) -> Launch:
        if THREADS in self.env and self.threads not in ("auto", int(self.env[THREADS])):
            raise PydanticCustomError(
                "threads",
                "threads({threads}) and env.{name}({other}) differ; set only one of them",
                {"threads": self.threads, "name": THREADS, "other": self.env[THREADS]},
            )
        return self


class Sweep(Section):
    """Settings of a sweep as a whole."""

    affects: ClassVar[Affects] = Affects.SWEEP

    exclude: list[str]
    """Combinations to leave out, each a line of conditions: `activation_checkpoint=full micro_batch=8,16`."""
    baseline: str | None
    """Setting that other rows of the table are compared with: `parallelism=fsdp1`."""
    repeat: Annotated[int, whole(at_most=1000)]
    """Runs of every combination, interleaved, from whose differences the noise is estimated."""
    seeds: Annotated[int, whole(at_most=1000)]
    """Seeds of every combination, from `seed` on, from whose differences the noise of seeds is estimated."""
    retry: Annotated[int, whole(at_least=0, at_most=1000)]
    """Most times that a run that failed or timed out is executed again."""
    rerun: list[Literal["completed", "oom", "skipped"]]
    """Results to discard: runs with them are executed again when a sweep is resumed."""
    devices: AutoCount
    """
    Devices of this node for the sweep. Several runs that fit run at once, each with its share of the cores.

    CUDA_VISIBLE_DEVICES limits the GPUs. auto: all GPUs; without any, one run at a time.
    """
    fail_fast: bool
    """Stop at the first run that is not completed."""
    preflight: Annotated[
        Literal["off", "warn", "skip"],
        BeforeValidator(lambda value: "off" if value is False else value),  # which YAML reads `off` as
        Affects.SWEEP | Affects.DISPLAY,
    ] = "warn"
    """Runs predicted not to fit, before any begin: warn about them or skip them. On CPUs only `skip` predicts."""

    @model_validator(mode="after")
    def _few_enough(self) -> Sweep:
        if (runs := self.repeat * self.seeds) > MAX_REPEATS:
            raise PydanticCustomError(
                "repeats", f"repeat({self.repeat}) x seeds({self.seeds}) = {runs:,}; expected at most {MAX_REPEATS:,}"
            )
        return self


class Experiment(Recipe):
    """A recipe and everything around it: one run, or one row of a sweep."""

    hardware: Annotated[SerializeAsAny[Hardware], chosen(Hardware)]
    """Device that MFU and memory percentages refer to: its peak FLOP/s, memory and bandwidths."""
    tracker: Annotated[SerializeAsAny[Tracker], chosen(Tracker)]
    """Destination of figures in addition to the run directory, such as Weights & Biases."""
    profiler: Annotated[SerializeAsAny[Profiler], chosen(Profiler)]
    """Detailed record of some steps: a trace, or the memory by category."""
    launch: Launch
    """Settings of the workers: nodes, workers per node, threads, environment, time limits."""
    sweep: Sweep
    """Settings of a sweep as a whole: combinations to leave out, repeats, retries."""
    progress: Annotated[Literal["auto", "steps", "runs"], Affects.DISPLAY] = "auto"
    """Progress on the terminal; auto: a live line or table if it is a terminal, else a line per step or per run of a sweep."""
    log_every: Annotated[AutoCount, Affects.FIGURES]
    """
    Steps between reading metrics, which waits for the device and gathers from all ranks; auto: 1 on CPU, 10 on CUDA.
    Every step has a row in events.jsonl.
    """
    measure_after: Annotated[int, whole(at_least=0), Affects.RESULT]
    """First steps, with compilation and autotuning, to leave out of throughput and peak memory."""
    objective: Annotated[str, AfterValidator(_known_figure), Field(json_schema_extra=_figures), Affects.SWEEP]
    """The key of summary.json that a sweeper optimises."""

    @property
    def profiled(self) -> ProfiledRun:
        """Facts that a profiler needs about the run."""
        return ProfiledRun(self.steps, self.measure_after, self.compile.compiles)

    def steps_between_read_outs(self, device_type: str) -> int:
        """Return `log_every` with auto resolved: reading metrics at every step would leave a GPU idle, but not a CPU."""
        return READ_OUT_EVERY[device_type] if self.log_every == "auto" else self.log_every


def check(config: dict[str, Any]) -> Experiment:
    """
    Return a configuration as a frozen `Experiment` whose keys are valid one by one. `fit` checks their combination.

    Raises:
        NotImported: a class cannot be imported. The message lists all problems.
        ConfigError: a key is wrong. The message lists all problems.
    """
    try:
        return Experiment.model_validate(config)
    except ValidationError as error:
        found = invalid(error, lambda path: _fields_at(path, config), keys=flatten(config))
        if any(each["type"] == NOT_IMPORTED for each in error.errors(include_url=False)):
            raise NotImported(str(found)) from None
        raise found from None


def fit(experiment: Experiment, workers: int) -> None:
    """Check the settings against each other and the devices; raise Incompatible that lists all conflicts."""
    layout, element_bytes = experiment.parallelism, experiment.precision.element_bytes
    found = experiment.model.tensor_problems(layout.tensor) + experiment.model.expert_problems(layout.expert)
    found += experiment.model.alignment_problems(layout.tensor, element_bytes) + layout.problems()
    found += experiment.activation_checkpoint.problems() + experiment.compile.problems()
    found += experiment.profiler.problems(experiment.profiled, experiment.launch.nodes * workers)
    try:
        degrees = experiment.parallelism.degrees(experiment.launch.nodes, workers)
        experiment.accumulation(degrees.data)
    except ConfigError as error:
        found.append(str(error))
    else:
        found += compatibility.problems(experiment, degrees)
    if not found:
        try:
            remarks(experiment)
        except ConfigError as error:
            found.append(str(error))
    if found:
        raise Incompatible(listed("These settings do not go together:", found))


def remarks(experiment: Experiment) -> list[str]:
    """
    Return a line for each setting that works but is perhaps not intended.

    Only if names of parameters or modules matter, torch is imported and the model built on the meta device.

    Raises:
        ConfigError: a name is not in the model.
    """
    found = []
    if experiment.measure_after >= experiment.steps:
        found.append(
            f"measure_after({experiment.measure_after}) leaves none of steps({experiment.steps}): the speed of this run "
            "will be unknown, and its peak memory includes the start-up; raise steps"
        )
    found += experiment.lr_schedule.remarks(experiment.steps)
    if experiment.precision.compute == "fp8" and not experiment.compile.is_partitioned:
        found.append(
            "precision=float8 without inductor: scaling and casting run as separate kernels, which is slow; use "
            "compile=per_block to fuse them"
        )
    if experiment.model.inactive_parameters():
        if experiment.precision.kind == "float8":
            found.append("precision=float8 leaves the matmuls of routed experts in bf16, and the router in fp32")
        if experiment.precision.fp32_matmul != "highest":
            found.append(
                "precision.matmul=high computes router scores in TF32: an error of 1e-3 can send a token to another expert"
            )
    if experiment.objective.startswith("trace/") and experiment.profiler.kind != "trace":
        found.append(f"objective({experiment.objective}) is known only with a trace; use profiler=trace")
    if experiment.objective == "perf/checkpoint_time_s" and not experiment.checkpoint.saves:
        found.append(f"objective({experiment.objective}) is known only if a checkpoint is saved; use checkpoint=dcp")
    if not experiment.parallelism.wraps_units:
        idle = {
            f"wrap={experiment.wrap.kind}": experiment.wrap.kind != "blocks",
            "parallelism.reshard_after_forward": experiment.parallelism.reshard_after_forward not in ("auto", "always"),
        }
        found += [f"{key} has no effect: {experiment.parallelism.kind} has no units" for key in idle if idle[key]]
    if not (experiment.model.freeze or experiment.wrap.needs_network or experiment.parallelism.checks_units):
        return found
    network = experiment.model.on_meta(experiment.seq_len)
    units = experiment.wrap.plan(network, experiment.parallelism.reshard(shard=2))
    _check_units_in_blocks(experiment, network, units)
    experiment.parallelism.check_units(network, units)
    return found + experiment.wrap.remarks(network, units, experiment.parallelism.kind)


def _check_units_in_blocks(experiment: Experiment, network: Network, plan: WrapPlan) -> None:
    """Raise ConfigError for units in recomputed blocks that backward gathers at other times than forward: torch 2.13 fails."""
    from meshrunner.recipes.parallelism.wrap_plan import units_in_blocks

    layout, option = experiment.parallelism, experiment.activation_checkpoint
    ahead = layout.expert > 1 or layout.units_ahead > 0
    names = units_in_blocks(network, plan)
    recomputed = any(map(option.recomputes, range(len(network.block_names()))))
    if names and recomputed and layout.plans_buffers:
        raise ConfigError(
            f"wrap: '{names[0]}' cannot be a unit if blocks are recomputed and buffers planned: backward gathers it at "
            "other times than forward; use wrap=blocks, activation_checkpoint=none, or parallelism.buffers=dynamic"
        )
    if names and layout.kind == "fsdp2" and ahead and option.kind == "selective_op":
        raise ConfigError(
            f"wrap: '{names[0]}' cannot be a unit if selective_op recomputes blocks and units are gathered ahead; use "
            "wrap=blocks, activation_checkpoint=full, or parallelism.expert=1 with parallelism.prefetch=0"
        )


def _fields_at(loc: tuple[int | str, ...], config: dict[str, Any]) -> list[str]:
    """Return the keys that exist at a configuration path, from which to suggest the nearest name."""
    here: Any = Experiment
    for part in loc:
        field = here.model_fields.get(str(part)) if isinstance(here, type) and issubclass(here, BaseModel) else None
        here = field.annotation if field else None
        if isinstance(here, type) and issubclass(here, Option):
            here = here.resolve(config[str(part)]["kind"])
    return list(here.model_fields) if isinstance(here, type) and issubclass(here, BaseModel) else []
