"""Tests that train a small model: combinations of options (the grid), resuming a run, and running out of memory."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from bench.gpu.commands import Commands, Outcome, outcome, overridden, shown
from bench.gpu.grid import LEAVES, Steps, differs, reference_of
from bench.gpu.machine import Machine
from bench.gpu.results import Result
from meshrunner.runner.rundir.files import CONFIG

STEPS = 8
OUT_OF_MEMORY = "a sweep in which memory runs out"


class Small(NamedTuple):
    """The small model that all tests of this module train. All tests share the overrides `common`."""

    machine: Machine
    common: list[str]

    @classmethod
    def on(cls, machine: Machine) -> Small:
        """Return the small model for a machine. On a CPU, it is so small that a test takes seconds."""
        common = ["data=random", f"steps={STEPS}", "measure_after=2", "global_batch=4", "micro_batch=1", "tracker=none"]
        common += ["sweep.preflight=off"]  # predicting all rows would take minutes
        if machine.gpus:
            limits = ["launch.start_timeout_minutes=2", "launch.timeout_minutes=1"]
            return cls(machine, [*common, *limits, "model.n_layers=2", "model.n_kv_heads=4"])
        shape = {"dim": 32, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64, "vocab_size": 304}
        common += [f"model.{key}={value}" for key, value in shape.items()]
        return cls(machine, [*common, "seq_len=16", "hardware=cpu", "launch.threads=1"])

    def overrides(self, row: str, devices: int | None = None) -> list[str]:
        """Return all overrides of a row's command."""
        words = row.split()
        more = ["model.n_layers=2"] if "model=moe_tiny" in words else []  # the first layer has no experts
        if self.machine.gpus and "compile=whole_model" in words:
            more.append("launch.start_timeout_minutes=4")
        more += ["precision.emulate=true"] if "precision=float8" in words and not self.machine.gpus else []
        more += [f"loss.tokens={85 if self.machine.gpus else 5}"] if "loss=chunked" in words else []  # several chunks
        workers = 1 if "parallelism=single" in words else devices or self.machine.pair
        common = [each for each in self.common if "model=hybrid_tiny" not in words or "model.n_layers=" not in each]
        return overridden([*common, f"launch.workers={workers}", *words, *more])


def grid_row(
    row: str, number: int, small: Small, commands: Commands, lane: dict[str, str], reference: Steps, devices: int | None
) -> Result:
    """Run a row of the grid. The row fails if a file in LEAVES is missing or a step differs from a non-empty `reference`."""
    name = f"row-{number:03}"
    run_dir = commands.folder / name
    arguments = ["run", *small.overrides(row, devices), f"hydra.run.dir={run_dir}"]
    ended = commands.meshrunner(name, *arguments, **lane)
    found = outcome(run_dir, ended, commands)
    if found.state == "works":
        reason = differs(row, found.steps, reference or found.steps) or _missing(row, run_dir)
        found = found._replace(state="failed", reason=reason, log=shown(run_dir)) if reason else found
        if not reason and not reference and row != reference_of(row):
            found = found._replace(reason="not compared: the reference did not run")
    result = _result("grid", row, found, ended.seconds)
    if row == reference_of(row):
        result.figures["steps"] = found.steps
    return result


def _missing(row: str, run_dir: Path) -> str:
    wanted = [pattern for option, pattern in LEAVES.items() if option in row.split()]
    return next((f"it wrote no {pattern}" for pattern in wanted if not list(run_dir.glob(pattern))), "")


def resumed_row(options: str, small: Small, commands: Commands, lane: dict[str, str], reference: Steps) -> Result:
    """Train half of the steps with checkpoints, then resume the run. All losses and gradient norms must match `reference`."""
    name, what = "-".join(["resume", *(word.partition("=")[2] for word in options.split())]), f"resume, {options}"
    run_dir = commands.folder / name
    row = f"precision=fp32 {options} checkpoint.every={STEPS // 4} steps={STEPS // 2}"
    first = commands.meshrunner(name, "run", *small.overrides(row), f"hydra.run.dir={run_dir}", **lane)
    found = outcome(run_dir, first, commands)
    if found.state != "works":
        return _result("proofs", what, found, first.seconds)
    config = run_dir / CONFIG
    config.write_text(config.read_text().replace(f"\nsteps: {STEPS // 2}\n", f"\nsteps: {STEPS}\n"))
    second = commands.meshrunner(name, "resume", str(run_dir), **lane)
    found = outcome(run_dir, second, commands)
    if found.state == "works":
        wrong = differs(row, found.steps, reference or found.steps)
        begun_again = len(found.steps) != STEPS or "continues after step" not in second.log.read_text(errors="replace")
        reason = wrong or ("it did not continue from its checkpoint" if begun_again else "")
        saves = f"saving a checkpoint stops training for {found.summary['perf/checkpoint_time_s']:.3f} s"
        found = (
            found._replace(state="failed", reason=reason, log=shown(second.log))
            if reason
            else found._replace(reason=saves)
        )
    return _result("proofs", what, found, first.seconds + second.seconds)


def out_of_memory_row(small: Small, commands: Commands) -> Result:
    """Run a sweep of three batch sizes. Only the second one may run out of memory: its logits take twice the device memory."""
    vocab, seq_len = (65536, 4096) if small.machine.gpus else (65536, 64)
    limit_gib = small.machine.memory_gib or 1.0
    most = int(2 * limit_gib * 2**30 / (4 * vocab * seq_len))
    row = f"parallelism=fsdp2 precision=fp32 model.vocab_size={vocab} seq_len={seq_len} global_batch=null"
    words = small.overrides(row, 1)
    words += [] if small.machine.gpus else [f"launch.host_memory_gib={limit_gib:g}"]
    sweep = commands.folder / "out-of-memory"
    batches = f"micro_batch=1,{most},2"
    ended = commands.meshrunner("out-of-memory", "run", "-m", *words, batches, f"hydra.sweep.dir={sweep}")
    found = [
        outcome(run_dir, ended, commands) for run_dir in sorted(each.parent for each in sweep.glob("*/config.yaml"))
    ]
    what = OUT_OF_MEMORY
    if ended.code is None or len(found) != 3:
        return _result("proofs", what, outcome(sweep, ended, commands), ended.seconds)
    states = [each.reason.partition(":")[0] if each.reason else "completed" for each in found]
    right = states == ["completed", "oom", "completed"]
    wrong = "" if right else f"the runs are {', '.join(states)}; expected completed, oom, completed. "
    return Result(
        "proofs",
        what,
        "works" if right else "failed",
        wrong + found[1].reason,
        "" if right else found[1].log,
        ended.seconds,
    )


def _result(part: str, what: str, found: Outcome, seconds: float) -> Result:
    keys = ("memory/peak_active_gib", "memory/startup_peak_active_gib", "perf/time_to_first_step_s", "train/final_loss")
    figures = {key: found.summary.get(key) for key in keys}
    return Result(part, what, found.state, found.reason, found.log, seconds, figures)
