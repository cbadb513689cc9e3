"""What recomputation saves of the activations of a block, from two rehearsals of as few blocks as tell it."""

from __future__ import annotations

from typing import NamedTuple

from meshrunner.recipes.activation_checkpoint.base import NoRecompute
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.base import Model
from meshrunner.recipes.model.network import Network
from meshrunner.runner.config.devices import Described
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.predict.kept import Kept, kept_by_block
from meshrunner.runner.predict.predict import not_planned
from meshrunner.runner.predict.trace.depth import blocks_may_differ
from meshrunner.runner.predict.trace.tracer import trace_recipe

MOST_BLOCKS = 64
"""Of a model that is rehearsed as deep as it is, which takes some seconds."""


class Kind(NamedTuple):
    """Blocks that are recomputed and alike."""

    name: str
    """Of their class."""
    whole: Kept
    """What each would keep without recomputation."""
    kept: Kept
    """What each keeps."""


def recomputed_blocks(experiment: Experiment, device: Described, network: Network) -> list[Kind]:
    """
    What the recomputed blocks keep, those that are alike once.

    Args:
        experiment: fits its devices (see `fit`), what is `auto` about it resolved for them.
        network: the experiment's, on meta.

    Raises:
        ConfigError: it cannot be known, with the reason.
    """
    if why := not_planned(experiment):
        raise ConfigError(why)
    option = experiment.activation_checkpoint
    classes = {
        block: type(network.get_submodule(name)).__name__
        for block, name in enumerate(network.block_names())
        if option.recomputes(block)
    }
    few = {"model": _first_blocks(experiment, network, classes), "global_batch": None}
    kept = _kept(experiment.model_copy(update=few), device)
    without = {**few, "activation_checkpoint": NoRecompute(kind="none")}
    whole = _kept(experiment.model_copy(update=without), device)
    alike: list[Kind] = []
    for block, name in classes.items():
        if block in kept and (kind := Kind(name, whole[block], kept[block])) not in alike:
            alike.append(kind)
    if not alike:
        raise ConfigError("the compiler sees the whole model and not its blocks")
    return alike


def _first_blocks(experiment: Experiment, network: Network, classes: dict[int, str]) -> Model:
    """The model with as few blocks as have one of each class, if it can be cut."""
    model, blocks = experiment.model, len(network.block_names())
    first = {name: block for block, name in reversed(classes.items())}
    few = max(*first.values(), model.first_blocks) + 1
    cut = None if blocks_may_differ(experiment) else model.first(few)
    if cut is not None:
        return cut
    if blocks > MOST_BLOCKS:
        raise ConfigError(f"to rehearse all {blocks} blocks takes long")
    return model


def _kept(experiment: Experiment, device: Described) -> dict[int, Kept]:
    nodes, workers = experiment.launch.nodes, device.workers
    return kept_by_block(
        trace_recipe(experiment, nodes=nodes, workers=workers, device_type=device.type, operators=False)
    )
