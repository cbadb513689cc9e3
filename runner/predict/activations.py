"""Finds the activations that each block keeps for backward, with and without recomputation, for the command `show`."""

from collections import Counter, defaultdict
from functools import partial
from typing import NamedTuple

from meshrunner.recipes.activation_checkpoint.base import NoRecompute
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.base import Model
from meshrunner.recipes.model.network import Network
from meshrunner.runner.config.devices import ExpectedDevices
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.ledger.allocations import UNKNOWN, Allocation
from meshrunner.runner.predict.gpu_libraries import gpu_libraries
from meshrunner.runner.predict.trace.depth import blocks_may_differ
from meshrunner.runner.predict.trace.tracer import Trace, trace_recipe

MOST_BLOCKS = 64
"""Maximum number of blocks that are traced if a model cannot be shortened. Tracing MOST_BLOCKS blocks takes a few seconds."""


class KeptActivations(NamedTuple):
    """Activations of one micro batch that a block keeps from forward to backward, except the block's input and output."""

    nbytes: int
    """Bytes of the kept activations on one device, without unsharded parameters."""
    operators: dict[str, tuple[int, int]]
    """Pairs (kept results, all results) of each operator that has a kept result, keyed by operator, such as `mm`."""


class BlockKind(NamedTuple):
    """Group of recomputed blocks. The blocks have the same class and keep the same activations."""

    name: str
    whole: KeptActivations
    kept: KeptActivations
    """Activations of each block. The block would keep `whole` without recomputation, and keeps `kept` with recomputation."""


def recomputed_blocks(experiment: Experiment, device: ExpectedDevices, network: Network) -> list[BlockKind]:
    """Group the recomputed blocks of an experiment. The blocks of a group have the same class and keep the same activations.
    The experiment must have passed `consistency.fit`. Raise ConfigError if tracing is impossible."""
    if reason := experiment.untraceable():
        raise ConfigError(reason)
    option = experiment.activation_checkpoint
    classes = {
        block: type(network.get_submodule(name)).__name__
        for block, name in enumerate(network.block_names())
        if option.recomputes(block)
    }
    model, layout = _first_blocks(experiment, network, classes), experiment.parallelism
    # A pipeline does not change the activations that a block keeps, so trace without a pipeline.
    without = {"parallelism": layout.model_copy(update={"pipeline": 1}), "global_batch": None}
    recipe = experiment.model_copy(update={"model": model, **without})
    workers = experiment.launch.nodes * device.workers // layout.pipeline
    libraries = gpu_libraries(experiment, device.hardware)
    trace = partial(trace_recipe, nodes=1, workers=workers, device_type=device.type, libraries=libraries)
    kept = kept_by_block(trace(recipe))
    whole = kept_by_block(trace(recipe.model_copy(update={"activation_checkpoint": NoRecompute(kind="none")})))
    alike: list[BlockKind] = []
    for block, name in classes.items():
        if block in kept and (kind := BlockKind(name, whole[block], kept[block])) not in alike:
            alike.append(kind)
    if not alike:
        raise ConfigError("the whole model is compiled at once, so its blocks cannot be told apart")
    return alike


def kept_by_block(trace: Trace) -> dict[int, KeptActivations]:
    """Return the activations that each block keeps, keyed by block index. The dict is empty if the whole model is compiled."""
    found = {}
    for block, (made, alive) in _made_in_forward(trace).items():
        results, alive = Counter(each.operator for each in made), [each for each in alive if not each.is_block_output]
        kept = Counter(each.operator for each in alive)
        # Name operators as in `activation_checkpoint.save`: `mm`, `_c10d_functional.all_to_all_single`.
        operators = {
            name.replace("::", ".").removeprefix("aten."): (kept[name], results[name]) for name in sorted(kept)
        }
        found[block] = KeptActivations(sum(each.nbytes for each in alive), operators)
    return found


def largest_block_bytes(trace: Trace) -> int | None:
    """Return the bytes that the largest block keeps for backward, including its output; None if the whole model is compiled."""
    return max((sum(each.nbytes for each in alive) for _, alive in _made_in_forward(trace).values()), default=None)


def _first_blocks(experiment: Experiment, network: Network, classes: dict[int, str]) -> Model:
    """Return a copy of the model with only its first blocks, at least one of each class in `classes`. If the model cannot be
    shortened, return the full model. Raise ConfigError if that model has more than MOST_BLOCKS blocks."""
    model, blocks = experiment.model, len(network.block_names())
    first = {name: block for block, name in reversed(classes.items())}
    few = max(*first.values(), model.first_blocks) + 1
    cut = None if blocks_may_differ(experiment) else model.first(few)
    if cut is None and blocks > MOST_BLOCKS:
        raise ConfigError(f"tracing all {blocks} blocks would take too long")
    return model if cut is None else cut


def _made_in_forward(trace: Trace) -> dict[int, tuple[list[Allocation], list[Allocation]]]:
    """Return two lists per block: all allocations in the last step's first forward, and those held when backward begins."""
    last, ledger = trace.last_step, trace.ledger
    in_backward = (each.allocated_at for each in ledger.allocations if each.phase[:2] == (last, "backward"))
    backward = next(in_backward, ledger.now)
    found: dict[int, tuple[list[Allocation], list[Allocation]]] = defaultdict(lambda: ([], []))
    for each in ledger.allocations:
        step, part, block = each.phase
        if (step, part) != (last, "forward") or block is None or each.allocated_at > backward:
            continue
        # `MemoryLedger` labels the results of a custom autograd function as temporary until they are freed.
        if each.category in UNKNOWN and each.nbytes:
            made, alive = found[block]
            made.append(each)
            if each.is_held(backward):
                alive.append(each)
    return found
