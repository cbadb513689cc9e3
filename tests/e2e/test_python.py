"""`meshrunner.run` and `meshrunner.sweep`, called by a script in a process of its own."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.e2e.command import TINY, Command, steps_done

pytestmark = pytest.mark.usefixtures("cache")
BEGIN = f"""
import os, signal, sys

def here():
    handlers = {{number: signal.getsignal(number) for number in signal.valid_signals()}}
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return handlers, masked, dict(os.environ), os.getcwd(), list(sys.path), list(sys.argv)

before = here()
import meshrunner
from meshrunner.recipes.errors import ConfigError
TINY = {list(TINY)!r}
"""
RUNS = """
try:
    meshrunner.run([*TINY, "stepz=3"])
except ConfigError as error:
    assert str(error).startswith("stepz: unknown key. Did you mean 'steps'? Keys of"), error
else:
    raise AssertionError("a wrong key")
failed = meshrunner.run([*TINY, "model.kind=faulty:Raises", "hydra.run.dir=failed"])
assert (failed.state, failed.folder.name) == ("failed", "failed") and "own mistake" in failed.reason, failed.reason
done = meshrunner.run([*TINY, "experiment=fsdp1_vs_fsdp2", "model.dim=16", "hydra.run.dir='<b>'", "steps=4"])
assert done.state == "completed" and done.reason == "" and done.config["model"]["dim"] == 16
assert len(done.events) == done.summary["steps"] == 4 and len(done.rows) == 1
measured = done.events[done.events["measured"]]["perf/wps"]
assert measured.median() == done.summary["perf/wps_median"]
assert "<td>&lt;b&gt;</td>" in done._repr_html_()
sweep = meshrunner.sweep([*TINY, "parallelism=ddp,fsdp2", "hydra.sweep.dir=swept"])
assert sweep.folder.name == "swept" and [each.state for each in sweep.runs] == ["completed"] * 2
assert [each.config["parallelism"]["kind"] for each in sweep.runs] == ["ddp", "fsdp2"] == list(sweep.rows["parallelism"])
assert "<td>ddp</td>" in sweep._repr_html_()
assert here() == before
assert not {"torch", "hydra", "omegaconf"} & set(sys.modules)
"""
INTERRUPTED = """
try:
    meshrunner.run([*TINY, "steps=100000", "hydra.run.dir=out"])
except KeyboardInterrupt as error:
    print("caught", error)
assert here() == before
"""


def script(text: str, folder: Path) -> Command:
    """A script without `if __name__ == "__main__"`, as in a notebook."""
    (folder / "script.py").write_text(BEGIN + text)
    return Command("-P", "script.py", cwd=folder, program=[sys.executable])


@pytest.mark.slow
def test_run_and_sweep_return_what_the_command_wrote_and_leave_the_process_as_it_was(folder: Path) -> None:
    with script(RUNS, folder) as command:
        ended = command.wait()
        command.check_nobody_left()
    assert ended.code == 0, ended
    assert "step 4/4" in ended.out and "sweep directory: swept" in ended.out, "live output"
    assert "unknown key" not in ended.err, "the exception says it"


@pytest.mark.slow
def test_an_interrupt_ends_the_run_and_is_raised(folder: Path) -> None:
    with script(INTERRUPTED, folder) as command:
        command.until(lambda: steps_done(folder / "out") > 1)
        os.kill(command.pid, signal.SIGINT)
        ended = command.wait()
        command.check_nobody_left()
    assert ended.code == 0, ended
    assert "caught interrupted by SIGINT; `meshrunner resume" in ended.out
