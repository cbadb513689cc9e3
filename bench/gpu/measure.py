"""Measure a realistic model in meshrunner, the hand-written loop and torchtitan, and predict its speed with `meshrunner plan`."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from bench.gpu.commands import REPOSITORY, Commands, Ended, outcome, said, shown
from bench.gpu.figures import READ_EVERY, STEPS, Case, overrides, subjects
from bench.gpu.machine import Machine
from bench.gpu.results import Result
from meshrunner.runner.rundir import JsonFile

CALIBRATION_RUNS = 4
"""Minimum number of runs from which a device's rates are fitted."""


def measured(case: Case, number: int, machine: Machine, commands: Commands, keep: Path) -> Result:
    """Train the model of a case with meshrunner. Return speed, memory, start-up time and losses. Copy its trace to `keep`."""
    name = f"figures-{number:03}"
    run_dir = commands.folder / name
    arguments = overrides(case, subjects(machine)[case.subject], machine)
    ended = commands.meshrunner(name, "run", *arguments, f"hydra.run.dir={run_dir}")
    found = outcome(run_dir, ended, commands)
    summary, losses = found.summary, [loss for loss, _ in found.steps]
    figures = {
        "wps": summary.get("perf/wps_median"),
        "mfu": summary.get("perf/mfu_median"),
        "peak_active_gib": summary.get("memory/peak_active_gib"),
        "startup_active_gib": summary.get("memory/startup_peak_active_gib"),
        "first_step_s": found.first_step and found.first_step - ended.begin,
        "parameters": summary.get("model/params"),
        "flops_per_token": summary.get("model/flops_per_token"),
        "peak_tflops": summary.get("peak_tflops"),
        "losses": losses,
        "run_dir": str(run_dir),
    }
    remarks = [found.reason] * bool(found.reason)
    if (stopped := summary.get("perf/checkpoint_time_s")) is not None and "checkpoint=" in case.more:
        remarks.append(f"saving a checkpoint stops training for {stopped:.3f} s")
    for trace in run_dir.glob("trace/rank0.json.gz"):
        remarks.append(f"trace: {shutil.copy(trace, keep / f'{name}-trace.json.gz').name}")
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)  # a checkpoint of the 1B model takes 15 GB
    return Result("figures", case.what, found.state, "; ".join(remarks), found.log, ended.seconds, figures)


def measured_plain(case: Case, number: int, machine: Machine, commands: Commands, peak_tflops: float | None) -> Result:
    """Train a case in the hand-written loop. Return speed, memory, start-up time and losses. MFU is relative to `peak_tflops`."""
    more = [] if machine.gpus else ["--threads", "1", "--device", "cpu"]
    name = f"figures-{number:03}-loop"
    ended, found, reason = _in_loop("plain_loop", name, case, machine, commands, more)
    return _of_loop("loop", case.loop, ended, found, reason, commands, peak_tflops)


def measured_titan(
    case: Case, graphs: str, number: int, machine: Machine, commands: Commands, peak_tflops: float | None
) -> Result:
    """Train a case with torchtitan. graphs: whether torchtitan replays CUDA graphs, `on` or `off`."""
    flavor = subjects(machine)[case.subject].flavor
    name = f"figures-{number:03}-torchtitan"
    more = ["--flavor", flavor, "--cuda-graphs", graphs]
    ended, found, reason = _in_loop("titan", name, case, machine, commands, more)
    return _of_loop("torchtitan", titan_row(case, graphs), ended, found, reason, commands, peak_tflops)


def titan_row(case: Case, graphs: str) -> str:
    return f"{case.loop} cuda_graphs={graphs}"


def _in_loop(
    module: str, name: str, case: Case, machine: Machine, commands: Commands, more: list[str]
) -> tuple[Ended, dict[str, Any], str]:
    """Run a module of bench.gpu.loops. Return the ended command, its measurements, and the reason for its failure or ""."""
    subject = subjects(machine)[case.subject]
    assert subject.shape is not None
    out = commands.folder / f"{name}.json"
    arguments = {
        "shape": json.dumps(subject.shape._asdict()),
        "recompute": case.recompute,
        "compile": case.compile,
        "seq-len": subject.seq_len,
        "micro-batch": subject.micro_batch,
        "steps": STEPS,
        "read-every": READ_EVERY,
        "lr": subject.lr,
        "out": out,
    }
    words = [word for key, value in arguments.items() for word in (f"--{key}", str(value))]
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(commands.folder / "cache" / module)}
    path = {"PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))}
    ended = commands.run(name, sys.executable, "-m", f"bench.gpu.loops.{module}", *words, *more, **caches, **path)
    found = JsonFile.read(out).as_json()
    works = ended.code == 0 and found and "oom" not in found
    return ended, found, "" if works else found.get("oom") or said(ended.log) or f"exit status {ended.code}"


def _of_loop(
    part: str,
    what: str,
    ended: Ended,
    found: dict[str, Any],
    reason: str,
    commands: Commands,
    peak_tflops: float | None,
) -> Result:
    if reason and commands.over:
        return Result(part, what, "not run", "stopped at the end of the bench", shown(ended.log), ended.seconds)
    if reason:
        return Result(part, what, "failed", reason, shown(ended.log), ended.seconds)
    found |= {"first_step_s": found["first_step"] - ended.begin, "peak_tflops": peak_tflops}
    flops = found.get("flops_per_token")
    found["mfu"] = 100 * found["wps"] * flops / (1e12 * peak_tflops) if peak_tflops and flops else None
    return Result(part, what, "works", "", "", ended.seconds, found)


def predicted(case: Case, number: int, machine: Machine, commands: Commands) -> Result:
    """Predict the speed and peak memory of a case on this machine's device with `meshrunner plan`."""
    name = f"plan-{number:03}"
    words = overrides(case, subjects(machine)[case.subject], machine)
    ended = commands.meshrunner(name, "plan", *words, "--json")
    text = ended.log.read_text(errors="replace")
    try:
        found, _ = json.JSONDecoder().raw_decode(text[text.index("{\n") :])  # warnings may follow
    except ValueError:
        state = "not run" if commands.over else "failed"
        return Result("plan", case.what, state, said(ended.log), shown(ended.log), ended.seconds)
    keys = {"wps": "perf/wps", "wps_error_pct": "perf/error_pct", "peak_active_gib": "memory/peak_active_gib"}
    return Result(
        *("plan", case.what, "works", "", "", ended.seconds),
        figures={name: found.get(key) for name, key in keys.items()},
    )


def calibrated(runs: list[str], commands: Commands, keep: Path) -> Result:
    """Fit the rates of this machine's device to runs, given as run directories. Write the rates to `keep`/hardware.yaml."""
    if len(runs) < CALIBRATION_RUNS:
        return Result("proofs", "calibrate", "not run", f"needs {CALIBRATION_RUNS} runs, but found {len(runs)}")
    out = keep / "hardware.yaml"
    ended = commands.meshrunner("calibrate", "calibrate", *runs, "--force", "--out", str(out))
    if ended.code == 0:
        return Result("proofs", "calibrate", "works", f"{len(runs)} runs, {out.name}", "", ended.seconds)
    state = "not run" if commands.over else "failed"
    return Result("proofs", "calibrate", state, said(ended.log), shown(ended.log), ended.seconds)
