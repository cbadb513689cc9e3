"""The `eval` group: options that compute the loss on held-out data during training."""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field, SerializeAsAny

from meshrunner.recipes.data.base import Data, DataSpec, Sequences
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import Affects, Count, Option, chosen, whole


class HeldOut(NamedTuple):
    """The data on which a run is evaluated."""

    data: Data
    spec: DataSpec
    global_batch: int
    sequences: int
    """Value of `eval.sequences`. `spec.held_out` is this number rounded up to whole global batches."""

    def global_batches(self, sequences: Sequences) -> int:
        """Return the number of global batches to evaluate. Raise ConfigError if the text is shorter than one global batch."""
        assert self.spec.held_out is not None
        wanted, available = self.spec.held_out, sequences.describe().get("sequences")
        found = wanted if available is None else min(wanted, available)
        if found < self.global_batch:
            raise ConfigError(
                f"eval: the held-out text has {found} sequences of {self.spec.seq_len} tokens, but one global batch has "
                f"{self.global_batch}; raise eval.share, or set eval.data to a longer text"
            )
        return found // self.global_batch

    def remark(self, sequences: Sequences) -> str | None:
        """Return a warning if the run evaluates another number of sequences than the configuration asks for, else None."""
        found = self.global_batches(sequences) * self.global_batch
        if found < self.sequences:
            return (
                f"eval.sequences: the held-out text has only {found} of {self.sequences} sequences, counted in whole global "
                f"batches of {self.global_batch}; raise eval.share or set eval.data to evaluate more"
            )
        if found > self.sequences:
            multiple = f"a multiple of the global batch of {self.global_batch}"
            return f"eval.sequences: {self.sequences} is rounded up to {found}, {multiple}"
        return None


class Evaluation(Option):
    """Base class of the `eval` options."""

    kinds: ClassVar[dict[str, str]] = {
        "none": "meshrunner.recipes.evaluation.base:NoEvaluation",
        "held_out": "meshrunner.recipes.evaluation.base:HeldOutLoss",
    }

    affects: ClassVar[Affects] = Affects.RESULT

    evaluates: ClassVar[bool] = False
    """Whether a run computes a held-out loss."""

    @property
    def patience(self) -> int | None:
        """The run ends after this number of consecutive evaluations without a new lowest loss. None: it takes all steps."""
        return None

    @property
    def withheld(self) -> float:
        """Share of the documents of `data` on which the run does not train."""
        return 0.0

    def held_out(self, data: Data, spec: DataSpec, global_batch: int) -> HeldOut | None:
        """Return the data to evaluate on, or None. `data`, `spec`: the training data. Raise ConfigError if none is usable."""
        return None

    def due(self, step: int, last_step: int) -> bool:
        """Return whether to evaluate after a step."""
        return False


class NoEvaluation(Evaluation):
    """No evaluation."""


class HeldOutLoss(Evaluation):
    """The loss on data that the run does not train on. Computed before step 1, every `every` steps and after the last."""

    evaluates: ClassVar[bool] = True

    every: Annotated[int, whole(), Affects.FIGURES]
    """Steps between evaluations."""
    sequences: Count
    """Sequences to evaluate, rounded up to whole global batches."""
    data: Annotated[SerializeAsAny[Data] | None, chosen(Data, optional=True)]
    """Data to evaluate on, with the tokenizer of the training data. null: documents held out from the training data."""
    share: float = Field(gt=0, lt=1)
    """Share of the training documents to hold out if `data` is null."""
    stop_after: Annotated[int | None, whole(None), Affects.FIGURES]
    """The run ends as completed after this number of consecutive evaluations without a new lowest loss. null: never."""

    @property
    def patience(self) -> int | None:
        return self.stop_after

    @property
    def withheld(self) -> float:
        return self.share if self.data is None else 0.0

    def held_out(self, data: Data, spec: DataSpec, global_batch: int) -> HeldOut:
        number = -(-self.sequences // global_batch) * global_batch
        source = data if self.data is None else self.data
        return HeldOut(source.for_evaluation(data, spec), spec._replace(held_out=number), global_batch, self.sequences)

    def due(self, step: int, last_step: int) -> bool:
        return step % self.every == 0 or step == last_step
