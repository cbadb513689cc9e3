"""Train the stages of a rank with the schedules of torch.distributed.pipelining."""

import logging
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _PipelineSchedule, get_schedule_class

from meshrunner.recipes.data.loader import Batches
from meshrunner.recipes.parallelism.pipeline.stages import Schedule


class Pipeline:
    """This rank's stages. All ranks of a pipeline train on the same micro batches."""

    def __init__(
        self,
        stages: dict[int, nn.Module],
        number: int,
        schedule: Schedule,
        group: dist.ProcessGroup,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        """stages: this rank's stages, keyed by their index among all `number` stages. shape, dtype: properties of the
        residual stream that stages exchange for a micro batch."""
        self.stages, self.number, self.group, self._shape, self._dtype = stages, number, group, shape, dtype
        self._class = get_schedule_class(schedule.torch_name)
        self._schedule: _PipelineSchedule | None = None
        # If a stage fails, torch would log the whole schedule on every rank before the error.
        logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)

    @property
    def exchanged_bytes(self) -> int:
        """Bytes that neighbouring stages exchange for a micro batch, in each direction."""
        return math.prod(self._shape) * self._dtype.itemsize

    def run(self, batches: Batches, *, forward_only: bool) -> Tensor:
        """Return the mean loss over all micro batches, or 0 on ranks without the last stage. Unless `forward_only` is true,
        accumulate the gradients of the mean loss."""
        tokens, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        if self._schedule is None:
            self._schedule = self._build(batches)
        losses: list[Tensor] = []
        arguments = (tokens,) if 0 in self.stages else ()
        # Every stage gets `targets`, with which the last stage computes the loss. torch gives `target` only to `loss_fn`.
        hidden: BaseException | None = None
        try:
            run = self._schedule.eval if forward_only else self._schedule.step
            run(*arguments, targets=targets, target=targets, losses=losses, return_outputs=False)
        except RuntimeError as error:  # torch wraps a stage's error, such as OutOfMemoryError
            hidden = error.__cause__
            if hidden is None or "failed to run" not in str(error).lower():
                raise
        if hidden is not None:
            raise hidden  # raised here, because inside `except` Python would replace the error's context
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=tokens.device)

    def summed(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Add up values (0-d) over the ranks of the pipeline, in one all-reduce of fp64."""
        total = torch.stack([value.double() for value in values])
        dist.all_reduce(total, group=self.group)
        return list(total.unbind())

    def _build(self, batches: Batches) -> _PipelineSchedule:
        micro_batches, (tokens, _) = len(batches), batches[0]
        like_tokens, loss = torch.empty_like(tokens, device="meta"), torch.empty((), device="meta", requires_grad=True)
        stream = torch.empty(self._shape, dtype=self._dtype, device="meta", requires_grad=True)
        # Pass the shapes of inputs and results. Otherwise torch would run the model once more to infer them.
        stages = [
            PipelineStage(
                stage,
                place,
                self.number,
                tokens.device,
                input_args=stream if place else like_tokens,
                output_args=stream if place < self.number - 1 else loss,
                group=self.group,
            )
            for place, stage in self.stages.items()
        ]
        schedule: _PipelineSchedule = self._class(
            stages[0] if issubclass(self._class, PipelineScheduleSingle) else stages,
            n_microbatches=micro_batches,
            loss_fn=lambda loss, _: loss / micro_batches,
            scale_grads=False,
        )
        return schedule
