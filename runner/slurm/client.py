"""What SLURM says of its jobs. Every call has a time limit: a controller that is busy or away must not hang a command."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from meshrunner.recipes.errors import ConfigError

TIMEOUT_S = 30.0
FORGOTTEN = "Invalid job id"
ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
"""States of a job that will not run any more; a requeued one is PENDING again."""


@dataclass(frozen=True)
class SlurmJob:
    """A job as SLURM sees it."""

    state: str
    """SLURM's word: `PENDING`, `RUNNING`, `TIMEOUT`, ..."""
    why: str
    """Why it waits or ended so; empty when SLURM does not say."""
    nodes: str
    """Where it runs or ran; empty when nowhere."""

    @property
    def lives(self) -> bool:
        """Whether it runs or may yet run."""
        return self.state not in ENDED

    def __str__(self) -> str:
        text = self.state + (f" ({self.why})" if self.why else "")
        return f"{text} on {self.nodes}" if self.nodes else text


def slurm(*command: str, timeout: float = TIMEOUT_S) -> str:
    """
    The standard output of one of SLURM's commands.

    Raises:
        ConfigError: it is not installed, did not answer, or refused: with SLURM's own words.
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
    What SLURM knows of jobs, by id (`12`, or `12_3` for a task of an array); those it has forgotten are left out.

    The controller remembers a job for some minutes after its end; then accounting is asked, where there is one.

    Raises:
        ConfigError: SLURM cannot be asked.
    """
    wanted = set(ids)
    found: dict[str, SlurmJob] = {}
    for parent in sorted({each.partition("_")[0] for each in wanted}):
        try:
            found |= _queued(parent)
        except ConfigError as error:
            if FORGOTTEN not in str(error):
                raise
    missing = sorted({each.partition("_")[0] for each in wanted - set(found)})
    if missing:
        with suppress(ConfigError):  # without accounting the rest stays unknown
            found = _accounted(missing) | found
    return {each: found[each] for each in wanted if each in found}


def _queued(parent: str) -> dict[str, SlurmJob]:
    """The tasks of a job that the controller remembers. One line each: array job, task, state, reason, nodes."""
    text = slurm("squeue", "--noheader", "--array", "--states=all", f"--jobs={parent}", "--format=%F|%K|%T|%r|%N")
    found = {}
    for line in text.splitlines():
        job, task, state, why, nodes = line.split("|")
        found[_name(job, task)] = SlurmJob(state, "" if why in ("None", "") else why, nodes)
    return found


def _accounted(parents: list[str]) -> dict[str, SlurmJob]:
    text = slurm(
        "sacct",
        "--noheader",
        "--allocations",
        "--parsable2",
        f"--jobs={','.join(parents)}",
        "--format=JobID,State,NodeList",
    )
    found = {}
    for line in text.splitlines():
        job, state, nodes = line.split("|")
        word, _, rest = state.partition(" ")  # `CANCELLED by 1000`
        found[job] = SlurmJob(word, rest, "" if nodes == "None assigned" else nodes)
    return found


def _name(job: str, task: str) -> str:
    return f"{job}_{task}" if task.isdigit() else job


def show_job(job_id: str, timeout: float = 5.0) -> dict[str, str]:
    """`scontrol show job`, KEY -> value; {} when SLURM does not answer."""
    try:
        text = slurm("scontrol", "--oneliner", "show", "job", job_id, timeout=timeout)
    except ConfigError:
        return {}
    return dict(word.split("=", 1) for word in text.split() if "=" in word)
