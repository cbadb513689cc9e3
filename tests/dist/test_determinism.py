"""`deterministic=true`: nothing that is offered refuses it, it changes no figure on a CPU, and a resumed run is bit-equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshrunner.recipes import compatibility
from meshrunner.recipes.pretrain import train
from tests.composed import SMALL, experiment
from tests.dist.ranks import on_ranks
from tests.dist.test_checkpoint import interrupted
from tests.dist.test_layouts import CPU, Recorder

OPTIONS = [
    "parallelism=single micro_batch=12",
    "parallelism=ddp",
    "parallelism=fsdp1 loss=chunked loss.tokens=16",
    "parallelism=fsdp2 precision=bf16 activation_checkpoint=selective_op optimizer.implementation=foreach",
    "parallelism=fsdp2 activation_checkpoint=full compile=per_block compile.backend=aot_eager",
    "parallelism=tp micro_batch=12 loss=chunked loss.tokens=16 parallelism.loss_parallel=true model.vocab_size=510",
    "parallelism=tp micro_batch=12 parallelism.sequence_parallel=false",
]


def curve(overrides: tuple[str, ...]) -> list[float]:
    """Losses and norms of five steps."""
    recorder = Recorder()
    train(experiment(*SMALL, *overrides), recorder, device=CPU, nodes=1, workers=dist.get_world_size())
    return recorder.losses + recorder.norms


def both(overrides: tuple[str, ...]) -> tuple[list[float], list[float], bool]:
    """The curve without and with the key, and whether torch was told."""
    free, asked = curve(overrides), curve((*overrides, "deterministic=true"))
    return free, asked, torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("options", OPTIONS)
def test_no_option_refuses_it_and_on_a_cpu_no_figure_changes(options: str) -> None:
    overrides = tuple(options.split())
    for free, asked, told in on_ranks(1 if "single" in options else 2, both, overrides):
        assert told and asked == free


@pytest.mark.parametrize("layout", ["parallelism=fsdp1", "parallelism=fsdp2"])
def test_a_resumed_run_is_bit_equal(layout: str, tmp_path: Path) -> None:
    for straight, resumed in on_ranks(3, interrupted, tmp_path, "dcp", (layout, "deterministic=true")):
        assert len(straight) == 6 and resumed == straight


def test_ddp_of_three_is_refused_because_it_is_not(tmp_path: Path) -> None:
    """When torch keeps the order of its buckets, the row of the table is to go."""
    three: Any = experiment(*SMALL, "parallelism=ddp", "deterministic=true")
    assert [each for each in compatibility.problems(three, three.parallelism.degrees(1, 3)) if "buckets" in each]
    assert not compatibility.problems(three, three.parallelism.degrees(1, 2))
    ranks = on_ranks(3, interrupted, tmp_path, "dcp", ("parallelism=ddp", "deterministic=true"))
    assert any(resumed != straight for straight, resumed in ranks)
