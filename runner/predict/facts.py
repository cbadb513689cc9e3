"""Derives the facts that a configuration determines exactly, without a GPU: parameters, work, communication and memory of a step.

Facts are grouped in sections, such as `forward of block 3`. All sections except MODEL and PARAMETERS come from a trace. Facts
from a trace also depend on which operators torch calls.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.parallelism.base import Degrees
from meshrunner.recipes.parallelism.mesh import expert_mesh_dims
from meshrunner.runner.config.devices import ExpectedDevices
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.console import counted
from meshrunner.runner.own_code import fault
from meshrunner.runner.predict.forecast import why

if TYPE_CHECKING:
    from meshrunner.recipes.model.network import Network
    from meshrunner.runner.predict.trace.tracer import Trace

Fact = int | str | None
Sections = dict[str, dict[str, Fact]]
"""Facts, keyed by section and name."""
MODEL, PARAMETERS, COMPILER, PEAK = "model", "parameters", "compiler", "peak memory"
OF_CODE = (MODEL, PARAMETERS)
"""Sections that do not depend on the operators that torch calls."""
MOST_DRAWN = 2 * 10**9
"""Largest model, in parameters, for which random initial values are drawn. Drawing the values takes up to a minute."""
BLOCK = re.compile(r"(?<=\.)\d+(?=\.)")
"""Pattern of the block number in a parameter's name."""


def exact_facts(experiment: Experiment, device: ExpectedDevices) -> Sections:
    """Derive the facts of a run that passed `consistency.fit`. Exceptions of the user's code propagate."""
    import torch._dynamo

    from meshrunner.runner.predict.workload import trace_run

    network = experiment.model.on_meta(experiment.seq_len)
    network.tie_weights()
    found: Sections = {MODEL: _model(experiment, network), PARAMETERS: dict(_parameters(experiment, network))}
    if reason := experiment.untraceable():
        return found | {"trace": {"unavailable": reason}}
    counters = torch._dynamo.utils.counters
    counters.clear()
    try:
        workload, traces = trace_run(experiment, device, shallow=False)
    except ConfigError:
        raise
    except Exception as error:  # a user's class may raise anything, and an operator may lack a meta kernel
        if fault(error):
            raise
        return found | {"trace": {"unavailable": why(error)}}
    if experiment.compile.compiles:
        breaks = Counter[str]()
        for reason, count in counters["graph_break"].items():
            breaks[f"graph break: {reason.splitlines()[0]}"] += count
        found[COMPILER] = {"graphs": counters["stats"]["unique_graphs"], **breaks}
    degrees = experiment.parallelism.degrees(experiment.launch.nodes, workload.workers)
    for rank, (trace,) in traces.items():
        prefix = f"rank {rank}: " if degrees.pipeline > 1 else ""
        for section, own in _traced(trace, degrees, experiment.parallelism.expert).items():
            found[prefix + section] = own
    return found


def _model(experiment: Experiment, network: Network) -> dict[str, Fact]:
    flops = experiment.model.flops_per_token(experiment.seq_len)
    trained = sum(each.numel() for each in network.parameters() if each.requires_grad)
    frozen = sum(each.numel() for each in network.parameters() if not each.requires_grad)
    counts = {"trained parameters": trained, "frozen parameters": frozen}
    return {**counts, "FLOPs per token": flops.total, "of which attention": flops.attention}


def _parameters(experiment: Experiment, network: Network) -> Iterator[tuple[str, str]]:
    """Yield each parameter name, with `*` for the block number, and a description of the parameters that match the name."""
    import torch

    from meshrunner.recipes.model.init_weights import Initialiser

    initialiser = Initialiser(network, experiment.seed, torch.device("cpu"))
    draws = sum(parameter.numel() for parameter in network.parameters()) <= MOST_DRAWN
    alike: dict[str, list[tuple[str, torch.nn.Parameter]]] = defaultdict(list)
    for name, parameter in network.named_parameters():
        alike[BLOCK.sub("*", name)].append((name, parameter))
    for pattern, members in alike.items():
        digest = hashlib.blake2b(digest_size=8)
        for name, parameter in members if draws else ():
            digest.update(initialiser.whole(name, parameter.shape).numpy().tobytes())
        shapes = " or ".join(dict.fromkeys("x".join(map(str, each.shape)) for _, each in members))
        trained = sum(each.requires_grad for _, each in members)
        values = f", initial values {digest.hexdigest()}" if draws else ""
        yield pattern, f"{len(members)} of {shapes}, {trained} trained{values}"


def _traced(trace: Trace, degrees: Degrees, expert: int) -> Sections:
    """Return work and communication in each phase of the last traced step, activations kept by each block, and peak memory."""
    from meshrunner.runner.predict.activations import kept_by_block
    from meshrunner.runner.predict.record.trace_events import Collective, Operator
    from meshrunner.runner.predict.trace.depth import step_peak

    found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for event in trace.events:
        if isinstance(event, Collective) and event.phase.step == trace.last_step:
            name = f"{event.name} over {_dims(event.ranks, degrees, expert)}"
            found[str(event.phase)][name].append(event.nbytes)
        elif isinstance(event, Operator) and event.kind != "memory" and event.phase.step == trace.last_step:
            found[str(event.phase)][f"{event.name.removeprefix('aten::')} of {event.dtype}"].append(event.flops)
    sections: Sections = {
        section: {
            name: f"{counted(len(sizes), 'call')}, {sum(sizes):,} {'bytes' if ' over ' in name else 'FLOPs'}"
            for name, sizes in sorted(calls.items())
        }
        for section, calls in found.items()
    }
    for block, kept in sorted(kept_by_block(trace).items()):
        results = {f"results of {name}": f"{few} of {all_}" for name, (few, all_) in kept.operators.items()}
        sections[f"kept for backward of block {block}"] = {"bytes": kept.nbytes, **results}
    peak = step_peak(trace)
    categories = {category: nbytes for category, nbytes in peak.by_category.items() if nbytes}
    return sections | {PEAK: {"bytes": peak.total, "phase": str(peak.phase), **categories}}


def _dims(ranks: tuple[int, ...], degrees: Degrees, expert: int) -> str:
    """Return the names of the mesh dimensions over which the ranks of a group differ, such as `replicate x shard`."""
    replicate, shard = degrees.without_context
    inner = {"context": degrees.context, "tensor": degrees.tensor}
    meshes = [{"pipeline": degrees.pipeline, "replicate": replicate, "shard": shard, **inner}]
    if expert > 1:
        meshes.append(expert_mesh_dims(degrees.replicate, degrees.shard, expert, degrees.pipeline))
    found = []
    for mesh in meshes:
        coordinates = np.unravel_index(ranks, tuple(mesh.values()))
        found.append([name for name, along in zip(mesh, coordinates, strict=True) if len(set(along)) > 1])
    fewest = min(found, key=len)
    return " x ".join(fewest)
