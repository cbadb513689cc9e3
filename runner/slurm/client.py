"""Runs SLURM's commands and reads the state of jobs. A time limit on every call prevents a hang if SLURM's controller is down."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from meshrunner.recipes.errors import ConfigError

TIMEOUT_S = 30.0
ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED",
    "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT",
)  # fmt: skip
"""Final states of a job. A requeued job returns to the state PENDING."""


@dataclass(frozen=True)
class SlurmJob:
    """The state of a job in SLURM."""

    state: str
    """SLURM's name for the state: `PENDING`, `RUNNING`, `TIMEOUT`, ..."""
    reason: str
    """Reason why the job is waiting or has ended; empty if SLURM gives no reason."""
    nodes: str
    """Nodes that the job runs or ran on, in SLURM's notation; empty if SLURM has assigned no nodes."""

    @property
    def active(self) -> bool:
        """Whether the job is running or may still run."""
        return self.state not in ENDED

    def __str__(self) -> str:
        text = self.state + (f" ({self.reason})" if self.reason else "")
        return f"{text} on {self.nodes}" if self.nodes else text


def slurm(*command: str, timeout: float = TIMEOUT_S) -> str:
    """Return the output of a SLURM command. Raise ConfigError if the command is missing, does not answer or fails."""
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


def jobs(ids: Iterable[str]) -> dict[str, SlurmJob]:
    """
    Return a SlurmJob for each id that SLURM knows; ids look like `12` or `12_3`. Raise ConfigError if SLURM does not answer.

    SLURM's controller forgets a job some minutes after the job ends. Older jobs are looked up in SLURM's accounting, if enabled.
    """
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
    """Return the ids without task numbers (`12` for `12_3`), sorted and without duplicates."""
    return sorted({each.partition("_")[0] for each in ids})


def _queued(parent: str) -> dict[str, SlurmJob]:
    """Query SLURM's controller. Return the state of a job, or of each task of a job array, by id."""
    text = slurm("squeue", "--noheader", "--array", "--states=all", f"--jobs={parent}", "--format=%F|%K|%T|%r|%N")
    found = {}
    for line in text.splitlines():
        job, task, state, reason, nodes = line.split("|")
        job_id = f"{job}_{task}" if task.isdigit() else job
        found[job_id] = SlurmJob(state, "" if reason == "None" else reason, nodes)
    return found


def _accounted(parents: list[str]) -> dict[str, SlurmJob]:
    """Query SLURM's accounting. Return the states of jobs and array tasks by id."""
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
