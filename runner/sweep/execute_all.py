"""Execution of the unfinished runs of a sweep: sequentially, or in parallel on disjoint devices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from meshrunner.recipes.errors import AlreadyRunning, ConfigError, Interrupted, Moved
from meshrunner.runner.config.devices import CORES, NodeDevices, cores, node_devices, visible_gpus
from meshrunner.runner.config.experiment import Experiment, Sweep, check
from meshrunner.runner.console import say, warn
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
from meshrunner.runner.sweep.live_page import LivePage
from meshrunner.runner.sweep.live_table import LiveTable
from meshrunner.runner.sweep.run_lines import RunLines

POLL_S = 0.05


Display = LiveTable | RunLines


def execute_all(run_dirs: Sequence[Path], experiment: Experiment) -> tuple[int, bool]:
    """
    Execute the unfinished runs of a sweep, as the first of them says.

    Runs that another living process executes are left to it. After an interrupt the rest stay `pending`.

    Returns:
        The exit status of the sweep, and whether the sweep must stop: a stop was requested, or `sweep.fail_fast` applies.

    Raises:
        Interrupted: by the user.
        Moved: the sweep directory was moved or removed meanwhile.
    """
    settings = experiment.sweep
    todo = {run_dir: _attempts(run_dir) for run_dir in run_dirs if _unfinished(run_dir, settings)}
    for run_dir in run_dirs:
        if run_dir not in todo:
            print(f"\n{run_dir.name}\n{condition(read_status(run_dir))}", flush=True)
    devices, needs = _shared(todo, settings)
    try:
        with (
            interruptible(),
            Preemption(run_dirs[0].parent) as preemption,
            _display(run_dirs, todo, experiment) as table,
        ):
            page = LivePage(run_dirs[0].parent, len(run_dirs))
            execute_todo = _Parallel(devices, needs, page) if devices else partial(_sequential, page)
            execute_todo(todo, settings, table, preemption)
    except Interrupted as error:
        cause = str(error).partition(";")[0]  # what follows names the run to resume
        raise Interrupted(f"{cause}; `meshrunner resume {run_dirs[0].parent}` continues the sweep") from None
    sweep_dir = run_dirs[0].parent
    if not sweep_dir.is_dir():
        raise Moved(
            f"{sweep_dir} was moved or removed while the sweep went on; `meshrunner resume` continues a moved one"
        )
    states = [read_state(run_dir) for run_dir in run_dirs]
    if preemption.requested or "preempted" in states:
        return 75, True
    code = 0 if all(state in RESULTS or state == "running" for state in states) else 1
    return code, any(_fails_fast(run_dir, settings) for run_dir in todo)


def _shared(run_dirs: Collection[Path], settings: Sweep) -> tuple[list[str], dict[Path, NodeDevices]]:
    """
    Return the devices that runs of this node share, and what each run takes; no devices: one run at a time.

    GPUs are named as in CUDA_VISIBLE_DEVICES. Runs on CPUs only count their devices.

    Raises:
        ConfigError: there are fewer GPUs than `sweep.devices` says.
    """
    gpus = visible_gpus()
    count = len(gpus) if settings.devices == "auto" else settings.devices
    needs = {run_dir: node_devices(check(read_config(run_dir))) for run_dir in run_dirs} if count > 1 else {}
    if len(needs) < 2 or count < 2 * min(each.workers for each in needs.values()):
        return [], {}
    if all(each.type == "cpu" for each in needs.values()):
        return [str(number) for number in range(count)], needs
    if count > len(gpus):
        raise ConfigError(f"sweep.devices({count}) is more than the {len(gpus)} GPUs visible here: {', '.join(gpus)}")
    return gpus[:count], needs


def _display(run_dirs: Sequence[Path], todo: Collection[Path], experiment: Experiment) -> Display:
    if experiment.progress == "auto" and (table := LiveTable(run_dirs, todo)).active:
        return table
    return RunLines(run_dirs, todo, steps=experiment.progress == "steps")


def _unfinished(run_dir: Path, settings: Sweep) -> bool:
    status = read_status(run_dir)
    return not owner_is_alive(status) and (status.state not in RESULTS or status.state in settings.rerun)


def _attempts(run_dir: Path) -> int:
    """Return the number of executions. If it has grown since the sweep began, another process has executed the run."""
    return read_status(run_dir).attempt


def _fails_fast(run_dir: Path, settings: Sweep) -> bool:
    return settings.fail_fast and read_state(run_dir) in (*CRASHED, "oom")


def _is_gone(run_dir: Path) -> bool:
    """Return whether a run directory was moved or removed since the sweep began; then that is printed."""
    if run_dir.is_dir():
        return False
    print(f"\n{run_dir.name}\nis gone: it was moved or removed", flush=True)
    return True


def _sequential(page: LivePage, todo: dict[Path, int], settings: Sweep, table: Display, preemption: Preemption) -> None:
    """Execute runs one after another, from this process and its warm forkserver."""
    for number, (run_dir, attempts) in enumerate(todo.items()):
        preemption.poll()
        if preemption.requested:
            return
        if _is_gone(run_dir):
            continue
        if _attempts(run_dir) != attempts:
            print(f"\n{run_dir.name}\n{condition(read_status(run_dir))}", flush=True)
            table.run_ended(run_dir)
            continue
        for attempt in range(1 + settings.retry):
            if attempt:
                say(f"{run_dir.name}: retry {attempt}")
            table.run_started(run_dir)
            try:
                ended = execute(run_dir, display=None if table.steps else table)
                report(*ended, row=False)
                if ended.outcome.interrupted:  # too late for this run
                    raise Interrupted("by SIGINT")
            except AlreadyRunning as error:
                say(error)
                break
            except ConfigError as error:  # since the sweep began, e.g. data was removed
                update_status(run_dir, state="failed", reason=str(error).splitlines()[0], ended=time.time())
                say(error, to_stderr=True)
            finally:
                table.run_ended(run_dir)
            if read_state(run_dir) not in CRASHED:
                break
        page.run_ended()
        preempted = read_state(run_dir) == "preempted"  # and so is the sweep's job
        if preempted or _fails_fast(run_dir, settings):
            why = "a stop was requested" if preempted else "sweep.fail_fast, and an earlier run has failed"
            for rest in list(todo)[number + 1 :]:
                print(f"\n{rest.name}\nnot started: {why}")
            return


class _Parallel:
    """Execute runs in parallel, each by a process that sees only its devices."""

    def __init__(self, devices: list[str], needs: dict[Path, NodeDevices], page: LivePage) -> None:
        """`devices`: as CUDA_VISIBLE_DEVICES names them; runs on CPUs only count them."""
        self.devices, self.needs, self.page = devices, needs, page
        self.free = devices
        self.running: dict[Path, tuple[subprocess.Popen[bytes], list[str]]] = {}
        self.starts: dict[Path, int] = {}
        self.interrupted = False

    def __call__(self, todo: dict[Path, int], settings: Sweep, table: Display, preemption: Preemption) -> None:
        try:
            with first_interrupt(self._interrupt):
                self._execute(todo, settings, table, preemption)
        finally:
            self._signal_all(signal.SIGHUP)  # ends a run at once, where the first SIGINT has it save a checkpoint
            for process, _ in self.running.values():
                process.wait()
        if self.interrupted:
            raise Interrupted("by SIGINT")

    def _interrupt(self) -> bool:
        self.interrupted = True
        return True

    def _execute(self, todo: dict[Path, int], settings: Sweep, table: Display, preemption: Preemption) -> None:
        queue, stopping = list(todo), False
        while queue or self.running:
            preemption.poll()
            if (preemption.requested or self.interrupted) and not stopping:
                stopping = True
                queue.clear()
                self._signal_all(signal.SIGINT if self.interrupted else signal.SIGTERM)
                if self.interrupted:
                    warn(
                        "the runs are ending, after a checkpoint if they save any; press Ctrl-C again to stop them at once"
                    )
            # In order: small runs must not starve a large one that waits for devices.
            while queue and (self.needs[queue[0]].workers <= len(self.free) or not self.running):
                run_dir = queue.pop(0)
                if _is_gone(run_dir):
                    continue
                if run_dir not in self.starts and _attempts(run_dir) != todo[run_dir]:
                    print(f"{run_dir.name}: {condition(read_status(run_dir))}", flush=True)
                    table.run_ended(run_dir)
                    continue
                table.run_started(run_dir)
                self._start(run_dir)
            for run_dir in self._reap():
                if table.active:
                    status = read_status(run_dir)
                    say(f"{run_dir.name}: {status.state} {status.reason}".rstrip())
                table.run_ended(run_dir)
                self.page.run_ended()
                if not stopping and read_state(run_dir) in CRASHED and self.starts[run_dir] <= settings.retry:
                    queue.insert(0, run_dir)
                elif _fails_fast(run_dir, settings):
                    queue.clear()
            table.refresh()
            time.sleep(POLL_S)

    def _start(self, run_dir: Path) -> None:
        need = self.needs[run_dir]
        own, self.free = self.free[: need.workers], self.free[need.workers :]
        self.starts[run_dir] = self.starts.get(run_dir, 0) + 1
        if read_state(run_dir) in FINAL:  # of an earlier execution
            update_status(run_dir, state="pending", reason="")
        with (run_dir / LAUNCHER_LOG).open("ab") as log:
            process = subprocess.Popen(
                # -P: nothing in the current directory may shadow what is imported
                [sys.executable, "-P", "-m", "meshrunner", "resume", str(run_dir)],
                env=os.environ | self._environment(need.type, own),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # Ctrl-C reaches it only through this process
                preexec_fn=partial(die_with_parent, signal.SIGTERM),  # it records the interrupt and exits
            )
        self.running[run_dir] = process, own
        print(f"{run_dir.name}: started on {', '.join(own)}", flush=True)

    def _environment(self, device_type: str, own: list[str]) -> dict[str, str]:
        """Return the variables by which a run keeps to its part of the node: its devices, and as large a part of the cores."""
        part = {CORES: str(max(1, cores() * len(own) // len(self.devices)))}
        return part | ({"CUDA_VISIBLE_DEVICES": ",".join(own)} if device_type == "cuda" else {})

    def _reap(self) -> list[Path]:
        ended = [run_dir for run_dir, (process, _) in self.running.items() if process.poll() is not None]
        for run_dir in ended:
            process, own = self.running.pop(run_dir)
            self.free = [device for device in self.devices if device in self.free or device in own]
            status = read_status(run_dir)
            # One that was interrupted while it was starting stays pending.
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
    """Return the reason of a run whose process recorded none: it was killed, or the run could not begin."""
    if process.returncode < 0:
        return f"its process was killed by signal {signal.Signals(-process.returncode).name}"
    lines = last_lines(run_dir / LAUNCHER_LOG)
    return lines[-1] if lines else f"its process ended with exit code {process.returncode}"
