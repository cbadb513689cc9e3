"""Predictions of pipelines: which ranks are traced, how long they wait, and which rank's memory is answered."""

from __future__ import annotations

import gc

import pytest
import torch

from meshrunner.recipes.model import transformer
from meshrunner.recipes.parallelism.pipeline.order import idle_share, passes_by_rank
from meshrunner.recipes.parallelism.pipeline.pipeline import Pipeline
from meshrunner.recipes.parallelism.pipeline.stages import SCHEDULES
from meshrunner.runner.config.devices import expected_devices
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.predict.forecast import Forecast
from meshrunner.runner.predict.predict import predict
from meshrunner.runner.predict.record.trace_events import Collective, Operator, PipelinePass
from meshrunner.runner.predict.timing.pipelined import traced_ranks
from meshrunner.runner.predict.timing.rates import GPURates
from meshrunner.runner.predict.timing.simulated_clock import SimulatedClock
from meshrunner.runner.predict.trace.depth import step_peak
from meshrunner.runner.predict.trace.tracer import Trace, trace_recipe
from meshrunner.runner.predict.workload import trace_run, trace_workload
from tests.composed import experiment
from tests.unit.predict.test_clock import gpu, product

SMALL = ("model.dim=64", "model.vocab_size=512", "model.ffn_dim=128", "seq_len=32", "micro_batch=1", "data=random")


def recipe(*overrides: str) -> Experiment:
    return experiment(*SMALL, "parallelism=fsdp2_pp", "parallelism.pipeline=4", *overrides)


SPLIT = "parallelism.pipeline_split"


@pytest.mark.parametrize(
    ("overrides", "alike"),
    [
        (f"model.n_layers=8 {SPLIT}=[2,2,2,2]", (0, 1, 1, 3)),
        (f"model.n_layers=8 {SPLIT}=[2,3,2,1]", (0, 1, 2, 3)),
        # Every second block is recomputed, so stages of two blocks are alike, but stages of three blocks are not.
        (f"model.n_layers=8 {SPLIT}=[2,2,2,2] activation_checkpoint=selective_layer", (0, 1, 1, 3)),
        (f"model.n_layers=9 {SPLIT}=[2,3,3,1] activation_checkpoint=selective_layer", (0, 1, 2, 3)),
        # A pattern names a block, so blocks may differ.
        (f"model.n_layers=8 {SPLIT}=[2,2,2,2] model.freeze=[layers.3.*]", (0, 1, 2, 3)),
        (f"model.n_layers=8 {SPLIT}=[1,1,1,1,1,1,1,1] parallelism.pipeline_schedule=interleaved_1f1b", (0, 1, 1, 3)),
        # Under zbv, the last ranks hold most micro batches. Under dualpipe_v, ranks split the backward of other micro batches.
        (f"model.n_layers=8 {SPLIT}=[1,1,1,1,1,1,1,1] parallelism.pipeline_schedule=zbv", (0, 1, 2, 3)),
    ],
)
def test_a_rank_of_each_kind_is_traced(overrides: str, alike: tuple[int, ...]) -> None:
    found = traced_ranks(recipe(*overrides.split()), 8, 8, None)
    assert found is not None and found.alike == alike and found.neighbours == 2


def test_an_emulated_rank_is_traced_itself() -> None:
    found = traced_ranks(recipe("model.n_layers=8", "parallelism.pipeline_split=[2,2,2,2]"), 8, 8, 5)
    assert found is not None and found.alike == (0, 2, 2, 3) and found.traced == {0: 0, 2: 5, 3: 6}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_wait_as_the_order_says(name: str, ranks: int) -> None:
    """If a forward takes 1 ms, and a backward twice as long, the predicted wait is the computed wait plus that for transfers."""
    schedule, micro_batches = SCHEDULES[name], 4 * ranks
    traced = traced_ranks(
        recipe("model.n_layers=8", f"parallelism.pipeline={ranks}", f"parallelism.pipeline_schedule={name}"),
        *(ranks, micro_batches, None),
    )
    assert traced is not None
    clocks, order = [], passes_by_rank(schedule, ranks, schedule.stages, micro_batches)
    for passes in (order[rank] for rank in traced.traced):
        clock = SimulatedClock(GPURates(gpu(), "tf32", 8))
        clocks.append(clock)
        for each in passes:
            this = PipelinePass(each.name, each.stage, each.micro_batch, begins=True)
            for event in (this, product(each.cost), this._replace(begins=False)):
                clock.take(event)
    step, work = traced.step_time(clocks, exchanged=0), 3e-3 * schedule.stages * micro_batches
    waits = idle_share(schedule, ranks, schedule.stages, micro_batches) * work
    assert step.pipeline_idle_pct is not None
    latency = 8e-6 * 4 * (micro_batches + ranks)
    waited = step.pipeline_idle_pct / 100 * step.seconds
    assert waits * 0.999 <= waited * work / step.seconds <= waits + latency
    assert step.seconds - work == pytest.approx(step.exposed_communication_s)


def planned(*overrides: str) -> Forecast:
    two = ("hardware=h100_80gb", "launch.workers=2", "parallelism.pipeline=2", "model.n_layers=2")
    chosen = recipe(*two, *overrides)
    return predict(chosen, expected_devices(chosen))


@pytest.mark.slow
def test_the_rank_with_most_memory_is_answered() -> None:
    """Under gpipe, the last rank keeps the logits of all micro batches. Under 1f1b, the first rank keeps more activations."""
    last = planned("parallelism.pipeline_schedule=gpipe", "global_batch=4", "model.vocab_size=4096")
    assert last.rank == 1 and last.as_json()["rank"] == 1 and last.verdict.answer == "fits"
    first = planned("global_batch=8", "micro_batch=2", "seq_len=512")
    second = planned("global_batch=8", "micro_batch=2", "seq_len=512", "launch.emulate=1")
    assert first.rank == 0 and second.rank == 1
    assert first.memory and first.memory.peak_reserved_gib and second.memory and second.memory.peak_reserved_gib
    assert first.memory.peak_reserved_gib > second.memory.peak_reserved_gib
    assert first.speed and second.speed and first.speed.wps == pytest.approx(second.speed.wps)
    assert first.speed.pipeline_idle_pct


def test_a_rank_stands_for_ranks_that_hold_fewer_micro_batches() -> None:
    chosen = recipe("model.n_layers=4", f"{SPLIT}=[1,1,1,1]", "global_batch=4", "launch.workers=4")
    first, second = (trace_recipe(chosen, rank, nodes=1, workers=4, device_type="cpu") for rank in (1, 2))
    assert step_peak(second).total < step_peak(first).total


def counted(trace: Trace, kind: type[Operator | Collective], name: str) -> int:
    """Return how many matmuls or all-gathers the last step has."""
    return sum(
        isinstance(each, kind) and each.phase.step == trace.last_step and name in (each.name, getattr(each, "kind", ""))
        for each in trace.events
    )


@pytest.mark.slow_but("1f1b")
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_multiplies_no_more_than_one_process_and_gathers_once(name: str) -> None:
    """Summed over ranks, a step has as many matmuls as without a pipeline. A unit that is not freed is gathered once."""
    alone = experiment(*SMALL, "parallelism=single", "model.n_layers=4", "global_batch=2")
    per_micro_batch = counted(trace_recipe(alone, nodes=1, workers=1, device_type="cpu"), Operator, "matmul") / 2
    assert per_micro_batch > 4 * 3 * 7
    small = ("model.n_layers=4", "global_batch=8", "parallelism.reshard_after_forward=never")
    chosen = recipe(*small, "parallelism.pipeline=2", f"parallelism.pipeline_schedule={name}")
    traces = [trace_recipe(chosen, rank, nodes=1, workers=4, device_type="cpu") for rank in (0, 2)]
    assert sum(counted(each, Operator, "matmul") for each in traces) == 4 * per_micro_batch
    # The units are the embedding, four blocks, the output projection, and the norm before it.
    assert sum(counted(each, Collective, "all_gather") for each in traces) == 7


def test_an_error_in_a_stage_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would raise a RuntimeError instead, also for memory that ran out."""

    def fails(*_: object) -> None:
        raise TypeError("of this stage") from torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(transformer.Block, "forward", fails)
    with pytest.raises(TypeError, match="of this stage") as caught:
        trace_recipe(recipe("parallelism.pipeline=2", "model.n_layers=2"), nodes=1, workers=2, device_type="cpu")
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_gradients_of_weights_are_no_work_of_the_optimizer() -> None:
    chosen = recipe("parallelism.pipeline_schedule=zbv", "parallelism.reshard_after_forward=never", "model.n_layers=8")
    trace = trace_recipe(chosen, nodes=1, workers=4, device_type="cpu")
    parts = {each.phase.part for each in trace.events if isinstance(each, Operator) and each.kind == "matmul"}
    assert parts <= {"forward", "loss", "backward", "end of backward"}
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Pipeline], "the traced model is freed"


@pytest.mark.slow
def test_an_emulated_rank_waits_for_nobody() -> None:
    chosen = recipe("hardware=h100_80gb", "launch.workers=4", "model.n_layers=4", "launch.emulate=3")
    device = expected_devices(chosen)
    assert device.hardware is not None
    alone, together = trace_workload(chosen, device), trace_run(chosen, device, shallow=True)[0]
    assert 0 < alone.step_time(device.hardware).seconds < together.step_time(device.hardware).seconds


def test_blocks_keep_their_numbers() -> None:
    """Every second block of the whole model is recomputed, not of a stage."""
    chosen = recipe(
        "parallelism.pipeline=2", "model.n_layers=6", f"{SPLIT}=[3,3]", "activation_checkpoint=selective_layer"
    )
    trace = trace_recipe(chosen, 1, nodes=1, workers=2, device_type="cpu")
    recomputed = {
        each.phase.block
        for each in trace.events
        if isinstance(each, Operator) and each.kind == "attention" and each.phase.part == "backward"
    }
    assert recomputed == {block for block in range(3, 6) if chosen.activation_checkpoint.recomputes(block)} != set()
