"""Executing a run directory: claim, prepare, launch, record. The local launcher, `resume` and SLURM all do it this way."""

from __future__ import annotations

import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.option import ConfigError
from runner.blame import write_error
from runner.child import in_slurm_job
from runner.devices import resolve
from runner.events import Tail
from runner.experiment import check, remarks
from runner.launch import launch
from runner.nodes import Peers, this_node
from runner.outcome import Interrupted, Outcome
from runner.preemption import Preemption
from runner.prepare import prepared
from runner.progress import Progress, warn
from runner.resume import fit_continuing
from runner.rundir import claim, heartbeat, read_config, update_status, write_json
from runner.summary import write_summary
from runner.trackers.following import Following

if TYPE_CHECKING:
    from runner.experiment import Experiment

EXIT = {"completed": 0, "interrupted": 130, "preempted": 75}
"""Exit status of a single run by its final state; every other state is 1."""
IGNORE_S = 15.0
"""After an interrupt the workers have this long to end before another one is heard."""
PACKAGES = ("meshrunner", "torch", "hydra-core", "omegaconf", "pydantic", "datasets", "sentencepiece", "numpy", "wandb")


def execute(
    run_dir: Path, *, force: bool = False, poll: Callable[[], None] | None = None
) -> tuple[Outcome, dict[str, Any]]:
    """
    Run what a directory says and record how it ended; returns that and the summary.

    Args:
        force: continue from a checkpoint though keys have changed that decide what is trained.
        poll: called a few times a second, by one who shows the progress; None: it is shown here.

    Raises:
        ConfigError: the configuration does not fit this node or its data; nothing was started.
        Busy: another process executes the directory.
        Interrupted: by the user, after everything was ended and recorded.
    """
    experiment = _configuration(run_dir)
    node = this_node(experiment.launch.nodes)
    if node.rank > 0:
        return _accompany(run_dir, experiment, Peers(run_dir, node)), {}
    device = resolve(experiment)
    _, stored = fit_continuing(experiment, run_dir, device[1], force=force)
    done = stored.record.step if stored is not None else 0
    for remark in [*remarks(experiment), *experiment.profiler.remarks(experiment, device[0], done)]:
        warn(remark)
    status: dict[str, Any] | None = None
    tracking: Following | None = None
    error: BaseException | None = None
    with signals(), Preemption(run_dir) as preemption, Peers(run_dir, node) as peers:
        try:
            with _held():
                status = claim(run_dir)
            if stored is not None:
                print(f"continues after step {stored.record.step}, from {stored.path}", flush=True)
            (run_dir / "error.json").unlink(missing_ok=True)
            tracking = Following.start(run_dir, experiment.tracker)
            with heartbeat(run_dir):
                write_json(run_dir / "environment.json", _environment(experiment, device))
                outcome = _run(run_dir, experiment, device, status["attempt"], peers, preemption, poll)
        except Interrupted as caught:
            outcome, error = Outcome("interrupted", str(caught)), caught
        except Exception as caught:
            outcome, error = Outcome("failed", str(caught) or type(caught).__name__), caught
        if status is None:
            assert error is not None
            raise error
        outcome = peers.agree(outcome)
        with _held():
            summary = _record(run_dir, experiment, outcome)
        if tracking is not None:
            _finish(tracking, outcome)
    if isinstance(error, Interrupted):
        raise Interrupted(f"{error}; `meshrunner resume {run_dir}` goes on with it")
    if error is not None:
        raise error
    return outcome, summary


def _accompany(run_dir: Path, experiment: Experiment, peers: Peers) -> Outcome:
    """What every node but the first does: its workers. The record is the first node's, which hears what is wrong here."""
    error: BaseException | None = None
    with signals(), Preemption(run_dir) as preemption, peers:
        try:
            with prepared(experiment, run_dir):
                outcome = launch(
                    run_dir,
                    experiment,
                    resolve(experiment),
                    attempt=0,  # of the rows, which are the first node's
                    peers=peers,
                    preemption=preemption,
                    started=lambda workers: peers.say(workers=workers),
                    poll=lambda: None,
                )
        except Interrupted as caught:
            outcome, error = Outcome("interrupted", str(caught)), caught
        except Exception as caught:
            outcome, error = Outcome("failed", str(caught) or type(caught).__name__), caught
        outcome = peers.agree(outcome)
        peers.wait_for_head()
    if error is not None:
        raise error
    return outcome


def _configuration(run_dir: Path) -> Experiment:
    try:
        return check(read_config(run_dir))
    except ConfigError as error:
        raise ConfigError(f"{run_dir / 'config.yaml'}:\n{error}") from None


def _finish(tracking: Following, outcome: Outcome) -> None:
    try:
        warning = tracking.finish()
    except Interrupted:
        warning = f"the run is {outcome.state}; its tracker was not waited for"
    if warning is not None:
        warn(warning)


def _run(
    run_dir: Path,
    experiment: Experiment,
    device: tuple[str, int, int],
    attempt: int,
    peers: Peers,
    preemption: Preemption,
    poll: Callable[[], None] | None,
) -> Outcome:
    def started(workers: list[dict[str, int]]) -> None:
        update_status(run_dir, workers=workers)
        peers.say(workers=workers)

    with prepared(experiment, run_dir):
        begin = partial(
            launch, run_dir, experiment, device, attempt, peers=peers, preemption=preemption, started=started
        )
        if poll is not None:
            return begin(poll=poll)
        tail = Tail(run_dir / "events.jsonl")
        tail.read()  # rows of earlier attempts
        with Progress(experiment.steps) as progress:
            return begin(poll=lambda: progress.show(tail.read()))


def _record(run_dir: Path, experiment: Experiment, outcome: Outcome) -> dict[str, Any]:
    """Write the final state and the summary. On a full disk the run has still ended, so that is said and no more."""
    write_error(run_dir, outcome)
    try:
        status = update_status(run_dir, state=outcome.state, reason=outcome.reason, ended=time.time())
        return write_summary(run_dir, experiment.measure_after, status)
    except OSError as error:
        warn(f"the state '{outcome.state}' could not be written to {run_dir}: {error.strerror}")
        return {"state": outcome.state, "reason": outcome.reason}


SIGNALS = (signal.SIGINT, signal.SIGHUP, *(() if in_slurm_job() else (signal.SIGTERM,)))
"""What ends a run at once. In a SLURM job SIGTERM asks it to leave: `runner.preemption` hears that."""


@contextmanager
def signals(consequence: str = "") -> Iterator[None]:
    """
    Ctrl-C, SIGTERM and SIGHUP raise Interrupted; those that follow at once, while the workers end, are passed over.

    Args:
        consequence: of such an end, for the user to read.
    """
    last = float("-inf")

    def interrupt(number: int, _: object) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > IGNORE_S:
            last = now
            raise Interrupted(f"by {signal.Signals(number).name}{consequence}")

    before = {name: signal.signal(name, interrupt) for name in SIGNALS}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


@contextmanager
def _held() -> Iterator[None]:
    """Hold the signals back: what is done inside is done as a whole, and they arrive at its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _environment(experiment: Experiment, device: tuple[str, int, int]) -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "command": sys.argv,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git_commit": _git_commit(),
        "device_type": device[0],
        "workers": device[1],
        "threads": device[2],
        "launch.env": experiment.launch.env,
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("NCCL_", "CUDA_", "TORCH", "PYTORCH_", "OMP_", "SLURM_"))
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit checked out in the current directory; None outside a repository."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
