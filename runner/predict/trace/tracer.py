"""Runs the recipe itself on meta, as one rank of a fake process group. Nothing is computed, everything is recorded."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

# Imported early: imported by the first operator that needs it, its frames would keep that operator's tensors alive.
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshrunner.recipes import pretrain
from meshrunner.recipes.data.loader import micro_batches
from meshrunner.recipes.model.init_weights import Initialiser
from meshrunner.recipes.parallelism.mesh import build_mesh
from meshrunner.recipes.recipe import Recipe
from meshrunner.runner.ledger.memory_ledger import MemoryLedger
from meshrunner.runner.ledger.phases import START, Phases
from meshrunner.runner.predict.meta.fsdp import META
from meshrunner.runner.predict.meta.replacements import Replacements
from meshrunner.runner.predict.meta.stand_ins import meta_as
from meshrunner.runner.predict.record.device_streams import TracedDevice
from meshrunner.runner.predict.record.recorder import Recorder
from meshrunner.runner.predict.record.trace_events import EventLog
from meshrunner.runner.process.garbage import garbage_collection_disabled

STEPS = 2
"""The first step creates the optimizer's state. The second is like all later ones."""
MICRO_BATCHES = 4
"""
Most micro batches to trace in a step. The first finds no gradients, and the last has them reduced. The third is like all that are
skipped: it follows one of its kind, and so does the micro batch after it.
"""
CUDA_ROUNDING = 512
"""Bytes of the caching allocator's smallest block. Every block is a multiple of it."""


class Trace(NamedTuple):
    """A traced run."""

    ledger: MemoryLedger
    events: EventLog
    """Events up to the end of the last step. The ledger continues, and sees the model freed."""
    last_step: int
    """Number of the step that is like all later ones."""
    tokens: int
    """Tokens per step of one data-parallel rank."""
    skipped_micro_batches: int
    """Micro batches per step that were not traced, although their tokens were in memory."""
    parameters: int
    """Parameters of the full model."""


def trace_recipe(
    recipe: Recipe, *, nodes: int, workers: int, device_type: str, rank: int = 0, operators: bool = True
) -> Trace:
    """
    Assemble a recipe and take two optimizer steps.

    Args:
        recipe: with every `auto` resolved for the device type.
        workers: processes per node.
        device_type: `cpu` or `cuda`.
        rank: the rank to trace.
        operators: whether to record operators and collectives as well as memory.

    Raises:
        ConfigError: the recipe does not fit the devices.
    """
    compiles = recipe.compile.compiles
    phases, device = Phases(START, compiles=compiles), TracedDevice()
    rounding = CUDA_ROUNDING if device_type == "cuda" else 1
    recorder = Recorder(device, phases, on_host=device_type == "cpu", rounding=rounding, operators=operators)
    degrees = recipe.parallelism.degrees(nodes, workers)
    with (
        _without_garbage_collection(),
        _quiet(),
        _fake_group(rank, nodes * workers),
        meta_as(device_type, recorder, compiles=compiles),
        phases,
        ExitStack() as recording,
    ):
        mesh = build_mesh("cpu", degrees)  # a mesh cannot be on meta
        with _before_first_weight(lambda: recording.enter_context(recorder)):
            model, trained, parameters = pretrain.assemble(recipe, mesh, META)
        micro = recipe.accumulation(degrees.data)[1]
        optimizer = recipe.parallelism.optimizer(model, recipe.optimizer.build([each.parameter for each in trained]))
        for _ in range(STEPS):
            phases.begin_step()
            batches = _batches(micro, recipe.micro_batch, recipe.seq_len)
            pretrain.update(recipe, model, trained, optimizer, batches[:MICRO_BATCHES], recipe.optimizer.lr)
        tokens = micro * recipe.micro_batch * recipe.seq_len
        skipped = max(0, micro - MICRO_BATCHES)
        return Trace(recorder, recorder.events[:], phases.step, tokens, skipped, parameters)


def _batches(micro: int, micro_batch: int, seq_len: int) -> list[tuple[Tensor, Tensor]]:
    with torch.no_grad():
        rows = torch.empty(micro * micro_batch, seq_len + 1, dtype=torch.int64, device=META)
        return micro_batches(rows, micro_batch)


@contextmanager
def _before_first_weight(start: Callable[[], Any]) -> Iterator[None]:
    """
    Call `start` once, before the model gets memory.

    In a run, too, the network is first built on meta, and has no memory on the device until it is materialised.
    """
    started: list[bool] = []

    def once() -> None:
        if not started:
            started.append(True)
            start()

    class TracedInitialiser(Initialiser):
        def materialise(self, model: nn.Module, *, offload: bool = False) -> None:
            once()
            super().materialise(model, offload=offload)

        def param_init_fn(self) -> Callable[[nn.Module], None]:
            initialise = super().param_init_fn()

            def traced(module: nn.Module) -> None:
                once()
                initialise(module)

            return traced

        def whole(self, name: str, shape: torch.Size) -> Tensor:
            once()
            return super().whole(name, shape)

    with Replacements() as in_recipe:
        in_recipe.replace(pretrain, "Initialiser", TracedInitialiser)
        yield


@contextmanager
def _fake_group(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings about meta or about training, and torch's logging of errors that it also raises."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, as in training: tensors in reference cycles stay allocated."""
    gc.collect()
    with garbage_collection_disabled():
        yield
