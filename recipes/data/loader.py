"""Micro batches of one data-parallel rank, prefetched during the previous step."""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, Queue

import torch
from torch import Tensor

from meshrunner.recipes.data.base import Sequences

Batches = list[tuple[Tensor, Tensor]]
Part = Callable[[Tensor, int], Tensor]
"""(tensor with whole sequences, number of its token dimension) -> the part of the tensor that this rank holds."""


class Loader:
    """Loader of one data-parallel rank. A thread reads the sequences of the next step during the current step. Steps train on
    consecutive global batches, the first of which begins with sequence `first`. Each global batch is cut into `ranks` equal
    slices. Rank r splits slice r into consecutive micro batches."""

    def __init__(
        self,
        sequences: Sequences,
        *,
        global_batch: int,
        micro_batch: int,
        rank: int,
        ranks: int,
        device: torch.device,
        own: Part,
        first: int = 0,
    ) -> None:
        assert 0 <= rank < ranks and global_batch % (ranks * micro_batch) == 0, (global_batch, micro_batch, rank, ranks)
        self._sequences = sequences
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._rows = global_batch // ranks
        self._device, self._own = device, own
        self._ready: Queue[Tensor | Exception] = Queue(maxsize=1)
        self._closed = False
        begin = first + rank * self._rows
        self._thread = threading.Thread(target=self._prefetch, args=(begin,), daemon=True, name="loader")
        self._thread.start()

    def next(self) -> Batches:
        """Return the next step's (tokens, targets) pairs, int64 [micro_batch, seq_len]. Re-raises the reading thread's error."""
        if self._closed:
            raise RuntimeError("the loader is closed")
        ready = self._ready.get()
        if isinstance(ready, Exception):
            self._ready.put(ready)  # keep the error for later calls, because the thread has ended
            raise ready
        rows = ready.to(self._device, non_blocking=True)  # on the step's stream; asynchronous if `ready` is pinned
        return micro_batches(rows, self._micro_batch, self._own)

    def close(self) -> None:
        """Stop the thread and wait at most 1 s. A thread that runs longer ends with the process, because it is a daemon."""
        self._closed = True
        with suppress(Empty):
            self._ready.get_nowait()  # make room in the queue, because the thread may be waiting for room
        self._thread.join(timeout=1.0)

    def _prefetch(self, first: int) -> None:
        try:
            while not self._closed:
                self._ready.put(self._read(first))
                first += self._global_batch
        except Exception as error:
            self._ready.put(error)

    def _read(self, first: int) -> Tensor:
        rows = torch.from_numpy(self._sequences.rows(first, self._rows))
        if self._device.type != "cuda":
            return rows
        torch.cuda.set_device(self._device)  # needed in every thread; otherwise all ranks open contexts on GPU 0
        return rows.pin_memory()


def micro_batches(rows: Tensor, micro_batch: int, own: Part) -> Batches:
    """Split sequences, [rows, seq_len + 1], into micro batches: pairs (tokens, targets), each [micro_batch, seq_len]. With
    context parallelism, `own` returns this rank's part of the tokens, so the results have fewer columns."""
    parts = rows.view(-1, micro_batch, rows.shape[1])
    return [(own(part[:, :-1], 1).contiguous(), own(part[:, 1:], 1).contiguous()) for part in parts]
