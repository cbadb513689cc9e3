"""The loader: every layout gets the same global batch, one step ahead, and nothing hangs."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from meshrunner.recipes.data.base import DataSpec, RandomSequences
from meshrunner.recipes.data.loader import Loader

SPEC = DataSpec(1000, 8, 0)
CPU = torch.device("cpu")


class Recorded(RandomSequences):
    """Random sequences that can be slow or fail."""

    def __init__(self) -> None:
        super().__init__(SPEC)
        self.asked: list[int] = []
        self.fail_at = 1 << 60
        self.go = threading.Event()
        self.go.set()

    def rows(self, first: int, count: int) -> NDArray[np.int64]:
        self.asked.append(first)
        self.go.wait(20)
        if first >= self.fail_at:
            raise RuntimeError("the disk is gone")
        return super().rows(first, count)


def loader(sequences: Any, **changes: Any) -> Loader:
    arguments = {"global_batch": 24, "micro_batch": 2, "rank": 0, "ranks": 1, "device": CPU, "own": lambda x, _: x}
    return Loader(sequences, **arguments | changes)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_slices_make_up_the_global_batch(ranks: int, micro_batch: int) -> None:
    loaders = [loader(Recorded(), rank=rank, ranks=ranks, micro_batch=micro_batch) for rank in range(ranks)]
    for step in (1, 2, 3):
        batches = [batch for one in loaders for batch in one.next()]
        assert len(batches) == 24 // micro_batch
        assert all(part.shape == (micro_batch, 8) and part.dtype == torch.int64 for batch in batches for part in batch)
        assert all(part.is_contiguous() for batch in batches for part in batch)
        rows = torch.from_numpy(RandomSequences(SPEC).rows((step - 1) * 24, 24))
        assert torch.equal(torch.cat([tokens for tokens, _ in batches]), rows[:, :-1])
        assert torch.equal(torch.cat([targets for _, targets in batches]), rows[:, 1:])
    for one in loaders:
        one.close()


def test_a_rank_gets_its_own_tokens_and_their_targets() -> None:
    positions = torch.tensor([0, 1, 6, 7])
    one = loader(Recorded(), own=lambda x, dim: x.index_select(dim, positions))
    rows = torch.from_numpy(RandomSequences(SPEC).rows(0, 24))
    batches = one.next()
    assert torch.equal(torch.cat([tokens for tokens, _ in batches]), rows[:, positions])
    assert torch.equal(torch.cat([targets for _, targets in batches]), rows[:, positions + 1])
    one.close()


def test_a_resumed_run_goes_on_with_its_step() -> None:
    first, resumed = loader(Recorded()), loader(Recorded(), first=2 * 24)
    for _ in range(2):
        first.next()
    assert torch.equal(first.next()[0][0], resumed.next()[0][0])
    first.close()
    resumed.close()


def test_a_run_with_another_batch_continues_in_the_data() -> None:
    """Two steps consumed 10 sequences, so the third begins with index 10."""
    sequences = Recorded()
    resumed = loader(sequences, first=10)
    resumed.next()
    assert sequences.asked[0] == 10
    resumed.close()


def test_one_step_is_made_ahead_and_no_more_than_two() -> None:
    sequences = Recorded()
    one = loader(sequences)
    one.next()
    deadline = time.monotonic() + 10
    while len(sequences.asked) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert sequences.asked == [0, 24, 48]  # step 2 is ready, step 3 waits for its place
    one.close()


def test_an_exception_comes_out_of_next() -> None:
    sequences = Recorded()
    sequences.fail_at = 24
    one = loader(sequences)
    one.next()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the disk is gone"):
            one.next()
    one.close()


def test_close_ends_the_thread_while_nobody_takes_batches() -> None:
    one = loader(Recorded())
    one.next()
    one.close()
    assert not one._thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        one.next()


def test_close_does_not_wait_for_data_that_never_comes() -> None:
    sequences = Recorded()
    sequences.go.clear()
    one = loader(sequences)
    one.close()  # returns, though the thread is blocked
    assert one._thread.is_alive() and one._thread.daemon
    sequences.go.set()
    one._thread.join(60)
    assert not one._thread.is_alive()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_arrive_on_the_gpu() -> None:
    one = loader(Recorded(), device=torch.device("cuda", 0))
    tokens, targets = one.next()[0]
    rows = torch.from_numpy(RandomSequences(SPEC).rows(0, 2))
    assert torch.equal(tokens.cpu(), rows[:, :-1]) and torch.equal(targets.cpu(), rows[:, 1:])
    assert tokens.device.type == "cuda"
    one.close()
