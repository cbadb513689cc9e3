"""Runs the pipeline stages of an emulated or traced rank without the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class _Sent(NamedTuple):
    tensor: torch.Tensor

    def wait(self) -> None: ...


def replace_neighbours(replace: Callable[[Any, str, Any], Any], *, on_host: bool) -> None:
    """Replace transfers between pipeline stages: nothing is sent, and each receive buffer is filled with random values once.
    replace: a function like `setattr`, called for each attribute of torch to replace. on_host: whether ranks communicate by
    gloo. Gloo keeps a sent tensor alive until the schedule drops the `Work` object of the transfer."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, schedules, stage
    from torch.distributed.pipelining._utils import InferenceMode, _make_tensor_from_meta

    def agree(self: Any, stages: list[PipelineStage], *_: Any) -> None:
        for each in stages:
            each._inference_mode = InferenceMode.STATIC

    def received(*args: Any) -> torch.Tensor:
        with torch.no_grad():
            return _make_tensor_from_meta(*args).normal_()

    def transfer(ops: list[dist.P2POp], desc: str | None = None) -> list[_Sent]:
        return [_Sent(each.tensor) for each in ops if each.op is dist.isend and on_host]

    replace(schedules._PipelineSchedule, "_warmup_p2p", agree)
    replace(schedules, "_batch_p2p", transfer)
    replace(stage, "_make_tensor_from_meta", received)
