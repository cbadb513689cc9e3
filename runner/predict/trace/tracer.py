"""The recipe itself, run on meta as one rank of a fake process group: nothing is computed, everything is written down."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

# Else it is imported from within the first operator that it takes part in, and the import's frames keep that one's tensors.
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
from meshrunner.runner.predict.meta.replacements import Replacements
from meshrunner.runner.predict.meta.stand_ins import META, in_place_of
from meshrunner.runner.predict.record.device_streams import TracedDevice
from meshrunner.runner.predict.record.recorder import Recorder
from meshrunner.runner.predict.record.trace_events import EventLog
from meshrunner.runner.process.garbage import collector_held_off

STEPS = 2
"""The first makes the optimizer's state; the second is like all that follow."""
MICRO_BATCHES = 4
"""
Of a step, at most: the first finds no gradients, the last hands them over to be reduced, the third is like all that are left
out: it follows one of its kind, and so does what follows it.
"""
CUDA_ROUNDS_TO = 512
"""Bytes of the smallest block of the caching allocator, which all are multiples of."""


class Trace(NamedTuple):
    """What was written down."""

    ledger: MemoryLedger
    events: EventLog
    """Up to the end of the last step; the account goes on, and sees the model die."""
    last_step: int
    """Number of the step that is like all that follow."""
    tokens: int
    """Of a step, of one data-parallel rank."""
    skipped_micro_batches: int
    """Micro batches of a step that were not rehearsed, though their tokens were in memory."""
    parameters: int
    """Of the full model."""


def trace_recipe(
    recipe: Recipe, *, nodes: int, workers: int, device_type: str, rank: int = 0, operators: bool = True
) -> Trace:
    """
    Assemble a recipe and take two optimizer steps.

    Args:
        recipe: what is `auto` about it resolved for the device type.
        device_type: `cpu` or `cuda`.
        rank: the rank that is rehearsed.
        operators: whether the log has more than memory.

    Raises:
        ConfigError: the recipe does not fit the devices.
    """
    compiles = recipe.compile.compiles
    phases, device = Phases(START, compiles=compiles), TracedDevice()
    rounding = CUDA_ROUNDS_TO if device_type == "cuda" else 1
    on_host = device_type == "cpu"
    recorder = Recorder(device, phases, on_host=on_host, rounding=rounding, operators=operators)
    degrees = recipe.parallelism.degrees(nodes, workers)
    with (
        _alone(),
        _quiet(),
        _fake_group(rank, nodes * workers),
        in_place_of(device_type, recorder, compiles=compiles),
        phases,
        ExitStack() as recording,
    ):
        mesh = build_mesh("cpu", degrees)  # meta is no device of a mesh
        with _beginning(lambda: recording.enter_context(recorder)):
            model, trained, parameters = pretrain.assemble(recipe, mesh, META)
        micro = recipe.accumulation(degrees.data)[1]
        optimizer = recipe.parallelism.optimizer(model, recipe.optimizer.build([each.parameter for each in trained]))
        for _ in range(STEPS):
            phases.begin_step()
            batches = _batches(micro, recipe.micro_batch, recipe.seq_len)
            pretrain.update(recipe, model, trained, optimizer, batches[:MICRO_BATCHES], recipe.optimizer.lr)
        tokens = micro * recipe.micro_batch * recipe.seq_len
        left_out = max(0, micro - MICRO_BATCHES)
        return Trace(recorder, recorder.events[:], phases.step, tokens, left_out, parameters)


def _batches(micro: int, micro_batch: int, seq_len: int) -> list[tuple[Tensor, Tensor]]:
    with torch.no_grad():
        rows = torch.empty(micro * micro_batch, seq_len + 1, dtype=torch.int64, device=META)
        return micro_batches(rows, micro_batch)


@contextmanager
def _beginning(begin: Callable[[], Any]) -> Iterator[None]:
    """
    Call `begin` before the first tensor is made that would have memory.

    The network is on meta anyway, and until it is materialised it has no memory on the device either.
    """
    begun: list[bool] = []

    def once() -> None:
        if not begun:
            begun.append(True)
            begin()

    class Observed(Initialiser):
        def materialise(self, model: nn.Module, *, offload: bool = False) -> None:
            once()
            super().materialise(model, offload=offload)

        def param_init_fn(self) -> Callable[[nn.Module], None]:
            initialise = super().param_init_fn()

            def observed(module: nn.Module) -> None:
                once()
                initialise(module)

            return observed

        def whole(self, name: str, shape: torch.Size) -> Tensor:
            once()
            return super().whole(name, shape)

    with Replacements() as own:
        own.replace(pretrain, "Initialiser", Observed)
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
    """What torch warns of is that a device is called meta, or for whoever trains; what it logs as an error it raises, too."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def _alone() -> Iterator[None]:
    """As in training, the garbage collector is held off: what lives in a circle of references lives on."""
    gc.collect()
    with collector_held_off():
        yield
