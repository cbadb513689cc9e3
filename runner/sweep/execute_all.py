"""Executes the unfinished runs of a sweep: one after another, or in parallel if the machine has devices for several runs."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from meshrunner.recipes.errors import AlreadyRunning, ConfigError, Interrupted, Moved
from meshrunner.runner.config.devices import CORES, NodeDevices, cores, node_devices, visible_gpus
from meshrunner.runner.config.experiment import Experiment, Sweep, check
from meshrunner.runner.config.interpreter import is_other
from meshrunner.runner.console import console, say
from meshrunner.runner.launch.execute import execute
from meshrunner.runner.launch.preemption import Preemption
from meshrunner.runner.launch.report import report
from meshrunner.runner.process.signals import die_with_parent, first_interrupt, interruptible
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
from meshrunner.runner.slurm.steps import allocated_nodes, step
from meshrunner.runner.sweep.live_table import LiveTable
from meshrunner.runner.sweep.results import LivePage
from meshrunner.runner.sweep.tally import RunLines

POLL_S = 0.05
NODES = "nodes"
"""Device type of runs that execute as job steps on several nodes."""
MACHINE = "machine"
"""Device type of runs that execute one after another, each in a process of its own."""
Display = LiveTable | RunLines


def execute_all(run_dirs: Sequence[Path], experiment: Experiment) -> tuple[int, bool]:
    """Execute the unfinished runs of a sweep, except runs that another live process is executing. `experiment`: the first run's
    configuration; the section `experiment.sweep` applies to all runs. Return the exit status and whether the sweep must stop. A
    sweep stops on request and, with `sweep.fail_fast`, after a crash, timeout or lack of memory."""
    settings, sweep_dir = experiment.sweep, run_dirs[0].parent
    todo = [run_dir for run_dir in run_dirs if _is_due(run_dir, settings)]
    devices, needs = _shared(todo, settings)
    screen, steps = console(), experiment.progress == "steps"
    live = experiment.progress == "auto" and screen.is_terminal and not screen.is_dumb_terminal
    display = LiveTable(screen, run_dirs, todo) if live else RunLines(run_dirs, todo, steps=steps)
    page = LivePage(sweep_dir, len(run_dirs))
    stopping = "stopping the runs, which first save a checkpoint if checkpoints are enabled"
    try:
        with interruptible(), Preemption(sweep_dir, saves=True, stopping=stopping) as preemption, display:
            if devices:
                _Parallel(devices, needs, settings, display, page).execute(todo, preemption)
            else:
                _sequential(todo, settings, display, page, preemption)
    except Interrupted as error:
        cause = str(error).partition(";")[0]  # drop the rest, which says how to resume a single run
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


def _shared(run_dirs: Sequence[Path], settings: Sweep) -> tuple[list[str], dict[Path, NodeDevices]]:
    """Return the names of the devices that parallel runs share, and the number and type of devices that each run needs. A
    GPU's name is its index or UUID. On CPUs, a device is an equal share of the cores, and its name is a number. If any run needs
    several nodes, all nodes of the SLURM job count as one device. If runs cannot execute in parallel and any run needs another
    interpreter, this machine counts as one device. Return ([], {}) if this process must execute the runs itself, one by one."""
    if allocated_nodes() > 1 and any(check(read_config(run_dir)).launch.nodes_used > 1 for run_dir in run_dirs):
        return ["all nodes of the job"], dict.fromkeys(run_dirs, NodeDevices(NODES, 1, 1))
    gpus = visible_gpus()
    count = len(gpus) if settings.devices == "auto" else settings.devices
    needs = {run_dir: node_devices(check(read_config(run_dir))) for run_dir in run_dirs} if count > 1 else {}
    if len(needs) < 2 or count < 2 * min(each.processes for each in needs.values()):
        if any(is_other(read_config(run_dir).get("launch", {}).get("python")) for run_dir in run_dirs):
            return ["this machine"], dict.fromkeys(run_dirs, NodeDevices(MACHINE, 1, 1))
        return [], {}
    if all(each.type == "cpu" for each in needs.values()):
        return [str(number) for number in range(count)], needs
    if count > len(gpus):
        raise ConfigError(f"sweep.devices: {count} is more than the {len(gpus)} visible GPUs: {', '.join(gpus)}")
    return gpus[:count], needs


def _is_due(run_dir: Path, settings: Sweep) -> bool:
    """Return whether to execute a run. Print the reason if the run has a result, is already executing, or was removed."""
    status = read_status(run_dir)
    if not run_dir.is_dir():
        say(f"{run_dir.name} was not executed: its directory was moved or removed")
    elif owner_is_alive(status) or (status.state in RESULTS and status.state not in settings.rerun):
        say(f"{run_dir.name} {condition(status)}")
    else:
        return True
    return False


def _fails_fast(run_dir: Path, settings: Sweep) -> bool:
    return settings.fail_fast and read_state(run_dir) in (*CRASHED, "oom")


def _sequential(
    todo: Sequence[Path], settings: Sweep, display: Display, page: LivePage, preemption: Preemption
) -> None:
    """Execute runs one after another. All workers are forked from this process's forkserver, which imports torch only once."""
    for number, run_dir in enumerate(todo):
        preemption.poll()
        if preemption.requested:
            return
        if not _is_due(run_dir, settings):  # another process may have executed the run
            display.run_ended(run_dir)
            continue
        for attempt in range(1 + settings.retry):
            if attempt:
                say(f"{run_dir.name}: retry {attempt}")
            display.run_started(run_dir)
            try:
                outcome, summary = execute(run_dir, display=None if display.steps else display)
                report(run_dir, outcome, summary, row=False)
                if outcome.interrupted:  # the run ended before the interrupt could stop it
                    raise Interrupted("by SIGINT")
            except AlreadyRunning as error:
                say(error)
                break
            except ConfigError as error:  # for example, data was removed after the sweep was checked
                update_status(run_dir, state="failed", reason=str(error).splitlines()[0], ended=time.time())
                say(error, to_stderr=True)
            finally:
                display.run_ended(run_dir)
            if read_state(run_dir) not in CRASHED:
                break
        page.run_ended()
        preempted = read_state(run_dir) == "preempted"  # the stop request applies to the whole sweep
        if preempted or _fails_fast(run_dir, settings):
            why = "a stop was requested" if preempted else "sweep.fail_fast is set and an earlier run failed"
            for rest in todo[number + 1 :]:
                say(f"{rest.name} not started: {why}")
            return


class _Parallel:
    """Executes runs in parallel, each in its own process that sees only the run's devices."""

    def __init__(
        self, devices: list[str], needs: dict[Path, NodeDevices], settings: Sweep, display: Display, page: LivePage
    ) -> None:
        self.devices, self.needs, self.settings, self.display, self.page = devices, needs, settings, display, page
        self.free = devices
        self.running: dict[Path, tuple[subprocess.Popen[bytes], list[str]]] = {}
        self.starts: Counter[Path] = Counter()

    def execute(self, todo: Sequence[Path], preemption: Preemption) -> None:
        """Execute runs. On Ctrl-C, let the runs stop by themselves, then raise Interrupted. A second Ctrl-C ends runs at once."""
        try:
            with first_interrupt(preemption.interrupt):
                self._execute(list(todo), preemption)
        finally:
            self._signal_all(signal.SIGHUP)  # unlike a first SIGINT, SIGHUP ends a run without a checkpoint
            for process, _ in self.running.values():
                process.wait()
        if preemption.interrupted:
            raise Interrupted("by SIGINT")

    def _execute(self, queue: list[Path], preemption: Preemption) -> None:
        stopping = False
        while queue or self.running:
            preemption.poll()
            if preemption.requested and not stopping:
                stopping = True
                queue.clear()
                self._signal_all(signal.SIGINT if preemption.interrupted else signal.SIGTERM)
            # Start runs in order, so that small runs do not starve a large run that waits for devices.
            while queue and (self.needs[queue[0]].processes <= len(self.free) or not self.running):
                run_dir = queue.pop(0)
                if _is_due(run_dir, self.settings):
                    self._start(run_dir)
                else:
                    self.display.run_ended(run_dir)
            for run_dir in self._reap():
                status = read_status(run_dir)
                if isinstance(self.display, LiveTable):
                    say(f"{run_dir.name}: {status.state} {status.reason}".rstrip())
                self.display.run_ended(run_dir)
                self.page.run_ended()
                if not stopping and status.state in CRASHED and self.starts[run_dir] <= self.settings.retry:
                    queue.insert(0, run_dir)
                elif _fails_fast(run_dir, self.settings):
                    queue.clear()
            self.display.refresh()
            time.sleep(POLL_S)

    def _start(self, run_dir: Path) -> None:
        need = self.needs[run_dir]
        own, self.free = self.free[: need.processes], self.free[need.processes :]
        self.starts[run_dir] += 1
        self.display.run_started(run_dir)
        if read_state(run_dir) in FINAL:  # a state from an earlier execution
            update_status(run_dir, state="pending", reason="")
        # -P: modules in the current directory must not shadow installed modules
        command = [sys.executable, "-P", "-m", "meshrunner", "resume", str(run_dir)]
        if need.type == NODES:
            command, variables = step(run_dir, check(read_config(run_dir)).launch.nodes_used)
        else:  # a run on half of the devices gets half of the node's cores
            variables = {CORES: str(max(1, cores() * len(own) // len(self.devices)))}
        if need.type == "cuda":
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        with (run_dir / LAUNCHER_LOG).open("ab") as log:
            process = subprocess.Popen(
                command,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # Ctrl-C reaches a run only through this process
                # If this process dies, the run receives SIGTERM, records the interrupt and exits.
                preexec_fn=partial(die_with_parent, signal.SIGTERM),
            )
        self.running[run_dir] = process, own
        say(f"{run_dir.name}: started on {', '.join(own)}")

    def _reap(self) -> list[Path]:
        ended = [run_dir for run_dir, (process, _) in self.running.items() if process.poll() is not None]
        for run_dir in ended:
            process, own = self.running.pop(run_dir)
            self.free = [device for device in self.devices if device in self.free or device in own]
            status, code = read_status(run_dir), process.returncode
            # A run that was interrupted while it was starting (exit status 130) stays pending.
            if code == 130 or not run_dir.is_dir() or status.state in FINAL or owner_is_alive(status):
                continue
            if code < 0:
                reason = f"its process was killed by signal {signal.Signals(-code).name}"
            else:  # the process could not begin the run
                reason = [f"its process ended with exit code {code}", *last_lines(run_dir / LAUNCHER_LOG)][-1]
            update_status(run_dir, state="failed", reason=reason, ended=time.time())
        return ended

    def _signal_all(self, number: signal.Signals) -> None:
        for process, _ in self.running.values():
            process.send_signal(number)  # does nothing if the process has ended
