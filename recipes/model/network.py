"""The class `Network`, through which parallel layouts wrap, initialise and train a model, and the types that `Network` uses."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from meshrunner.recipes.loss.base import LossFunction
    from meshrunner.recipes.model.context import Context


class Network(nn.Module):
    """A language model. Subclasses implement `forward`, `block_names` and `initial`; the other methods have defaults."""

    uses_rng: ClassVar[bool] = False
    """Whether forward draws random numbers, for example for dropout."""
    context: Context | None = None
    """Ranks that share this rank's sequences; None if sequences are not split. Modules that mix tokens have a `context`, too."""
    loads: Loads | None = None
    """Counter of the tokens routed to each expert since the last optimizer step; None if the network has no experts."""
    expert_mesh: DeviceMesh | None = None
    """Mesh with dimensions `expert_shard` and `expert`; None unless experts are distributed over several devices."""
    document_end: int | None = None
    """Token that ends each document, if tokens attend only to their own document; None if they attend to all earlier tokens."""
    outliers: Any = None
    """The `Outliers` that finds the optimizer steps to skip; None unless `optimizer.skip_above` is set."""
    pipeline: Any = None
    """The `Pipeline` that trains this rank's stages; None unless the network is cut into stages."""
    observed: Mapping[str, Tensor] = MappingProxyType({})
    """Sums of metrics over the forward passes of the current step, 0-d, fp32, keyed by the metrics' names in events.jsonl."""
    loss: LossFunction
    """The loss function of the `loss` option, set before training. With targets, `forward` calls `loss` and not the projection:

        loss(output, hidden [batch, seq, dim] after the final norm, targets [batch, seq]) -> mean loss of the tokens, 0-d, fp32

    `output` is the projection module. The `chunked` loss calls the projection once per pass if the network's attribute
    `output` is a linear layer without bias. Otherwise, the `chunked` loss calls the projection once per chunk.
    """

    @abstractmethod
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits, [batch, seq, vocab], or the mean loss (0-d, fp32) if targets are given. Inputs: [batch, seq]."""

    def forward_part(self, blocks: range, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run the blocks of a pipeline stage. x: tokens for the first stage, otherwise the result of the previous stage. The last
        stage returns the result of `forward`. Other stages return the residual stream, [batch, seq, dim]."""
        raise NotImplementedError(f"{type(self).__name__} cannot be cut into pipeline stages")

    def stream_shape(self, batch: int, seq: int) -> tuple[int, ...]:
        """Return the shape of the residual stream between pipeline stages."""
        raise NotImplementedError(f"{type(self).__name__} cannot be cut into pipeline stages")

    @abstractmethod
    def block_names(self) -> list[str]:
        """Return the names of the repeated blocks, in order. By default, each block is a unit to wrap, compile or recompute."""

    def initial(self, name: str) -> Initial:
        """Return the distribution from which the initial values of a parameter are drawn."""
        raise NotImplementedError(f"{type(self).__name__} needs a method `initial(name)` for initial parameter values")

    def is_stack(self, name: str) -> bool:
        """Whether a parameter is a stack of matrices, [matrices, in, out], each initialised separately."""
        return False

    def matrices(self) -> set[str]:
        """Return the names of the weights of linear layers in blocks, and of stacks. Call it before modules are wrapped."""
        blocks = [(name, self.get_submodule(name)) for name in self.block_names()]
        linear = {
            f"{block}.{name}.weight"
            for block, module in blocks
            for name, layer in module.named_modules()
            if isinstance(layer, nn.Linear)
        }
        return linear | {name for name, _ in self.named_parameters() if self.is_stack(name)}

    def stays_fp32(self, name: str) -> bool:
        """Whether forward uses a parameter in fp32 under every `precision`. Layouts that cannot mix dtypes ignore this method."""
        return False

    def exchanged_elements(self, block: int) -> int:
        """Return the number of elements per token that one all-to-all sends to a block's experts; 0 without experts."""
        return 0

    def calls(self, name: str) -> int:
        """Return how often one forward pass with targets calls the module `name`: at least 1. "" is the network itself."""
        return max(1, self.multiplied_modules().count(self.get_submodule(name)))

    def multiplied_modules(self) -> list[nn.Module]:
        """Return the modules whose weights multiply tokens, in call order. A module that is called twice is listed twice."""
        return [module for module in self.children() if not isinstance(module, nn.Embedding)]

    def active_elements(self, name: str) -> int:
        """Count the elements of a parameter that multiply each token. In a stack of experts, count only the chosen experts."""
        return self.get_parameter(name).numel()

    def tensor_plan(self, sequence_parallel: bool, loss_parallel: bool) -> dict[str, ParallelStyle]:
        """Return the tensor-parallel styles of the modules to split, keyed by module name."""
        raise NotImplementedError(f"{type(self).__name__} has no tensor-parallel plan")

    def tie_weights(self) -> None:
        """Tie shared parameters again after `Module.to_empty` has untied them."""

    def reset_buffers(self) -> None:
        """Compute the values of all buffers. During the call, torch's default device is the network's device."""

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """Gather the positions of all ranks along `dim`. x: a tensor with this rank's positions."""
        return x if self.context is None else self.context.whole(x, dim)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """Return the part of x at this rank's positions along `dim`. x: a tensor with all positions."""
        return x if self.context is None else self.context.own(x, dim)

    def observe(self, key: str, value: Tensor) -> None:
        """Record a metric (0-d) of this forward pass. events.jsonl stores the mean over all passes of a step and all ranks."""
        if key in self.observed and torch.is_grad_enabled():
            with torch.no_grad():
                self.observed[key].add_(value)


def network_of(model: nn.Module) -> Network:
    """Return the Network inside a wrapped model, or the model itself if it is not wrapped."""
    return next(module for module in model.modules() if isinstance(module, Network))


class Loads:
    """Counter of this rank's tokens per expert in a step. Not a buffer, because DDP overwrites buffers with rank 0's values."""

    def __init__(self, bias: Tensor, bias_rate: float) -> None:
        self.bias, self.bias_rate = bias, bias_rate
        """bias: buffer, shaped like `tokens`, added to scores when choosing experts. bias_rate: change of the bias per step."""
        self.tokens = torch.zeros(bias.shape, dtype=torch.int64, device=bias.device)
        """Number of tokens routed to each expert so far in this step, [number of blocks with experts, number of experts]."""
        self.groups: tuple[dist.ProcessGroup, ...] = ()
        """Process groups over which token counts are summed, one group for each mesh dimension along which the data differs."""
        self.expert_ranks = 1
        """Number of expert-parallel ranks. Each rank holds an equal, contiguous range of experts."""

    @torch.no_grad()
    def balance(self, taken: Tensor) -> dict[str, Tensor]:
        """Sum token counts over ranks, update the experts' biases, and reset the counts. Return global metrics (0-d, fp32).

        An expert's load is its token count. Per block, bias += rate x sign(mean load - load) (Wang et al. 2024, arXiv 2408.15664,
        algorithm 1). taken: whether the optimizer step is taken (0-d, bool); if it is not, biases stay unchanged. A block's
        violation is (largest load / mean load) - 1. The host does not wait for the device.
        """
        for group in self.groups:
            dist.all_reduce(self.tokens, group=group)
        total = self.tokens.sum(-1, keepdim=True)
        if self.bias_rate:
            # (mean load - load) x number of experts is an integer, so equal loads compare equal.
            below = torch.sign(total - self.tokens * self.tokens.shape[-1])
            self.bias += torch.where(taken, self.bias_rate * below, 0.0)
        violations = _violations(self.tokens)
        figures = {
            "experts/max_violation": violations.amax(),
            "experts/mean_violation": violations.mean(),
            "experts/unused": (self.tokens == 0).sum().float(),
        }
        if self.expert_ranks > 1:
            by_rank = self.tokens.view(len(self.tokens), self.expert_ranks, -1).sum(-1)  # [blocks, ranks]
            figures["experts/rank_violation"] = _violations(by_rank).amax()
        self.tokens.zero_()
        return figures


def _violations(tokens: Tensor) -> Tensor:
    """Return each block's violation (defined in `Loads.balance`), [blocks], fp32. tokens: [blocks, experts or ranks]."""
    share = tokens.float() / tokens.sum(-1, keepdim=True)
    return share.amax(-1) * tokens.shape[-1] - 1


CUTOFF = 3.0
TABLE_SIZE = 1024
"""Number of truncated-normal values in the table. `TruncatedNormal` replaces values beyond `CUTOFF` by values from the table."""


class Initial(ABC):
    """A distribution of initial values."""

    @abstractmethod
    def draw(self, shape: torch.Size, generator: Generator, device: torch.device) -> Tensor:
        """Draw the values of a parameter in fp32 on `device`. The generator is on `device`, or on the CPU if `device` is meta."""


@dataclass(frozen=True)
class Filled(Initial):
    """A distribution that gives every element the same value."""

    value: float

    def draw(self, shape: torch.Size, generator: Generator, device: torch.device) -> Tensor:
        return torch.full(shape, self.value, device=device)


@dataclass(frozen=True)
class TruncatedNormal(Initial):
    """A normal distribution with mean 0, truncated at `CUTOFF` standard deviations."""

    std: float

    def draw(self, shape: torch.Size, generator: Generator, device: torch.device) -> Tensor:
        value = torch.empty(shape, device=device).normal_(generator=generator)
        # Values beyond the cutoff (0.3%) are replaced from a small table. On a CPU, this is several times faster than
        # inverting the error function for every value. The table needs no data-dependent control flow.
        table = nn.init.trunc_normal_(torch.empty(TABLE_SIZE, device=device), a=-CUTOFF, b=CUTOFF, generator=generator)
        rows = table[: shape[-1]] if shape[-1] <= TABLE_SIZE else table.repeat(-(-shape[-1] // TABLE_SIZE))[: shape[-1]]
        return torch.where(value.abs() > CUTOFF, rows, value).mul_(self.std)


@dataclass(frozen=True)
class LogOfUniform(Initial):
    """The logarithm of a variable that is uniform between two positive bounds."""

    low: float
    high: float

    def draw(self, shape: torch.Size, generator: Generator, device: torch.device) -> Tensor:
        return torch.empty(shape, device=device).uniform_(self.low, self.high, generator=generator).log_()


@dataclass(frozen=True)
class InverseSoftplus(Initial):
    """Values whose softplus is log-uniform between two positive bounds."""

    low: float
    high: float

    def draw(self, shape: torch.Size, generator: Generator, device: torch.device) -> Tensor:
        bounds = math.log(self.low), math.log(self.high)
        value = torch.empty(shape, device=device).uniform_(*bounds, generator=generator).exp_()
        return value + torch.log(-torch.expm1(-value))  # softplus(this) = log(1 + exp(this)) = value


ONES = Filled(1.0)
ZEROS = Filled(0.0)
