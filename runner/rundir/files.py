"""The names of the files in run and sweep directories. No other package contains these names. A run replaces its JSON files
atomically, but appends to `events.jsonl`. The subclasses of `records.JsonFile` describe the content of the JSON files. Tab
completion imports this module, so it must not import pydantic, which is slow."""

import json
import os
from pathlib import Path
from typing import Any

from meshrunner.recipes.storage import replace_file

CONFIG = "config.yaml"
"""The resolved configuration, sufficient to repeat the run. A folder that contains this file is a run directory."""
OVERRIDES = "overrides.yaml"
"""The overrides that the user typed (`task`) and the chosen option of each group (`choices`)."""
STATUS = "status.json"
STATUS_LOCK = ".status.lock"
EVENTS = "events.jsonl"
EVALS = "evals.jsonl"
"""One JSON object per evaluation, in the format of `events.jsonl`."""
SUMMARY = "summary.json"
ENVIRONMENT = "environment.json"
LAYOUTS = "layouts.json"
PLAN = "plan.json"
ERROR = "error.json"
TRACKING = "tracker.json"
"""The state of a run's tracker, such as W&B. If a run has several trackers, each has its own file (see `tracking`)."""
LOGS = "logs"
DATA_LOG = f"{LOGS}/data.log"
EVAL_DATA_LOG = f"{LOGS}/eval_data.log"
LAUNCHER_LOG = f"{LOGS}/launcher.log"
"""Output of the process that executes one run of a parallel sweep. Other runs do not have this file."""
TRACES = "trace"
EXPLANATION = "explain.json"
TRACE_TABLE = f"{TRACES}/table.json"
TENSORBOARD = "tensorboard"
HPARAMS = f"{TENSORBOARD}/hparams"
"""Settings and final measurements for TensorBoard's HParams tab."""
WANDB = "wandb"
STOP_REQUEST = "preempt"
"""File that slurm/run.sbatch writes when SLURM asks a job to stop. Content: `12.0` for job 12, or `12.1` after a requeue."""
SLURM_JOB = "slurm.json"
SLURM_SETTINGS = "submit.json"
"""SLURM settings of the last submission of a run or sweep directory."""
SLURM_OUTPUT = "slurm-%j.out"
"""Output of a job, in `logs`. SLURM replaces %j with the job's number."""
SLURM_TASK_OUTPUT = "slurm-%A_%a.out"
"""Output of one task of a sweep's job array. SLURM replaces %A with the array's number and %a with the task's number."""
SWEEP = "sweep.json"
"""A folder that contains this file is a sweep directory."""
SWEEP_RUNS = "runs.txt"
"""The names of a sweep's run directories, one per line. Task 0 of a SLURM job array executes the run on the first line."""
TUNE = "tune.json"
"""Predictions for all combinations of a `meshrunner tune` search, keyed by a hash of each combination's settings."""
MULTIRUN = "multirun.yaml"
"""The configuration of a sweep. Hydra's sweeper writes this file before any run exists."""
REPORT = "report.html"
"""The report page of a sweep, updated during the sweep and written again at the end."""
RECORD_BYTES = 32 << 20
"""Maximum size of a JSON or YAML file in bytes. A larger file counts as damaged."""


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run directory, damaged or not."""
    return os.path.lexists(folder / CONFIG)


def is_sweep(folder: Path) -> bool:
    """Return whether a folder is a sweep directory, damaged or not."""
    return os.path.lexists(folder / SWEEP) or os.path.lexists(folder / TUNE)


def tracking(folder: Path, member: str = "") -> Path:
    """Return the path of the file with a tracker's state. `member`: the tracker's name, or "" if the run has only one tracker."""
    return folder / (f"tracker-{member}.json" if member else TRACKING)


def tracker_log(folder: Path, member: str = "") -> Path:
    return folder / LOGS / (f"tracker-{member}.log" if member else "tracker.log")


def rank_log(run_dir: Path, rank: int) -> Path:
    return run_dir / LOGS / f"rank{rank}.log"


def rank_error(run_dir: Path, rank: int) -> Path:
    return run_dir / LOGS / f"rank{rank}.error.json"


def node_file(run_dir: Path, node: int) -> Path:
    """Return the path of the file with a node's heartbeat and outcome. Only runs on several nodes have such files."""
    return run_dir / LOGS / f"node{node}.json"


def rank_trace(run_dir: Path, rank: int) -> Path:
    return run_dir / TRACES / f"rank{rank}.json.gz"


def memory_profile(run_dir: Path, rank: int, ending: str) -> Path:
    """Return the path of a worker's memory profile; `ending` is `.json`, `.pickle` or `_oom.pickle`."""
    return run_dir / TRACES / f"memory_rank{rank}{ending}"


def slurm_script(folder: Path, number: int | None = None) -> Path:
    """Return the path of the script submitted to SLURM. `number`: index of the job array, if a sweep needs several arrays."""
    return folder / ("submit.sbatch" if number is None else f"submit-{number}.sbatch")


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically."""
    replace_file(path, (json.dumps(value, indent=2) + "\n").encode())
