"""A user's own options, each of which makes a step slower for one reason."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from meshrunner.recipes.data.base import Random, RandomSequences
from meshrunner.recipes.model.llama import Llama
from meshrunner.recipes.optim.optimizer import AdamW

if TYPE_CHECKING:
    from torch import nn

    from meshrunner.recipes.model.transformer import Transformer

STALL_S = 0.15


class ExtraMatmul(Llama):
    """Llama that multiplies two matrices in every forward pass and discards the product."""

    def network(self, seq_len: int) -> Transformer:
        network = super().network(seq_len)
        network.register_forward_pre_hook(_multiply)
        return network


def _multiply(module: nn.Module, given: tuple[Any, ...]) -> None:
    import torch

    if not given[0].is_meta:
        with torch.no_grad():
            torch.ones(2048, 1024) @ torch.ones(1024, 1024)


class SlowData(Random):
    """Random tokens that take STALL_S per batch."""

    def open(self, spec: Any) -> RandomSequences:
        return SlowSequences(spec)


class SlowSequences(RandomSequences):
    def rows(self, first: int, count: int) -> Any:
        time.sleep(STALL_S)
        return super().rows(first, count)


class StallingAdamW(AdamW):
    """AdamW whose every step first waits on the host."""

    def build(self, parameters: Any) -> Any:
        optimizer = super().build(parameters)
        optimizer.register_step_pre_hook(lambda *_: time.sleep(STALL_S))
        return optimizer
