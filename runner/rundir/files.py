"""The names of the files in run and sweep directories. No other room spells one.

Everything about a run is in its directory, whoever executes it: JSON files are replaced atomically, `events.jsonl` is
append-only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshrunner.recipes.durable import replace_file

CONFIG = "config.yaml"
"""The resolved configuration: enough to run again. A folder that holds one is a run directory."""
OVERRIDES = "overrides.yaml"
"""What the user typed (`task`) and which option of each group was chosen (`choices`)."""
STATUS = "status.json"
EVENTS = "events.jsonl"
SUMMARY = "summary.json"
ENVIRONMENT = "environment.json"
ERROR = "error.json"
"""What is known of the rank that failed first."""
TRACKING = "tracker.json"
"""In a run or sweep directory: `run_id`, `phase` (opening, following, finishing, finished), `warning`."""
LOGS = "logs"
TRACES = "trace"
STOP_REQUEST = "preempt"
"""Names the start of the SLURM job that was requested to stop, `12.0`. slurm/run.sbatch writes it."""
SLURM_JOB = "slurm.json"
"""{"job_id", "submitted", "script"} of the newest SLURM job of a run."""
SLURM_SETTINGS = "submit.json"
"""In a run or sweep directory: the settings of the last submission."""
SLURM_OUTPUT = "slurm-%j.out"
"""What a job prints, in `logs`; SLURM replaces %j by the job's number."""
SLURM_TASK_OUTPUT = "slurm-%A_%a.out"
"""What a task of a sweep's array prints; SLURM replaces %A and %a by the numbers of array and task."""
SWEEP = "sweep.json"
"""{"command", "jobs"}; a folder that holds one is a sweep directory."""
SWEEP_RUNS = "runs.txt"
"""The run directories of a sweep, one a line, in the order of sweep.json: what a SLURM array counts."""
REPORT = "report.html"
"""The page that a sweep ends with."""


def is_run(folder: Path) -> bool:
    """Whether a folder is a run directory."""
    return (folder / CONFIG).exists()


def is_sweep(folder: Path) -> bool:
    """Whether a folder is a sweep directory."""
    return (folder / SWEEP).exists()


def rank_log(run_dir: Path, rank: int) -> Path:
    """Standard output and error of a worker."""
    return run_dir / LOGS / f"rank{rank}.log"


def rank_error(run_dir: Path, rank: int) -> Path:
    """Where a worker that fails says why."""
    return run_dir / LOGS / f"rank{rank}.error.json"


def node_file(run_dir: Path, node: int) -> Path:
    """What a node of several tells the others: that it lives, and how its workers ended."""
    return run_dir / LOGS / f"node{node}.json"


def data_log(run_dir: Path) -> Path:
    """Output of the process that reads and tokenises data in the background."""
    return run_dir / LOGS / "data.log"


def tracker_log(folder: Path) -> Path:
    """Output of the tracker's process, in a run or sweep directory."""
    return folder / LOGS / "tracker.log"


def launcher_log(run_dir: Path) -> Path:
    """Output of a run's own process, where several runs of a sweep are executed at once."""
    return run_dir / LOGS / "launcher.log"


def slurm_script(folder: Path, number: int | None = None) -> Path:
    """The script that was submitted for a run or sweep directory; `number`: of several arrays of a sweep."""
    return folder / ("submit.sbatch" if number is None else f"submit-{number}.sbatch")


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically."""
    replace_file(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is none or it is damaged."""
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
