"""`meshrunner show`: the resolved configuration of a run, its mesh, wrap plan and arithmetic; starts nothing."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from omegaconf import OmegaConf
from rich.table import Table
from rich.tree import Tree

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.compose import Composer, parse
from meshrunner.runner.config.devices import node_devices
from meshrunner.runner.config.experiment import Experiment, check, fit
from meshrunner.runner.console import console

if TYPE_CHECKING:
    from meshrunner.recipes.model.network import Network
    from meshrunner.recipes.parallelism.base import Degrees
    from meshrunner.recipes.parallelism.wrap_plan import WrapPlan


def show(arguments: list[str]) -> int:
    """Explain one run; raises ConfigError as `run` does."""
    composer = Composer(parse("show", arguments))
    if composer.answer_query():
        return 0
    composed = composer.single_run()
    if composed is None:
        raise ConfigError("show explains one run; leave out -m and give each key one value")
    experiment = check(composed.config)
    given = experiment.launch.workers
    # Only `auto` depends on this node, so a laptop can show a cluster's run.
    workers = node_devices(experiment).workers if given == "auto" else given
    fit(experiment, workers)
    import torch

    with torch.device("meta"):
        network = experiment.model.build(experiment.seq_len)
    degrees = experiment.parallelism.degrees(experiment.launch.nodes, workers)
    plan = experiment.wrap.plan(network, experiment.parallelism.reshard_after_forward)
    screen = console()
    screen.print(OmegaConf.to_yaml(OmegaConf.create(composed.config)).rstrip())
    screen.print()
    screen.print(_facts(experiment, network, degrees))
    micro_batches = experiment.accumulation(degrees.data)[1]
    screen.print(_plan_tree(experiment, network, plan, degrees, micro_batches))
    screen.print(_recompute(experiment, len(network.block_names())))
    return 0


def _facts(experiment: Experiment, network: Network, degrees: Degrees) -> Table:
    from meshrunner.recipes.parallelism.mesh import mesh_dims

    parameters = sum(p.numel() for p in network.parameters())
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    flops = experiment.model.flops_per_token(experiment.seq_len)
    global_batch, micro_batches = experiment.accumulation(degrees.data)
    table = Table(box=None, show_header=False, pad_edge=False)
    rows = {
        "mesh": " x ".join(f"{name}({size})" for name, size in mesh_dims(degrees).items()),
        "data-parallel ranks": f"{degrees.data}",
        "global batch": f"{global_batch} sequences = {global_batch * experiment.seq_len:,} tokens, "
        f"{micro_batches} micro batch{'es' * (micro_batches > 1)} per rank",
        "parameters": f"{parameters:,}" + (f", {trained:,} trained" if trained != parameters else ""),
        "FLOPs per token": f"{flops.total:,}, of which attention {flops.attention:,}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _plan_tree(experiment: Experiment, network: Network, plan: WrapPlan, degrees: Degrees, micro_batches: int) -> Tree:
    """Units with their own parameters (those of no unit below), and the traffic of a device."""
    from meshrunner.recipes.parallelism.wrap_plan import local_parameters, unit_parameters

    whole, texts, gathered, reduced = unit_parameters(network, plan), {}, 0, 0
    for name, unit in local_parameters(network, plan, degrees.tensor).items():
        traffic = experiment.parallelism.traffic(unit, experiment.precision, degrees, micro_batches)
        gathered, reduced = gathered + traffic.gathered, reduced + traffic.reduced
        texts[name] = (
            f"{sum(p.numel() for p in whole[name].values()):,} parameters, {_bytes(4 * (unit.trained + unit.frozen))} in "
            f"fp32, {_reshard(unit.reshard_after_forward)}; per step gathers {_bytes(traffic.gathered)}, "
            f"reduces {_bytes(traffic.reduced)}"
        )
    tree = Tree(f"wrap plan: {len(plan)} units; a device's step gathers {_bytes(gathered)}, reduces {_bytes(reduced)}")
    for text, alike in groupby(plan, key=texts.__getitem__):  # equal neighbours share a line
        names = [name or "root" for name in alike]
        tree.add(
            f"{names[0]}: {text}" if len(names) == 1 else f"{names[0]} ... {names[-1]}: {len(names)} units, each {text}"
        )
    for remark in experiment.wrap.remarks(network, plan, experiment.parallelism.kind):
        tree.add(f"warning: {remark}")
    return tree


def _recompute(experiment: Experiment, blocks: int) -> str:
    option = experiment.activation_checkpoint
    recomputed = sum(option.recomputes(block) for block in range(blocks))
    title = f"recompute: {option.kind}, {recomputed} of {blocks} blocks"
    if not recomputed:
        return title
    from meshrunner.recipes.activation_checkpoint.saved_tensors import saved_by_block

    whole, kept = saved_by_block(
        option,
        lambda: experiment.model.build(experiment.seq_len),
        (experiment.micro_batch, experiment.seq_len),
        experiment.precision.param_dtype,
    )
    if kept == whole:
        return f"{title}; the compiler decides how much of a block's {_bytes(whole.nbytes)} is kept for backward"
    operators = ", ".join(f"{name} {n} of {of}" for name, (n, of) in kept.operators.items())
    text = f"{title}; each keeps {_bytes(kept.nbytes)} for backward in addition to its input, a block that recomputes nothing "
    return f"{text}{_bytes(whole.nbytes)}" + (f"; kept are the results of {operators}" if operators else "")


def _bytes(count: int) -> str:
    unit, size = ("GiB", 2**30) if count >= 2**28 else ("MiB", 2**20)
    return f"{count / size:,.2f} {unit}"


def _reshard(reshard: bool | int) -> str:
    if isinstance(reshard, bool):
        return "freed after forward" if reshard else "kept after forward"
    return f"kept over {reshard} devices after forward"
