"""
The network and loss of torchtitan in 2024 as a user's own classes: in March pull request #165 measured FSDP1 against FSDP2, in
December its team measured Llama 3.

What memory and time see of the difference to Llama here: the norm is written out in fp32, rotary embeddings are complex,
keys and values are repeated for grouped heads, and the logits are made fp32 by the model, whose caller computes the loss of
them; in March it kept them through backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from meshrunner.recipes.activation_checkpoint.base import Full
from meshrunner.recipes.loss.base import Loss
from meshrunner.recipes.model.llama import Llama
from meshrunner.recipes.parallelism.base import Parallelism
from meshrunner.recipes.parallelism.fsdp1 import FSDP1
from meshrunner.recipes.parallelism.fsdp2 import FSDP2

if TYPE_CHECKING:
    from torch import Tensor, nn

    from meshrunner.recipes.loss.base import LossFunction, SummedLoss
    from meshrunner.recipes.model.transformer import Transformer


class Titan2024(Llama):
    """Llama, as torchtitan wrote it then."""

    fused_norm: ClassVar[bool] = False

    def network(self, seq_len: int) -> Transformer:
        import torch
        import torch.nn.functional as F
        from torch import nn

        from meshrunner.recipes.model import transformer

        class RMSNorm(transformer.RMSNorm):
            def forward(self, x: Tensor) -> Tensor:
                wide = x.float()
                return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight

        def rotated(x: Tensor, table: Tensor) -> Tensor:
            pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
            # Of the table only the size is right: the model is for memory and time alone.
            angles = torch.view_as_complex(table.view(table.shape[0], -1, 2)[:, : pairs.shape[-1]])
            turned = pairs * angles.unsqueeze(0).unsqueeze(2)
            return torch.view_as_real(turned).flatten(3).type_as(x)

        def repeated(x: Tensor) -> Tensor:
            times = self.n_heads // self.n_kv_heads
            return x if times == 1 else x[:, :, :, None].expand(-1, -1, -1, times, -1).flatten(2, 3)

        class Attention(transformer.Attention):
            def forward(self, x: Tensor, table: Tensor) -> Tensor:
                q, k, v = (w(x).view(*x.shape[:-1], -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
                q, k, v = rotated(q, table), repeated(rotated(k, table)), repeated(v)
                q, k, v = (t.transpose(1, 2) for t in (q, k, v))
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                return self.wo(out.transpose(1, 2).contiguous().flatten(2))

        network = super().network(seq_len)
        for block in network.layers.values():
            if not self.fused_norm:
                block.attention_norm = RMSNorm(self.dim, self.norm_eps)
                block.ffn_norm = RMSNorm(self.dim, self.norm_eps)
            block.attention = Attention(self)
        if not self.fused_norm:
            network.norm = RMSNorm(self.dim, self.norm_eps)
        assert isinstance(network.layers, nn.ModuleDict)
        return network


class Logits(Loss):
    """None yet: the network returns fp32 logits."""

    def function(self, summed: SummedLoss) -> LossFunction:
        return lambda output, hidden, targets: output(hidden).float()


class LossOutside(Parallelism):
    """
    The caller computes the cross entropy of what the wrapped network returns.

    So FSDP's backward begins with the gradient of the logits; until then FSDP1's host gathers nothing and waits for nothing.
    """

    keeps_logits: ClassVar[bool] = True
    """Whether the caller still has them when backward runs."""

    def apply(self, *arguments: Any, **more: Any) -> nn.Module:
        import torch.nn.functional as F

        held: dict[str, Tensor] = {}

        def loss(_: nn.Module, batch: tuple[Tensor, Tensor], logits: Tensor) -> Tensor:
            if self.keeps_logits:
                held["logits"] = logits
            return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

        model = super().apply(*arguments, **more)
        model.register_forward_hook(loss)
        return model


class FSDP1Then(LossOutside, FSDP1):
    """FSDP1 with the loss outside."""


class FSDP2Then(LossOutside, FSDP2):
    """FSDP2 with the loss outside."""


class FSDP2InDecember(FSDP2Then):
    """FSDP2 in the runs with Llama 3, which did not keep the logits until backward."""

    keeps_logits: ClassVar[bool] = False


class FullInside(Full):
    """Whole blocks, as the compiler saw it: it leaves out the last matmul of a block, whose result backward does not need."""

    inside_compile: ClassVar[bool] = True


class FusedNorm(Titan2024):
    """torchtitan's Llama of July 2024, with a fused RMSNorm kernel."""

    fused_norm: ClassVar[bool] = True
