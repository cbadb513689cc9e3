"""profiler=memory on one rank, step by step, without a run around it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshrunner.runner.measure.device import GIB
from meshrunner.runner.profiler.base import Session
from tests.composed import experiment

CPU = torch.device("cpu")
ONE = ("profiler=memory", "measure_after=0", "profiler.start=1", "profiler.steps=1", "steps=3")


def session(folder: Path, *overrides: str, rank: int = 0, device_type: str = "cpu") -> Session:
    chosen = experiment(*ONE, *overrides)
    context: Any = SimpleNamespace(rank=rank, device_type=device_type, emulated=False)
    return chosen.profiler.session(chosen.profiled, folder, context)


def step(session: Session, number: int, kib: int) -> list[float] | None:
    """Run a step that creates a tensor. A larger one is created after the step, and must not count."""
    session.step_begins()
    made = torch.zeros(kib * 256)
    session.pause()
    torch.zeros(2**20)
    del made
    session.step_begins()
    return session.step_done(number)


def test_peak_covers_only_the_steps_of_the_window(tmp_path: Path) -> None:
    one = session(tmp_path)
    one.started(CPU, 0)
    assert step(one, 1, kib=64) is None
    figures = step(one, 2, kib=16)
    assert figures is not None and figures[0] * GIB == 16 * 1024
    assert step(one, 3, kib=64) is None
    record = json.loads((tmp_path / "trace" / "memory_rank0.json").read_text())
    assert record["peak_live_bytes"] == sum(record["by_category"].values()) == 16 * 1024
    assert record["steps"] == [2, 2] and not record["out_of_memory"]
    nothing = [float("nan")] * len(figures)
    found = one.summary([nothing, figures, [figure / 2 for figure in figures]])
    assert found["memory/peak_live_gib"] * GIB == 16 * 1024, "the rank with the highest peak"
    assert found["memory/live_parameters_gib"] == 0


def test_out_of_memory_inside_the_window_writes_the_profile(tmp_path: Path) -> None:
    one = session(tmp_path)
    one.started(CPU, 0)
    one.out_of_memory()
    assert not (tmp_path / "trace").exists(), "the window has not begun"
    step(one, 1, kib=4)
    one.step_begins()
    kept = torch.zeros(8 * 256)
    one.out_of_memory()
    record = json.loads((tmp_path / "trace" / "memory_rank0.json").read_text())
    assert record["out_of_memory"] and record["peak_live_bytes"] == kept.nbytes


def test_compiled_model_has_no_figure(tmp_path: Path) -> None:
    chosen = experiment(*ONE, "compile=per_block")
    assert "will be null" in chosen.profiler.remarks(chosen.profiled, "cpu", 0)[0]
    assert not chosen.profiler.remarks(chosen.profiled, "cuda", 0)
    one = session(tmp_path, "compile=per_block")
    one.started(CPU, 0)
    step(one, 1, kib=1)
    figures = step(one, 2, kib=1)
    assert figures is not None
    found = one.summary([figures, figures])
    assert "memory/peak_live_gib" in found and set(found.values()) == {None}
    assert json.loads((tmp_path / "trace" / "memory_rank0.json").read_text())["peak_live_bytes"] is None


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls to the CUDA allocator, which need not be there."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **how: calls.append(str(how)))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(Path(path).name))
    return calls


def test_on_cuda_history_is_recorded_from_the_start_to_the_end_of_the_window(
    tmp_path: Path, history: list[str]
) -> None:
    one = session(tmp_path, "profiler.max_entries=7", device_type="cuda")
    assert history == ["{'max_entries': 7}"]
    one.started(CPU, 0)
    assert one.recording, "stacks are recorded from the first step on, so it is slowed"
    assert one.step_done(1) is None and one.recording
    figures = one.step_done(2)
    assert figures is not None and not one.recording
    assert set(one.summary([figures]).values()) == {None}, "the allocator's peak is more precise"
    assert history[1:] == ["memory_rank0.pickle", "{'enabled': None}"]
    one.out_of_memory()
    assert history[3:] == ["memory_rank0_oom.pickle"]


def test_on_cuda_out_of_memory_before_the_model_is_built_writes_the_history(tmp_path: Path, history: list[str]) -> None:
    session(tmp_path, device_type="cuda").out_of_memory()
    session(tmp_path, device_type="cuda", rank=1).out_of_memory()
    assert history[1:] == ["memory_rank0.pickle"], "rank 1 was not chosen"


def test_on_cuda_a_resumed_run_without_room_for_the_window_records_nothing(tmp_path: Path, history: list[str]) -> None:
    one = session(tmp_path, device_type="cuda")
    one.started(CPU, 2)
    assert history[1:] == ["{'enabled': None}"] and not one.recording
