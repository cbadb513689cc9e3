"""The configuration of a training recipe: everything that decides its numbers, nothing about how it is launched."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, SerializeAsAny

from meshrunner.recipes.activation_checkpoint.base import ActivationCheckpoint
from meshrunner.recipes.checkpoint.base import Checkpoint
from meshrunner.recipes.checkpoint.on_disk import Record
from meshrunner.recipes.compile import Compile
from meshrunner.recipes.config_diff import differences
from meshrunner.recipes.data.base import Data
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.loss.base import Loss
from meshrunner.recipes.model.base import Model
from meshrunner.recipes.optim.lr_schedule import LRSchedule
from meshrunner.recipes.optim.optimizer import Optimizer
from meshrunner.recipes.option import Affects, Count, Section, chosen, whole
from meshrunner.recipes.parallelism.base import Parallelism
from meshrunner.recipes.parallelism.wrap_policy import Wrap
from meshrunner.recipes.precision.base import Precision


class Recipe(Section):
    """One training run."""

    affects: ClassVar[Affects] = Affects.SPEED | Affects.RESULT

    model: Annotated[SerializeAsAny[Model], chosen(Model)]
    """The network that is trained: its architecture and size."""
    parallelism: Annotated[SerializeAsAny[Parallelism], chosen(Parallelism)]
    """How the model is distributed over devices, and over how many."""
    wrap: Annotated[SerializeAsAny[Wrap], chosen(Wrap)]
    """Which modules become units, whose parameters FSDP gathers and frees together."""
    activation_checkpoint: Annotated[SerializeAsAny[ActivationCheckpoint], chosen(ActivationCheckpoint)]
    """What is computed again in backward, to save the memory of activations."""
    compile: Annotated[SerializeAsAny[Compile], chosen(Compile)]
    """Which parts of the model torch.compile compiles."""
    precision: Annotated[SerializeAsAny[Precision], chosen(Precision)]
    """The dtypes of compute and of the gradient reduction; master weights are fp32. auto: bf16 on CUDA, fp32 on CPU."""
    loss: Annotated[SerializeAsAny[Loss], chosen(Loss)]
    """How the cross entropy is computed; every option gives the same value."""
    optimizer: Annotated[SerializeAsAny[Optimizer], chosen(Optimizer)]
    """The optimizer, its learning rate and weight decay."""
    lr_schedule: Annotated[SerializeAsAny[LRSchedule], chosen(LRSchedule)]
    """The factor on optimizer.lr in every step."""
    data: Annotated[SerializeAsAny[Data], chosen(Data)]
    """The tokens that are trained on: which text, which tokenizer, in which order."""
    checkpoint: Annotated[SerializeAsAny[Checkpoint], chosen(Checkpoint)]
    """Whether the run is saved, and what it continues from."""

    steps: Annotated[Count, Affects.FIGURES]
    """Optimizer steps."""
    seed: Annotated[int, whole(at_least=0, at_most=2**62), Affects.CHANCE]
    """Seed of the initial weights and of the data order."""
    deterministic: bool = False
    """Only algorithms that give the same bits every time, if the layout and the devices are the same. Slower on GPUs."""
    seq_len: Annotated[int, whole(at_most=2**24)]
    """Tokens per sequence."""
    micro_batch: Annotated[int, whole(at_most=2**16), Affects.SPEED]
    """Sequences per data-parallel rank in one forward pass."""
    global_batch: Annotated[int | None, whole(None)]
    """Sequences per optimizer step; null: micro_batch x data-parallel ranks. Larger batches use gradient accumulation."""
    max_grad_norm: float | None = Field(gt=0)
    """Gradients are clipped to this global norm; null: no clipping."""

    def accumulation(self, data_ranks: int) -> tuple[int, int]:
        """(sequences per optimizer step, micro batches per rank and step); raises ConfigError with the arithmetic."""
        per_pass = self.micro_batch * data_ranks
        total = per_pass if self.global_batch is None else self.global_batch
        if total % per_pass:
            raise ConfigError(
                f"global_batch({total}) is not a multiple of micro_batch({self.micro_batch}) x data-parallel "
                f"ranks({data_ranks}) = {per_pass}"
            )
        return total, total // per_pass

    def on(self, device_type: str) -> Self:
        """This recipe on `cpu` or `cuda` devices, what is `auto` about its numbers resolved."""
        own = {"precision": self.precision.on(device_type), "model": self.model.on(device_type)}
        return self.model_copy(update=own)

    def resumed_from(self, record: Record) -> Self:
        """
        This recipe, resumed from a checkpoint: a global batch of null keeps its size, whatever the number of ranks is now.

        Raises:
            ConfigError: the checkpoint is from another model, or already past the last step.
        """
        changed = differences(record.config["model"], self.model.model_dump(mode="json"), "model")
        if lines := "".join(
            f"\n  {key}: {old!r} in the checkpoint, {new!r} now"
            for key, old, new in changed
            if "freeze" not in key and not key.endswith(".kernel")
        ):
            raise ConfigError(f"the checkpoint of step {record.step} holds another model:{lines}")
        if record.step > self.steps:
            raise ConfigError(f"steps({self.steps}) is less than the checkpoint's step({record.step})")
        return self.model_copy(update={"global_batch": self.global_batch or record.global_batch})
