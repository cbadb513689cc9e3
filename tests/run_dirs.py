"""Run directories made by hand, in any state and with any figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

CONFIG: dict[str, Any] = {
    "model": {"kind": "llama", "dim": 32, "n_layers": 2},
    "parallelism": {"kind": "fsdp2", "shard": "auto", "tensor": 1, "prefetch": 0},
    "activation_checkpoint": {"kind": "none"},
    "precision": {"kind": "fp32", "matmul": "highest"},
    "optimizer": {"kind": "adamw", "lr": 0.003, "betas": [0.9, 0.95]},
    "data": {"kind": "random"},
    "checkpoint": {"kind": "none", "load": None, "keep": 2},
    "tracker": {"kind": "none"},
    "seq_len": 16,
    "steps": 4,
    "seed": 0,
    "measure_after": 0,
    "launch": {"nodes": 1, "workers": 2, "env": {}, "port": None},
    "sweep": {"fail_fast": False},
}
CHOICES = {
    "model": "llama_tiny",
    "parallelism": "fsdp2",
    "activation_checkpoint": "none",
    "precision": "fp32",
    "optimizer": "adamw",
    "data": "random",
    "checkpoint": "none",
    "tracker": "none",
    "experiment": None,
}
FSDP1 = {"kind": "fsdp1", "shard": "auto", "tensor": 1, "forward_prefetch": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "model=llama_large": CONFIG["model"] | {"dim": 64},
    "model=own": CONFIG["model"] | {"kind": "own:Model", "activation": "relu"},
    "parallelism=fsdp1": FSDP1,
    "parallelism=fsdp1_tp": FSDP1 | {"tensor": 2},
    "parallelism=fsdp2": CONFIG["parallelism"],
    "activation_checkpoint=none": {"kind": "none"},
    "activation_checkpoint=full": {"kind": "full"},
    "activation_checkpoint=selective_op": {"kind": "selective_op", "save": ["mm"]},
    "precision=auto": {"kind": "auto"},
    "precision=fp32": CONFIG["precision"],
    "precision=bf16": {"kind": "bf16", "reduce": "fp32"},
    "tracker=wandb": {"kind": "wandb", "mode": "offline"},
}
TOKENS = 64
"""Of a step."""


def make_run(
    folder: Path,
    *overrides: str,
    wps: float | None = 100.0,
    losses: Sequence[float | None] | None = (6.0, 5.0, 4.0, 3.0),
    norms: Sequence[float | None] | None = None,
    times: Sequence[float] | None = None,
    state: str = "completed",
    reason: str = "",
    tokens: int = TOKENS,
    summary: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
) -> Path:
    """
    Write a run directory as a finished run leaves it.

    Args:
        overrides: `group=option` of OPTIONS, or `key=value`.
        wps: median, p10 and p90; None: nothing was measured.
        losses, norms: of each step; losses None: not a single step. norms None: 1.0 throughout.
        times: of each step, in seconds; None: not recorded.
        tokens: of one step.
        summary: further keys, or other values.
    """
    folder.mkdir(parents=True)
    config, choices = json.loads(json.dumps(CONFIG)), dict(CHOICES)
    for override in overrides:
        key, _, value = override.partition("=")
        if override in OPTIONS:
            config[key], choices[key] = dict(OPTIONS[override]), value
            continue
        *path, name = key.split(".")
        place = config
        for part in path:
            place = place[part]
        place[name] = yaml.safe_load(value)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (folder / "overrides.yaml").write_text(yaml.safe_dump({"task": list(overrides), "choices": choices}))
    write(folder / "status.json", {"state": state, "reason": reason, "attempt": 1, "started": 1.0})
    figures = {f"perf/wps_{name}": wps for name in ("median", "p10", "p90")}
    write(folder / "summary.json", figures | {"state": state, "reason": reason} | (summary or {}))
    if environment is not None:
        write(folder / "environment.json", environment)
    rows = [
        {
            "step": i + 1,
            "attempt": 1,
            "time": i + 2.0,
            "train/loss": loss,
            "train/grad_norm": norms[i] if norms else 1.0,
            "train/tokens": tokens * (i + 1),
            "perf/wps": wps,
            **({"perf/step_time_s": times[i]} if times else {}),
        }
        for i, loss in enumerate(losses or ())
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write(path: Path, value: Any) -> None:
    """A JSON file."""
    path.write_text(json.dumps(value))
