"""Calls SLURM's commands, such as `squeue`. Calls have a time limit, because they can hang while SLURM's controller is down."""

import math
import re
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.rundir import Submission
from meshrunner.runner.rundir.files import SLURM_JOB

TIMEOUT_S = 30.0
ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED",
    "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT",
)  # fmt: skip
"""SLURM's states of jobs that have ended. A requeued job has not ended: its state is PENDING again."""


@dataclass(frozen=True)
class SlurmJob:
    """The state of a SLURM job, or of one task of a job array."""

    state: str
    """SLURM's name for the state: `PENDING`, `RUNNING`, `TIMEOUT`, ..."""
    reason: str
    """Reason why the job waits or has ended, such as `Priority`; empty if SLURM gives no reason."""
    nodes: str
    """Nodes of the job in SLURM's notation, such as `node[1-4]`; empty if SLURM has not assigned any nodes."""

    @property
    def active(self) -> bool:
        """Whether the job waits, runs or may run again."""
        return self.state not in ENDED

    def __str__(self) -> str:
        text = self.state + (f" ({self.reason})" if self.reason else "")
        return f"{text} on {self.nodes}" if self.nodes else text


def slurm(*command: str, timeout: float = TIMEOUT_S) -> str:
    """Return the output of a SLURM command. Raise ConfigError if the command is missing, fails or runs out of time."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except FileNotFoundError:
        raise ConfigError(f"`{command[0]}` was not found: SLURM's commands must be installed on this machine") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"SLURM did not answer `{' '.join(command)}` within {timeout:g} s") from None
    if done.returncode != 0:
        said = [line.removeprefix(f"{command[0]}: ").removeprefix("error: ") for line in done.stderr.splitlines()]
        raise ConfigError("; ".join(said) or f"`{' '.join(command)}` ended with exit status {done.returncode}")
    return done.stdout


def job_id(run_dir: Path) -> str | None:
    """Return the id of a run's newest job (`12` or `12_3`), or None if the run was not submitted or slurm.json is damaged."""
    return Submission.peek(run_dir / SLURM_JOB).job_id


def jobs(ids: Iterable[str]) -> dict[str, SlurmJob]:
    """Return the jobs that SLURM still lists, keyed by id: `12` is a job, `12_3` is task 3 of job array 12. The controller
    drops a job minutes after its end; accounting, if enabled, does not. Raise ConfigError if the controller does not answer."""
    unique = set(ids)
    found: dict[str, SlurmJob] = {}
    for parent in _parents(unique):
        try:
            found |= _queued(parent)
        except ConfigError as error:
            if "Invalid job id" not in str(error):  # a job that the controller no longer knows
                raise
    if missing := _parents(unique - set(found)):
        with suppress(ConfigError):  # without accounting, the missing jobs stay unknown
            found = _accounted(missing) | found
    return {each: found[each] for each in unique if each in found}


def _parents(ids: Iterable[str]) -> list[str]:
    """Return the ids of the jobs and job arrays to which `ids` belong: `12` for both `12_3` and `12_4`."""
    return sorted({each.partition("_")[0] for each in ids})


def _queued(parent: str) -> dict[str, SlurmJob]:
    """Ask SLURM's controller about a job or job array. Return the job, or each task of the array, keyed by id."""
    text = slurm("squeue", "--noheader", "--array", "--states=all", f"--jobs={parent}", "--format=%F|%K|%T|%r|%N")
    found = {}
    for line in text.splitlines():
        job, task, state, reason, nodes = line.split("|")
        job_id = f"{job}_{task}" if task.isdigit() else job
        found[job_id] = SlurmJob(state, "" if reason == "None" else reason, nodes)
    return found


def _accounted(parents: list[str]) -> dict[str, SlurmJob]:
    """Ask SLURM's accounting about jobs and job arrays. Return each job and each task of an array, keyed by id."""
    given = f"--jobs={','.join(parents)}"
    text = slurm("sacct", "--noheader", "--allocations", "--parsable2", given, "--format=JobID,State,NodeList")
    found = {}
    for line in text.splitlines():
        job_id, state, nodes = line.split("|")
        state, _, reason = state.partition(" ")  # `CANCELLED by 1000`
        found[job_id] = SlurmJob(state, reason, "" if nodes == "None assigned" else nodes)
    return found


def show_job(job_id: str, timeout: float = 5.0) -> dict[str, str]:
    """Return the KEY=value pairs that `scontrol show job` prints, or {} if the command fails."""
    try:
        text = slurm("scontrol", "--oneliner", "show", "job", job_id, timeout=timeout)
    except ConfigError:
        return {}
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def longest_minutes(partition: str | None) -> float:
    """Return a partition's time limit in minutes, or infinity if SLURM fails. partition: None for the default partition."""
    try:
        text = slurm("sinfo", "--noheader", "--format=%P %l", *([f"--partition={partition}"] if partition else []))
    except ConfigError:
        return math.inf
    limits = [line.split() for line in text.splitlines()]
    return min((_minutes(limit) for name, limit in limits if partition or name.endswith("*")), default=math.inf)


def _minutes(limit: str) -> float:
    """Convert a time limit of `sinfo`, such as 2-00:00:00 or 30:00, to minutes. Return infinity if the text is not a time."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
    if found is None:
        return math.inf
    days, hours, minutes, _ = (int(each or 0) for each in found.groups())
    return (24 * days + hours) * 60 + minutes
