"""Random tokens that form short documents, as an option for tests of attention within documents."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshrunner.recipes.data.base import DataSpec, Random, RandomSequences, Sequences

END = 7


class RandomDocuments(Random):
    """Random tokens. One token in eleven ends a document."""

    @property
    def separates_documents(self) -> bool:
        return True

    def document_end(self, spec: DataSpec) -> int:
        return END

    def open(self, spec: DataSpec) -> Sequences:
        return ShortDocuments(spec)


class ShortDocuments(RandomSequences):
    """Random tokens in which every multiple of 11 is replaced by END."""

    def rows(self, first: int, count: int) -> NDArray[np.int64]:
        rows = super().rows(first, count)
        return np.where(rows % 11 == 0, END, rows)
