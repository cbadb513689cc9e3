"""SLURM's commands and what they say of jobs. Every call has a time limit: no command hangs on a busy or absent controller."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from meshrunner.recipes.errors import ConfigError

TIMEOUT_S = 30.0
FORGOTTEN = "Invalid job id"
"""Part of what squeue answers for a job that the controller has forgotten."""
ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED",
    "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT",
)  # fmt: skip
"""States of a job that will not run any more; a requeued job is PENDING again."""


@dataclass(frozen=True)
class SlurmJob:
    """A job as SLURM sees it."""

    state: str
    """SLURM's name of it: `PENDING`, `RUNNING`, `TIMEOUT`, ..."""
    reason: str
    """Why the job waits or ended like that; empty when SLURM does not say."""
    nodes: str
    """The nodes that the job runs or ran on, as SLURM writes a list of them; empty when there are none."""

    @property
    def active(self) -> bool:
        """Whether the job runs or may still run."""
        return self.state not in ENDED

    def __str__(self) -> str:
        text = self.state + (f" ({self.reason})" if self.reason else "")
        return f"{text} on {self.nodes}" if self.nodes else text


def slurm(*command: str, timeout: float = TIMEOUT_S) -> str:
    """
    Run one of SLURM's commands; returns its standard output.

    Raises:
        ConfigError: the command is not installed, did not answer, or refused: with SLURM's own words.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except FileNotFoundError:
        raise ConfigError(f"`{command[0]}` is not on this machine: SLURM's commands are needed here") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"SLURM did not answer `{' '.join(command)}` within {timeout:g} s") from None
    if done.returncode != 0:
        said = [line.removeprefix(f"{command[0]}: ").removeprefix("error: ") for line in done.stderr.splitlines()]
        raise ConfigError("; ".join(said) or f"`{' '.join(command)}` ended with exit status {done.returncode}")
    return done.stdout


def jobs(ids: Iterable[str]) -> dict[str, SlurmJob]:
    """
    The jobs with these ids (`12`, or `12_3` for a task of an array), by id; those that SLURM has forgotten are left out.

    The controller remembers a job for some minutes after its end; then accounting is asked, where there is one.

    Raises:
        ConfigError: SLURM cannot be asked.
    """
    unique = set(ids)
    found: dict[str, SlurmJob] = {}
    for parent in _parents(unique):
        try:
            found |= _queued(parent)
        except ConfigError as error:
            if FORGOTTEN not in str(error):
                raise
    if missing := _parents(unique - set(found)):
        with suppress(ConfigError):  # without accounting the rest stays unknown
            found = _accounted(missing) | found
    return {each: found[each] for each in unique if each in found}


def _parents(ids: Iterable[str]) -> list[str]:
    """The jobs and arrays that ids belong to: `12` of `12_3`."""
    return sorted({each.partition("_")[0] for each in ids})


def _queued(parent: str) -> dict[str, SlurmJob]:
    """The tasks of a job that the controller remembers, by id."""
    text = slurm("squeue", "--noheader", "--array", "--states=all", f"--jobs={parent}", "--format=%F|%K|%T|%r|%N")
    found = {}
    for line in text.splitlines():
        job, task, state, reason, nodes = line.split("|")
        job_id = f"{job}_{task}" if task.isdigit() else job
        found[job_id] = SlurmJob(state, "" if reason == "None" else reason, nodes)
    return found


def _accounted(parents: list[str]) -> dict[str, SlurmJob]:
    """The tasks of jobs that accounting has recorded, by id."""
    given = f"--jobs={','.join(parents)}"
    text = slurm("sacct", "--noheader", "--allocations", "--parsable2", given, "--format=JobID,State,NodeList")
    found = {}
    for line in text.splitlines():
        job_id, state, nodes = line.split("|")
        state, _, reason = state.partition(" ")  # `CANCELLED by 1000`
        found[job_id] = SlurmJob(state, reason, "" if nodes == "None assigned" else nodes)
    return found


def show_job(job_id: str, timeout: float = 5.0) -> dict[str, str]:
    """What `scontrol show job` says, KEY -> value; {} when SLURM does not answer."""
    try:
        text = slurm("scontrol", "--oneliner", "show", "job", job_id, timeout=timeout)
    except ConfigError:
        return {}
    return dict(word.split("=", 1) for word in text.split() if "=" in word)
