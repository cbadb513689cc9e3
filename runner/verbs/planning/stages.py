"""The pipeline stages that `show` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table

from meshrunner.recipes.parallelism.pipeline.stages import ranges
from meshrunner.runner.config.experiment import Experiment

if TYPE_CHECKING:
    from meshrunner.recipes.model.network import Network


class Stage(NamedTuple):
    """A pipeline stage."""

    rank: int
    """Pipeline rank: the index of the group of devices that holds the stage."""
    blocks: range
    modules: list[str]
    """Names of the stage's modules."""
    parameters: int
    flops: float
    """Share of the model's FLOPs."""


def stages_of(experiment: Experiment, network: Network) -> list[Stage]:
    """Return the stages of a pipeline, in the order of the model."""
    from meshrunner.recipes.parallelism.pipeline.part import part_names

    layout = experiment.parallelism
    ranks = {
        number: rank
        for rank in range(layout.pipeline)
        for number in layout.schedule.stages_of(rank, layout.pipeline, layout.stages_per_rank)
    }
    *costs, last = experiment.model.block_flops(experiment.seq_len)
    found = []
    for number, blocks in enumerate(ranges(experiment.pipeline_split())):
        modules = part_names(network, blocks)
        parameters = sum(p.numel() for name in modules for p in network.get_submodule(name).parameters())
        flops = sum(costs[block] for block in blocks) + last * (blocks.stop == len(costs))
        found.append(Stage(ranks[number], blocks, modules, parameters, flops / (sum(costs) + last)))
    return found


def largest_rank(stages: list[Stage]) -> int | None:
    """Return the pipeline rank with the most parameters, or None if there are no stages."""
    sizes: dict[int, int] = {}
    for stage in stages:
        sizes[stage.rank] = sizes.get(stage.rank, 0) + stage.parameters
    return max(sizes, key=sizes.__getitem__, default=None)


def stage_table(stages: list[Stage]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("stage", "pipeline rank", "blocks", "parameters", "FLOPs"):
        table.add_column(title, justify="right")
    for number, stage in enumerate(stages):
        first, last = stage.blocks[0], stage.blocks[-1]
        blocks = f"{first}" if first == last else f"{first} to {last}"
        table.add_row(f"{number}", f"{stage.rank}", blocks, f"{stage.parameters:,}", f"{stage.flops:.1%}")
    return table
