"""The network of hybrid decoders. Each letter of the key `pattern`, such as M, names the kind of one block."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel

from meshrunner.recipes.loss.base import to_plain, with_gradient_of
from meshrunner.recipes.loss.z_loss import IGNORED
from meshrunner.recipes.model.documents import Rope
from meshrunner.recipes.model.experts.feed_forward import ExpertFeedForward
from meshrunner.recipes.model.experts.moe_transformer import MoETransformer
from meshrunner.recipes.model.hybrid.hybrid import Hybrid
from meshrunner.recipes.model.hybrid.mamba import Mamba
from meshrunner.recipes.model.network import ONES, ZEROS, Initial, InverseSoftplus, LogOfUniform, TruncatedNormal
from meshrunner.recipes.model.tensor_plan import TensorPlan, matmul_styles, stream_placement
from meshrunner.recipes.model.transformer import Attention, Block, FeedForward, RMSNorm, in_compute_dtype


class SquaredReLU(nn.Module):
    """A feed-forward network with a squared ReLU (So et al. 2021)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.relu(self.w1(x)).square())

    def styles(self, sequence_parallel: bool) -> TensorPlan:
        return matmul_styles(("w1",), "w2", sequence_parallel)


def feed_forward(config: Hybrid) -> nn.Module:
    return (FeedForward if config.ffn == "swiglu" else SquaredReLU)(config.dim, config.ffn_dim)


class MambaBlock(nn.Module):
    """A Mamba-2 block, letter M of the pattern."""

    def __init__(self, config: Hybrid) -> None:
        super().__init__()
        assert config.mamba is not None
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.mamba = Mamba(config.dim, config.mamba, config.norm_eps)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        return x + self.mamba(self.norm(x))


class AttentionBlock(nn.Module):
    """An attention block, letter * of the pattern."""

    def __init__(self, config: Hybrid) -> None:
        super().__init__()
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        return x + self.attention(self.norm(x), rope)


class FeedForwardBlock(nn.Module):
    """A feed-forward block, letter - of the pattern."""

    def __init__(self, config: Hybrid) -> None:
        super().__init__()
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = feed_forward(config)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        return x + self.feed_forward(self.norm(x))


class ExpertsBlock(nn.Module):
    """A block with experts, letter E of the pattern. Forward returns the same three tensors as `ExpertBlock.forward`."""

    def __init__(self, config: Hybrid) -> None:
        super().__init__()
        assert config.experts is not None
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = ExpertFeedForward(config.dim, config.experts)

    def forward(self, x: Tensor, rope: Rope, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, load, balance = self.feed_forward(self.norm(x), bias)
        return x + y, load, balance


class PredictionBlock(nn.Module):
    """A module of multi-token prediction, which predicts one token further ahead than the previous module."""

    def __init__(self, config: Hybrid) -> None:
        super().__init__()
        self.stream_norm = RMSNorm(config.dim, config.norm_eps)
        self.token_norm = RMSNorm(config.dim, config.norm_eps)
        self.join = nn.Linear(2 * config.dim, config.dim, bias=False)
        self.block = Block(config, feed_forward(config))
        self.norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, token: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return the new stream and its normalised copy for `output`. x: residual stream; token: embeddings of the previous
        prediction's targets. Shapes: [batch, seq, dim]."""
        x = self.join(torch.cat((self.stream_norm(x), self.token_norm(token)), -1))  # [batch, seq, 2 dim] -> [.., dim]
        x = self.block(x, rope)
        return x, self.norm(x)

    def styles(self, sequence_parallel: bool) -> TensorPlan:
        stream = stream_placement(sequence_parallel)
        return {"join": ColwiseParallel(input_layouts=stream, output_layouts=stream)}


BLOCKS: dict[str, type[nn.Module]] = {"M": MambaBlock, "*": AttentionBlock, "-": FeedForwardBlock, "E": ExpertsBlock}


class HybridTransformer(MoETransformer):
    """Embedding, the blocks of the pattern, norm, output projection, and the modules of multi-token prediction."""

    config: Hybrid

    def __init__(self, config: Hybrid, seq_len: int) -> None:
        super().__init__(config, seq_len, [BLOCKS[letter](config) for letter in config.pattern])
        self.mtp = nn.ModuleList(PredictionBlock(config) for _ in range(config.mtp.depth))

    def forward_part(self, blocks: range, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run some blocks. Balance and multi-token losses change the gradients, but not the result. With multi-token prediction,
        embeddings of shifted targets are appended to the residual stream: [(1 + depth) x batch, seq, dim]. The first pipeline
        stage looks up these embeddings, and the last stage uses them."""
        tokens, is_first, rows = x, blocks.start == 0, [x]
        if targets is not None:
            all_targets = self.whole(targets, 1) if self.config.mtp.depth else targets
            rows += [self.own(all_targets.roll(-ahead, 1), 1) for ahead in range(self.config.mtp.depth)]
            # `targets` is a slice of longer sequences and therefore not contiguous, but the shifted targets
            # are contiguous. If all targets are contiguous, the loss is compiled only once.
            targets = targets.clone(memory_format=torch.contiguous_format)
        if is_first:  # one lookup for all rows, so that FSDP gathers the table once
            x = in_compute_dtype(self.tok_embeddings(torch.cat(rows)))
        rope = self.positions(tokens if is_first or targets is None else targets, x.dtype)
        x, *between = x.chunk(len(rows))
        x, balance = self.through_blocks(blocks, x, rope, count=targets is not None)
        if blocks.stop < self.config.n_layers:
            return torch.cat((x, *between))
        hidden = self.norm(x)
        if targets is None:
            return self.output(hidden)
        loss = self.loss(self.output, hidden, targets)
        losses = []
        for ahead, (module, token) in enumerate(zip(self.mtp, between, strict=True), 1):
            x, hidden = module(x, token, rope)
            # The loss function divides by the number of all tokens, so divide by the share of tokens with a target, too.
            known = (all_targets.shape[1] - ahead) / all_targets.shape[1]
            losses.append(to_plain(self.loss(self.output, hidden, self.own(further(all_targets, ahead), 1))) / known)
        if not losses:
            return with_gradient_of(loss, balance)
        mtp_loss = torch.stack(losses).mean()
        self.observe("train/mtp_loss", mtp_loss)
        weighted = self.config.mtp.loss_weight * mtp_loss
        return with_gradient_of(loss, weighted if balance is None else balance + weighted)

    def stream_shape(self, batch: int, seq: int) -> tuple[int, ...]:
        return (1 + self.config.mtp.depth) * batch, seq, self.config.dim

    def block_names(self) -> list[str]:
        return [*super().block_names(), *(f"mtp.{ahead}" for ahead in range(len(self.mtp)))]

    def multiplied_modules(self) -> list[nn.Module]:
        further_on = [each for module in self.mtp or () for each in (module, self.output)]
        return [self.layers, self.norm, self.output, *further_on]

    def reset_buffers(self) -> None:
        super().reset_buffers()
        if self.config.mtp.depth:
            self.observed = {**self.observed, "train/mtp_loss": torch.zeros(())}

    def stays_fp32(self, name: str) -> bool:
        return name.endswith((".scan.a_log", ".scan.dt_bias", ".scan.d")) or super().stays_fp32(name)

    def initial(self, name: str) -> Initial:
        """Return the initial distribution. Mamba-2 starts as in Dao and Gu: decay rates 1 to 16, step sizes dt 0.001 to 0.1."""
        match name.rpartition(".")[2]:
            case "a_log":
                return LogOfUniform(1, 16)
            case "dt_bias":
                return InverseSoftplus(0.001, 0.1)
            case "d" | "norm":
                return ONES
            case "bias":
                return ZEROS
        if ".scan.conv_" in name:
            assert self.config.mamba is not None
            # the same variance as torch's default, a uniform distribution within +-1 / sqrt(width)
            return TruncatedNormal((3 * self.config.mamba.conv) ** -0.5)
        if name.endswith("mamba.wo.weight"):
            return self.initial_into_stream()
        return super().initial(name)


def further(targets: Tensor, ahead: int) -> Tensor:
    """Shift targets by `ahead` tokens. The last `ahead` targets of a sequence are unknown, so they become IGNORED."""
    # The length stays the same, because under sequence parallelism a rank holds a shard of every sequence.
    known = torch.arange(targets.shape[1], device=targets.device) < targets.shape[1] - ahead
    return torch.where(known, targets.roll(-ahead, 1), IGNORED)
