"""The copy of a checkpoint to host memory before it is written in the background."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from meshrunner.recipes.checkpoint.save import ChecksummedWriter, staging_options


class On(nn.Module):
    """A model on a device that need not exist."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield SimpleNamespace(device=self.device)


def options(device: str) -> set[str]:
    """Return the staging options of a model."""
    return {name for name, value in asdict(staging_options(On(device))).items() if value}


def test_on_cuda_the_copy_is_pinned_and_complete_before_training_goes_on() -> None:
    assert options("cuda") == {"use_pinned_memory", "use_non_blocking_copy"}
    assert options("cpu") == set(), "torch refuses what needs a GPU"


def test_copies_of_tensors_that_do_not_last_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FullyShardedDataParallel, "fsdp_modules", lambda module: [module])
    assert options("cuda") == {"use_non_blocking_copy"}


def test_state_in_host_memory_is_written_without_the_device(tmp_path: Path) -> None:
    """Otherwise the writing thread would wait for the training stream."""
    assert ChecksummedWriter(tmp_path, dict, on_host=True).per_thread_copy_ahead == 0  # type: ignore[arg-type]
    assert ChecksummedWriter(tmp_path, dict).per_thread_copy_ahead > 0  # type: ignore[arg-type]
