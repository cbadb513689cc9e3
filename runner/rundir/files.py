"""The names of the files in run and sweep directories. No other room contains one.

Everything about a run is in its directory: JSON files are replaced atomically, `events.jsonl` is append-only.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from meshrunner.recipes.storage.durable import read_regular, replace_file

CONFIG = "config.yaml"
"""The resolved configuration: enough to run again. A folder that holds one is a run directory."""
OVERRIDES = "overrides.yaml"
"""The overrides that the user typed (`task`) and the option chosen of each group (`choices`)."""
STATUS = "status.json"
STATUS_LOCK = ".status.lock"
EVENTS = "events.jsonl"
SUMMARY = "summary.json"
ENVIRONMENT = "environment.json"
LAYOUTS = "layouts.json"
"""{"layouts": [{"attempt", "settings"}]}: what figures depend on, and from which attempt on it was like that."""
PLAN = "plan.json"
"""What was predicted of the run before it began, as `meshrunner plan --json` prints it."""
ERROR = "error.json"
"""The exit code and the error of the rank that failed first."""
TRACKING = "tracker.json"
"""The `run_id`, `phase` (opening, following, finishing, finished) and `warning` of a tracker; of several `tracking` has names."""
LOGS = "logs"
DATA_LOG = f"{LOGS}/data.log"
LAUNCHER_LOG = f"{LOGS}/launcher.log"
"""Output of a run's launcher, where several runs of a sweep are executed in parallel."""
TRACES = "trace"
TRACE_TABLE = f"{TRACES}/table.json"
"""Shares of compute, exposed communication and idle time of each profiled rank."""
TENSORBOARD = "tensorboard"
HPARAMS = f"{TENSORBOARD}/hparams"
"""What TensorBoard's HParams tab shows of the run."""
WANDB = "wandb"
"""Folder that the library of W&B creates."""
STOP_REQUEST = "preempt"
"""Contains the id of the job start that was requested to stop, `12.0`. slurm/run.sbatch writes it."""
SLURM_JOB = "slurm.json"
"""{"job_id", "submitted", "script"} of the newest SLURM job of a run."""
SLURM_SETTINGS = "submit.json"
"""Settings of the last submission of a run or sweep directory."""
SLURM_OUTPUT = "slurm-%j.out"
"""What a job prints, in `logs`; SLURM replaces %j by the job's number."""
SLURM_TASK_OUTPUT = "slurm-%A_%a.out"
"""What a task of a sweep's array prints; SLURM replaces %A and %a by the numbers of array and task."""
SWEEP = "sweep.json"
"""{"command", "created", "varies", "jobs"}; a folder that holds one is a sweep directory."""
SWEEP_RUNS = "runs.txt"
"""The run directories of a sweep, one per line, in the order of sweep.json: task N of a SLURM array runs line N."""
MULTIRUN = "multirun.yaml"
"""Written by Hydra's sweeper before any run exists."""
REPORT = "report.html"
"""The report page, written at the end of a sweep."""


JSON_BYTES = 32 << 20
"""Largest JSON file that is read."""
DEPTH = 100
"""Deepest nesting of JSON and YAML that is read."""


def is_run(folder: Path) -> bool:
    """Whether a folder is a run directory, good or damaged."""
    return os.path.lexists(folder / CONFIG)


def is_sweep(folder: Path) -> bool:
    """Whether a folder is a sweep directory, good or damaged."""
    return os.path.lexists(folder / SWEEP)


def tracking(folder: Path, member: str = "") -> Path:
    """`phase` and `warning` of a tracker; `member`: its name where there are several."""
    return folder / (f"tracker-{member}.json" if member else TRACKING)


def tracker_log(folder: Path, member: str = "") -> Path:
    """Standard output and error of a tracker; `member`: its name where there are several."""
    return folder / LOGS / (f"tracker-{member}.log" if member else "tracker.log")


def rank_log(run_dir: Path, rank: int) -> Path:
    """Standard output and error of a worker."""
    return run_dir / LOGS / f"rank{rank}.log"


def rank_error(run_dir: Path, rank: int) -> Path:
    """The error of a worker that failed."""
    return run_dir / LOGS / f"rank{rank}.error.json"


def node_file(run_dir: Path, node: int) -> Path:
    """The heartbeat of one of several nodes, and the outcome of its workers."""
    return run_dir / LOGS / f"node{node}.json"


def rank_trace(run_dir: Path, rank: int) -> Path:
    """Chrome trace of a worker."""
    return run_dir / TRACES / f"rank{rank}.json.gz"


def memory_profile(run_dir: Path, rank: int, ending: str) -> Path:
    """Memory profile of a worker; `ending` is `.json`, `.pickle` or `_oom.pickle`."""
    return run_dir / TRACES / f"memory_rank{rank}{ending}"


def slurm_script(folder: Path, number: int | None = None) -> Path:
    """The script that was submitted for a run or sweep directory; `number`: of several arrays of a sweep."""
    return folder / ("submit.sbatch" if number is None else f"submit-{number}.sbatch")


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically."""
    replace_file(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is none or it is damaged. Raises OSError where it may not be read."""
    try:
        return load_json(path)
    except ValueError:
        return {}


def load_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is none. Raises ValueError that says how it is damaged, and OSError."""
    try:
        content = read_regular(path, JSON_BYTES)
    except FileNotFoundError:
        return {}
    if not content.strip():
        raise ValueError("it is empty")
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError(f"it is nested more than {DEPTH} levels deep") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    if content.count(b"[") + content.count(b"{") > DEPTH and _nested(value):
        raise ValueError(f"it is nested more than {DEPTH} levels deep")
    return value


def _nested(value: Any) -> bool:
    layer = [value]
    for _ in range(DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in layer if isinstance(each, dict | list))
        layer = [value for values in inner for value in values]
        if not layer:
            return False
    return True
