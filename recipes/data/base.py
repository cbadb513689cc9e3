"""The base class of the `data` options, the interface of their token sequences, and the option `random`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import Option

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class DataSpec(NamedTuple):
    """The settings that determine a run's data."""

    vocab_size: int
    """Vocabulary size of the model. Every token id must be smaller than this size."""
    seq_len: int
    """Input tokens per sequence. Each sequence has seq_len + 1 tokens, because its last token is only a target."""
    seed: int
    """Seed for the order of the sequences, and for random tokens."""
    share: float = 0.0
    """Share of the source's documents to hold out for evaluation. 0 without evaluation, or if `eval.data` names other data."""
    held_out: int | None = None
    """Number of held-out sequences to evaluate. None if these settings describe the training data."""


class Sequences(Protocol):
    """An endless list of token sequences. Sequence i is the same on every rank, and in every run with the same data and seed."""

    def rows(self, first: int, count: int) -> NDArray[np.int64]:
        """Wait for `count` sequences and return them, [count, seq_len + 1]. Raises RuntimeError if packing has stopped."""

    def describe(self) -> dict[str, Any]:
        """Return a description of the data for the run record, as JSON values. Packed text has the keys `tokenizer_hash`,
        `corpus_hash` (of all packed text) and `beginning_hash` (of the first tokens, which are always packed before training
        begins). If documents are separate, `document_length` is the mean length of a token's document, averaged over tokens."""


def different_data(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return "tokenizer" if two results of `describe` name different tokenizers, "text" if only the texts differ, else ""."""
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
        """File, directory or glob pattern that every node must be able to read. None if the option reads no local files."""
        return None

    @property
    def separates_documents(self) -> bool:
        """Whether a token attends only to tokens of its own document. If so, `document_end` must return a token."""
        return False

    def document_end(self, spec: DataSpec) -> int:
        """Return the token that ends each document. Every worker calls this method after `open` if documents are separate."""
        raise NotImplementedError(
            f"{type(self).__name__} separates documents and therefore needs a method `document_end`"
        )

    def prepare(self, spec: DataSpec) -> bool:
        """Return whether `produce` must run. Raises ConfigError if the data is unusable or does not fit the model."""
        return False

    def produce(self, spec: DataSpec) -> None:
        """Read, tokenise and pack all data. Before raising an error, record it, so that `started` and the workers find it."""

    def started(self, spec: DataSpec) -> bool:
        """Return whether enough data is available for training to begin. Raises ConfigError if `produce` recorded an error."""
        return True

    @abstractmethod
    def open(self, spec: DataSpec) -> Sequences:
        """Return the sequences to train or evaluate on. Every worker calls this method after `prepare`."""

    def for_evaluation(self, trained: Data, spec: DataSpec) -> Self:
        """Return the option that reads held-out data from this source. `trained`, `spec`: option and settings of the training
        data, which is already prepared. Raise ConfigError if this option cannot hold out data or use the training tokenizer."""
        raise ConfigError(f"eval: data={self.kind} cannot hold out data; set eval.data, or use eval=none")


class Random(Data):
    """Uniformly random tokens for speed runs. The loss on random tokens stays at log(vocab_size)."""

    def for_evaluation(self, trained: Data, spec: DataSpec) -> Self:
        return self

    def open(self, spec: DataSpec) -> Sequences:
        if spec.held_out is not None:
            spec = spec._replace(seed=spec.seed + 2**63)  # larger than every training seed, so the tokens differ
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
