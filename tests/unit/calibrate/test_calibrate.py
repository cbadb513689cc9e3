"""`meshrunner calibrate` finds the constants behind planted speeds, and refuses runs that determine too little."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshrunner.runner import cli
from meshrunner.runner.calibrate.fit import MeasuredRun, constant, fit, leave_one_out_errors, scaled
from meshrunner.runner.config.devices import expected_devices
from meshrunner.runner.config.hardware import CPU, GPU, CPUSpeed
from meshrunner.runner.ledger.allocations import Phase
from meshrunner.runner.predict.record.trace_events import Collective, EventRecorded, Operator, StreamWaitedForEvent
from meshrunner.runner.predict.timing.rates import CPURates, GPURates
from meshrunner.runner.predict.timing.simulated_clock import SimulatedClock
from meshrunner.runner.predict.workload import trace_workload
from tests.composed import config, experiment
from tests.run_dirs import write

SETUP = (
    "hardware=h100_80gb",
    "data=random",
    "precision=bf16",
    "model.n_layers=2",
    "model.n_heads=4",
    "model.n_kv_heads=4",
)
WIDE = ("model.dim=8192", "model.ffn_dim=28672", "seq_len=512", "micro_batch=8")
"""Matmuls take most of the time."""
NARROW = ("model.dim=512", "model.ffn_dim=1024", "seq_len=4096", "micro_batch=16")
"""Memory-bound operators take most of the time."""
COMBINATIONS = {
    "wide": WIDE,
    "wide, full": (*WIDE, "activation_checkpoint=full"),
    "narrow": NARROW,
    "narrow, full": (*NARROW, "activation_checkpoint=full"),
}
PLANTED = {"efficiency.matmul": 1.3, "efficiency.memory": 0.8}


@cache
def observed(name: str) -> MeasuredRun:
    """A combination as fast as PLANTED makes it."""
    run = experiment(*SETUP, *COMBINATIONS[name])
    device = expected_devices(run)
    assert device.hardware is not None
    workload = trace_workload(run, device)
    return MeasuredRun(name, workload, workload.wps(scaled(device.hardware, PLANTED)))


@cache
def hardware() -> GPU:
    found = experiment(*SETUP).hardware
    assert isinstance(found, GPU)
    return found


@pytest.mark.slow(sampled=True)
def test_planted_constants_are_found() -> None:
    runs = [observed(name) for name in COMBINATIONS]
    assert max(abs(each.workload.wps(hardware()) / each.wps - 1) for each in runs) > 0.1
    fitted = fit(hardware(), runs)
    assert fitted.tells_apart
    for each in runs:
        assert each.workload.wps(fitted.hardware) == pytest.approx(each.wps, rel=0.01)
    for key, factor in PLANTED.items():
        assert constant(fitted.hardware, key) == pytest.approx(factor * constant(hardware(), key), rel=0.1)
    assert fitted.unknown["efficiency.matmul"] < 0.3 and fitted.unknown["efficiency.contention"] > 0.9
    assert max(map(abs, leave_one_out_errors(hardware(), runs, fitted))) < 3


def test_similar_runs_cannot_separate_constants() -> None:
    fitted = fit(hardware(), [observed("wide"), observed("wide, full")])
    assert not fitted.tells_apart


def test_no_constant_leaves_its_bounds() -> None:
    faster = scaled(hardware(), {"efficiency.matmul": 5.0, "efficiency.attention": 2.0})
    assert constant(faster, "efficiency.matmul") == 1.0
    assert constant(faster, "efficiency.attention_backward") == pytest.approx(
        2 * hardware().efficiency.attention_backward
    )
    too_fast = [each._replace(wps=10 * each.wps) for each in (observed("wide"), observed("narrow"))]
    assert constant(fit(hardware(), too_fast).hardware, "efficiency.matmul") <= 1.0


SPEED = CPUSpeed(
    fp32_tflops=0.1,
    bf16_tflops=None,
    attention=0.5,
    memory_bandwidth=10,
    operator_s=1e-3,
    link_bandwidth=1,
    collective_s=5e-3,
    jitter=0.01,
)


def test_nothing_overlaps_on_a_processor() -> None:
    clock = SimulatedClock(CPURates(CPU(kind="cpu", speed=SPEED)))
    forward = Phase(0, "forward", 0)
    clock.take(Operator("aten::mm", "matmul", 0, forward, 10**9, "float32", 1000))  # 10 ms and 1
    clock.take(EventRecorded(0, 0))
    clock.take(Collective("all_gather", 2, forward, (0, 1), 10**7))  # 10 ms and 5
    clock.take(Collective("all_reduce", 2, forward, (0, 1), 10**7))  # 20 ms and 5, for which nobody has to be waited
    clock.take(Collective("all_reduce", 2, forward, (0,), 10**7))
    clock.take(Operator("aten::copy_", "memory", 1, forward, 0, "float32", 10**8))  # 10 ms and 1
    clock.take(StreamWaitedForEvent(0, 0))
    timed = clock.step_time()
    waited = 0.01 * 0.011**0.5 * 0.589  # the larger of two standard normals is 0.56 on average
    assert timed.seconds == pytest.approx(62e-3 + waited, abs=1e-6)
    assert timed.exposed_communication_s == pytest.approx(40e-3 + waited, abs=1e-6)


def test_ranks_wait_for_the_slowest() -> None:
    of_cpu = CPURates(CPU(kind="cpu", speed=SPEED))
    assert of_cpu.waiting_s(1, 1.0) == 0
    assert of_cpu.waiting_s(2, 1.0) == pytest.approx(0.01 / math.pi**0.5, rel=0.05)
    assert of_cpu.waiting_s(4, 1.0) == pytest.approx(0.01 * 1.0294, rel=0.05)
    assert of_cpu.waiting_s(4, 4.0) == 2 * of_cpu.waiting_s(4, 1.0)
    assert GPURates(hardware(), "tf32", 8).waiting_s(4, 1.0) == 0


def test_zero_constants_stay_zero() -> None:
    efficiency = hardware().efficiency.model_copy(update={"contention": 0.0, "host_s": 0.0})
    ideal = hardware().model_copy(update={"efficiency": efficiency})
    fitted = fit(ideal, [observed("wide"), observed("narrow")])
    assert constant(fitted.hardware, "efficiency.contention") == constant(fitted.hardware, "efficiency.host_s") == 0
    assert set(fitted.unknown) == {"efficiency.matmul", "efficiency.memory", "efficiency.attention"}


def test_runs_in_bf16_only() -> None:
    def device(tflops: float) -> CPU:
        return CPU(kind="cpu", speed=SPEED.model_copy(update={"fp32_tflops": None, "bf16_tflops": tflops}))

    runs = [observed(name) for name in COMBINATIONS]
    runs = [each._replace(wps=each.workload.wps(device(0.3))) for each in runs]
    fitted = fit(device(0.2), runs)
    assert constant(fitted.hardware, "speed.bf16_tflops") == pytest.approx(0.3, rel=0.1)
    assert isinstance(fitted.hardware, CPU) and fitted.hardware.speed and fitted.hardware.speed.fp32_tflops is None
    assert "speed.bf16_tflops" in fitted.unknown and "speed.fp32_tflops" not in fitted.unknown


def run_of(folder: Path, name: str, **changed: Any) -> Path:
    """The directory of a run that was as fast as PLANTED makes it."""
    made = folder / name.replace(", ", "_")
    made.mkdir(parents=True)
    (made / "config.yaml").write_text(yaml.safe_dump(config(*SETUP, *COMBINATIONS[name])))
    (made / "overrides.yaml").write_text(yaml.safe_dump({"task": [], "choices": {}}))
    write(made / "status.json", {"state": "completed", "reason": "", "attempt": 1, "started": 1.0})
    summary = {"device": "NVIDIA H100 80GB HBM3", "device_memory_gib": 79.11, "perf/wps_median": observed(name).wps}
    write(made / "summary.json", summary | changed)
    write(made / "environment.json", {"device_type": "cuda", "workers": 8, "threads": 4})
    return made


def calibrated(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert cli._dispatch(["calibrate", *map(str, arguments)]) == code
    said = capsys.readouterr()
    return said.err if code else said.out


@pytest.mark.slow
def test_calibrated_file_is_used_by_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMBINATIONS:
        run_of(tmp_path / "runs", name)
    file = tmp_path / "conf" / "hardware" / "ours.yaml"
    failed = run_of(tmp_path / "failed", "narrow", **{"perf/wps_median": None})
    write(failed / "config.yaml", config(*SETUP, *NARROW, "max_grad_norm=null"))
    found = json.loads(calibrated(capsys, tmp_path / "runs", failed, "--json", "--out", file))
    assert [why for why in found["left_out"].values() if "no speed was measured" in why], found["left_out"]
    assert file.read_text().startswith("# Fitted to 4 measured combinations")
    assert [abs(each["error_pct"]) < 1 for each in found["runs"]] == [True] * 4
    assert found["hardware"]["calibrated"]["runs"] == 4
    chosen = ("--config-dir", str(tmp_path / "conf"), "hardware=ours")
    assert cli._dispatch(["plan", *chosen, *SETUP[1:], *WIDE, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["perf/calibrated"] is True
    assert planned["perf/error_pct"] == found["hardware"]["calibrated"]["error_pct"]
    assert planned["perf/wps"] == pytest.approx(observed("wide").wps, rel=0.02)
    assert cli._dispatch(["plan", *chosen, *SETUP[1:], *WIDE]) == 0
    assert "speed: calibrated; " in capsys.readouterr().out


@pytest.mark.slow
def test_insufficient_or_wrong_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = run_of(tmp_path / "alike", "wide")
    assert "found 1 combination with a measured speed, but at least 2 are needed" in calibrated(capsys, wide, code=2)
    run_of(tmp_path / "alike", "wide, full")
    out = tmp_path / "alike.yaml"
    refused = calibrated(capsys, tmp_path / "alike", "--out", out, code=2)
    assert "cannot separate matmul speed from memory bandwidth" in refused and not out.exists()
    text = calibrated(capsys, tmp_path / "alike", "--out", out, "--force")
    assert "efficiency.matmul" in text and "0.48" in text and out.exists(), text
    failed = run_of(tmp_path / "failed", "narrow", **{"perf/wps_median": None})
    assert "no speed was measured" in calibrated(capsys, failed, code=2)
    other = run_of(tmp_path / "other", "narrow", device="NVIDIA H200")
    write(other / "config.yaml", config("hardware=h200", *SETUP[1:], *NARROW))
    assert "used different devices" in calibrated(capsys, wide, other, code=2)
    write(other / "config.yaml", config(*SETUP, *NARROW, "hardware.memory_bandwidth=2000"))
    assert "different values of hardware.memory_bandwidth" in calibrated(capsys, wide, other, code=2)
    unknown = run_of(tmp_path / "unknown", "narrow")
    write(unknown / "environment.json", {})
    assert "do not name its devices" in calibrated(capsys, unknown, code=2)
    for damage, why in (({"perf/wps_median": -5.0}, "no speed was measured"),):
        damaged = run_of(tmp_path / "damaged", "narrow", **damage)
        assert why in calibrated(capsys, damaged, code=2)
    (tmp_path / "a_file").write_text("")
    below = calibrated(capsys, tmp_path / "alike", "--force", "--out", tmp_path / "a_file" / "x.yaml", code=2)
    assert "cannot be written: " in below and below.endswith(f"'{tmp_path / 'a_file'}'\n")
    assert "--out: /proc/no/file cannot be written" in calibrated(
        capsys, tmp_path / "alike", "--force", "--out", "/proc/no/file", code=2
    )
    assert "--out: expected FILE, got an empty string" in calibrated(capsys, tmp_path / "alike", "--out", "", code=2)
    assert "neither a run nor a sweep" in calibrated(capsys, tmp_path, code=2)
    assert "unrecognized arguments: --frce" in calibrated(capsys, wide, "--frce", code=2)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf"), None])
def test_a_processor_without_a_rate_is_left_out(
    rate: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path, "narrow", device="a processor", peak_tflops=rate, peak_rate="fp32")
    write(run / "environment.json", {"device_type": "cpu", "workers": 8, "threads": 1})
    write(run / "config.yaml", config("hardware=cpu", *SETUP[1:], *NARROW))
    said = calibrated(capsys, run, code=2)
    assert "the run did not measure the matmul rate of its CPU" in said and "Traceback" not in said
