"""Check that an experiment's settings fit each other and the devices. A unit is a module that FSDP gathers as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshrunner.recipes import compatibility
from meshrunner.recipes.compile.base import WARM_UP
from meshrunner.recipes.errors import ConfigError, Incompatible
from meshrunner.recipes.model.base import check_patterns
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.validation import listed

if TYPE_CHECKING:
    from meshrunner.recipes.model.network import Network
    from meshrunner.recipes.parallelism.wrap_policy import WrapPlan


def fit(experiment: Experiment, workers: int) -> None:
    """Raise Incompatible, with a list of all conflicts, if settings conflict with each other or with the workers per node."""
    layout, element_bytes = experiment.parallelism, experiment.precision.element_bytes
    found = experiment.model.tensor_problems(layout.tensor) + experiment.model.expert_problems(layout.expert)
    if layout.context > 1:
        found += experiment.model.context_problems(layout.context, layout.tensor, layout.context_method)
    if experiment.data.separates_documents:
        found += experiment.model.document_problems()
    found += experiment.model.alignment_problems(layout.tensor, element_bytes) + layout.problems()
    found += experiment.activation_checkpoint.problems() + experiment.compile.problems()
    found += experiment.profiler.problems(experiment.profiled, experiment.launch.nodes * workers)
    if experiment.sweep.explain and (kind := experiment.profiler.kind) != "none":
        found.append(f"sweep.explain and profiler={kind} would profile the same run; choose one of them")
    if experiment.sweep.explain and experiment.compile.cuda_graph:
        found.append(
            "sweep.explain needs the operators that launch kernels, but a replayed CUDA graph has none; use "
            "compile.cuda_graph=false or sweep.explain=false"
        )
    found += _emulation_problems(experiment, workers)
    if experiment.compile.async_tensor_parallel and layout.tensor > workers:
        found.append(
            f"compile.async_tensor_parallel needs all {layout.tensor} GPUs of a parallelism.tensor group on one node, "
            f"but a node has {workers}"
        )
    if experiment.compile.cuda_graph and experiment.measure_after <= WARM_UP:
        first, given = WARM_UP + 1, experiment.measure_after
        found.append(
            f"measure_after({given}): compile.cuda_graph captures its graph in step {first}; use at least {first}"
        )
    try:
        degrees = layout.degrees(experiment.launch.nodes, workers)
        found += experiment.pipeline_problems(experiment.accumulation(degrees.data)[1])
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


def _emulation_problems(experiment: Experiment, workers: int) -> list[str]:
    launch, checkpoint = experiment.launch, experiment.checkpoint
    if launch.emulate is None:
        return []
    world, found = launch.nodes * workers, []
    if launch.emulate >= world:
        sizes = f"launch.nodes({launch.nodes}) x launch.workers({workers})"
        found.append(f"launch.emulate({launch.emulate}): the last rank of {sizes} is {world - 1}")
    if reason := experiment.untraceable():
        found.append(
            f"launch.emulate: the communication of this run cannot be predicted: {reason}; use launch.emulate=null"
        )
    if experiment.compile.async_tensor_parallel:
        found.append("compile.async_tensor_parallel: an emulated rank cannot access other ranks' memory; use false")
    if experiment.eval.evaluates:
        found.append("eval: an emulated rank has no loss; use eval=none")
    if checkpoint.saves or checkpoint.load is not None:
        found.append("checkpoint: the weights of an emulated rank are meaningless; use checkpoint=none")
    if experiment.model.weights is not None:
        found.append("model.weights: the weights of an emulated rank are meaningless; use model.weights=null")
    return found


def remarks(experiment: Experiment) -> list[str]:
    """Return a warning for each setting that is valid but has no effect, makes a metric unknown, or costs speed or precision.

    Raise ConfigError if a setting names an unknown parameter or module, or if FSDP units are invalid. Import torch and build
    the model on the meta device only if a setting names parameters or modules, or if FSDP units must be checked.
    """
    found = _remarks(experiment) + experiment.lr_schedule.remarks(experiment.steps) + experiment.model.remarks()
    found += [remark for tracker in experiment.tracker.members.values() for remark in tracker.remarks()]
    layout, wrap = experiment.parallelism, experiment.wrap
    if not layout.wraps_units:
        unused = [f"wrap={wrap.kind}"] if wrap.kind != "blocks" else []
        if layout.reshard_after_forward not in ("auto", "always"):
            unused.append("parallelism.reshard_after_forward")
        found += [f"{key} has no effect: {layout.kind} has no FSDP units" for key in unused]
    no_decay = experiment.optimizer.no_decay
    if not (experiment.model.freeze or no_decay or wrap.needs_network or layout.checks_units):
        return found
    network = experiment.model.on_meta(experiment.seq_len)
    check_patterns("optimizer.no_decay", no_decay, [name for name, _ in network.named_parameters()])
    units = wrap.plan(network, layout.reshard(shard=2))
    _check_units_in_blocks(experiment, network, units)
    layout.check_units(network, units)
    return found + wrap.remarks(network, units, layout.kind)


def _remarks(experiment: Experiment) -> list[str]:
    found = []
    objective, precision, launch = experiment.objective, experiment.precision, experiment.launch
    if launch.emulate is not None:
        found.append(f"rank {launch.emulate} is emulated: there is no loss and no gradient norm, and trackers are off")
    if experiment.sweep.explain:
        from meshrunner.runner.explain.session import OPTION

        if (needed := OPTION.last_step(experiment.profiled)) > experiment.steps:
            found.append(f"sweep.explain has no effect: steps({experiment.steps}) must be at least {needed}")
    if experiment.measure_after >= experiment.steps:
        found.append(
            f"measure_after={experiment.measure_after} excludes all steps (steps={experiment.steps}): the speed of "
            "this run will be unknown, and its peak memory will include the start-up; raise steps"
        )
    if objective.startswith("trace/") and experiment.profiler.kind != "trace":
        found.append(f"objective={objective} has a value only with a trace; use profiler=trace")
    if objective.startswith("eval/") and not experiment.eval.evaluates:
        found.append(f"objective={objective} has a value only with an evaluation; use eval=held_out")
    if objective == "perf/checkpoint_time_s" and not experiment.checkpoint.saves:
        found.append(f"objective={objective} has a value only if a checkpoint is saved; use checkpoint=dcp")
    if precision.compute == "fp8" and not experiment.compile.is_partitioned:
        found.append(
            "precision=float8 without inductor: scaling and casting run as separate kernels, which is slow; use "
            "compile=per_block to fuse them"
        )
    if experiment.model.inactive_parameters() and precision.kind == "float8":
        found.append("precision=float8 leaves the matmuls of routed experts in bf16, and the router in fp32")
    if experiment.model.inactive_parameters() and precision.fp32_matmul != "highest":
        found.append(
            "precision.matmul=high computes router scores in TF32: an error of 1e-3 can send a token to another expert"
        )
    return found


def _check_units_in_blocks(experiment: Experiment, network: Network, plan: WrapPlan) -> None:
    """Raise ConfigError if a recomputed block contains a unit that forward and backward would gather at different times.
    Torch 2.13 fails on such a unit."""
    from meshrunner.recipes.parallelism.wrap_policy import inside_blocks

    layout, option = experiment.parallelism, experiment.activation_checkpoint
    ahead = layout.expert > 1 or layout.units_ahead > 0
    names = inside_blocks(network, plan)
    recomputed = any(map(option.recomputes, range(len(network.block_names()))))
    if names and recomputed and layout.plans_buffers:
        raise ConfigError(
            f"wrap: '{names[0]}' cannot be a unit if buffers are planned, because it is inside a recomputed block and "
            "is gathered at different times in forward and backward; use wrap=blocks, activation_checkpoint=none, or "
            "parallelism.buffers=dynamic"
        )
    if names and layout.kind == "fsdp2" and ahead and option.kind == "selective_op":
        raise ConfigError(
            f"wrap: '{names[0]}' cannot be a unit inside a block that selective_op recomputes, because this layout gathers "
            "units ahead of use; use wrap=blocks, activation_checkpoint=full, or parallelism.expert=1 with parallelism.prefetch=0"
        )
