"""A Llama of which some blocks have experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshrunner.recipes.balance import Loads
from meshrunner.recipes.model.experts.feed_forward import ExpertFeedForward
from meshrunner.recipes.model.initial import Initial, TruncatedNormal
from meshrunner.recipes.model.transformer import Block, FeedForward, Transformer

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    from meshrunner.recipes.model.experts.shape import Experts
    from meshrunner.recipes.model.shape import DecoderShape


class ExpertBlock(Block):
    """A block with experts; it also returns what they had to do."""

    def forward(self, x: Tensor, rope: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """bias: of the choice of experts, [experts]. Returns the new x, the load, [experts], and the balance loss, 0-d."""
        x = x + self.attention(self.attention_norm(x), rope)
        y, load, balance = self.feed_forward(self.ffn_norm(x), bias)
        return x + y, load, balance


class MoETransformer(Transformer):
    """Embedding, blocks without and with experts, norm, output projection."""

    expert_bias: Tensor

    def __init__(self, config: DecoderShape, experts: Experts, dense_layers: int, seq_len: int) -> None:
        """dense_layers: first blocks without experts."""
        blocks: list[nn.Module] = [Block(config, FeedForward(config.dim, config.ffn_dim)) for _ in range(dense_layers)]
        for _ in range(config.n_layers - dense_layers):
            blocks.append(ExpertBlock(config, ExpertFeedForward(config.dim, experts)))
        super().__init__(config, seq_len, blocks)
        self.experts, self.dense_layers = experts, dense_layers
        self.register_buffer("expert_bias", torch.empty(config.n_layers - dense_layers, experts.number))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """With targets, the loss is the cross entropy; its gradient has that of the balance loss, too."""
        x = self.tok_embeddings(tokens)
        rope = self.rope[: tokens.shape[1]]
        for block in self.layers[: self.dense_layers]:
            x = block(x, rope)
        loads, balances = [], []
        for block, bias in zip(self.layers[self.dense_layers :], self.expert_bias, strict=True):
            x, load, balance = block(x, rope, bias)
            loads.append(load)
            balances.append(balance)
        x = self.norm(x)
        if targets is None:
            return self.output(x)
        loss = self.loss(self.output, x, targets)
        balance = self.experts.balance_rate * torch.stack(balances).sum()
        if torch.is_grad_enabled() and self.loads is not None:
            self.loads.add(torch.stack(loads), balance.detach())
        if self.experts.balance != "sequence_loss":
            return loss
        # A DTensor where the logits are split over the vocabulary.
        cross_entropy = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return cross_entropy + (balance - balance.detach())

    def block_plan(self, layer: int, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        plan = super().block_plan(layer, sequence_parallel)
        if layer < self.dense_layers:
            return plan
        from torch.distributed.tensor import Partial
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        from meshrunner.recipes.model.experts.split import SplitExperts

        plan = {name: style for name, style in plan.items() if not name.startswith("feed_forward")}
        if self.experts.shared_ffn_dim:
            plan |= {f"feed_forward.shared.w{number}": ColwiseParallel() for number in (1, 3)}
            plan["feed_forward.shared.w2"] = RowwiseParallel(output_layouts=Partial())
        return plan | {"feed_forward": SplitExperts(sequence_parallel)}

    def exchanged_elements(self, block: int) -> int:
        return 0 if block < self.dense_layers else self.experts.per_token * self.config.dim

    def is_stack(self, name: str) -> bool:
        return ".experts.w" in name

    def initial(self, name: str) -> Initial:
        """As of Llama; less for what experts add to the residual stream, too. A router's scores begin about 1 apart."""
        if name.endswith((".experts.w2", ".shared.w2.weight")):
            return self.into_stream()
        if name.endswith(".router.weight"):
            return TruncatedNormal(self.config.dim**-0.5)
        return super().initial(name)

    def reset_buffers(self) -> None:
        super().reset_buffers()
        self.expert_bias.zero_()
        rate = self.experts.balance_rate if self.experts.balance == "bias" else 0.0
        self.loads = Loads(self.expert_bias, rate, with_loss=self.experts.balance == "sequence_loss")
