"""`meshrunner show`: print a run's parameters, FLOPs, mesh, memory per device and FSDP units, without starting the run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from omegaconf import OmegaConf
from rich.table import Table

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.commands.parser import split
from meshrunner.runner.config.compose import Composer, warn_of_short_sequences
from meshrunner.runner.config.devices import ExpectedDevices, check_on_devices
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.console import console, one_line, table_of
from meshrunner.runner.verbs.planning.stages import largest_rank, stage_table, stages_of
from meshrunner.runner.verbs.reference.queries import answered

if TYPE_CHECKING:
    from meshrunner.recipes.model.network import Network
    from meshrunner.recipes.parallelism.base import Degrees
    from meshrunner.recipes.parallelism.unit_sizes import Units
    from meshrunner.recipes.parallelism.wrap_policy import WrapPlan

WHOLE_GRADIENTS = "unsharded gradients between micro batches"


def show(arguments: list[str]) -> int:
    """Print the properties of one run. Raise ConfigError if the configuration is invalid."""
    options, overrides = split("show", arguments)
    composer = Composer("show", overrides)
    if answered(composer):
        return 0
    composed = composer.single_run()
    if composed is None:
        raise ConfigError("show describes a single run; omit -m and give each key one value")
    from meshrunner.recipes.parallelism.unit_sizes import local_parameters

    experiment, device = check_on_devices(composed.config)
    warn_of_short_sequences([composed])
    network = experiment.model.on_meta(experiment.seq_len)
    degrees = experiment.parallelism.degrees(experiment.launch.nodes, device.workers)
    plan = experiment.wrap.plan(network, experiment.parallelism.reshard(degrees.shard))
    stages = stages_of(experiment, network) if degrees.pipeline > 1 else []
    largest = largest_rank(stages)
    held = [module for stage in stages if stage.rank == largest for module in stage.modules] or None
    units = local_parameters(network, plan, degrees.tensor, experiment.parallelism.expert)
    own = local_parameters(network, plan, degrees.tensor, experiment.parallelism.expert, held)
    screen = console()
    screen.print(_facts(experiment, network, degrees))
    if stages:
        screen.print()
        screen.print(stage_table(stages))
    whose = "each device"
    if largest is not None:
        whose += f" of pipeline rank {largest} (the rank with the most parameters)"
    screen.print(f"\n{whose} holds, in addition to activations and gathered units:")
    screen.print(_memory(experiment, own, degrees, device))
    screen.print()
    screen.print(_plan(experiment, network, plan, units, degrees))
    if not experiment.parallelism.wraps_units:
        kind = experiment.parallelism.kind
        screen.print(f"parallelism={kind} has no units; the table shows FSDP's units instead", soft_wrap=False)
    for line in _buffers(experiment, network, units, degrees) if not stages else ():
        screen.print(line, soft_wrap=False)
    for remark in experiment.wrap.remarks(network, plan, experiment.parallelism.kind):
        screen.print(f"warning: {remark}", soft_wrap=False)
    screen.print(f"\n{_recompute(experiment, device, network)}", soft_wrap=False)
    if options.config:
        screen.print(f"\n{OmegaConf.to_yaml(OmegaConf.create(composed.config)).rstrip()}")
    return 0


def _facts(experiment: Experiment, network: Network, degrees: Degrees) -> Table:
    from meshrunner.recipes.parallelism.mesh import expert_mesh_dims, mesh_dims

    parameters = sum(p.numel() for p in network.parameters())
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    counts = [f"{parameters:,}"] + [f"{trained:,} trained"] * (trained != parameters)
    if inactive := experiment.model.inactive_parameters():
        counts.append(f"{parameters - inactive:,} active per token")
    flops = experiment.model.flops_per_token(experiment.seq_len)
    whole = " (if documents fill whole sequences)" * experiment.data.separates_documents
    global_batch, micro_batches = experiment.accumulation(degrees.data)
    rows = [
        ("parameters", ", ".join(counts)),
        ("FLOPs per token", f"{flops.total:,}, of which attention {flops.attention:,}{whole}"),
        ("precision", experiment.precision.kind + _lowered(experiment, network)),
        ("mesh", _mesh(mesh_dims(degrees))),
    ]
    if (expert := experiment.parallelism.expert) > 1:
        dims = expert_mesh_dims(degrees.replicate, degrees.shard, expert, degrees.pipeline)
        rows.append(("expert mesh", _mesh(dims)))
        rows.append(("exchanged among experts", f"{_bytes(_exchanged(experiment, network, micro_batches))} a step"))
    if degrees.context > 1:
        method = experiment.parallelism.context_method
        rows.append(("context", f"{degrees.context} neighbouring devices split each sequence ({method})"))
    batch = f"{global_batch} sequences = {global_batch * experiment.seq_len:,} tokens"
    rows.append(("data-parallel ranks", f"{degrees.data}"))
    rows.append(("global batch", f"{batch}, {micro_batches} micro batch{'es' * (micro_batches > 1)} per rank"))
    return table_of(rows)


def _lowered(experiment: Experiment, network: Network) -> str:
    """Return a note on parameters that the model keeps in fp32 but the layout casts to a lower precision, or "" if none exist."""
    layout = experiment.parallelism
    names = [name for name, _ in network.named_parameters() if network.stays_fp32(name)]
    if experiment.precision.param_dtype is None or not names or layout.mixes_dtypes():
        return ""
    inside = dict.fromkeys(name.rpartition("layers.")[2].partition(".")[2] for name in names)
    why = (
        "fsdp2 keeps these parameters in fp32 only with torch 2.15 or later"
        if layout.kind == "fsdp2"
        else f"{layout.kind} uses a single dtype in each unit"
    )
    return f", also for {', '.join(inside)}: {why}"


def _mesh(dims: dict[str, int]) -> str:
    return " x ".join(f"{name}({size})" for name, size in dims.items())


def _exchanged(experiment: Experiment, network: Network, micro_batches: int) -> int:
    """Return the bytes that a device sends to and receives from all experts in one step, including its own experts."""
    option, total = experiment.activation_checkpoint, 0
    for block in range(len(network.block_names())):
        passes = 3 if option.recomputes(block) and option.repeats_exchange else 2  # forward, backward, recomputation
        total += 2 * passes * network.exchanged_elements(block)  # to the experts and back
    tokens = micro_batches * experiment.micro_batch * experiment.seq_len // experiment.parallelism.context
    return tokens * total * experiment.precision.element_bytes


def _memory(experiment: Experiment, units: Units, degrees: Degrees, device: ExpectedDevices) -> Table:
    """Return a table of the bytes that a device holds between steps. The last row is the total and its share of device memory."""
    layout, precision = experiment.parallelism, experiment.precision
    held = [layout.stored(unit, precision, degrees) for unit in units.values()]
    tensors = sum(parameter.trained for unit in units.values() for parameter in unit.parameters)
    sizes = {
        "weights": 4 * sum(unit.weights for unit in held),
        "gradients": 4 * sum(unit.gradients for unit in held),
        "optimizer state": experiment.optimizer.state_bytes(sum(unit.trained for unit in held), tensors),
    }
    notes = {}
    pipelined = degrees.pipeline > 1
    if experiment.accumulation(degrees.data)[1] > 1 and (whole := sum(unit.unsharded_gradient_bytes for unit in held)):
        holds = layout.accumulate == "hold" or pipelined
        sizes[WHOLE_GRADIENTS] = whole if holds else 0
        other = "; 0 with accumulate=reduce" if holds else f"; {whole:,} with accumulate=hold"
        notes[WHOLE_GRADIENTS] = "" if pipelined else other
    rows = [
        (name, *(("not known", "") if size is None else (_bytes(size), f"{size:,} bytes{notes.get(name, '')}")))
        for name, size in sizes.items()
    ]
    total, memory = sum(size for size in sizes.values() if size is not None), device.memory_gib * 2**30
    share = f"{total / memory:.1%} of {_bytes(round(memory))} ({device.name})"
    return table_of([*rows, ("together", _bytes(total), "in host memory (cpu_offload)" if layout.offloads else share)])


def _plan(experiment: Experiment, network: Network, plan: WrapPlan, units: Units, degrees: Degrees) -> Table:
    """Return a table of FSDP units. A unit's parameters exclude those of nested units. Gathered and reduced bytes are per
    step. They are unknown in a pipeline, where the schedule decides when to gather units."""
    from meshrunner.recipes.parallelism.wrap_policy import unit_parameters

    micro_batches, shown = experiment.accumulation(degrees.data)[1], 5 if degrees.pipeline == 1 else 3
    whole, rows, gathered, reduced = unit_parameters(network, plan), {}, 0, 0
    for name, unit in units.items():
        traffic = experiment.parallelism.traffic(unit, experiment.precision, degrees, micro_batches)
        gathered, reduced = gathered + traffic.gathered, reduced + traffic.reduced
        reshard = unit.reshard_after_forward
        row = (
            f"{sum(p.numel() for p in whole[name].values()):,}",
            _bytes(4 * (unit.trained + unit.frozen)),
            ("freed" if reshard else "kept") if isinstance(reshard, bool) else f"kept over {reshard} devices",
            _bytes(traffic.gathered),
            _bytes(traffic.reduced),
        )
        rows[name] = row[:shown]
    table = Table(box=None, pad_edge=False)
    table.add_column("wrap plan", overflow="fold")
    for title in ("parameters", "in fp32", "after forward", "gathers", "reduces")[:shown]:
        table.add_column(title, justify="right", no_wrap=title != "after forward")
    for cells, alike in groupby(plan, key=rows.__getitem__):  # adjacent units with equal cells share a row
        names = [name or "root" for name in alike]
        table.add_row(names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}: {len(names)} units, each", *cells)
    sums = ("", "", "", _bytes(gathered), _bytes(reduced))
    table.add_row(f"{len(plan)} unit{'s' * (len(plan) > 1)}, sum per step", *sums[:shown])
    return table


def _buffers(experiment: Experiment, network: Network, units: Units, degrees: Degrees) -> Iterator[str]:
    """Yield a line for all-gather buffers and one for reduction buffers. Each shows the peak bytes by placement."""
    from meshrunner.recipes.parallelism.buffers.placement import fixed_pool, max_pool, peak, scheduled

    in_forward = {name: units[name] for name, _ in network.named_modules() if name in units}
    asked = experiment.parallelism.buffer_schedules(in_forward, experiment.precision, degrees)
    for what, schedule in zip(("all-gathers", "reductions"), asked or (), strict=False):
        if schedule.units:
            sizes = (peak(schedule), scheduled(schedule).nbytes, max_pool(schedule).nbytes, *fixed_pool(schedule))
            yield "buffers of {}: dynamic {}, scheduled {}, max_pool {}, fixed pool {} + {} outside".format(
                what, *map(_bytes, sizes)
            )


def _recompute(experiment: Experiment, device: ExpectedDevices, network: Network) -> str:
    """Return a line with the number of recomputed blocks, and the bytes that a recomputed block keeps for backward."""
    option, blocks = experiment.activation_checkpoint, len(network.block_names())
    recomputed = sum(map(option.recomputes, range(blocks)))
    title = f"recompute: {option.kind}, {recomputed} of {blocks} blocks"
    if not recomputed:
        return title
    from meshrunner.runner.predict import recomputed_blocks, why

    try:
        kinds = recomputed_blocks(experiment, device, network)
    except Exception as error:  # a user's class may raise anything, and an operator may lack a meta kernel
        reason = one_line(error) if isinstance(error, ConfigError) else why(error)
        return f"{title}; the memory kept for backward is not known: {reason}"
    parts = []
    for name, whole, kept in kinds:
        operators = ", ".join(f"{operator} {n} of {of}" for operator, (n, of) in kept.operators.items())
        memory = "only its input for backward"
        if kept.nbytes:
            memory = f"{_bytes(kept.nbytes)} for backward in addition to its input"
        parts.append(
            f"each{f' {name}' * (len(kinds) > 1)} keeps {memory} ({_bytes(whole.nbytes)} without recomputation)"
            + (f", including the results of {operators}" * bool(operators))
        )
    return "; ".join([title, *parts])


def _bytes(count: int) -> str:
    unit, size = ("GiB", 2**30) if count >= 2**28 else ("MiB", 2**20)
    return f"{count / size:,.2f} {unit}"
