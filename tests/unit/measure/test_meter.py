"""The meter on a device that runs behind the host: when it waits, what its clock says, and what its rows add up to."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshrunner.runner.measure import meter as meter_module
from meshrunner.runner.measure.device import CudaDevice, HostDevice
from meshrunner.runner.measure.meter import RunMeter
from meshrunner.runner.rundir.events import read_events
from meshrunner.runner.rundir.files import EVENTS, PLAN, SUMMARY, write_json
from tests.composed import experiment

UNIX = 1e9
"""Unix time when the host's clock is 0."""
ISSUE_S, WORK_S, WRITE_S, SAVE_S, PROFILER_S = 0.01, 1.0, 0.25, 30.0, 7.0
"""Seconds: the host issues a step, the device does it; a row is written, a checkpoint, a profiler starts or ends."""
TOKENS, RANKS, WATTS = 600, 3, 400.0


@dataclass
class Device(HostDevice):
    """A stream of work, the host that issues it, and a clock: a stamp is a place in the stream, known once it is reached."""

    host: float = 0.0
    free: float = 0.0
    """When the device has done what was issued so far."""
    waits: list[int] = field(default_factory=list)
    """Steps after which the host waited for the device."""

    def work(self, seconds: float) -> None:
        self.free = max(self.free, self.host) + seconds

    def wait(self) -> None:
        self.host = max(self.host, self.free)

    def stamp(self) -> float:
        return max(self.free, self.host)

    def joules(self) -> float:
        return WATTS * self.host

    def seconds(self, begin: float, end: float) -> float:
        assert max(begin, end) <= self.host, "the device has not come so far"
        return end - begin


class Meter(RunMeter):
    """The meter of rank 0 on such a device, without other ranks."""

    device: Device

    def _on_host(self, steps: list[Any]) -> Any:
        self.device.wait()
        self.device.waits.append(steps[-1].number)
        return super()._on_host(steps)

    def _gather(self, values: list[float]) -> torch.Tensor:
        return torch.tensor([values] * (1 if self.context.emulated else RANKS), dtype=torch.float64)

    def _write(self, row: dict[str, Any]) -> None:
        self.device.host += WRITE_S
        super()._write(row)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    clock = {"perf_counter": lambda: made.host, "time": lambda: UNIX + made.host, "process_time": lambda: made.host}
    monkeypatch.setattr(meter_module, "time", SimpleNamespace(**clock))
    monkeypatch.setattr(meter_module, "HostDevice", lambda: made)
    monkeypatch.setattr(meter_module, "CudaDevice", lambda _: made)
    monkeypatch.setattr(meter_module, "peak_flops", lambda *_: (None, {"device": "a device"}))
    monkeypatch.setattr(meter_module, "add_layout", lambda *_: None)
    return made


def train(
    device: Device,
    folder: Path,
    *overrides: str,
    kind: str = "cuda",
    save_after: tuple[int, ...] = (),
    emulated: bool = False,
    data: dict[str, Any] | None = None,
) -> None:
    """Take all steps of an experiment, of which rows and summary are in the folder."""
    done = [0]
    context = SimpleNamespace(
        rank=0,
        local_rank=0,
        world_size=RANKS,
        attempt=1,
        threads=1,
        steps=done,
        records=True,
        emulated=emulated,
        device_type=kind,
        doing=lambda _: None,
    )
    chosen = experiment(*overrides)
    meter = Meter(chosen, folder, context)  # type: ignore[arg-type]
    meter.device = device
    meter.started(device=torch.device(kind), params=1, describe_data=lambda: data or {})
    for step in range(1, chosen.steps + 1):
        with meter.waiting_for_data():
            pass
        device.host += ISSUE_S
        device.work(WORK_S)
        value = torch.tensor(float(step))
        meter.step_done(step, loss=value, grad_norm=value, lr=1e-3, tokens=TOKENS, observed={})
        if step in save_after:
            with meter.saving():
                assert read_events(folder)[-1]["step"] == step, "rows first"
                device.host += SAVE_S
    assert done == [chosen.steps]
    assert meter.events is not None
    meter.events.close()


def test_flops_count_attention_within_documents(device: Device, tmp_path: Path) -> None:
    train(device, tmp_path, "steps=2", "seq_len=128", data={"document_length": 32.0})
    flops = experiment("seq_len=128").model.flops_per_token(128)
    found = json.loads((tmp_path / SUMMARY).read_text())["model/flops_per_token"]
    assert found == flops.total - flops.attention * 3 // 4
    row = read_events(tmp_path)[-1]
    assert row["perf/tflops"] * 1e12 == pytest.approx(row["perf/wps"] * found)


COMMUNICATION_S = 0.25


@pytest.mark.parametrize("plan", [{"perf/exposed_communication_s": COMMUNICATION_S}, {}])
def test_an_emulated_rank_adds_predicted_communication_and_has_no_loss(
    plan: dict[str, float], device: Device, tmp_path: Path
) -> None:
    write_json(tmp_path / PLAN, plan)
    train(device, tmp_path, "steps=25", "log_every=5")
    real = read_events(tmp_path)[-1]
    (tmp_path / EVENTS).unlink()
    device.host = device.free = 0.0
    train(device, tmp_path, "steps=25", "log_every=5", emulated=True)
    row = read_events(tmp_path)[-1]
    assert row["train/loss"] is row["train/grad_norm"] is row["perf/tokens_per_cpu_s"] is None
    assert row["perf/joules_per_token"] is None
    assert row["train/tokens"] == real["train/tokens"]
    assert row["perf/compute_step_time_s"] == real["perf/step_time_s"] == pytest.approx(WORK_S)
    if not plan:
        assert row["perf/step_time_s"] is row["perf/wps"] is row["perf/communication_s"] is None
        return
    assert row["perf/step_time_s"] == pytest.approx(WORK_S + COMMUNICATION_S)
    assert row["perf/wps"] == pytest.approx(real["perf/wps"] / (1 + COMMUNICATION_S / WORK_S))
    assert row["perf/communication_s"] == COMMUNICATION_S


def adds_up(rows: list[dict[str, Any]], first: int, last: int) -> None:
    """tokens = speed x time, over the steps after `first` up to `last`, both of which end a reading."""
    own = [row for row in rows if first < row["step"] <= last]
    counted = sum(TOKENS / (RANKS * row["perf/wps"]) for row in own)
    saved = sum(row["perf/checkpoint_time_s"] for row in own)
    (begin,), (end,) = ([row["time"] for row in rows if row["step"] == step] for step in (first, last))
    assert end - begin == pytest.approx(counted + saved)


@pytest.mark.parametrize(
    ("kind", "overrides", "waits"),
    [
        ("cuda", ("steps=25",), [1, 10, 20, 25]),
        ("cuda", ("steps=9", "log_every=4"), [1, 4, 8, 9]),
        ("cpu", ("steps=3",), [1, 2, 3]),
    ],
)
def test_the_host_waits_for_the_device_only_to_read_out(
    kind: str, overrides: tuple[str, ...], waits: list[int], device: Device, tmp_path: Path
) -> None:
    train(device, tmp_path, *overrides, kind=kind)
    assert device.waits == waits


def test_a_step_ends_when_the_device_has_done_it(device: Device, tmp_path: Path) -> None:
    """The host issues steps 2 to 10 within a tenth of a second; the device takes a second for each."""
    train(device, tmp_path, "steps=12")
    rows = read_events(tmp_path)
    times = [row["time"] - UNIX for row in rows]
    first = ISSUE_S + WORK_S
    begin = first + WRITE_S + ISSUE_S
    assert times[:10] == pytest.approx([first, *(begin + WORK_S * step for step in range(1, 10))])
    assert [row["perf/step_time_s"] for row in rows[2:10]] == pytest.approx([WORK_S] * 8)


def test_wps_accounts_for_slow_reading_of_metrics(device: Device, tmp_path: Path) -> None:
    train(device, tmp_path, "steps=30", "log_every=5")
    rows = read_events(tmp_path)
    adds_up(rows, 1, 30)
    for end in (15, 20, 25, 30):
        adds_up(rows, end - 5, end)
        took = 5 * (WRITE_S + WORK_S) + ISSUE_S  # the device is idle while the five rows before are written
        assert [row["perf/wps"] for row in rows[end - 5 : end]] == pytest.approx(
            [5 * TOKENS / took / RANKS] * 5, rel=0.01
        )


def test_saving_is_a_figure_of_its_own(device: Device, tmp_path: Path) -> None:
    """In the row of the step that follows, and not in any speed; the last save is followed by none."""
    train(device, tmp_path, "steps=12", "log_every=5", save_after=(7, 12))
    assert device.waits == [1, 5, 7, 10, 12], "before a save all rows are written"
    rows = read_events(tmp_path)
    assert {row["step"]: row["perf/checkpoint_time_s"] for row in rows if row["perf/checkpoint_time_s"]} == {8: SAVE_S}
    adds_up(rows, 1, 12)
    adds_up(rows, 7, 10)
    assert max(TOKENS / (RANKS * row["perf/wps"]) for row in rows) < 3 * (WORK_S + WRITE_S)
    assert json.loads((tmp_path / SUMMARY).read_text())["perf/checkpoint_time_s"] == SAVE_S


def test_energy_per_token_is_the_power_of_all_ranks_by_their_speed(device: Device, tmp_path: Path) -> None:
    train(device, tmp_path, "steps=12", "log_every=5", save_after=(7,))
    rows = read_events(tmp_path)
    for begin, end in ((1, 5), (5, 7), (7, 10), (10, 12)):
        own = rows[begin:end]
        expected = WATTS * sum(1 / row["perf/wps"] for row in own) / len(own)
        assert [row["perf/joules_per_token"] for row in own] == pytest.approx([expected] * len(own))


def test_energy_is_unknown_on_a_cpu(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "joules", HostDevice.joules)
    train(device, tmp_path, "steps=3", kind="cpu")
    assert {row["perf/joules_per_token"] for row in read_events(tmp_path)} == {None}


class Profiler:
    """Takes long to start, before step 4, and to end, after step 6."""

    recording = False

    def __init__(self, device: Device) -> None:
        self.device = device

    def started(self, *_: object) -> None:
        pass

    step_begins = pause = lambda self: None
    waiting_for_data = staticmethod(nullcontext)

    def turns_after(self, step: int) -> bool:
        return step in (3, 6)

    def step_done(self, step: int) -> None:
        if self.turns_after(step):
            assert self.device.host >= self.device.free, "what was issued before belongs to steps that count"
            self.device.host += PROFILER_S
            self.recording = step == 3


def test_what_a_profiler_does_before_and_after_its_window_slows_no_step(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = RunMeter.__init__

    def with_profiler(self: RunMeter, *arguments: Any) -> None:
        init(self, *arguments)
        self.profiler = Profiler(device)  # type: ignore[assignment]

    monkeypatch.setattr(RunMeter, "__init__", with_profiler)
    train(device, tmp_path, "steps=9", "log_every=9")
    rows = read_events(tmp_path)
    assert device.waits == [1, 3, 6, 9]
    assert [row["step"] for row in rows if row.get("profiled")] == [4, 5, 6]
    assert max(TOKENS / (RANKS * row["perf/wps"]) for row in rows) < WORK_S + 3 * WRITE_S


def test_the_clock_of_a_cuda_device_is_events_that_nothing_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        at = 0.0

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            Event.at += 250.0
            self.recorded = Event.at

        def elapsed_time(self, other: Event) -> float:
            return other.recorded - self.recorded

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**30, uuid="1"))
    clock = CudaDevice(torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert clock.seconds(clock.stamp(), clock.stamp()) == 0.25
