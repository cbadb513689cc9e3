"""Mixture of experts in place of a feed-forward network (Shazeer et al. 2017; DeepSeek-AI 2024, V3). No token is dropped. Each
token becomes one row per chosen expert. Rows are sorted by expert, multiplied expert by expert, and sorted back by token.
Blocks return their token counts and the network adds them up, because counters in blocks would count recomputed tokens twice."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

from meshrunner.recipes.model.decoder import Experts
from meshrunner.recipes.model.experts import grouped_rows as ops
from meshrunner.recipes.model.init_weights import local_part
from meshrunner.recipes.model.network import Network
from meshrunner.recipes.model.tensor_plan import SplitParameters, TensorPlan, matmul_styles, stream_placement
from meshrunner.recipes.model.transformer import FeedForward, in_compute_dtype


class Router(nn.Module):
    """Scores every expert for every token, always in fp32, and picks the best experts."""

    def __init__(self, dim: int, config: Experts) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.number, dim))

    def forward(self, x: Tensor, bias: Tensor, mesh: DeviceMesh | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return three tensors: the weights and the indices of each token's K experts, and the unweighted balance loss.

        weights: [T, K], fp32; indices: [T, K], int64; loss: 0-d, fp32; x: [batch, seq, dim], T = batch x seq.
        bias: [experts], added to the scores for choosing experts, but not for computing the weights.
        mesh: the tensor-parallel ranks, or None. Each rank holds the router's whole weight and routes all tokens.
        """
        config, weight = self.config, self.weight.float()
        if mesh is not None:
            weight = on_all_ranks(weight, mesh, Replicate())
        with torch.autocast(x.device.type, enabled=False):
            logits = ops.FP32Linear.apply(x, weight)  # type: ignore[no-untyped-call]  # [batch, seq, experts]
        scores = logits.sigmoid() if config.score == "sigmoid" else logits.softmax(-1)
        if config.routing == "balanced":
            shape = *x.shape[:-1], config.per_token  # [batch, seq, K]
            experts = (torch.arange(math.prod(shape), device=x.device) % config.number).view(shape)
        else:
            experts = torch.topk(scores.detach() + bias, config.per_token, dim=-1, sorted=False).indices
        weights = scores.gather(-1, experts)
        if config.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        balance = balance_loss(scores, experts) if config.balance == "sequence_loss" else scores.new_zeros(())
        return (weights * config.route_scale).flatten(0, 1), experts.flatten(0, 1), balance


def balance_loss(scores: Tensor, experts: Tensor) -> Tensor:
    """Return the unweighted balance loss, averaged over sequences (DeepSeek-AI 2024, V3, equations 17 to 20).

    The loss of a sequence is the sum of f x P over the experts. f is the fraction of choices that fall on the expert, times the
    number of experts. f has no gradient. P is the expert's fraction of a token's total score, averaged over the tokens. If all
    loads are equal, the loss is 1. scores: [batch, seq, number of experts]; experts: chosen indices, [batch, seq, K].
    """
    number, per_token = scores.shape[-1], experts.shape[-1]
    chosen = torch.zeros_like(scores).scatter_(-1, experts, 1.0)
    frequency = chosen.mean(1) * (number / per_token)  # f: [batch, experts]
    probability = (scores / scores.sum(-1, keepdim=True)).mean(1)  # P: [batch, experts]
    return (frequency * probability).sum(-1).mean()


class GroupedExperts(nn.Module):
    """The SwiGLU experts of one block on this rank. Each parameter stacks one matrix per expert: [experts, in, out]."""

    group: ProcessGroup | None = None
    """Process group of the expert-parallel ranks, which hold different experts; None: this rank holds all experts. Gradients are
    divided by the number of expert-parallel ranks, because data parallelism does not average over these ranks."""

    def __init__(self, number: int, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(number, dim, ffn_dim))
        self.w3 = nn.Parameter(torch.empty(number, dim, ffn_dim))
        self.w2 = nn.Parameter(torch.empty(number, ffn_dim, dim))

    def forward(self, rows: Tensor, load: Tensor) -> Tensor:
        """Apply each expert to its rows. rows: [rows, dim], sorted by expert; load: rows per expert, [experts], int64."""
        weights = [local_part(w) for w in (self.w1, self.w3, self.w2)]
        if self.group is not None:
            weights = [ops.ScaleGradient.apply(w, 1 / self.group.size()) for w in weights]  # type: ignore[no-untyped-call]
        if ops.leaves_empty_groups(rows.device):
            weights = [ops.ZeroGradient.apply(w, load == 0) for w in weights]  # type: ignore[no-untyped-call]
        rows, w1, w3, w2 = map(in_compute_dtype, (rows, *weights))  # autocast does not cover grouped matmuls
        ends = load.cumsum(0, dtype=torch.int32)
        return ops.grouped_mm(F.silu(ops.grouped_mm(rows, w1, ends)) * ops.grouped_mm(rows, w3, ends), w2, ends)


class SharedExpert(FeedForward):
    """The expert that every token passes through."""

    def styles(self, sequence_parallel: bool) -> TensorPlan:
        """Return styles that split the hidden width. The output stays partial, so that one sum over ranks covers all experts."""
        split = matmul_styles(("w1", "w3"), "w2", sequence_parallel=False)
        return {**split, "w2": RowwiseParallel(output_layouts=Partial())}


class ExpertFeedForward(nn.Module):
    """A router, experts that the router chooses from, and optionally a shared expert that every token passes through."""

    tensor_mesh: DeviceMesh | None = None
    """Mesh of the tensor-parallel ranks. Each rank holds a part of every expert's width. None: no tensor parallelism."""
    stream: Placement = Replicate()
    """Placement of the input and output, [batch, seq, dim], over the tensor-parallel ranks."""

    def __init__(self, dim: int, config: Experts) -> None:
        super().__init__()
        self.per_token = config.per_token
        self.number = config.number
        self.router = Router(dim, config)
        self.experts = GroupedExperts(config.number, dim, config.ffn_dim)
        self.shared = SharedExpert(dim, config.shared_ffn_dim) if config.shared_ffn_dim else None

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, [batch, seq, dim]; this rank's tokens per expert, [experts], int64; and the balance loss, 0-d."""
        mesh = self.tensor_mesh
        if mesh is None:
            return self._route(x, bias)
        y, load, balance = self._route(on_all_ranks(x, mesh, self.stream), bias)
        y = DTensor.from_local(y, mesh, [Partial()]).redistribute(placements=[self.stream]).to_local()
        # Every rank computes the whole balance loss, and its gradients are summed over ranks. Each rank's gradient is therefore
        # divided by the number of ranks.
        whole = balance.detach()
        return y, load, whole + (balance - whole) / mesh.size()

    def _route(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, experts, balance = self.router(x, bias, self.tensor_mesh)
        tokens = x.flatten(0, 1)  # [T, dim]
        # Each token has K choices. `order` sorts the T x K choices by expert, keeping the order of tokens.
        by_expert, order = experts.flatten().sort(stable=True)
        inverse = ops.inverse_of(order)
        ends = torch.searchsorted(by_expert, torch.arange(self.number, device=x.device), right=True)
        load = ends.diff(prepend=ends.new_zeros(1))  # [experts]
        rows = ops.permute(tokens, order, inverse, self.per_token)  # [T x K, dim], sorted by expert
        group = self.experts.group
        rows = self.experts(rows, load) if group is None else ops.exchanged(self.experts, rows, load, group)
        results = ops.permute(rows, inverse, order).view(len(tokens), self.per_token, -1)  # by token, [T, K, dim]
        y = ops.WeightedSum.apply(results, weights).view_as(x)  # type: ignore[no-untyped-call]
        if self.shared is not None:
            if self.tensor_mesh is not None:
                # Under tensor parallelism, the gradient of x is later summed over ranks. Unlike the routed experts, the shared
                # expert's first layers have already summed their gradient, so this gradient is divided by the number of ranks.
                x = ops.ScaleGradient.apply(x, 1 / self.tensor_mesh.size())  # type: ignore[no-untyped-call]
            y = y + self.shared(x)
        return y, load, balance

    def styles(self, sequence_parallel: bool) -> TensorPlan:
        return {"": SplitExperts(stream_placement(sequence_parallel))}


def on_all_ranks(x: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    """Return the full tensor on every rank. x: this rank's part, with this `placement`. Backward sums gradients over ranks."""
    shard = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [placement])
    return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def split_over_experts(network: Network, mesh: DeviceMesh) -> None:
    """Shard the experts of every block over the `expert` dimension of the mesh, in place. The network is on the meta device."""
    network.expert_mesh = mesh
    for module in network.modules():
        if isinstance(module, ExpertFeedForward):
            module.experts.group = mesh.get_group("expert")
            SplitParameters({"w1": 0, "w3": 0, "w2": 0})._apply(module.experts, mesh["expert"])


class SplitExperts(SplitParameters):
    """The tensor-parallel style of a block's experts. Every rank routes all tokens and holds a part of every expert's width."""

    def __init__(self, stream: Placement) -> None:
        super().__init__({"experts.w1": 2, "experts.w3": 2, "experts.w2": 1})
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, ExpertFeedForward)
        module.tensor_mesh = device_mesh
        module.stream = self.stream
        return super()._apply(module, device_mesh)
