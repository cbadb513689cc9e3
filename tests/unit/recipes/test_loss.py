"""The chunked cross entropy against the plain one: the same gradients, without the logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshrunner.recipes.loss.base import ChunkedLoss, Loss, PlainLoss, cross_entropy
from meshrunner.recipes.model.distributions import ONES, Initial
from meshrunner.recipes.model.network import Network
from tests.memory import allocated

VOCABULARY, DIM, BATCH, SEQ = 128_000, 16, 2, 128


class Head(Network):
    """The end of a network: its projection, under a name or another."""

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
    """The loss and the gradients of hidden states and projection. The values are those of bf16, whatever the dtype is."""
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
def test_chunks_change_nothing(tokens: int, name: str) -> None:
    expected, plain = gradients(PlainLoss(kind="plain"))
    found, chunked = gradients(ChunkedLoss(kind="chunked", tokens=tokens), name=name)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    for a, b in zip(chunked, plain, strict=True):
        assert (a - b).norm() / b.norm() < 1e-6


def test_the_projection_is_called_once() -> None:
    """FSDP gathers its weight for every call, and reduces its gradient."""
    head, calls = Head(100, DIM), []
    head.loss = ChunkedLoss(kind="chunked", tokens=8).install(head.projection, cross_entropy)
    head.projection.register_forward_hook(lambda *_: calls.append(1))
    head(torch.randn(BATCH, SEQ, DIM, requires_grad=True), torch.zeros(BATCH, SEQ, dtype=torch.int64)).backward()
    assert calls == [1]


def test_the_gradient_of_a_bf16_weight_is_added_up_in_fp32() -> None:
    """128 chunks are as near to fp32 as one is; added up in bf16 they are not."""
    _, (_, exact) = gradients(PlainLoss(kind="plain"))

    def error(tokens: int, name: str = "output") -> float:
        _, (_, found) = gradients(ChunkedLoss(kind="chunked", tokens=tokens), dtype=torch.bfloat16, name=name)
        assert found.dtype == torch.bfloat16
        return ((found.float() - exact).norm() / exact.norm()).item()

    whole, many, in_bf16 = error(10_000), error(2), error(2, "head")
    assert many < 1.2 * whole < 0.6 * in_bf16, (whole, many, in_bf16)


def test_one_fp32_gradient_is_in_memory() -> None:
    """With it the weight and the product that is added to it; all are fp32 here, as a CPU casts what it adds."""
    vocabulary, dim = 4000, 512
    peak = allocated(lambda: gradients(ChunkedLoss(kind="chunked", tokens=2), vocabulary=vocabulary, dim=dim)).peak
    assert peak < 3.3 * 4 * vocabulary * dim


def test_what_is_frozen_gets_no_gradient() -> None:
    head = Head(100, DIM)
    head.projection.weight.requires_grad_(False)
    head.loss = ChunkedLoss(kind="chunked", tokens=8).install(head.projection, cross_entropy)
    hidden = torch.randn(BATCH, SEQ, DIM, requires_grad=True)
    head(hidden, torch.zeros(BATCH, SEQ, dtype=torch.int64)).backward()
    assert head.projection.weight.grad is None and hidden.grad is not None and hidden.grad.norm() > 0


def test_the_softmax_of_bf16_logits_is_fp32() -> None:
    for loss in (PlainLoss(kind="plain"), ChunkedLoss(kind="chunked", tokens=64)):
        value, _ = gradients(loss, dtype=torch.bfloat16)
        assert value.dtype == torch.float32
        assert value.item() == pytest.approx(gradients(loss)[0].item(), rel=1e-2)


def test_the_logits_are_never_whole_in_memory() -> None:
    def peak(loss: Loss) -> int:
        return allocated(lambda: gradients(loss, vocabulary=VOCABULARY)).peak

    logits = 4 * BATCH * SEQ * VOCABULARY
    saved = peak(PlainLoss(kind="plain")) - peak(ChunkedLoss(kind="chunked", tokens=32))
    assert saved > logits
