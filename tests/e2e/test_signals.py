"""Whoever ends a run, and whenever: the exit status and the record are right, and no process stays behind."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.command import BOUND_S, TINY, Command, meshrunner, read, status, steps_done, until

SLOW = ("optimizer.kind=faulty:SlowAdamW", "steps=1000")
"""A run that lasts 100 s when it is left alone."""


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module", autouse=True)
def default_sigint() -> None:
    """A job in a shell's background would hand an ignored SIGINT down."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def started(*overrides: str, folder: Path) -> Command:
    """A run into folder/out that goes on until it is ended."""
    return Command("run", *TINY, "hydra.run.dir=out", *SLOW, *overrides, cwd=folder)


def in_a_step(command: Command, folder: Path) -> None:
    """Wait until the run is in the middle of its steps."""
    command.until(lambda: steps_done(folder / "out") >= 2)


def catches_interrupts(pid: int) -> bool:
    """Whether SIGINT no longer ends a process at once."""
    (caught,) = re.findall(r"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught, 16) >> (signal.SIGINT - 1) & 1)


def to_group(command: Command) -> None:
    """Ctrl-C in a terminal."""
    command.interrupt()


def to_parent(command: Command) -> None:
    """`kill -INT PID`."""
    command.process.send_signal(signal.SIGINT)


def check_interrupted(command: Command, out: Path, within: float = BOUND_S, first: str = "interrupted") -> None:
    """Exit status 130 soon, one line for the user, the record is right and nobody is left. `first`: of what is said."""
    ended = command.wait(within).check_manners()
    command.check_nobody_left()
    assert ended.code == 130, ended
    assert ended.err.startswith(first), ended
    if status(out).get("state", "pending") == "pending":
        return
    assert status(out)["state"] == "interrupted", (status(out), ended)
    assert status(out)["reason"] and status(out)["ended"], status(out)
    assert "nothing was started" not in ended.err


MOMENTS: dict[str, Callable[[Command, Path], object]] = {
    "forkserver": lambda command, out: command.until(command.forkserver),
    "placed": lambda command, out: command.until((out / "config.yaml").exists),
    "claimed": lambda command, out: command.until(lambda: status(out).get("state") == "running"),
    "workers": lambda command, out: command.until(lambda: status(out).get("workers")),
    "first log": lambda command, out: command.until((out / "logs" / "rank0.log").exists),
    "model": lambda command, out: command.until((out / "events.jsonl").exists),
    "step": lambda command, out: command.until(lambda: steps_done(out) >= 2),
}


@pytest.mark.slow_cases(
    "claimed-to_group", "first log*", "model*", "placed*", "step-to_parent", "workers*", "step-to_group"
)
@pytest.mark.parametrize("moment, send", [*((moment, to_group) for moment in MOMENTS), ("step", to_parent)])
def test_interrupt(moment: str, send: Callable[[Command], None], folder: Path) -> None:
    """Ctrl-C works whatever the run is doing: in particular while things are imported, placed and started."""
    with started(folder=folder) as command:
        MOMENTS[moment](command, folder / "out")
        send(command)
        check_interrupted(command, folder / "out")


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["claimed", "workers"])
def test_interrupt_with_a_tracker(moment: str, folder: Path) -> None:
    """A run is claimed before its tracker is started, which waits for the forkserver's imports: a second of its own."""
    with started("tracker.kind=faulty:SlowTracker", folder=folder) as command:
        MOMENTS[moment](command, folder / "out")
        command.interrupt()
        check_interrupted(command, folder / "out")


@pytest.mark.slow
def test_interrupted_run_says_how_to_continue(folder: Path) -> None:
    """The name of a run directory is made up by meshrunner: who interrupts a run has to be told it."""
    with started(folder=folder) as command:
        in_a_step(command, folder)
        command.interrupt()
        said = command.wait().err
    assert f"`meshrunner resume {folder}/out` starts the run again at step 1: there is no checkpoint" in said


SAVES = ("checkpoint=dcp", "checkpoint.every=1000")


@pytest.mark.parametrize("kind", ["dcp", pytest.param("dcp_async", marks=pytest.mark.slow)])
def test_the_first_interrupt_saves(kind: str, folder: Path) -> None:
    """Of a run that saves checkpoints, nothing is lost; the message says so while it saves, and where the run goes on."""
    with started(f"checkpoint={kind}", SAVES[1], folder=folder) as command:
        in_a_step(command, folder)
        command.interrupt()
        check_interrupted(
            command, folder / "out", first="meshrunner: saving a checkpoint; press Ctrl-C again to stop at once\n"
        )
        said = command.wait().err
    done = steps_done(folder / "out")
    (saved,) = (folder / "out" / "checkpoints").iterdir()
    assert saved.name == f"step-{done:08}"
    assert f"`meshrunner resume {folder}/out` continues the run after step {done}" in said
    assert status(folder / "out")["reason"] == "by SIGINT"


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_the_second_interrupt_ends_at_once(number: signal.Signals, folder: Path) -> None:
    """A save takes six seconds; whoever does not want to wait need not, nor does a shutdown."""
    overrides = ("checkpoint=dcp", "checkpoint.kind=faulty:SlowSave", "checkpoint.every=1000")
    with started(*overrides, folder=folder) as command:
        in_a_step(command, folder)
        command.interrupt()
        half = folder / "out" / "checkpoints" / ".tmp-step-00000002" / "__0_0.distcp"
        command.until(half.exists)
        command.process.send_signal(number)
        check_interrupted(command, folder / "out", first="meshrunner: saving a checkpoint")
        assert "starts the run again at step 1: there is no checkpoint" in command.wait().err
        assert half.stat().st_size < 6
    assert number.name in status(folder / "out")["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["claimed", "workers", "model"])
def test_before_the_first_step_there_is_nothing_to_save(moment: str, folder: Path) -> None:
    with started("checkpoint=dcp", folder=folder) as command:
        MOMENTS[moment](command, folder / "out")
        command.interrupt()
        check_interrupted(command, folder / "out")
        assert "again at step 1" in command.wait().err


@pytest.mark.slow
def test_a_terminated_run_saves_nothing(folder: Path) -> None:
    with started("checkpoint=dcp", folder=folder) as command:
        in_a_step(command, folder)
        command.process.send_signal(signal.SIGTERM)
        check_interrupted(command, folder / "out")
    assert not list((folder / "out" / "checkpoints").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0.15 + 0.05 * i for i in range(60)])
def test_interrupt_at_any_time(moment: float, folder: Path) -> None:
    """A signal that comes in an unlucky moment is lost, or leaves a state that is wrong."""
    with started(folder=folder) as command:
        command.until(lambda: catches_interrupts(command.process.pid))  # on a busy machine Python itself takes a while
        time.sleep(moment)
        command.interrupt()
        check_interrupted(command, folder / "out")


IMPORTED = ("signal", "meshrunner.runner.cli", "typing", "hydra", "meshrunner.runner.launch.execute")
INTERRUPTS_ITSELF = """
import os, sys

class Finder:
    def find_spec(self, name, *_):
        if name == {module!r} and "meshrunner" in sys.orig_argv:
            os.kill(os.getpid(), 2)

sys.modules.pop({module!r}, None)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("module", IMPORTED)
def test_interrupt_while_it_imports(module: str, folder: Path) -> None:
    """From the first import of its own on: exit status 130 and one line. Before, it is Python's to say something."""
    (folder / "sitecustomize.py").write_text(INTERRUPTS_ITSELF.format(module=module))
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    program = (sys.executable, "-m", "meshrunner")
    with Command("run", *TINY, "hydra.run.dir=out", program=program, cwd=folder, PYTHONPATH=path) as command:
        ended = command.wait()
        command.check_nobody_left()
    assert (ended.code, ended.err) == (130, "interrupted; nothing was started\n"), ended


@pytest.mark.slow
def test_no_interrupt_is_lost(folder: Path) -> None:
    """While the forkserver is started SIGINT must not reach it; ignoring it meanwhile would lose the user's Ctrl-C."""

    def ignores_or_warm() -> bool:
        fields = dict(line.split(":\t") for line in Path(f"/proc/{command.pid}/status").read_text().splitlines())
        return bool(int(fields["SigIgn"], 16) & 1 << signal.SIGINT - 1) or (folder / "out").exists()

    with started(folder=folder) as command:
        while not ignores_or_warm():
            pass
        command.interrupt()
        assert command.wait().code in (130, -signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0.01 + 0.005 * i for i in range(60)])
def test_interrupt_while_it_starts(moment: float, folder: Path) -> None:
    """
    Before there is a handler Python's own ends the process, with 1 while it sets up its streams and imports `site`, and
    for a moment before it is lost: then the interpreter prints it and goes on. Afterwards no signal is lost.
    """
    with started(folder=folder) as command:
        time.sleep(moment)
        command.interrupt()
        ended = command.wait()
        by_python = "init_sys_streams", "init_import_site", "Failed checking if argv[0] is an import path entry"
        assert ended.code in (130, -signal.SIGINT) or any(text in ended.err for text in by_python), ended
        command.check_nobody_left()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_end_by_the_system(number: signal.Signals, folder: Path) -> None:
    """A closed terminal or a shutdown ends the run in order, and the reason says what it was."""
    with started(folder=folder) as command:
        in_a_step(command, folder)
        command.process.send_signal(number)
        check_interrupted(command, folder / "out")
    assert number.name in status(folder / "out")["reason"]
    assert read(folder / "out" / "summary.json")["state"] == "interrupted"


@pytest.mark.slow
def test_second_interrupt(folder: Path) -> None:
    """Impatience while a worker that cannot be ended is waited for neither leaves it behind nor loses the record."""
    with started("model.kind=faulty:CannotBeEnded", folder=folder) as command:
        log = folder / "out" / "logs" / "rank1.log"
        command.until(lambda: log.exists() and "END is ignored" in log.read_text())
        for _ in range(10):
            command.interrupt()
            with pytest.raises(psutil.TimeoutExpired):
                psutil.Process(command.pid).wait(0.1)
        check_interrupted(command, folder / "out")


@pytest.mark.slow
def test_interrupt_while_the_tracker_finishes(folder: Path) -> None:
    """The training is over then: the run stays completed, and the message does not say that nothing was started."""
    overrides = ("steps=3", "optimizer.kind=adamw", "tracker.kind=faulty:SlowTracker")
    with started(*overrides, folder=folder) as command:
        command.until(lambda: read(folder / "out" / "tracker.json").get("phase") == "finishing")
        command.interrupt()
        ended = command.wait(15).check_manners()
        command.check_nobody_left()
    assert status(folder / "out")["state"] == "completed"
    assert "nothing was started" not in ended.err, ended
    assert ended.code in (0, 130), ended


@pytest.mark.slow
def test_interrupted_sweep(folder: Path) -> None:
    """Ctrl-C ends the sweep, not only its job; what was not begun stays pending."""
    arguments = ["run", "-m", *TINY, "hydra.sweep.dir=sweep", *SLOW, "seed=1,2"]
    with Command(*arguments, cwd=folder) as command:
        first = command.until(lambda: next(iter(sorted((folder / "sweep").glob("000*"))), None))
        command.until(lambda: steps_done(first) >= 2)
        command.interrupt()
        ended = command.wait(15).check_manners()
        command.check_nobody_left()
    assert ended.code == 130, ended
    (second,) = (folder / "sweep").glob("001*")
    assert (status(first)["state"], status(second)["state"]) == ("interrupted", "pending")
    assert f"`meshrunner resume {folder}/sweep` continues the sweep" in ended.err, ended


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
def test_an_interrupted_sweep_saves_its_runs(devices: int, folder: Path) -> None:
    """The runs that go on save a checkpoint, the next ones are not begun, and the sweep continues where it was."""
    arguments = ["run", "-m", *TINY, "hydra.sweep.dir=sweep", *SLOW, *SAVES, "seed=1,2,3", f"sweep.devices={devices}"]
    going = 1 if devices == 1 else 2
    with Command(*arguments, cwd=folder) as command:
        command.until(lambda: len(list((folder / "sweep").glob("0*"))) == 3)
        runs = sorted((folder / "sweep").glob("0*"))
        command.until(lambda: min(map(steps_done, runs[:going])) >= 2)
        command.interrupt()
        ended = command.wait().check_manners()
        command.check_nobody_left()
    assert ended.code == 130, ended
    assert f"`meshrunner resume {folder}/sweep` continues the sweep" in ended.err, ended
    assert [status(run)["state"] for run in runs] == ["interrupted"] * going + ["pending"] * (3 - going)
    for run in runs[:going]:
        assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{steps_done(run):08}"]


@pytest.mark.slow
def test_an_interrupted_sweep_ends_after_a_run_that_is_complete(folder: Path) -> None:
    """The interrupt comes in the last step: the run is completed, and no other begins."""
    overrides = ["optimizer.kind=faulty:SlowAdamW", "steps=30", *SAVES]
    with Command("run", "-m", *TINY, "hydra.sweep.dir=sweep", *overrides, "seed=1,2", cwd=folder) as command:
        first = command.until(lambda: next(iter(sorted((folder / "sweep").glob("000*"))), None))
        command.until(lambda: steps_done(first) >= 29)
        command.interrupt()
        ended = command.wait().check_manners()
        command.check_nobody_left()
    (second,) = (folder / "sweep").glob("001*")
    assert ended.code == 130, ended
    assert status(second)["state"] == "pending"


KILLED = {"in a step": (), "while a rank hangs": ("model.kind=faulty:Hangs",)}


@pytest.mark.slow_cases("while a rank hangs")
@pytest.mark.parametrize("overrides", KILLED.values(), ids=KILLED)
def test_kill_9_leaves_nobody_behind(overrides: tuple[str, ...], folder: Path) -> None:
    """Nothing can be recorded then, but workers and forkserver follow at once."""
    with started(*overrides, folder=folder) as command:
        command.until(lambda: steps_done(folder / "out") >= 1)
        command.process.kill()
        assert command.wait().code == -signal.SIGKILL
        command.check_nobody_left()
    assert status(folder / "out")["state"] == "running"


@pytest.mark.slow_cases("claimed", "forkserver", "model", "workers")
@pytest.mark.parametrize("moment", ["forkserver", "claimed", "workers", "model"])
def test_kill_9_while_it_starts(moment: str, folder: Path) -> None:
    """A worker that has just been forked does not yet follow its parent: it may not be forgotten."""
    with started(folder=folder) as command:
        MOMENTS[moment](command, folder / "out")
        command.process.kill()
        command.wait()
        command.check_nobody_left()


@pytest.mark.slow
def test_take_over_and_disturb_nothing(folder: Path) -> None:
    """While a run is executed nobody else can; once its process is gone, anybody can."""
    out = folder / "out"
    with started(folder=folder) as command:
        in_a_step(command, folder)
        ended = meshrunner("resume", "out", cwd=folder)
        assert ended.code == 1, ended
        assert f"is being executed by process {command.pid} on {os.uname().nodename}" in ended.err
        assert len(ended.err.splitlines()) == 1
        assert (status(out)["state"], status(out)["attempt"]) == ("running", 1)
        before = steps_done(out)
        command.until(lambda: steps_done(out) > before + 2)
        command.process.kill()
        command.wait()
        command.check_nobody_left()

    config = out / "config.yaml"
    config.write_text(config.read_text().replace("steps: 1000", "steps: 3"))
    ended = meshrunner("resume", "out", cwd=folder)
    assert ended.code == 0, ended
    assert (status(out)["state"], status(out)["attempt"]) == ("completed", 2)


@pytest.mark.slow
def test_two_at_once(folder: Path) -> None:
    """Two that resume one directory in the same moment: one executes it, the other says so."""
    with started(folder=folder) as command:
        in_a_step(command, folder)
        command.process.kill()
        command.wait()
        command.check_nobody_left()
    with Command("resume", "out", cwd=folder) as one, Command("resume", "out", cwd=folder) as other:
        first = until(lambda: next((c for c in (one, other) if c.process.poll() is not None), None))
        ended = first.wait().check_manners()
        assert ended.code == 1, ended
        assert "is being executed by process" in ended.err
        winner = other if first is one else one
        winner.until(lambda: status(folder / "out").get("workers"))
        assert status(folder / "out")["owner"]["pid"] == winner.pid
        assert status(folder / "out")["attempt"] == 2
        winner.interrupt()
        check_interrupted(winner, folder / "out")


@pytest.mark.slow
def test_stopped_and_continued(folder: Path) -> None:
    """Ctrl-Z and `fg`: the run continues."""
    with started(folder=folder) as command:
        in_a_step(command, folder)
        os.killpg(command.pid, signal.SIGSTOP)
        command.until(lambda: psutil.Process(command.pid).status() == psutil.STATUS_STOPPED)
        os.killpg(command.pid, signal.SIGCONT)
        before = steps_done(folder / "out")
        command.until(lambda: steps_done(folder / "out") > before + 2)
        command.interrupt()
        check_interrupted(command, folder / "out")


@pytest.mark.slow
def test_reader_of_the_output_goes_away(folder: Path) -> None:
    """`meshrunner run | head -1`: losing standard output does not end in a traceback, and leaves nobody behind."""
    program = ("bash", "-c", 'exec "$0" "$@" > >(head -c 1 > /dev/null)')
    arguments = [str(Path(sys.executable).with_name("meshrunner")), "run", *TINY, "hydra.run.dir=out"]
    with Command(*arguments, "optimizer.kind=faulty:SlowAdamW", "steps=30", program=program, cwd=folder) as command:
        ended = command.wait().check_manners()
        command.check_nobody_left()
    assert "Traceback" not in ended.err
    assert status(folder / "out")["state"] in ("completed", "interrupted"), ended
