"""Executes the unfinished runs of a sweep, one after another or in parallel on disjoint devices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from meshrunner.recipes.errors import AlreadyRunning, ConfigError, Interrupted, Moved
from meshrunner.runner.config.devices import CORES, NodeDevices, cores, node_devices, visible_gpus
from meshrunner.runner.config.experiment import Experiment, Sweep, check
from meshrunner.runner.console import console, say, warn
from meshrunner.runner.launch.execute import execute
from meshrunner.runner.launch.preemption import Preemption
from meshrunner.runner.launch.report import report
from meshrunner.runner.process.signals import first_interrupt, interruptible
from meshrunner.runner.process.tree import die_with_parent
from meshrunner.runner.rundir import (
    CRASHED,
    FINAL,
    RESULTS,
    condition,
    last_lines,
    owner_is_alive,
    read_config,
    read_state,
    read_status,
    update_status,
)
from meshrunner.runner.rundir.files import LAUNCHER_LOG
from meshrunner.runner.sweep.live_table import LiveTable
from meshrunner.runner.sweep.results import LivePage
from meshrunner.runner.sweep.run_lines import RunLines

POLL_S = 0.05
Display = LiveTable | RunLines


def execute_all(run_dirs: Sequence[Path], experiment: Experiment) -> tuple[int, bool]:
    """
    Execute the unfinished runs of a sweep.

    Skip runs that another live process is executing. After an interrupt the remaining runs stay `pending`.

    Args:
        experiment: the first run's configuration. Its `sweep` section applies to all runs.

    Returns:
        The exit status of the sweep, and whether the sweep must stop because of a stop request or `sweep.fail_fast`.

    Raises:
        Interrupted: the user interrupted the sweep.
        Moved: the sweep directory was moved or removed during the sweep.
    """
    settings, sweep_dir = experiment.sweep, run_dirs[0].parent
    todo = {run_dir: read_status(run_dir).attempt for run_dir in run_dirs if _unfinished(run_dir, settings)}
    for run_dir in run_dirs:
        if run_dir not in todo:
            _print_condition(run_dir)
    devices, needs = _shared(todo, settings)
    try:
        with interruptible(), Preemption(sweep_dir) as preemption, _display(run_dirs, todo, experiment) as display:
            page = LivePage(sweep_dir, len(run_dirs))
            execute_todo = _Parallel(devices, needs, page) if devices else partial(_sequential, page)
            execute_todo(todo, settings, display, preemption)
    except Interrupted as error:
        cause = str(error).partition(";")[0]  # the rest names the run to resume
        raise Interrupted(f"{cause}; `meshrunner resume {sweep_dir}` continues the sweep") from None
    if not sweep_dir.is_dir():
        raise Moved(
            f"{sweep_dir} was moved or removed during the sweep. If it was moved, continue with `meshrunner resume NEW_PATH`."
        )
    states = [read_state(run_dir) for run_dir in run_dirs]
    if preemption.requested or "preempted" in states:
        return 75, True
    code = 0 if all(state in RESULTS or state == "running" for state in states) else 1
    return code, any(_fails_fast(run_dir, settings) for run_dir in todo)


def _shared(run_dirs: Collection[Path], settings: Sweep) -> tuple[list[str], dict[Path, NodeDevices]]:
    """
    Return the devices to distribute among runs, and the devices that each run needs.

    The list of devices is empty if runs cannot share the node. GPUs are named as in CUDA_VISIBLE_DEVICES; CPU devices are only
    numbered.

    Raises:
        ConfigError: `sweep.devices` exceeds the number of visible GPUs.
    """
    gpus = visible_gpus()
    count = len(gpus) if settings.devices == "auto" else settings.devices
    needs = {run_dir: node_devices(check(read_config(run_dir))) for run_dir in run_dirs} if count > 1 else {}
    if len(needs) < 2 or count < 2 * min(each.workers for each in needs.values()):
        return [], {}
    if all(each.type == "cpu" for each in needs.values()):
        return [str(number) for number in range(count)], needs
    if count > len(gpus):
        raise ConfigError(f"sweep.devices: {count} is more than the {len(gpus)} visible GPUs: {', '.join(gpus)}")
    return gpus[:count], needs


def _display(run_dirs: Sequence[Path], todo: Collection[Path], experiment: Experiment) -> Display:
    screen = console()
    if experiment.progress == "auto" and screen.is_terminal and not screen.is_dumb_terminal:
        return LiveTable(screen, run_dirs, todo)
    return RunLines(run_dirs, todo, steps=experiment.progress == "steps")


def _unfinished(run_dir: Path, settings: Sweep) -> bool:
    status = read_status(run_dir)
    return not owner_is_alive(status) and (status.state not in RESULTS or status.state in settings.rerun)


def _fails_fast(run_dir: Path, settings: Sweep) -> bool:
    return settings.fail_fast and read_state(run_dir) in (*CRASHED, "oom")


def _print_condition(run_dir: Path) -> None:
    say(f"{run_dir.name} {condition(read_status(run_dir))}")


def _can_start(run_dir: Path, attempts: int, display: Display) -> bool:
    """Return False and print why if the run directory is gone or another process has executed the run since the sweep began."""
    if not run_dir.is_dir():
        say(f"{run_dir.name} was not executed: its directory was moved or removed")
        return False
    if read_status(run_dir).attempt != attempts:
        _print_condition(run_dir)
        display.run_ended(run_dir)
        return False
    return True


def _sequential(
    page: LivePage, todo: dict[Path, int], settings: Sweep, display: Display, preemption: Preemption
) -> None:
    """Execute runs one after another from this process and its warm forkserver; `todo`: run -> attempts before the sweep."""
    for number, (run_dir, attempts) in enumerate(todo.items()):
        preemption.poll()
        if preemption.requested:
            return
        if not _can_start(run_dir, attempts, display):
            continue
        for attempt in range(1 + settings.retry):
            if attempt:
                say(f"{run_dir.name}: retry {attempt}")
            display.run_started(run_dir)
            try:
                ended = execute(run_dir, display=None if display.steps else display)
                report(*ended, row=False)
                if ended.outcome.interrupted:  # too late for this run
                    raise Interrupted("by SIGINT")
            except AlreadyRunning as error:
                say(error)
                break
            except ConfigError as error:  # wrong since the sweep was checked, such as removed data
                update_status(run_dir, state="failed", reason=str(error).splitlines()[0], ended=time.time())
                say(error, to_stderr=True)
            finally:
                display.run_ended(run_dir)
            if read_state(run_dir) not in CRASHED:
                break
        page.run_ended()
        preempted = read_state(run_dir) == "preempted"  # so is the job that executes the sweep
        if preempted or _fails_fast(run_dir, settings):
            why = "a stop was requested" if preempted else "sweep.fail_fast is set and an earlier run failed"
            for rest in list(todo)[number + 1 :]:
                say(f"{rest.name} not started: {why}")
            return


class _Parallel:
    """Executes runs in parallel, each in a process that sees only its own devices."""

    def __init__(self, devices: list[str], needs: dict[Path, NodeDevices], page: LivePage) -> None:
        """See `_shared` for `devices` and `needs`."""
        self.devices, self.needs, self.page = devices, needs, page
        self.free = devices
        self.running: dict[Path, tuple[subprocess.Popen[bytes], list[str]]] = {}
        self.starts: Counter[Path] = Counter()
        self.interrupted = False

    def __call__(self, todo: dict[Path, int], settings: Sweep, display: Display, preemption: Preemption) -> None:
        try:
            with first_interrupt(self._interrupt):
                self._execute(todo, settings, display, preemption)
        finally:
            self._signal_all(signal.SIGHUP)  # unlike a first SIGINT, this ends a run without a checkpoint
            for process, _ in self.running.values():
                process.wait()
        if self.interrupted:
            raise Interrupted("by SIGINT")

    def _interrupt(self) -> bool:
        self.interrupted = True
        return True

    def _execute(self, todo: dict[Path, int], settings: Sweep, display: Display, preemption: Preemption) -> None:
        queue, stopping = list(todo), False
        while queue or self.running:
            preemption.poll()
            if (preemption.requested or self.interrupted) and not stopping:
                stopping = True
                queue.clear()
                self._signal_all(signal.SIGINT if self.interrupted else signal.SIGTERM)
                if self.interrupted:
                    warn("stopping the runs, after a checkpoint if they save any; press Ctrl-C again to stop at once")
            # In order, so that small runs do not starve a large one that waits for devices.
            while queue and (self.needs[queue[0]].workers <= len(self.free) or not self.running):
                run_dir = queue.pop(0)
                if _can_start(run_dir, todo[run_dir], display):
                    display.run_started(run_dir)
                    self._start(run_dir)
            for run_dir in self._reap():
                status = read_status(run_dir)
                if isinstance(display, LiveTable):
                    say(f"{run_dir.name}: {status.state} {status.reason}".rstrip())
                display.run_ended(run_dir)
                self.page.run_ended()
                if not stopping and status.state in CRASHED and self.starts[run_dir] <= settings.retry:
                    todo[run_dir] = status.attempt
                    queue.insert(0, run_dir)
                elif _fails_fast(run_dir, settings):
                    queue.clear()
            display.refresh()
            time.sleep(POLL_S)

    def _start(self, run_dir: Path) -> None:
        need = self.needs[run_dir]
        own, self.free = self.free[: need.workers], self.free[need.workers :]
        self.starts[run_dir] += 1
        if read_state(run_dir) in FINAL:  # left by an earlier execution
            update_status(run_dir, state="pending", reason="")
        with (run_dir / LAUNCHER_LOG).open("ab") as log:
            process = subprocess.Popen(
                # -P: modules in the current directory must not shadow installed ones
                [sys.executable, "-P", "-m", "meshrunner", "resume", str(run_dir)],
                env=os.environ | self._environment(need.type, own),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # only this process passes Ctrl-C on
                preexec_fn=partial(die_with_parent, signal.SIGTERM),  # it records the interrupt and exits
            )
        self.running[run_dir] = process, own
        say(f"{run_dir.name}: started on {', '.join(own)}")

    def _environment(self, device_type: str, own: list[str]) -> dict[str, str]:
        """Return the variables that limit a run to its devices and to the same fraction of the node's cores."""
        part = {CORES: str(max(1, cores() * len(own) // len(self.devices)))}
        return part | ({"CUDA_VISIBLE_DEVICES": ",".join(own)} if device_type == "cuda" else {})

    def _reap(self) -> list[Path]:
        ended = [run_dir for run_dir, (process, _) in self.running.items() if process.poll() is not None]
        for run_dir in ended:
            process, own = self.running.pop(run_dir)
            self.free = [device for device in self.devices if device in self.free or device in own]
            status = read_status(run_dir)
            # A run that was interrupted while it was starting (exit status 130) stays pending.
            may_record = process.returncode != 130 and run_dir.is_dir()
            if may_record and status.state not in FINAL and not owner_is_alive(status):
                reason = _missing_reason(run_dir, process)
                status = update_status(run_dir, state="failed", reason=reason, ended=time.time())
        return ended

    def _signal_all(self, number: signal.Signals) -> None:
        for process, _ in self.running.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)


def _missing_reason(run_dir: Path, process: subprocess.Popen[bytes]) -> str:
    """Return why a process recorded no final state: it was killed, or it could not begin the run."""
    if process.returncode < 0:
        return f"its process was killed by signal {signal.Signals(-process.returncode).name}"
    lines = last_lines(run_dir / LAUNCHER_LOG)
    return lines[-1] if lines else f"its process ended with exit code {process.returncode}"
