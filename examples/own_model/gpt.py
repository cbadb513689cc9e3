"""A model of your own: a small GPT-2. No shipped model has learned positions, LayerNorm or GELU.

    meshrunner run --config-dir examples/own_model model=gpt steps=5

`model/gpt.yaml` names this class by `kind: examples.own_model.gpt:GPT`; nothing has to be registered. This file defines the
option: the keys of the YAML file, and the FLOPs that `show` and MFU need. The module is in `network.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.model.base import Flops, Model
from meshrunner.recipes.option import Count

if TYPE_CHECKING:
    from examples.own_model.network import GPTNetwork


class GPT(Model):
    """A decoder as in "Language Models are Unsupervised Multitask Learners" (Radford et al. 2019), without biases."""

    dim: Count
    """Width of the residual stream."""
    n_layers: Count
    """Number of blocks."""
    n_heads: Count
    """Attention heads; each is dim / n_heads wide."""

    @model_validator(mode="after")
    def _heads_divide(self) -> GPT:
        """Check that n_heads divides dim. meshrunner shows all problems together, before anything starts."""
        if self.dim % self.n_heads:
            raise PydanticCustomError("heads", f"dim({self.dim}) is not a multiple of n_heads({self.n_heads})")
        return self

    def network(self, seq_len: int) -> GPTNetwork:
        """Build the module. torch is imported here, so that checking a configuration does not import it."""
        from examples.own_model.network import GPTNetwork

        return GPTNetwork(self, seq_len)

    def flops_per_token(self, seq_len: int) -> Flops:
        """Return 6 x (parameters outside the two embedding tables) + 12 x layers x dim x seq_len."""
        block = 12 * self.dim**2 + 2 * self.dim  # attention 4 dim^2, feed-forward 8 dim^2, two norms
        weights = self.n_layers * block + self.dim + self.vocab_size * self.dim
        attention = 12 * self.n_layers * self.dim * seq_len
        return Flops(6 * weights + attention, attention)

    def tensor_problems(self, tensor: int) -> list[str]:
        """Return reasons why the model cannot be split over `tensor` devices. A sweep skips such runs and shows why."""
        why = f"model: {type(self).__name__} has no tensor-parallel plan; use parallelism.tensor=1"
        return [why] if tensor > 1 else []
