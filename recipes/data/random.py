"""Tokens without text, for pure speed runs: nothing to read, nothing to prepare, any vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshrunner.recipes.data.base import Data, DataSpec, Sequences

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Random(Data):
    """Uniformly distributed tokens. The loss stays at log(vocab_size): there is nothing to learn."""

    def prepare(self, spec: DataSpec) -> bool:
        return False

    def open(self, spec: DataSpec) -> Sequences:
        return RandomSequences(spec)


class RandomSequences:
    """Each sequence has a random stream of its own, keyed by (seed, index)."""

    def __init__(self, spec: DataSpec) -> None:
        self.spec = spec

    def rows(self, first: int, count: int) -> NDArray[np.int64]:
        import numpy as np

        rows = np.empty((count, self.spec.seq_len + 1), dtype=np.int64)
        for row, index in zip(rows, range(first, first + count), strict=True):
            stream = np.random.Philox(key=[self.spec.seed % 2**64, index])
            row[:] = np.random.Generator(stream).integers(self.spec.vocab_size, size=len(row))
        return rows

    def describe(self) -> dict[str, Any]:
        return {"kind": "random", "vocab_size": self.spec.vocab_size, "seed": self.spec.seed}
