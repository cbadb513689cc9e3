"""Traces two training steps on the meta device, as one rank of a fake process group. No tensor gets memory or values."""

import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

# Import torch._dynamo early. If an operator's first call imported it, the frames of the import would keep the operator's
# tensors alive.
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshrunner.recipes import pretrain
from meshrunner.recipes.assembly import assemble
from meshrunner.recipes.data.loader import micro_batches
from meshrunner.recipes.model.init_weights import Initialiser
from meshrunner.recipes.model.network import network_of
from meshrunner.recipes.parallelism.base import Parallelism
from meshrunner.recipes.parallelism.mesh import build_mesh
from meshrunner.recipes.recipe import Recipe
from meshrunner.runner.ledger.allocations import START
from meshrunner.runner.ledger.memory_ledger import MemoryLedger
from meshrunner.runner.ledger.phases import Phases
from meshrunner.runner.predict.allocator.caching_allocator import UNIT
from meshrunner.runner.predict.gpu_libraries import GPULibraries
from meshrunner.runner.predict.meta.replacements import Replacements
from meshrunner.runner.predict.meta.stand_ins import meta_as
from meshrunner.runner.predict.record.recorder import Recorder
from meshrunner.runner.predict.record.trace_events import META, CaptureBegan, EventLog, TracedDevice

STEPS = 2
"""Optimizer steps to trace. The first step creates the optimizer's state. The second step is like all later steps."""
MICRO_BATCHES = 3
"""Maximum number of micro batches to trace per step. The first micro batch creates the gradients, and the last one reduces them.
All micro batches except the first and last are alike, so an untraced micro batch is assumed to take as long as the second."""


class Trace(NamedTuple):
    """A traced run."""

    ledger: MemoryLedger
    events: EventLog
    """Events (operators, collectives, allocations and the like) up to the end of the last traced step."""
    last_step: int
    """Number of the last traced step, counted from 0."""
    tokens: int
    """Tokens that one data-parallel rank processes per step."""
    skipped_micro_batches: int
    """Number of untraced micro batches per step. `tokens` and the memory of the batch include the untraced micro batches."""
    exchanged: int = 0
    """Bytes that neighbouring pipeline stages exchange for a micro batch, in each direction."""


def trace_recipe(recipe: Recipe, rank: int = 0, **setting: Any) -> Trace:
    """Trace the first two optimizer steps of a rank. Each `auto` in `recipe` must already be resolved for the device type."""
    return trace_depths([recipe], rank, **setting)[0]


def trace_depths(
    recipes: Sequence[Recipe],
    rank: int = 0,
    *,
    nodes: int,
    workers: int,
    device_type: str,
    libraries: GPULibraries | None = None,
) -> tuple[Trace, ...]:
    """Trace each recipe as `trace_recipe` does. Several recipes must differ only in the number of blocks, because their traces
    share compiled code. Traces of several recipes cannot be replayed, because their first step has only one micro batch."""
    in_first_step = 1 if len(recipes) > 1 else MICRO_BATCHES
    setting = rank, in_first_step, nodes, workers, device_type, libraries or GPULibraries()
    try:
        return tuple(_trace(each, *setting) for each in recipes)
    finally:
        if recipes[0].compile.compiles:
            torch._dynamo.reset()  # compiled code is valid only for this model


def _trace(
    recipe: Recipe, rank: int, in_first_step: int, nodes: int, workers: int, device_type: str, libraries: GPULibraries
) -> Trace:
    compiles = recipe.compile.compiles
    phases, device = Phases(START, compiles=compiles), TracedDevice()
    on_host = device_type == "cpu"
    recorder = Recorder(device, phases, on_host=on_host, rounding=1 if on_host else UNIT)
    recorder.workspaces = dict.fromkeys((False, True), libraries.workspace)
    degrees = recipe.parallelism.degrees(nodes, workers)
    pipelined, cudnn = degrees.pipeline > 1, libraries.cudnn_attention
    with (
        _undisturbed(),
        ExitStack() as group,
        meta_as(device_type, recorder, compiles=compiles, cudnn=cudnn, pipelined=pipelined),
        phases,
        ExitStack() as recording,
    ):
        dist.init_process_group("fake", rank=rank, world_size=nodes * workers, store=FakeStore())
        group.callback(dist.destroy_process_group)
        if pipelined:  # DTensor's cache holds names of process groups, and another rank's groups have other names
            _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
            group.callback(_clear_sharding_prop_cache)
        mesh = build_mesh("cpu", degrees)  # a mesh cannot be on meta
        with _from_first_weight(recorder, recording, type(recipe.parallelism)):
            model, trained, _ = assemble(recipe, mesh, META)
        exchanged = network_of(model).pipeline.exchanged_bytes if pipelined else 0
        micro = recipe.accumulation(degrees.data)[1]
        optimizer = recipe.parallelism.optimizer(model, recipe.optimizer.build_for(trained))
        most = micro if pipelined else MICRO_BATCHES  # a pipeline schedule needs all micro batches
        for step in range(STEPS):
            if step and recipe.compile.cuda_graph:
                device.write(CaptureBegan())
            phases.begin_step()
            shape = micro * recipe.micro_batch, recipe.seq_len + 1
            with torch.no_grad():
                rows = torch.empty(shape, dtype=torch.int64, device=META)
                batches = micro_batches(rows, recipe.micro_batch, network_of(model).own)
                del rows
            traced = batches[: most if step or pipelined else in_first_step]
            pretrain.update(recipe, model, trained, optimizer, traced, recipe.optimizer.lr)
        tokens = micro * recipe.micro_batch * recipe.seq_len // degrees.context
        skipped = max(0, micro - most)
        return Trace(recorder, recorder.events[:], phases.step, tokens, skipped, exchanged)


@contextmanager
def _from_first_weight(recorder: Recorder, recording: ExitStack, layout: type[Parallelism]) -> Iterator[None]:
    """Enter `recorder` just before parameters are allocated. In a real run, parameters are the first tensors on the device.
    Recording stops while a further pipeline stage is wrapped, because the parameters of that stage are not allocated yet."""
    enter = cache(lambda: recording.enter_context(recorder))

    def leave() -> None:
        recording.close()
        enter.cache_clear()

    def after(action: Callable[[], object], function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            action()
            return function(*args, **kwargs)

        return call

    with Replacements() as in_recipe:
        in_recipe.replace(nn.Module, "to_empty", after(enter, nn.Module.to_empty))
        in_recipe.replace(Initialiser, "whole", after(enter, Initialiser.whole))
        defining: Any = next(each for each in layout.__mro__ if "apply" in vars(each))
        in_recipe.replace(defining, "apply", after(leave, defining.apply))
        yield


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Collect garbage once, then disable garbage collection. As in training, tensors in reference cycles then stay allocated.
    Silence warnings, which concern real training, and logged errors, which only repeat torch's exceptions."""
    collects, silenced = gc.isenabled(), logging.root.manager.disable
    gc.collect()
    gc.disable()
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(silenced)
        if collects:
            gc.enable()
