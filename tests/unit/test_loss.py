"""The chunked cross entropy against the plain one: the same gradients, without the logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshrunner.recipes.loss import Chunked, Loss, Plain, cross_entropy
from tests.memory import allocated

VOCABULARY, DIM, BATCH, SEQ = 128_000, 16, 2, 128


def gradients(loss: Loss, *, dtype: torch.dtype = torch.float32, vocabulary: int = 1000) -> tuple[Tensor, list[Tensor]]:
    """The loss and the gradients of hidden states and projection."""
    torch.manual_seed(0)
    output = nn.Linear(DIM, vocabulary, bias=False, dtype=dtype)
    hidden = torch.randn(BATCH, SEQ, DIM, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocabulary, (BATCH, SEQ))
    value = loss.function(cross_entropy)(output, hidden, targets)
    value.backward()
    assert hidden.grad is not None and output.weight.grad is not None
    return value.detach(), [hidden.grad, output.weight.grad]


@pytest.mark.parametrize("tokens", [1, 50, 64, 10_000])
def test_chunks_change_nothing(tokens: int) -> None:
    expected, plain = gradients(Plain(kind="plain"))
    found, chunked = gradients(Chunked(kind="chunked", tokens=tokens))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    for a, b in zip(chunked, plain, strict=True):
        assert (a - b).norm() / b.norm() < 1e-6


def test_the_softmax_of_bf16_logits_is_fp32() -> None:
    for loss in (Plain(kind="plain"), Chunked(kind="chunked", tokens=64)):
        value, _ = gradients(loss, dtype=torch.bfloat16)
        assert value.dtype == torch.float32
        assert value.item() == pytest.approx(gradients(loss)[0].item(), rel=1e-2)


def test_the_logits_are_never_whole_in_memory() -> None:
    def peak(loss: Loss) -> int:
        return allocated(lambda: gradients(loss, vocabulary=VOCABULARY)).peak

    logits = 4 * BATCH * SEQ * VOCABULARY
    saved = peak(Plain(kind="plain")) - peak(Chunked(kind="chunked", tokens=32))
    assert saved > logits
