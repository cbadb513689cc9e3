"""Repeat published runs on many GPUs with a single GPU, which emulates one rank of each run (`launch.emulate`)."""

from __future__ import annotations

import os
import re

from bench.gpu import grid
from bench.gpu.commands import REPOSITORY, Commands, outcome, overridden
from bench.gpu.machine import Machine
from bench.gpu.results import Result
from bench.published_rows import ROWS as PUBLISHED
from bench.published_rows import Row
from meshrunner.runner import shipped
from meshrunner.runner.config.hardware import GPU
from meshrunner.runner.rundir import JsonFile
from meshrunner.runner.rundir.files import PLAN

ROWS = [
    row
    for row in PUBLISHED
    if row.reserved_gib is not None
    and (row.source == "PR 165" or (row.source == "titan 2024-12" and "model=llama3_8b" in row.overrides))
]
"""torchtitan's runs in pull request #165, and its runs of December 2024 with Llama 3 8B on 8 and 128 GPUs."""
RANK = 0
STEPS, UNMEASURED = 6, 3
"""Steps of a run, and the number of first steps that are not measured."""
SETTINGS = [
    *(f"launch.emulate={RANK}", f"steps={STEPS}", f"measure_after={UNMEASURED}", "log_every=1", "tracker=none"),
    "+launch.env.PYTORCH_ALLOC_CONF=expandable_segments:False",  # docs/measurements/plan.md compares both kinds of segments
]
TOY = [
    *("model.vocab_size=64", "model.dim=64", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2"),
    *("model.ffn_dim=128", "seq_len=64", "micro_batch=4", "hardware=cpu", "launch.threads=1"),
]
"""Overrides of all runs on a CPU."""


def card(row: Row) -> GPU:
    """Return the type of GPU of a published run."""
    return GPU.model_validate(shipped.values("hardware", _value(row, "hardware", "")))


def devices(row: Row) -> int:
    """Return the number of GPUs of a published run."""
    return int(_value(row, "launch.nodes", "1")) * card(row).devices_per_node


def what(row: Row) -> str:
    """Return the text that identifies a run in its table."""
    seq_len = int(_value(row, "seq_len", ""))
    return f"{row.source}: {row.name}, {seq_len:,} tokens, {devices(row)} GPUs"


def overrides(row: Row, machine: Machine) -> list[str]:
    """Return the arguments of the `meshrunner run` that emulates a rank of a published run. On a CPU, the model is a toy."""
    words = [*row.overrides, f"launch.workers={card(row).devices_per_node}", *SETTINGS]
    if not machine.gpus:
        words += [*TOY, *["precision.emulate=true"] * ("precision=float8" in row.overrides)]
    return overridden(words)


def missing(row: Row, machine: Machine) -> str:
    """Return why a machine cannot repeat a published run, or "" if it can. A GPU of the same type may have less memory."""
    published, memory_gib = card(row), machine.memory_gib
    if memory_gib is not None and not re.search(published.match, machine.name, re.IGNORECASE):
        return f"this row needs the GPU of the published run, {published.name}"
    needed_gib = (row.reserved_gib or 0.0) + published.reserved_elsewhere_gib
    if memory_gib is not None and needed_gib > memory_gib:
        return f"this row needs {needed_gib:.1f} GiB, but this GPU has {memory_gib:.1f} GiB"
    return grid.missing(" ".join(row.overrides), machine, 1)


def emulated(row: Row, number: int, machine: Machine, commands: Commands) -> Result:
    """Emulate a rank of a published run. Return its speed and reserved memory, as measured and as predicted."""
    name = f"emulate-{number:03}"
    run_dir = commands.folder / name
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))  # for tests.titan2024
    words = ["run", *overrides(row, machine), f"hydra.run.dir={run_dir}"]
    ended = commands.meshrunner(name, *words, PYTHONPATH=path)
    found, plan = outcome(run_dir, ended, commands), JsonFile.read(run_dir / PLAN).as_json()
    figures = {
        "wps": found.summary.get("perf/wps_median"),
        "compute_s": found.summary.get("perf/compute_step_time_s_median"),
        "communication_s": found.summary.get("perf/communication_s_median"),
        "reserved_gib": found.summary.get("memory/peak_reserved_gib"),
        "alloc_retries": found.summary.get("memory/alloc_retries"),
        "plan_wps": plan.get("perf/wps"),
        "plan_reserved_gib": plan.get("memory/peak_reserved_gib"),
    }
    return Result("emulate", what(row), found.state, found.reason, found.log, ended.seconds, figures)


def _value(row: Row, key: str, default: str) -> str:
    return next((word.partition("=")[2] for word in reversed(row.overrides) if word.startswith(f"{key}=")), default)
