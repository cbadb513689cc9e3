"""A model whose forward pass does extra work: `model.kind=bench.planted:Planted +launch.env.EXTRA=ROWS`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from meshrunner.recipes.model.llama import Llama

if TYPE_CHECKING:
    from torch import nn

    from meshrunner.recipes.model.transformer import Transformer

WIDTH = 128


class Planted(Llama):
    """Llama that also multiplies a matrix of EXTRA rows by a square matrix in every forward pass, and discards the result."""

    def network(self, seq_len: int) -> Transformer:
        network = super().network(seq_len)
        network.register_forward_pre_hook(_multiply)
        return network


def _multiply(module: nn.Module, given: object) -> None:
    import torch

    with torch.no_grad():
        torch.ones(int(os.environ.get("EXTRA", "0")), WIDTH) @ torch.ones(WIDTH, WIDTH)
