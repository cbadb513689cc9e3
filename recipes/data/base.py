"""The base class of the `data` options, their endless sequences of tokens, and the option `random`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from meshrunner.recipes.option import Option

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class DataSpec:
    """A run's requirements of its data."""

    vocab_size: int
    """Vocabulary size of the model: every token is smaller."""
    seq_len: int
    """Input tokens per sequence; a sequence has one more, the last target."""
    seed: int
    """Seed of the order of sequences, and of random tokens."""


class Sequences(Protocol):
    """Endless sequences. An index gives the same sequence in every process, layout and run."""

    def rows(self, first: int, count: int) -> NDArray[np.int64]:
        """The `count` sequences from global index `first` on: [count, seq_len + 1].

        Waits for data that is still being produced; raises RuntimeError if its producer is dead.
        """

    def describe(self) -> dict[str, Any]:
        """
        The run record's entry about the data: JSON values. Keys that two runs are compared by, where both have them:

        `tokenizer_hash`; `corpus_hash` of the text read so far, which is all of it where `complete`; until then
        `beginning_hash`, of as many tokens as every run with this configuration finds when it begins.
        """


def different_data(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What differs between two records of `Sequences.describe`: `tokenizer` or `text`; empty if nothing is known to."""
    if _differs(one, other, "tokenizer_hash"):
        return "tokenizer"
    whole = one.get("complete") is True and other.get("complete") is True
    return "text" if _differs(one, other, "corpus_hash" if whole else "beginning_hash") else ""


def _differs(one: Mapping[str, Any], other: Mapping[str, Any], key: str) -> bool:
    return key in one and key in other and one[key] != other[key]


class Data(Option):
    """Base class of the data options."""

    kinds: ClassVar[dict[str, str]] = {
        "stdlib": "meshrunner.recipes.data.stdlib:Stdlib",
        "jsonl": "meshrunner.recipes.data.local:Jsonl",
        "parquet": "meshrunner.recipes.data.local:Parquet",
        "hf": "meshrunner.recipes.data.hf:HuggingFace",
        "random": "meshrunner.recipes.data.base:Random",
    }

    @property
    def local_path(self) -> str | None:
        """The file, folder or glob pattern that nodes have to read; None for data from elsewhere."""
        return None

    def prepare(self, spec: DataSpec) -> bool:
        """
        Check, in the launching process, that the data is usable; slow work is left to `produce`.

        Returns:
            Whether a process has to run `produce`.

        Raises:
            ConfigError: the data is missing, unusable, or does not fit the model.
        """
        raise NotImplementedError

    def produce(self, spec: DataSpec) -> None:
        """Read, tokenise and pack the data to its end, in a separate process. Waits while another process does so.

        A failure is recorded for `started` and the readers, then raised.
        """
        raise NotImplementedError

    def started(self, spec: DataSpec) -> bool:
        """Whether training can begin while `produce` continues; raises ConfigError if `produce` recorded a failure."""
        raise NotImplementedError

    def open(self, spec: DataSpec) -> Sequences:
        """Open the sequences. Every worker calls it, after `prepare`."""
        raise NotImplementedError


class Random(Data):
    """Uniformly random tokens, for speed runs. The loss stays at log(vocab_size)."""

    def prepare(self, spec: DataSpec) -> bool:
        return False

    def open(self, spec: DataSpec) -> Sequences:
        return RandomSequences(spec)


class RandomSequences:
    """Sequences of random tokens; each has its own random stream, keyed by (seed, index)."""

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
