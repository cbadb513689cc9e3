"""Early stopping: all ranks stop together and save, and the run continues as if uninterrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from meshrunner.recipes.checkpoint.on_disk import checkpoint_folders
from meshrunner.recipes.pretrain import train
from tests.composed import SMALL, experiment
from tests.dist.ranks import on_ranks
from tests.dist.test_layouts import CPU, Recorder

MODELS: list[nn.Module] = []
"""Models of this process: DDP must not be destroyed before its process group."""


def requested_at(folder: Path, request: tuple[int, int] | None, overrides: tuple[str, ...]) -> tuple[int, list[float]]:
    """Return (last step, losses) of a run in which one rank is requested to stop after a step."""
    recorder = Recorder()

    def requested() -> bool:
        assert request is not None
        rank, step = request
        return dist.get_rank() == rank and len(recorder.losses) >= step

    model, step = train(
        experiment(*SMALL, "steps=8", *overrides),
        recorder,
        device=CPU,
        nodes=1,
        workers=dist.get_world_size(),
        checkpoints=folder,
        stop_requested=requested if request is not None else None,
    )
    MODELS.append(model)
    return step, recorder.losses


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "kind"), [(0, "dcp"), (2, "dcp_async")])
def test_all_stop_one_step_after_one_was_requested_to(rank: int, kind: str, tmp_path: Path) -> None:
    saved = ("parallelism=fsdp2", f"checkpoint={kind}", "checkpoint.every=1000")
    stopped = on_ranks(3, requested_at, tmp_path / "stopped", (rank, 3), saved)
    assert [step for step, _ in stopped] == [4, 4, 4]
    assert list(checkpoint_folders(tmp_path / "stopped")) == [4]
    rest = on_ranks(3, requested_at, tmp_path / "stopped", None, saved)
    straight = on_ranks(3, requested_at, tmp_path / "straight", None, saved)
    for (_, first), (last, second), (_, whole) in zip(stopped, rest, straight, strict=True):
        assert last == 8
        assert first + second == whole


def test_without_checkpoints_it_just_ends(tmp_path: Path) -> None:
    stopped = on_ranks(2, requested_at, tmp_path, (1, 1), ("parallelism=ddp",))
    assert [step for step, _ in stopped] == [2, 2]
    assert list(tmp_path.iterdir()) == []


def test_requested_in_the_last_step_it_completes(tmp_path: Path) -> None:
    assert [step for step, _ in on_ranks(2, requested_at, tmp_path, (1, 7), ("parallelism=ddp",))] == [8, 8]
