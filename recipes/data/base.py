"""The base class of the `data` options, the interface of their token sequences, and the option `random`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from meshrunner.recipes.option import Option

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class DataSpec:
    """The requirements of a run on its data."""

    vocab_size: int
    """Vocabulary size of the model. Every token is smaller."""
    seq_len: int
    """Input tokens per sequence. A sequence has one more token, the last target."""
    seed: int
    """Seed of the order of sequences, and of random tokens."""


class Sequences(Protocol):
    """Endless sequences of tokens. An index gives the same sequence in every process, layout and run."""

    def rows(self, first: int, count: int) -> NDArray[np.int64]:
        """Return `count` sequences, [count, seq_len + 1], or wait for them. Raises RuntimeError if their producer is dead."""

    def describe(self) -> dict[str, Any]:
        """
        Return facts for the run record, as JSON values. `different_data` compares two runs by:

        `tokenizer_hash`; `corpus_hash` of the text read so far, if that is `complete`; else `beginning_hash` of the tokens that
        are available whenever a run with this configuration begins.
        """


def different_data(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the known difference between two records of `Sequences.describe`: `tokenizer`, `text` or ""."""
    complete = one.get("complete") is True and other.get("complete") is True
    for key, name in (("tokenizer_hash", "tokenizer"), ("corpus_hash" if complete else "beginning_hash", "text")):
        if key in one and key in other and one[key] != other[key]:
            return name
    return ""


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
        """File, directory or glob pattern that every node must be able to read; None for other data."""
        return None

    def prepare(self, spec: DataSpec) -> bool:
        """Return whether a process must run `produce`. Raises ConfigError if the data is unusable or does not fit the model."""
        return False

    def produce(self, spec: DataSpec) -> None:
        """Read, tokenise and pack all data. A failure is recorded for `started` and the readers, then raised."""

    def started(self, spec: DataSpec) -> bool:
        """Whether training can begin while `produce` continues. Raises ConfigError if `produce` recorded a failure."""
        return True

    @abstractmethod
    def open(self, spec: DataSpec) -> Sequences:
        """Open the sequences. Every worker calls this, after `prepare`."""


class Random(Data):
    """Uniformly random tokens for speed runs. The loss stays at log(vocab_size)."""

    def open(self, spec: DataSpec) -> Sequences:
        return RandomSequences(spec)


class RandomSequences:
    """Random tokens. Each sequence has its own random stream, keyed by (seed, index)."""

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
