"""The configuration of a training run: model, data and training. Launch and measurement settings are in `Experiment`."""

from contextlib import suppress
from typing import Annotated, ClassVar, Self

from pydantic import Field, SerializeAsAny, ValidationError

from meshrunner.recipes.activation_checkpoint.base import ActivationCheckpoint
from meshrunner.recipes.checkpoint.base import Checkpoint
from meshrunner.recipes.checkpoint.on_disk import Record
from meshrunner.recipes.compile.base import Compile
from meshrunner.recipes.config_keys import differences
from meshrunner.recipes.data.base import Data, DataSpec
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.evaluation.base import Evaluation, HeldOut, NoEvaluation
from meshrunner.recipes.loss.base import Loss
from meshrunner.recipes.model.base import Model
from meshrunner.recipes.optim.lr_schedule import LRSchedule
from meshrunner.recipes.optim.optimizer import Optimizer
from meshrunner.recipes.option import Affects, Count, Section, chosen, whole
from meshrunner.recipes.parallelism.base import Parallelism
from meshrunner.recipes.parallelism.pipeline.stages import balanced, stage_problems
from meshrunner.recipes.parallelism.wrap_policy import Wrap
from meshrunner.recipes.precision.base import Precision


class Recipe(Section):
    """Settings of one training run."""

    affects: ClassVar[Affects] = Affects.SPEED | Affects.RESULT

    # chosen(Model): an instance of the class in `Model.kinds` that the section's `kind` names.
    model: Annotated[SerializeAsAny[Model], chosen(Model)]
    """Network to train: its architecture and size."""
    parallelism: Annotated[SerializeAsAny[Parallelism], chosen(Parallelism)]
    """Distribution of the model over devices: the mechanism, such as fsdp2, and the parallel degrees."""
    wrap: Annotated[SerializeAsAny[Wrap], chosen(Wrap)]
    """Choice of FSDP units: the modules whose parameters are gathered and freed together."""
    activation_checkpoint: Annotated[SerializeAsAny[ActivationCheckpoint], chosen(ActivationCheckpoint)]
    """Activations to recompute in backward instead of keeping them in memory."""
    compile: Annotated[SerializeAsAny[Compile], chosen(Compile)]
    """Parts of the model that torch.compile compiles."""
    precision: Annotated[SerializeAsAny[Precision], chosen(Precision)]
    """dtypes of compute and gradient reduction; master weights are fp32. auto: bf16 on CUDA, fp32 on CPU."""
    loss: Annotated[SerializeAsAny[Loss], chosen(Loss)]
    """Implementation of the cross entropy. Every option computes the same value."""
    optimizer: Annotated[SerializeAsAny[Optimizer], chosen(Optimizer)]
    """Optimizer, its learning rate and weight decay."""
    lr_schedule: Annotated[SerializeAsAny[LRSchedule], chosen(LRSchedule)]
    """Learning rate of each step, as a multiple of optimizer.lr."""
    data: Annotated[SerializeAsAny[Data], chosen(Data)]
    """Tokens to train on: the text, its tokenizer, and the order of sequences."""
    checkpoint: Annotated[SerializeAsAny[Checkpoint], chosen(Checkpoint)]
    """Interval between saved checkpoints, and the checkpoint to start from."""
    eval: Annotated[SerializeAsAny[Evaluation], chosen(Evaluation)] = NoEvaluation.model_construct(kind="none")
    """Loss on data that the run does not train on."""

    steps: Annotated[Count, Affects.FIGURES]
    """Optimizer steps."""
    seed: Annotated[int, whole(at_least=0, at_most=2**62), Affects.CHANCE]
    """Seed of the initial weights and of the data order."""
    deterministic: bool = False
    """Whether to use only deterministic algorithms, so that a rerun on equal devices is bitwise equal. Slower on GPUs."""
    seq_len: Annotated[int, whole(at_most=2**24)]
    """Tokens per sequence."""
    micro_batch: Annotated[int, whole(at_most=2**16), Affects.SPEED]
    """Sequences that each data-parallel rank processes in one forward pass."""
    global_batch: Annotated[int | None, whole(None)]
    """Sequences per optimizer step; null: micro_batch x data-parallel ranks x pipeline. Larger batches use gradient
    accumulation."""
    max_grad_norm: float | None = Field(gt=0)
    """Maximum global norm of the gradients. Gradients with a larger norm are scaled down to the maximum. null: no clipping."""

    def accumulation(self, data_ranks: int) -> tuple[int, int]:
        """Return two numbers: the sequences per step, and the micro batches that each rank processes per step. Raise ConfigError
        if global_batch is not a multiple of the sequences that all ranks together process in one forward pass."""
        per_pass = self.micro_batch * data_ranks
        total = per_pass * self.parallelism.pipeline if self.global_batch is None else self.global_batch
        if total % per_pass:
            raise ConfigError(
                f"global_batch({total}) is not a multiple of micro_batch({self.micro_batch}) x data-parallel "
                f"ranks({data_ranks}) = {per_pass}"
            )
        return total, total // per_pass

    @property
    def data_spec(self) -> DataSpec:
        """The settings that determine the training data."""
        return DataSpec(self.model.vocab_size, self.seq_len, self.seed, self.eval.withheld)

    def held_out(self, data_ranks: int) -> HeldOut | None:
        """Return the data to evaluate on; None without evaluation. The training data must already be prepared."""
        return self.eval.held_out(self.data, self.data_spec, self.accumulation(data_ranks)[0])

    def pipeline_split(self) -> list[int]:
        """Return the number of blocks of each pipeline stage. If the split is null, divide the FLOPs as evenly as possible."""
        layout = self.parallelism
        if layout.pipeline_split is not None:
            return layout.pipeline_split
        *blocks, last = self.model.block_flops(self.seq_len)
        return balanced(blocks, last, layout.pipeline * layout.stages_per_rank)

    def pipeline_problems(self, micro_batches: int) -> list[str]:
        """Return the reasons why the model cannot be cut into stages, or why stages cannot process `micro_batches` per step."""
        layout = self.parallelism
        if layout.pipeline == 1:
            return []
        if problems := self.model.pipeline_problems():
            return problems
        settings = layout.pipeline_schedule, layout.pipeline, layout.stages_per_rank, layout.pipeline_split
        return stage_problems(*settings, blocks=self.model.pipeline_blocks, micro_batches=micro_batches)

    def untraceable(self) -> str | None:
        """Return the reason why a step cannot be traced on the meta device, or None if tracing is possible."""
        return self.parallelism.untraceable() or self.precision.untraceable()

    def host_bytes(self, ranks: int) -> int | None:
        """Return the bytes of host memory that each of `ranks` ranks may use on CPUs, or None if the limit is unknown."""
        return None

    def on(self, device_type: str) -> Self:
        """Return this recipe for `cpu` or `cuda` devices, with `auto` in precision and model resolved."""
        model = self.model.on(device_type, deterministic=self.deterministic)
        return self.model_copy(update={"precision": self.precision.on(device_type), "model": model})

    def resumed_from(self, record: Record) -> Self:
        """Return this recipe for a run that resumes from a checkpoint. If global_batch is null, use the checkpoint's value.
        Raise ConfigError if the checkpoint holds another model or a step after the last step of this run."""
        self.refuse_other_model(record)
        if record.step > self.steps:
            raise ConfigError(f"steps({self.steps}) is less than the checkpoint's step({record.step}); raise steps")
        return self.model_copy(update={"global_batch": self.global_batch or record.global_batch})

    def refuse_other_model(self, record: Record) -> None:
        """Raise ConfigError if a checkpoint holds a model of another kind or other shapes."""
        saved = record.config["model"]
        with suppress(ValidationError):  # validation adds the defaults of keys that the checkpoint lacks
            saved = type(self.model).model_validate(saved).model_dump(mode="json")
        if lines := "".join(
            f"\n  {key}: {old!r} in the checkpoint, {new!r} now"
            for key, old, new in differences(saved, self.model.model_dump(mode="json"), "model")
            if key not in ("model.freeze", "model.weights") and not key.endswith(".kernel")
        ):
            raise ConfigError(f"the checkpoint of step {record.step} was saved with another model:{lines}")
