"""A model whose forward pass does extra work: `model.kind=bench.planted:Planted +launch.env.EXTRA=COUNT`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from meshrunner.recipes.model.llama import Llama

if TYPE_CHECKING:
    from torch import nn

    from meshrunner.recipes.model.transformer import Transformer

ROWS, WIDTH = 32, 128


class Planted(Llama):
    """Llama that also multiplies two matrices EXTRA times in every forward pass, and discards the results."""

    def network(self, seq_len: int) -> Transformer:
        network = super().network(seq_len)
        network.register_forward_pre_hook(_multiply)
        return network


def _multiply(module: nn.Module, given: object) -> None:
    import torch

    with torch.no_grad():
        for _ in range(int(os.environ.get("EXTRA", "0"))):
            torch.ones(ROWS, WIDTH) @ torch.ones(WIDTH, WIDTH)
