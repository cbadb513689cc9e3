"""A configuration, checked: plain dict -> `Experiment`. All problems are reported at once, and torch is not imported."""

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
"""Type of the devices -> `log_every`, where it is auto."""
MAX_REPEATS = 10_000
"""Runs of one combination of a sweep."""


def _known_figure(key: str) -> str:
    if key not in (known := summary_keys()):
        raise PydanticCustomError("objective", f"no run has a figure '{key}'.{did_you_mean(key, known)}")
    return key


def _figures(schema: JsonDict) -> None:
    schema["enum"] = [*summary_keys()]


class Launch(Section):
    """How the workers of a run are started."""

    affects: ClassVar[Affects] = Affects.SPEED

    nodes: Annotated[int, whole(at_most=2**17)]
    """Machines that a run is spread over."""
    workers: Annotated[int | Auto, whole("auto", at_most=1024)]
    """Processes on each node, one for each device; auto: the node's GPUs, or 2 without any."""
    threads: Annotated[int | Auto, whole("auto", at_most=4096)]
    """Threads of a worker's CPU operations; auto: OMP_NUM_THREADS of launch.env, else the cores that the run has / workers."""
    env: Annotated[
        dict[str, Annotated[str, BeforeValidator(as_text, json_schema_input_type=str | int | float | bool)]],
        AfterValidator(effective),
    ]
    """Environment variables of the workers: allocator, NCCL, CUDA, torch settings. They win over those of the command."""
    bind: Literal["auto", "none"] = "auto"
    """CPUs of a worker; auto: those in its GPU's NUMA domain, if they are enough; none: all of the node."""
    port: Annotated[int | None, whole(None, at_most=65535), Affects.NOTHING]
    """TCP port of the rendezvous on the first node; null: one that is free."""
    host_memory_gib: float | None = Field(gt=0, le=1e6)
    """Host memory a worker may take beyond what it holds when the recipe starts; null: no limit. Past it the run is `oom`."""
    start_timeout_minutes: Minutes
    """Minutes until the first step is done, compilation included; then the run ends in state `timeout`."""
    timeout_minutes: Minutes
    """Minutes without a completed step, after the first; then the run ends in state `timeout`."""

    @property
    def given_threads(self) -> int | None:
        """Threads of a worker, where the configuration says how many."""
        if self.threads != "auto":
            return self.threads
        return int(self.env[THREADS]) if THREADS in self.env else None

    @model_validator(mode="after")
    def _one_number_of_threads(self) -> Launch:
        if THREADS in self.env and self.threads not in ("auto", int(self.env[THREADS])):
            raise PydanticCustomError(
                "threads",
                "threads({threads}) and env.{name}({other}) contradict each other",
                {"threads": self.threads, "name": THREADS, "other": self.env[THREADS]},
            )
        return self


class Sweep(Section):
    """How the runs of a sweep are treated."""

    affects: ClassVar[Affects] = Affects.SWEEP

    exclude: list[str]
    """Combinations that are not run, as lines of conditions: `activation_checkpoint=full micro_batch=8,16`."""
    baseline: str | None
    """What the rows of the table at the end are compared with: `parallelism=fsdp1`."""
    repeat: Annotated[int, whole(at_most=1000)]
    """Runs of every combination, interleaved: what differs between them is noise."""
    seeds: Annotated[int, whole(at_most=1000)]
    """Seeds of every combination, from `seed` on: what differs between them is the noise of seeds."""
    retry: Annotated[int, whole(at_least=0, at_most=1000)]
    """How often a run that failed or timed out is executed again."""
    rerun: list[Literal["completed", "oom", "skipped"]]
    """Results that do not count: such runs are executed again when a sweep is resumed."""
    devices: AutoCount
    """
    Devices of this node that runs share: several run at once where they fit, each with its part of the cores.

    GPUs are counted inside CUDA_VISIBLE_DEVICES; auto: all of them, without any one run at a time.
    """
    fail_fast: bool
    """Stop at the first run that is not completed."""
    preflight: Annotated[
        Literal["off", "warn", "skip"],
        BeforeValidator(lambda value: "off" if value is False else value),  # which YAML reads `off` as
        Affects.SWEEP | Affects.DISPLAY,
    ] = "warn"
    """Before runs begin: warn of those predicted not to fit, or skip them; on CPUs with skip alone."""

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
    """The device that MFU and memory percentages refer to: peak FLOP/s, memory, bandwidths."""
    tracker: Annotated[SerializeAsAny[Tracker], chosen(Tracker)]
    """Where figures go in addition to the run directory, such as Weights & Biases."""
    profiler: Annotated[SerializeAsAny[Profiler], chosen(Profiler)]
    """What is recorded of some steps in detail: a trace, or what holds memory."""
    launch: Launch
    """How the workers of a run are started: nodes, workers, threads, environment, time limits."""
    sweep: Sweep
    """How the runs of a sweep are treated: what is left out, repeated, tried again."""
    progress: Annotated[Literal["auto", "steps", "runs"], Affects.DISPLAY] = "auto"
    """What is shown meanwhile; auto: on a terminal a line or a sweep's table, else the steps of a run and the runs of a sweep."""
    log_every: Annotated[AutoCount, Affects.FIGURES]
    """
    Steps between two read-outs, each of which waits for the device and gathers from all ranks; auto: 1 on a CPU, 10 on CUDA.
    Every step has its row.
    """
    measure_after: Annotated[int, whole(at_least=0), Affects.RESULT]
    """Steps that do not count for throughput and peak memory: compilation, autotuning, first touch."""
    objective: Annotated[str, AfterValidator(_known_figure), Field(json_schema_extra=_figures), Affects.SWEEP]
    """The key of summary.json that a sweeper optimises."""

    @property
    def profiled(self) -> ProfiledRun:
        """What a profiler is told."""
        return ProfiledRun(self.steps, self.measure_after, self.compile.compiles)

    def steps_between_read_outs(self, device_type: str) -> int:
        """`log_every`, auto resolved: a CPU has done every step when it is issued, a GPU would fall idle."""
        return READ_OUT_EVERY[device_type] if self.log_every == "auto" else self.log_every


def check(config: dict[str, Any]) -> Experiment:
    """
    A configuration as a frozen `Experiment`, every part right by itself; `fit` checks the combination.

    Raises:
        ConfigError: lists every part that is wrong; NotImported where a class among them cannot be imported.
    """
    try:
        return Experiment.model_validate(config)
    except ValidationError as error:
        found = invalid(error, lambda path: _fields_at(path, config), keys=flatten(config))
        if any(each["type"] == NOT_IMPORTED for each in error.errors(include_url=False)):
            raise NotImported(str(found)) from None
        raise found from None


def fit(experiment: Experiment, workers: int) -> None:
    """Check the parts against each other and against the devices; raises Incompatible with all that does not fit."""
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
    What works, but is perhaps not what was meant.

    Where names of parameters and modules matter the model is built, on meta: only then torch is imported.

    Raises:
        ConfigError: the names are not those of the model.
    """
    found = []
    if experiment.measure_after >= experiment.steps:
        found.append(
            f"measure_after({experiment.measure_after}) leaves none of steps({experiment.steps}): the speed of this run "
            "will be unknown, and its peak memory is that of the start-up, too"
        )
    found += experiment.lr_schedule.remarks(experiment.steps)
    if experiment.precision.compute == "fp8" and not experiment.compile.is_partitioned:
        found.append(
            "precision=float8 without inductor: scaling and casting are kernels of their own, which float8 counts on the "
            "compiler to fuse; compile=per_block"
        )
    if experiment.model.inactive_parameters():
        if experiment.precision.kind == "float8":
            found.append("precision=float8 leaves the products of routed experts in bf16, and the router in fp32")
        if experiment.precision.fp32_matmul != "highest":
            found.append(
                "precision.matmul=high lets routers score in TF32, too: with a score that is 1e-3 off, a token can go elsewhere"
            )
    if experiment.objective.startswith("trace/") and experiment.profiler.kind != "trace":
        found.append(f"objective({experiment.objective}) is known only with profiler=trace")
    if experiment.objective == "perf/checkpoint_time_s" and not experiment.checkpoint.saves:
        found.append(f"objective({experiment.objective}) is known only where a checkpoint is saved: checkpoint=dcp")
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
    """Refuse what torch (2.13) fails on in backward: units in recomputed blocks, if gathered at other times than in forward."""
    from meshrunner.recipes.parallelism.wrap_plan import units_in_blocks

    layout, option = experiment.parallelism, experiment.activation_checkpoint
    ahead = layout.expert > 1 or layout.units_ahead > 0
    names = units_in_blocks(network, plan)
    recomputed = any(map(option.recomputes, range(len(network.block_names()))))
    if names and recomputed and layout.plans_buffers:
        raise ConfigError(
            f"wrap: '{names[0]}' cannot be a unit where blocks are recomputed and buffers planned: backward gathers it at other "
            "times than forward; use wrap=blocks, activation_checkpoint=none, or parallelism.buffers=dynamic"
        )
    if names and layout.kind == "fsdp2" and ahead and option.kind == "selective_op":
        raise ConfigError(
            f"wrap: '{names[0]}' cannot be a unit where blocks are recomputed by selective_op and units gathered ahead; use "
            "wrap=blocks, activation_checkpoint=full, or parallelism.expert=1 with parallelism.prefetch=0"
        )


def _fields_at(loc: tuple[int | str, ...], config: dict[str, Any]) -> list[str]:
    """The keys known at a configuration path, for the nearest name."""
    here: Any = Experiment
    for part in loc:
        field = here.model_fields.get(str(part)) if isinstance(here, type) and issubclass(here, BaseModel) else None
        here = field.annotation if field else None
        if isinstance(here, type) and issubclass(here, Option):
            here = here.resolve(config[str(part)]["kind"])
    return list(here.model_fields) if isinstance(here, type) and issubclass(here, BaseModel) else []
