"""The `data` group: what a run trains on, as endless sequences of tokens that are addressed by a global index; `random`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from meshrunner.recipes.option import Option

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class DataSpec:
    """What a run requires of its data."""

    vocab_size: int
    """The model's: every token is smaller."""
    seq_len: int
    """Tokens the model sees per sequence; a sequence has one more, the last target."""
    seed: int
    """Decides the order of the sequences (and random tokens), nothing else."""


class Sequences(Protocol):
    """Endless sequences. The same index gives the same sequence in every process, layout and run."""

    def rows(self, first: int, count: int) -> NDArray[np.int64]:
        """The sequences with the global indices `first`, `first + 1`, ...: [count, seq_len + 1].

        Waits where the data is still being read; raises RuntimeError when it will never come.
        """

    def describe(self) -> dict[str, Any]:
        """What the record of a run says about its data: hashes of corpus and tokenizer, number of tokens."""


class Data(Option):
    """Base class of the data options."""

    kinds: ClassVar[dict[str, str]] = {
        "stdlib": "meshrunner.recipes.data.stdlib:Stdlib",
        "jsonl": "meshrunner.recipes.data.local:Jsonl",
        "parquet": "meshrunner.recipes.data.local:Parquet",
        "hf": "meshrunner.recipes.data.hf:HuggingFace",
        "random": "meshrunner.recipes.data.base:Random",
    }

    def prepare(self, spec: DataSpec) -> bool:
        """
        Make sure, in the launching process, that there will be data; what takes long is left to `produce`.

        Returns:
            Whether a process that runs `produce` is needed.

        Raises:
            ConfigError: the data is missing, unusable, or does not fit the model.
        """
        raise NotImplementedError

    def produce(self, spec: DataSpec) -> None:
        """Read, tokenise and pack to the end of the data, in a process of its own. Waits while another process does it.

        A failure is recorded where `started` and the readers see it, then raised.
        """
        raise NotImplementedError

    def started(self, spec: DataSpec) -> bool:
        """Whether training can begin while `produce` goes on; raises ConfigError when `produce` recorded a failure."""
        raise NotImplementedError

    def open(self, spec: DataSpec) -> Sequences:
        """The sequences, in a worker, after `prepare`."""
        raise NotImplementedError


class Random(Data):
    """Uniformly distributed tokens, without text: for pure speed runs. The loss stays at log(vocab_size)."""

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
