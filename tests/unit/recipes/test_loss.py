"""Chunked cross entropy gives the same loss and gradients as the plain one, without holding all logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshrunner.recipes.loss.base import ChunkedLoss, Loss, PlainLoss, cross_entropy
from meshrunner.recipes.model.network import ONES, Initial, Network
from tests.memory import allocated

VOCABULARY, DIM, BATCH, SEQ = 128_000, 16, 2, 128


class Head(Network):
    """A network that is only an output projection, under a given name."""

    def __init__(self, vocabulary: int, dim: int, name: str = "output") -> None:
        super().__init__()
        self.projection = nn.Linear(dim, vocabulary, bias=False)
        setattr(self, name, self.projection)

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        return self.projection(hidden) if targets is None else self.loss(self.projection, hidden, targets)

    def block_names(self) -> list[str]:
        return []

    def initial(self, name: str) -> Initial:
        return ONES


def gradients(
    loss: Loss, *, dtype: torch.dtype = torch.float32, vocabulary: int = 1000, dim: int = DIM, name: str = "output"
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and the gradients of hidden states and projection. Values are rounded to bf16 for every dtype."""
    torch.manual_seed(0)
    head = Head(vocabulary, dim, name).bfloat16().to(dtype)
    hidden = torch.randn(BATCH, SEQ, dim).bfloat16().to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (BATCH, SEQ))
    head.loss = loss.install(getattr(head, "output", None), cross_entropy)
    value = head(hidden, targets)
    value.backward()
    assert head(hidden).shape == (BATCH, SEQ, vocabulary)
    assert hidden.grad is not None and head.projection.weight.grad is not None
    return value.detach(), [hidden.grad, head.projection.weight.grad]


@pytest.mark.parametrize("name", ["output", "head"])
@pytest.mark.parametrize("tokens", [1, 50, 64, 10_000])
def test_chunks_give_the_same_loss_and_gradients(tokens: int, name: str) -> None:
    expected, plain = gradients(PlainLoss(kind="plain"))
    found, chunked = gradients(ChunkedLoss(kind="chunked", tokens=tokens), name=name)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    for a, b in zip(chunked, plain, strict=True):
        assert (a - b).norm() / b.norm() < 1e-6


def test_projection_is_called_once() -> None:
    """Each call makes FSDP gather the weight and reduce its gradient."""
    head, calls = Head(100, DIM), []
    head.loss = ChunkedLoss(kind="chunked", tokens=8).install(head.projection, cross_entropy)
    head.projection.register_forward_hook(lambda *_: calls.append(1))
    head(torch.randn(BATCH, SEQ, DIM, requires_grad=True), torch.zeros(BATCH, SEQ, dtype=torch.int64)).backward()
    assert calls == [1]


def test_gradient_of_a_bf16_weight_is_accumulated_in_fp32() -> None:
    """128 chunks are as close to fp32 as one chunk is. Accumulated in bf16 they are not."""
    _, (_, exact) = gradients(PlainLoss(kind="plain"))

    def error(tokens: int, name: str = "output") -> float:
        _, (_, found) = gradients(ChunkedLoss(kind="chunked", tokens=tokens), dtype=torch.bfloat16, name=name)
        assert found.dtype == torch.bfloat16
        return ((found.float() - exact).norm() / exact.norm()).item()

    whole, many, in_bf16 = error(10_000), error(2), error(2, "head")
    assert many < 1.2 * whole < 0.6 * in_bf16, (whole, many, in_bf16)


@pytest.mark.slow
def test_only_one_fp32_gradient_is_in_memory() -> None:
    """The peak is the gradient, the weight and the chunk's contribution, all fp32, because a CPU casts what it adds."""
    vocabulary, dim = 4000, 512
    peak = allocated(lambda: gradients(ChunkedLoss(kind="chunked", tokens=2), vocabulary=vocabulary, dim=dim)).peak
    assert peak < 3.3 * 4 * vocabulary * dim


def test_frozen_projection_gets_no_gradient() -> None:
    head = Head(100, DIM)
    head.projection.weight.requires_grad_(False)
    head.loss = ChunkedLoss(kind="chunked", tokens=8).install(head.projection, cross_entropy)
    hidden = torch.randn(BATCH, SEQ, DIM, requires_grad=True)
    head(hidden, torch.zeros(BATCH, SEQ, dtype=torch.int64)).backward()
    assert head.projection.weight.grad is None and hidden.grad is not None and hidden.grad.norm() > 0


def test_softmax_of_bf16_logits_is_fp32() -> None:
    for loss in (PlainLoss(kind="plain"), ChunkedLoss(kind="chunked", tokens=64)):
        value, _ = gradients(loss, dtype=torch.bfloat16)
        assert value.dtype == torch.float32
        assert value.item() == pytest.approx(gradients(loss)[0].item(), rel=1e-2)


@pytest.mark.parametrize("name", ["output", "head"])
@pytest.mark.parametrize("kind", ["plain", "chunked"])
def test_z_loss_changes_the_gradient_but_not_the_value(kind: str, name: str) -> None:
    """One target is ignored, as targets behind the end of multi-token prediction are."""
    z, keys = 0.3, {"chunked": {"tokens": 50}}.get(kind, {})
    hidden, targets = torch.randn(BATCH, SEQ, DIM), torch.randint(1000, (BATCH, SEQ))
    targets[1, 5] = -100
    found = []
    for loss in (None, Loss.resolve(kind).model_validate({"kind": kind, "z": z, **keys})):
        torch.manual_seed(0)
        head, x = Head(1000, DIM, name), hidden.clone().requires_grad_()
        if loss is None:
            logits = head(x)
            value = cross_entropy(logits, targets) / targets.numel()
            square = logits.logsumexp(-1).square() * (targets != -100)
            (value + z * square.sum() / targets.numel()).backward()
        else:
            assert isinstance(loss, Loss)
            head.loss = loss.install(getattr(head, "output", None), loss.summed())
            value = head(x, targets)
            value.backward()
        assert x.grad is not None and head.projection.weight.grad is not None
        found.append((value.detach(), x.grad, head.projection.weight.grad))
    for expected, each in zip(*found, strict=True):
        assert (each - expected).norm() / expected.norm() < 1e-6


@pytest.mark.slow
def test_chunked_loss_never_holds_all_logits() -> None:
    def peak(loss: Loss) -> int:
        return allocated(lambda: gradients(loss, vocabulary=VOCABULARY)).peak

    logits = 4 * BATCH * SEQ * VOCABULARY
    saved = peak(PlainLoss(kind="plain")) - peak(ChunkedLoss(kind="chunked", tokens=32))
    assert saved > logits
