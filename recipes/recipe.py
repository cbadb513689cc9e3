"""What a training recipe is told: the part of an experiment that decides the numbers, without how it is launched."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, SerializeAsAny

from meshrunner.recipes.activation_checkpoint.base import ActivationCheckpoint
from meshrunner.recipes.checkpoint.base import Checkpoint
from meshrunner.recipes.checkpoint.on_disk import Record
from meshrunner.recipes.compile import Compile
from meshrunner.recipes.config_diff import differences
from meshrunner.recipes.data.base import Data
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.loss import Loss
from meshrunner.recipes.lr_schedule import LRSchedule
from meshrunner.recipes.model.base import Model
from meshrunner.recipes.optimizer import Optimizer
from meshrunner.recipes.option import Count, Section, chosen, whole
from meshrunner.recipes.parallelism.base import Parallelism
from meshrunner.recipes.parallelism.wrap_policy import Wrap
from meshrunner.recipes.precision import Precision


class Recipe(Section):
    """One training run."""

    model: Annotated[SerializeAsAny[Model], chosen(Model)]
    parallelism: Annotated[SerializeAsAny[Parallelism], chosen(Parallelism)]
    wrap: Annotated[SerializeAsAny[Wrap], chosen(Wrap)]
    activation_checkpoint: Annotated[SerializeAsAny[ActivationCheckpoint], chosen(ActivationCheckpoint)]
    compile: Annotated[SerializeAsAny[Compile], chosen(Compile)]
    precision: Annotated[SerializeAsAny[Precision], chosen(Precision)]
    loss: Annotated[SerializeAsAny[Loss], chosen(Loss)]
    optimizer: Annotated[SerializeAsAny[Optimizer], chosen(Optimizer)]
    lr_schedule: Annotated[SerializeAsAny[LRSchedule], chosen(LRSchedule)]
    data: Annotated[SerializeAsAny[Data], chosen(Data)]
    checkpoint: Annotated[SerializeAsAny[Checkpoint], chosen(Checkpoint)]

    steps: Count
    """Optimizer steps."""
    seed: Annotated[int, whole(at_least=0)]
    """Decides initial weights and the order of the data."""
    seq_len: Count
    """Tokens of a sequence."""
    micro_batch: Count
    """Sequences per data-parallel rank in one forward pass."""
    global_batch: Annotated[int | None, whole(None)]
    """Sequences per optimizer step; null: micro_batch x data-parallel ranks. More is reached by gradient accumulation."""
    max_grad_norm: float | None = Field(gt=0)
    """Gradients are scaled down to this global norm; null: they are left as they are."""

    def accumulation(self, data_ranks: int) -> tuple[int, int]:
        """(sequences per optimizer step, micro batches per rank in it); raises ConfigError that shows the arithmetic."""
        at_once = self.micro_batch * data_ranks
        total = at_once if self.global_batch is None else self.global_batch
        if total % at_once:
            raise ConfigError(
                f"global_batch({total}) is not a multiple of micro_batch({self.micro_batch}) x data-parallel "
                f"ranks({data_ranks}) = {at_once}"
            )
        return total, total // at_once

    def continuing(self, record: Record) -> Self:
        """
        This recipe, after a checkpoint: an undecided global batch stays what it was, whatever the number of ranks is now.

        Raises:
            ConfigError: the checkpoint is of another model, or there is nothing left to train.
        """
        changed = differences(record.config["model"], self.model.model_dump(mode="json"), "model")
        if lines := "".join(
            f"\n  {key}: {old!r} there, {new!r} here" for key, old, new in changed if "freeze" not in key
        ):
            raise ConfigError(f"the checkpoint of step {record.step} holds another model:{lines}")
        if record.step > self.steps:
            raise ConfigError(f"steps({self.steps}) is less than the checkpoint's step({record.step})")
        return self.model_copy(update={"global_batch": self.global_batch or record.global_batch})
