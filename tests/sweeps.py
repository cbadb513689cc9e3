"""
Sweeps made by hand, of the sizes that a page has to show: figures that depend on the settings as those of real runs do.

    python -m tests.sweeps FOLDER ROWS     a sweep directory with that many rows: 4, 12, 60 or 200
"""

from __future__ import annotations

import math
import random
import sys
from itertools import product
from pathlib import Path
from typing import Any

from tests.run_dirs import make_run

LAYOUTS = ("fsdp1", "fsdp2")
RECOMPUTE = ("none", "full", "selective_op")
GRIDS: dict[int, dict[str, tuple[Any, ...]]] = {
    4: {"parallelism": LAYOUTS, "activation_checkpoint": RECOMPUTE[:2]},
    12: {"parallelism": LAYOUTS, "activation_checkpoint": RECOMPUTE, "seq_len": (2048, 4096)},
    60: {
        "parallelism": LAYOUTS,
        "activation_checkpoint": RECOMPUTE,
        "launch.nodes": (1, 2, 4, 8, 16),
        "optimizer.lr": (1e-3, 3e-4),
    },
    200: {
        "parallelism": LAYOUTS,
        "activation_checkpoint": RECOMPUTE[:2],
        "launch.nodes": (1, 2, 4, 8, 16),
        "optimizer.lr": (1e-3, 5e-4, 2e-4, 1e-4, 5e-5),
        "parallelism.prefetch": (0, 2),
    },
}
"""Rows -> the settings that vary."""
PER_NODE = 8
DEVICE_GIB = 80.0


def make_sweep(folder: Path, rows: int, *, repeats: int = 1, steps: int = 100) -> Path:
    """Write the runs of a grid, with one that failed, one that has not begun, and those that do not fit out of memory."""
    grid = GRIDS[rows]
    for number, values in enumerate(product(*grid.values())):
        settings = dict(zip(grid, values, strict=True))
        for repeat in range(repeats):
            name = f"{number:03}_{'_'.join(f'{key}-{value}' for key, value in settings.items())}_repeat-{repeat}"
            _run(folder / name, settings, random.Random(f"{values} {repeat}"), steps, number)
    return folder


def _run(folder: Path, settings: dict[str, Any], noise: random.Random, steps: int, number: int) -> None:
    nodes, length = settings.get("launch.nodes", 1), settings.get("seq_len", 2048)
    fsdp2, recompute = settings["parallelism"] == "fsdp2", settings["activation_checkpoint"]
    speed = 9000 * (1.03 if fsdp2 else 1) * {"none": 1, "selective_op": 0.92, "full": 0.79}[recompute]
    speed *= 0.97 ** math.log2(nodes) * (1 - length / 40960) * (1.01 if settings.get("parallelism.prefetch") else 1)
    activations = {"none": 60.0, "selective_op": 36.0, "full": 14.0}[recompute] * length / 2048
    active = activations + (26 - fsdp2) / nodes + 3 * bool(settings.get("parallelism.prefetch"))
    ranks = nodes * PER_NODE
    state, reason = "completed", ""
    if active * 1.1 > DEVICE_GIB:
        state, reason = "oom", f"rank {noise.randrange(ranks)}: CUDA out of memory, 2.00 GiB wanted"
    elif number == 7:
        state, reason = "failed", "rank 3: RuntimeError: NCCL error: unhandled system error"
    elif number == 11:
        state, reason = "pending", ""
    overrides = [f"{key}={value}" for key, value in settings.items()]
    environment = {
        "command": ["meshrunner", "run", "-m", "model=llama3_8b"],
        "git_commit": "6c0d4bf3" * 5,
        "packages": {"torch": "2.13.0", "meshrunner": "1.0"},
        "host": f"node{noise.randrange(16):02}",
    }
    if state != "completed":
        first = 5 if state == "failed" else 0
        losses = [9.0 - 0.05 * step for step in range(first)] or None
        make_run(folder, *overrides, wps=None, losses=losses, state=state, reason=reason, environment=environment)
        return
    wps = speed * noise.gauss(1, 0.004)
    per_step = 4 * length / wps
    times = [per_step * (1 + abs(noise.gauss(0, 0.02)) + 0.4 * (noise.random() < 0.01)) for _ in range(steps)]
    decay = 3e3 * settings.get("optimizer.lr", 1e-3)
    losses = [2.4 + 7 * math.exp(-decay * step / steps) + 0.05 * math.sin(step * 1.7) for step in range(steps)]
    if fsdp2:
        losses = [loss * (1 + noise.gauss(0, 2e-6)) for loss in losses]
    slow = noise.randrange(ranks)
    mean = sum(times) / len(times)
    summary = {
        "perf/wps_median": wps,
        "perf/wps_p10": wps * 0.985,
        "perf/wps_p90": wps * 1.009,
        "perf/mfu_median": 40.3 * wps / 9300,
        "perf/step_time_s_median": mean,
        "memory/peak_active_gib": active,
        "memory/peak_active_pct": 100 * active / DEVICE_GIB,
        "memory/peak_reserved_gib": active * 1.08,
        "memory/peak_reserved_pct": 108 * active / DEVICE_GIB,
        "train/final_loss": losses[-1],
        "device": "NVIDIA H100 80GB HBM3",
        "device_memory_gib": DEVICE_GIB,
        "world_size": ranks,
        "perf/step_time_s_by_rank": [mean * (1 + 0.002 * noise.random() + 0.03 * (r == slow)) for r in range(ranks)],
        "memory/peak_active_gib_by_rank": [active * (1 - 0.03 * noise.random()) for _ in range(ranks)],
    }
    make_run(folder, *overrides, wps=wps, losses=losses, times=times, summary=summary, environment=environment)


if __name__ == "__main__":
    make_sweep(Path(sys.argv[1]), int(sys.argv[2]), repeats=3 if int(sys.argv[2]) <= 12 else 1)
