"""`parallelism.buffers`: values refused before a run starts, and the output of `show`."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import FSDPModule

from meshrunner.recipes.errors import Incompatible
from meshrunner.runner.config.consistency import fit
from meshrunner.runner.config.devices import node_devices
from tests.composed import experiment
from tests.unit.verbs.test_show import shown

UNITS = "wrap=rules wrap.rules=[{match:layers.*},{match:layers.*.feed_forward}]"


def says(*overrides: str) -> str:
    """Return the error before a run starts on this machine's CPUs."""
    given = experiment("hardware=cpu", *" ".join(overrides).split())
    try:
        fit(given, node_devices(given).workers)
    except Incompatible as error:
        return str(error)
    return ""


@pytest.mark.parametrize("buffers", ["process_group", "symmetric"])
def test_nccl_memory_needs_a_gpu_and_a_torch_that_supports_it(buffers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = experiment(f"parallelism.buffers={buffers}")
    assert f"NCCL allocates {buffers} buffers and needs a GPU; use dynamic, max_pool or scheduled" in says(
        f"parallelism.buffers={buffers}"
    )
    assert given.parallelism.unsupported("cuda") is None
    monkeypatch.delattr(FSDPModule, "set_symm_mem_for_comm", raising=False)
    refused = ["this torch's FSDP2 has no symmetric buffers" in each for each in given.parallelism.problems()]
    assert refused == [True] * (buffers == "symmetric"), "torch 2.11 has the other"


@pytest.mark.parametrize("buffers", ["max_pool", "scheduled"])
def test_planned_buffers_need_units_with_one_parameter_group(buffers: str) -> None:
    given = f"parallelism.buffers={buffers}"
    assert not says(given) and not says(given, "parallelism=hsdp2 launch.workers=4 activation_checkpoint=full")
    refused = says(given, "model=moe_tiny parallelism.expert=2")
    assert "gathers and reduces over two process groups" in refused and "parallelism.buffers=dynamic" in refused


def test_planned_buffers_refuse_a_unit_in_a_recomputed_block() -> None:
    refused = says(UNITS, "parallelism.buffers=scheduled activation_checkpoint=full")
    assert "'layers.0.feed_forward' cannot be a unit if buffers are planned, because it is inside a" in refused
    assert not says(UNITS, "parallelism.buffers=scheduled") and not says(UNITS, "activation_checkpoint=full")


def lines(capsys: pytest.CaptureFixture[str], *overrides: str) -> list[str]:
    text = shown(capsys, *overrides, "hardware=cpu")
    return [line for line in text.splitlines() if line.startswith("buffers of ")]


def test_show_lists_the_bytes_of_every_placement(capsys: pytest.CaptureFixture[str]) -> None:
    """
    Two tables of 4096 x 256, and 6 blocks of 4 x 256 x 256 + 3 x 256 x 768 + 2 x 256: 4 and 3.25 MiB in fp32. A table and a block
    are gathered together, or two blocks; one is reduced at a time.
    """
    assert lines(capsys, "launch.workers=2") == [
        "buffers of all-gathers: dynamic 7.25 MiB, scheduled 7.25 MiB, max_pool 8.00 MiB, fixed pool 6.50 MiB + 8.00 MiB outside",
        "buffers of reductions: dynamic 4.00 MiB, scheduled 4.00 MiB, max_pool 4.00 MiB, fixed pool 6.50 MiB + 8.00 MiB outside",
    ]
    halved = lines(capsys, "launch.workers=2", "precision=bf16")
    assert "dynamic 3.63 MiB" in halved[0] and "dynamic 4.00 MiB" in halved[1], "gradients are reduced in fp32"
    assert (
        "dynamic 10.50 MiB, scheduled 11.25 MiB, max_pool 12.00 MiB"
        in lines(capsys, "launch.workers=2", "parallelism.prefetch=2")[0]
    )


@pytest.mark.parametrize("words", ["parallelism=ddp", "parallelism=fsdp1", "model=moe_tiny parallelism=ep"])
def test_show_omits_buffers_without_one_buffer_per_unit(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys, "launch.workers=2", *words.split()) == []


def test_a_single_shard_gathers_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = lines(capsys, "launch.workers=2", "parallelism=hsdp2")
    assert line.startswith("buffers of reductions")
