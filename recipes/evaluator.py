"""Compute the held-out loss with the layout and the batch shapes of training, without changing the state of training."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from meshrunner.recipes.data.loader import Batches, micro_batches
from meshrunner.recipes.evaluation.base import HeldOut
from meshrunner.recipes.loss.base import to_plain
from meshrunner.recipes.model.network import network_of
from meshrunner.recipes.recipe import Recipe


class Evaluator:
    """The held-out loss of a model. Every evaluation uses the same sequences in the same order."""

    def __init__(
        self, recipe: Recipe, model: nn.Module, held_out: HeldOut, *, rank: int, ranks: int, device: torch.device
    ) -> None:
        """rank, ranks: this rank among the data-parallel ranks."""
        self._recipe, self._model, self._device = recipe, model, device
        self._sequences = held_out.data.open(held_out.spec)
        global_batches = held_out.global_batches(self._sequences)
        rows = held_out.global_batch // ranks
        self._slices = [(held_out.global_batch * i + rank * rows, rows) for i in range(global_batches)]
        """(Index of the first sequence, number of sequences) of this rank, for each global batch."""
        self.tokens = global_batches * held_out.global_batch * recipe.seq_len
        """Tokens that all ranks together evaluate."""

    @torch.no_grad()
    def loss(self) -> Tensor:
        """Return the mean loss of this rank's tokens (0-d, fp64). The held-out loss is the mean over the ranks' values."""
        recipe, network = self._recipe, network_of(self._model)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        devices = [self._device] if self._device.type == "cuda" else []
        self._model.eval()
        with torch.random.fork_rng(devices, enabled=network.uses_rng):
            for first, count in self._slices:
                rows = torch.from_numpy(self._sequences.rows(first, count)).to(self._device)
                total += forward(recipe, self._model, micro_batches(rows, recipe.micro_batch, network.own))
        self._model.train()
        for wrapped in [self._model] if network.pipeline is None else network.pipeline.stages.values():
            recipe.parallelism.after_evaluation(wrapped)
        mean = total / len(self._slices)
        return mean if network.pipeline is None else network.pipeline.summed((mean,))[0]


def forward(recipe: Recipe, model: nn.Module, batches: Batches) -> Tensor:
    """Return this rank's mean loss over some micro batches; 0 if another rank has the last pipeline stage."""
    layout, pipeline = recipe.parallelism, network_of(model).pipeline
    with loss_parallel() if layout.splits_logits else nullcontext():
        if pipeline is not None:
            mean: Tensor = pipeline.run(batches, forward_only=True)
            return mean
        total = torch.zeros((), dtype=torch.float64, device=batches[0][0].device)
        for batch in batches:
            with layout.computing(recipe.precision, total.device.type):
                loss = model(*batch)
            total += to_plain(loss)
    return total / len(batches)
