"""The network of a Llama with experts in some blocks."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from meshrunner.recipes.model.decoder import Decoder
from meshrunner.recipes.model.documents import Rope
from meshrunner.recipes.model.experts.feed_forward import ExpertFeedForward
from meshrunner.recipes.model.network import Initial, Loads, TruncatedNormal
from meshrunner.recipes.model.transformer import Block, Transformer


class ExpertBlock(Block):
    """A Llama block with experts in place of the feed-forward network."""

    def forward(self, x: Tensor, rope: Rope, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Return the block's output; the tokens per expert, [experts]; and the balance loss, 0-d. bias: see `Router.forward`."""
        x = x + self.attention(self.attention_norm(x), rope)
        y, load, balance = self.feed_forward(self.ffn_norm(x), bias)
        return x + y, load, balance


class MoETransformer(Transformer):
    """Embedding, blocks (some with experts), norm, output projection."""

    expert_bias: Tensor

    def __init__(self, config: Decoder, seq_len: int, blocks: Iterable[nn.Module]) -> None:
        """Build the network. A block with an `ExpertFeedForward` must have the same `forward` signature as `ExpertBlock`."""
        super().__init__(config, seq_len, blocks)
        self.experts = config.routed
        self.rows: dict[int, int] = {}
        """Row of `expert_bias` for each block with experts, keyed by block number."""
        for number, block in enumerate(self.layers.values()):
            if isinstance(getattr(block, "feed_forward", None), ExpertFeedForward):
                self.rows[number] = len(self.rows)
        if self.experts is not None:
            self.register_buffer("expert_bias", torch.empty(len(self.rows), self.experts.number))

    def through_blocks(self, blocks: range, x: Tensor, rope: Rope, *, count: bool) -> tuple[Tensor, Tensor | None]:
        loads, balances = [], []
        for number in blocks:
            block = self.layers[str(number)]
            if (row := self.rows.get(number)) is None:
                x = block(x, rope)
            else:
                x, load, balance = block(x, rope, self.expert_bias[row])
                loads.append(load)
                balances.append(balance)
        if self.loads is not None and loads and count and torch.is_grad_enabled():
            first = sum(number < blocks.start for number in self.rows)
            self.loads.tokens[first : first + len(loads)] += torch.stack(loads)
        if self.experts is None or self.experts.balance != "sequence_loss":
            return x, None
        weighted = self.experts.balance_rate * torch.stack(balances).sum()
        if count:
            self.observe("experts/balance_loss", weighted)
        return x, weighted

    def exchanged_elements(self, block: int) -> int:
        return self.experts.per_token * self.config.dim if self.experts is not None and block in self.rows else 0

    def is_stack(self, name: str) -> bool:
        return ".experts.w" in name

    def active_elements(self, name: str) -> int:
        size = super().active_elements(name)
        if self.experts is None or not self.is_stack(name):
            return size
        return size // self.experts.number * self.experts.per_token

    def stays_fp32(self, name: str) -> bool:
        return name.endswith(".router.weight")

    def initial(self, name: str) -> Initial:
        """Return a parameter's distribution. Experts start like a dense feed-forward network. Router logits get variance 1."""
        if name.endswith((".experts.w2", ".shared.w2.weight")):
            return self.initial_into_stream()
        if name.endswith(".router.weight"):
            return TruncatedNormal(self.config.dim**-0.5)
        return super().initial(name)

    def reset_buffers(self) -> None:
        super().reset_buffers()
        if self.experts is not None:
            self.expert_bias.zero_()
            self.loads = Loads(self.expert_bias, self.experts.balance_rate if self.experts.balance == "bias" else 0.0)
            if self.experts.balance == "sequence_loss":
                self.observed = {"experts/balance_loss": torch.zeros((), device=self.expert_bias.device)}
