"""Tracing: the events that are recorded, and that no stand-in for the device can be left out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrunner.recipes.assembly import assemble
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.parallelism.base import Degrees
from meshrunner.runner.predict.meta import kernels, stand_ins
from meshrunner.runner.predict.meta.autocast import autocast_on_meta
from meshrunner.runner.predict.meta.replacements import Replacements
from meshrunner.runner.predict.record import recorder
from meshrunner.runner.predict.record.trace_events import COMPUTE, Collective, Operator, UsedByStream
from meshrunner.runner.predict.trace.tracer import Trace, trace_recipe
from tests.composed import SMALL, experiment


def traced(*overrides: str, device_type: str = "cuda", workers: int = 2) -> Trace:
    recipe = experiment(*SMALL, "global_batch=2", "model.n_layers=2", *overrides).on(device_type)
    return trace_recipe(recipe, nodes=1, workers=workers, device_type=device_type)


def found(trace: Trace) -> tuple[Any, ...]:
    """Return the peak of a trace, and how often it has each event."""
    peak = trace.ledger.peak_of(lambda phase: phase.step == trace.last_step)
    kinds: dict[Any, int] = {}
    for event in trace.events:
        key = (event.name, event.stream) if isinstance(event, Operator | Collective) else type(event).__name__
        kinds[key] = kinds.get(key, 0) + 1
    return peak, kinds


def found_or_error(*overrides: str) -> Any:
    try:
        return found(traced(*overrides))
    except Exception as error:
        return type(error)


NEEDED_BY = {
    stand_ins.fsdp2_streams: ("parallelism=fsdp2",),
    stand_ins.fsdp2_device: ("parallelism=fsdp2",),
    stand_ins.planned_buffers: ("parallelism=fsdp2", "parallelism.buffers=max_pool"),
    stand_ins.fsdp1_streams: ("parallelism=fsdp1",),
    stand_ins.optimizer_devices: ("parallelism=fsdp2",),
    stand_ins.ddp_reducer: ("parallelism=ddp",),
    stand_ins.sharding_propagation: ("parallelism=tp", "seq_len=38"),
    stand_ins.grouped_attention: ("parallelism=fsdp2", "precision=fp32"),
    stand_ins.float8_gathers: ("precision=float8", "precision.all_gather=true", "model.ffn_dim=96", "seq_len=32"),
}


@pytest.mark.slow_but("fsdp2_streams", "planned_buffers", "fsdp1_streams", "optimizer_devices")
@pytest.mark.parametrize("stand_in", NEEDED_BY, ids=lambda each: each.__name__)
def test_no_stand_in_can_be_left_out(stand_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = NEEDED_BY[stand_in]
    with monkeypatch.context() as without:  # first: DTensor remembers the shapes of a process
        without.setattr(stand_ins, "STAND_INS", tuple(each for each in stand_ins.STAND_INS if each is not stand_in))
        incomplete = found_or_error(*overrides)
    complete = found_or_error(*overrides)
    assert isinstance(complete, tuple) and incomplete != complete


def test_every_stand_in_is_tested() -> None:
    assert set(NEEDED_BY) == set(stand_ins.STAND_INS)


@pytest.mark.slow_but("autocast")
@pytest.mark.parametrize("name", ["attention", "rms_norm", "autocast", "returned argument"])
def test_no_kernel_can_be_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ("parallelism=ddp", "precision=bf16") if name == "autocast" else ("parallelism=tp",)
    complete = found(traced(*overrides))
    if name == "autocast":
        monkeypatch.setattr(stand_ins, "autocast_on_meta", lambda *_: None)
    elif name == "returned argument":
        monkeypatch.setattr(recorder, "RETURN_THEIR_ARGUMENT", set())
    elif name == "rms_norm":
        impl = torch.library.Library.impl
        monkeypatch.setattr(
            torch.library.Library,
            "impl",
            lambda library, name, *how: None if name == "_fused_rms_norm" else impl(library, name, *how),
        )
    else:
        device_kernels = kernels.device_kernels
        monkeypatch.setattr(
            kernels, "device_kernels", lambda in_torch, _, **how: device_kernels(in_torch, "cpu", **how)
        )
    assert found_or_error(*overrides) != complete


@pytest.mark.parametrize("arguments", [(), (True,), (True, None)])  # compiled code of torch 2.11 passes all of them
def test_autocast_takes_arguments_by_position(arguments: tuple[Any, ...]) -> None:
    x = torch.ones(2, 2, device="meta")
    with Replacements() as in_torch:
        autocast_on_meta(in_torch, "cuda")
        with torch.autocast("meta", torch.bfloat16, *arguments):
            assert (x @ x).dtype == torch.bfloat16
        with torch.autocast("meta", torch.bfloat16, False, *arguments[1:]):
            assert (x @ x).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16, *arguments):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_torch_without_a_replaced_attribute_is_an_error_that_names_it() -> None:
    class Owner:
        present = 1

    with Replacements() as own:
        assert own.replace(Owner, "present", 2) == 1 and Owner.present == 2
        with pytest.raises(ConfigError, match=r"has no Owner\.gone, which tracing needs"):
            own.replace(Owner, "gone", 3)
    assert Owner.present == 1


@pytest.mark.slow
def test_first_trace_of_a_process_is_like_all_others() -> None:
    """torch imports parts of itself when an operator is first called, and an import's frames can keep tensors alive."""
    code = (
        "from tests.unit.predict.test_trace import *\n"
        "tied = 'model.tie_embeddings=true', 'global_batch=1'\n"
        "for layout in ('single', 'fsdp1'):\n"
        "    first, later = (found(traced(f'parallelism={layout}', *tied, workers=1)) for _ in range(2))\n"
        "    assert first == later, (layout, first, later)\n"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert ended.returncode == 0, ended.stderr


def test_communication_overlaps_and_fsdp1_keeps_memory_that_other_streams_use() -> None:
    for layout in ("fsdp1", "fsdp2"):
        trace = traced(f"parallelism={layout}")
        gathers = [each for each in trace.events if isinstance(each, Collective) and each.name == "all_gather"]
        assert gathers and all(each.stream != COMPUTE for each in gathers), layout
        assert any(isinstance(each, UsedByStream) for each in trace.events) == (layout == "fsdp1")


def test_matmul_flops_match_the_formula() -> None:
    """All matmuls together have the FLOPs of the formula without attention."""
    single = "parallelism=single", "global_batch=1"
    recipe, trace = experiment(*SMALL, "model.n_layers=2", *single), traced(*single, workers=1)
    last = [each for each in trace.events if isinstance(each, Operator) and each.phase.step == trace.last_step]
    flops = recipe.model.flops_per_token(recipe.seq_len)
    products = sum(each.flops for each in last if each.kind == "matmul")
    assert products == (flops.total - flops.attention) * trace.tokens - _flops_of_norms(recipe) * trace.tokens
    assert {each.kind for each in last} == {"matmul", "attention", "attention_backward", "memory"}


def _flops_of_norms(recipe: Any) -> int:
    """Return the FLOPs per token that the formula counts for the norms' weights, which are in no matmul."""
    return 6 * recipe.model.dim * (2 * recipe.model.n_layers + 1)


def test_tracing_leaves_the_process_unchanged() -> None:
    import torch.distributed as dist

    before = torch.UntypedStorage.resize_, torch.autocast, torch.nn.parallel.DistributedDataParallel.__init__
    traced("parallelism=ddp")
    assert before == (torch.UntypedStorage.resize_, torch.autocast, torch.nn.parallel.DistributedDataParallel.__init__)
    assert not dist.is_initialized()
    assert torch.rms_norm(torch.ones(2, 4), (4,)).shape == (2, 4)


def test_ddp_reduces_its_rebuilt_buckets_while_backward_continues(tmp_path: Path) -> None:
    """The buckets equal those of a replica on a CPU after its first step, when DDP has rebuilt them."""
    import torch.distributed as dist

    from meshrunner.recipes import pretrain
    from meshrunner.recipes.parallelism.mesh import build_mesh

    overrides = ("parallelism=ddp", "parallelism.bucket_cap_mb=0.03")
    log = traced(*overrides).events
    reduced = [each for each in log if isinstance(each, Collective) and each.name == "all_reduce"]
    last = [each for each in reduced if each.phase.step == 1]
    recipe = experiment(*SMALL, "model.n_layers=2", *overrides, "launch.workers=1").on("cpu")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model, trained, _ = assemble(recipe, build_mesh("cpu", Degrees(1, 1, 1)), torch.device("cpu"))
        optimizer = recipe.optimizer.build_for(trained)
        row = torch.zeros(1, recipe.seq_len, dtype=torch.int64)
        for _ in range(3):
            pretrain.update(recipe, model, trained, optimizer, [(row, row)], 1e-3)
        sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    finally:
        dist.destroy_process_group()
    assert len(last) > 3 and ", ".join(str(each.nbytes) for each in last) == sizes
    assert {each.stream for each in last} != {COMPUTE}
    later = log[log.index(last[0]) :]
    assert sum(isinstance(each, Operator) and each.phase.part == "backward" for each in later) > 10
