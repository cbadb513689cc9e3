"""The memory ledger against sizes known by hand, and against the allocator's own statistics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, UntypedStorage, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from meshrunner.runner.ledger.allocations import Allocation
from meshrunner.runner.ledger.memory_ledger import MemoryLedger
from meshrunner.runner.profiler.memory import CATEGORIES

KIB = 256
"""fp32 elements in a KiB."""


def kib(ledger: MemoryLedger) -> dict[str, float]:
    """Return the peak in KiB by category, without empty categories."""
    peak = ledger.peak
    assert sum(peak.by_category.values()) == peak.total and set(peak.by_category) == set(CATEGORIES)
    return {name: size / 1024 for name, size in peak.by_category.items() if size}


def test_peak_follows_allocations_and_releases() -> None:
    with torch.no_grad(), MemoryLedger() as ledger:
        a = torch.zeros(4 * KIB)
        b = a + 1
        view = b[KIB:].view(3, KIB)  # shares b's storage
        del a, b
        c = torch.zeros(3 * KIB)  # while view holds all of b
        del view, c
        torch.zeros(6 * KIB)
    assert kib(ledger) == {"temporary": 8}, "a and b; then b and c are 7"


def test_memory_may_be_freed_while_the_peak_is_computed() -> None:
    held: list[Tensor] = []

    class FreedMeanwhile(list[Allocation]):
        def __iter__(self) -> Iterator[Allocation]:
            held.clear()  # as a thread of gloo does
            return super().__iter__()

    with torch.no_grad(), MemoryLedger() as ledger:
        held.append(torch.zeros(4 * KIB))
        ledger.allocations = FreedMeanwhile(ledger.allocations)
    assert kib(ledger) == {"temporary": 4} and not held


def test_older_memory_counts_from_its_first_use_and_parameters_from_the_beginning() -> None:
    old, weight = torch.zeros(2 * KIB), nn.Parameter(torch.zeros(5 * KIB))
    with torch.no_grad(), MemoryLedger() as ledger:
        torch.zeros(8 * KIB)
        torch.sum(old)
        torch.sum(weight)
    assert kib(ledger) == {"temporary": 8, "parameters": 5}
    with MemoryLedger() as ledger:
        pass
    assert ledger.peak.total == 0


def test_resized_storage_is_a_new_allocation() -> None:
    """FSDP frees and allocates parameters by resizing."""
    before = UntypedStorage.resize_
    with torch.no_grad(), MemoryLedger() as ledger:
        a = torch.zeros(4 * KIB)
        a.untyped_storage().resize_(0)
        b = torch.zeros(3 * KIB)
        a.untyped_storage().resize_(6 * 1024)
    assert kib(ledger) == {"temporary": 3, "unsharded": 6} and UntypedStorage.resize_ is before
    del b


def test_categories_follow_the_use_of_memory() -> None:
    """A linear layer without bias has 1 KiB of weight. A large tensor puts the peak where the category is alive."""
    model = nn.Linear(16, 16, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.ones(64, 16)  # 4 KiB
    with MemoryLedger() as ledger:
        hidden = model(x)
        with torch.no_grad():
            torch.zeros(100 * KIB)
    assert kib(ledger) == {"parameters": 1, "activations": 4, "temporary": 104}
    with MemoryLedger() as ledger:
        model(x).sum().backward()
        del hidden
        with torch.no_grad():
            torch.zeros(100 * KIB)
        optimizer.step()
    assert kib(ledger) == {"parameters": 1, "gradients": 1, "temporary": 104}
    with ledger:  # continues where it stopped
        optimizer.zero_grad()
        with torch.no_grad():
            torch.zeros(200 * KIB)
    assert kib(ledger) == {"parameters": 1, "optimizer": 1, "temporary": 204}


class Net(nn.Module):
    """Blocks whose inner activations are 4 times as wide as their outputs."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 32)) for _ in range(4))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x.square().mean()


def a_step(recompute: bool) -> tuple[MemoryLedger, int]:
    """Return the ledger of a step, and the allocator's peak in the same step."""
    torch.manual_seed(0)
    model, x = Net(recompute), torch.randn(1024, 32)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # creates the optimizer's state
    with MemoryLedger() as ledger:
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = sum(each.nbytes for each in [x, *model.parameters()])
    total += sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return ledger, peak


@pytest.mark.parametrize("recompute", [False, True])
def test_peak_agrees_with_the_allocator(recompute: bool) -> None:
    ledger, allocated = a_step(recompute)
    assert ledger.peak.total == pytest.approx(allocated, rel=0.02)


def test_recomputation_saves_activations() -> None:
    """
    Each block keeps 2 x 512 KiB inside, and its input of 128 KiB; the first input is the batch. At the peak, in backward of the
    last block, its output is freed. With recomputation only one block at a time holds its inner activations.
    """
    (kept, _), (recomputed, _) = a_step(False), a_step(True)
    assert kib(kept)["activations"] == pytest.approx(4 * 2 * 512 + 3 * 128, rel=0.001)
    assert kib(recomputed)["activations"] == pytest.approx(2 * 512 + 3 * 128, rel=0.001)
    assert kib(kept)["parameters"] == kib(recomputed)["parameters"] == 4 * (2 * 32 * 128 + 160) / KIB
