"""Wherever a run is started, and whatever is taken away from it: it ends as it should, or one sentence says why it cannot."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from meshrunner.runner.rundir.events import read_events
from tests.e2e.command import BOUND_S, PROGRAM, TINY, Command, Ended, meshrunner, own_classes, read, status, steps_done

RUN = (PROGRAM, "run", *TINY, "hydra.run.dir=out")
SLOW = ("optimizer.kind=faulty:SlowAdamW", "steps=20")
"""A run that lasts two seconds after its first step."""
slow = pytest.mark.slow


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder for temporary files with a path as short as /tmp's; what is put there must be removed."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    yield folder
    left = list(folder.iterdir())
    shutil.rmtree(folder)
    assert not left


def shell(script: str, *arguments: str, cwd: Path, **environment: str) -> Ended:
    """A shell script to its end, "$@" being the arguments; nobody may be left behind."""
    with Command(*arguments, program=("bash", "-c", script, "bash"), cwd=cwd, **environment) as command:
        ended = command.wait()
        command.check_nobody_left()
    return ended.check_manners()


def check_completed(folder: Path, steps: int = 3) -> None:
    assert status(folder / "out").get("state") == "completed", status(folder / "out")
    assert [row["step"] for row in read_events(folder / "out")] == list(range(1, steps + 1))


@pytest.mark.slow
def test_all_streams_closed_and_the_default_tracker(folder: Path, short: Path) -> None:
    """The first files that are opened would be taken for the streams. The tracker's library leaves folders in TMPDIR."""
    ended = shell('exec "$@" <&- >&- 2>&-', *RUN, "tracker=wandb", cwd=folder, TMPDIR=str(short))
    assert ended.code == 0, ended
    check_completed(folder)
    assert list((folder / "out" / "wandb").glob("offline-run-*/*.wandb"))
    assert read(folder / "out" / "tracker.json")["phase"] == "finished"


@pytest.mark.slow
def test_all_on_a_full_disk_and_temporary_files_far_away(folder: Path) -> None:
    temporary = folder / ("long" * 30)
    temporary.mkdir()
    script = 'exec "$@" > /dev/full 2> /dev/full'
    ended = shell(script, *RUN, "log_every=1", "tracker=wandb", cwd=folder, TMPDIR=str(temporary))
    assert ended.code == 0, ended
    check_completed(folder)
    assert read(folder / "out" / "tracker.json")["phase"] == "finished"
    assert not list(temporary.iterdir())


@slow
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream(closed: str, folder: Path) -> None:
    ended = shell(f'exec "$@" {closed}', *RUN, cwd=folder)
    assert ended.code == 0, ended
    check_completed(folder)
    assert ("step 3/3" in ended.out) == (">&-" not in closed.split())


@slow
def test_a_full_disk_under_stdout_is_said_once(folder: Path) -> None:
    ended = shell('exec "$@" > /dev/full', *RUN, cwd=folder)
    assert ended.code == 0, ended
    check_completed(folder)
    assert ended.err.count("meshrunner: stdout cannot be written: No space left on device") == 1, ended


@slow
@pytest.mark.parametrize("stream", ["", "2"])
def test_a_reader_goes_away(stream: str, folder: Path) -> None:
    ended = shell(f'exec "$@" {stream}> >(head -c 1 > /dev/null)', *RUN, *SLOW, "global_batch=4", cwd=folder)
    assert ended.code == 0, ended
    check_completed(folder, 20)
    assert "Error" not in ended.err, ended


def test_a_table_that_cannot_be_written_is_a_failure(folder: Path) -> None:
    """`meshrunner compare ... > FILE` must not succeed without the file; whoever reads the first line only is content."""
    ended = shell('exec "$@" > /dev/full', PROGRAM, "--help", cwd=folder)
    assert (ended.code, ended.err) == (1, "meshrunner: stdout cannot be written: No space left on device\n")
    ended = shell('"$@" | true; exit ${PIPESTATUS[0]}', PROGRAM, "--help", cwd=folder)
    assert (ended.code, ended.err) == (0, "")


@slow
@pytest.mark.parametrize("mode", ["absent", "a file"])
def test_no_folder_for_temporary_files(mode: str, folder: Path) -> None:
    if mode == "a file":
        (folder / "nowhere").touch()
    ended = meshrunner(*RUN[1:], "tracker=wandb", cwd=folder, TMPDIR=str(folder / "nowhere"))
    assert ended.code == 0, ended
    check_completed(folder)


def test_no_current_directory(folder: Path) -> None:
    script = 'mkdir gone; cd gone; rmdir "$PWD"; exec "$@"'
    ended = shell(script, *RUN, cwd=folder)
    assert (ended.code, ended.err) == (2, "the current directory was removed: change into one that exists\n")


@slow
def test_the_current_directory_is_removed_while_it_runs(folder: Path) -> None:
    here = folder / "here"
    here.mkdir()
    own_classes(here)
    arguments = [*RUN[1:-1], f"hydra.run.dir={folder}/out", *SLOW]
    with Command(*arguments, cwd=here) as command:
        command.until(lambda: steps_done(folder / "out") >= 2)
        shutil.move(here, folder / "elsewhere")
        shutil.rmtree(folder / "elsewhere", ignore_errors=True)
        assert command.process.wait(BOUND_S) == 0
        command.check_nobody_left()
    check_completed(folder, 20)


def shared_memory(mount: str, *arguments: str, cwd: Path) -> Ended:
    """A command that finds another /dev/shm."""
    private = ["unshare", "--mount", "--map-root-user", "bash", "-c", f'{mount} && exec "$@"', "bash"]
    if subprocess.run([*private, "true"], cwd=cwd, capture_output=True).returncode:
        pytest.skip("this user may not mount anything")
    with Command(*arguments, program=private, cwd=cwd) as command:
        ended = command.wait()
        command.check_nobody_left()
    return ended.check_manners()


@slow
@pytest.mark.parametrize(
    "mount",
    [
        "mount -t tmpfs -o ro none /dev/shm",
        "mount -t tmpfs -o size=4k none /dev/shm && ! cat /dev/zero > /dev/shm/full 2> /dev/null",
        "mkdir -p dev && cd dev && touch null urandom && mount --bind /dev/null null && mount --bind /dev/urandom urandom &&"
        "cd .. && mount --rbind dev /dev",
    ],
    ids=["read-only", "full", "absent"],
)
def test_without_shared_memory(mount: str, folder: Path) -> None:
    """Workers share a few integers with their launcher, and gloo uses sockets: neither needs /dev/shm."""
    ended = shared_memory(mount, *RUN, cwd=folder)
    assert ended.code == 0, ended
    check_completed(folder)


@slow
@pytest.mark.parametrize("moment", ["claimed", "step"])
def test_the_run_directory_is_renamed(moment: str, folder: Path) -> None:
    """The run ends with a message, and its rows remain until it is resumed."""
    with Command(*RUN[1:], *SLOW, cwd=folder) as command:
        command.until(lambda: status(folder / "out").get("state") == "running")
        if moment == "step":
            command.until(lambda: steps_done(folder / "out") >= 2)
        (folder / "out").rename(folder / "moved")
        ended = command.wait().check_manners()
        command.check_nobody_left()
    assert not (folder / "out").exists(), ended
    assert ended.code == 1 and f"{folder}/out was moved or removed during the run" in ended.err, ended
    assert moment == "claimed" or len(read_events(folder / "moved")) >= 2
    again = meshrunner("resume", "moved", cwd=folder)
    assert again.code == 0 and "starts again at step 1" in again.out, again


@slow
def test_the_run_directory_is_removed(folder: Path) -> None:
    with Command(*RUN[1:], *SLOW, cwd=folder) as command:
        command.until(lambda: steps_done(folder / "out") >= 2)
        shutil.rmtree(folder / "out")
        ended = command.wait().check_manners()
        command.check_nobody_left()
    assert ended.code == 1 and f"{folder}/out was moved or removed during the run" in ended.err, ended
    assert not (folder / "out").exists()


@slow
def test_the_sweep_directory_is_renamed(folder: Path) -> None:
    arguments = ["run", "-m", *TINY, *SLOW, "seed=1,2", "hydra.sweep.dir=sweep"]
    with Command(*arguments, cwd=folder) as command:
        first = command.until(lambda: next(iter(sorted((folder / "sweep").glob("000*"))), None))
        command.until(lambda: steps_done(first) >= 2)
        (folder / "sweep").rename(folder / "moved")
        ended = command.wait().check_manners()
        command.check_nobody_left()
    assert ended.code == 1 and "was moved or removed during the" in ended.err, ended
    assert not (folder / "sweep").exists()
    again = meshrunner("resume", "moved", cwd=folder)
    assert again.code == 0, again


@slow
@pytest.mark.parametrize("moment", ["tracker", "step"])
def test_a_killed_command_leaves_no_temporary_file(moment: str, folder: Path, short: Path) -> None:
    with Command(*RUN[1:], *SLOW, "tracker=wandb", cwd=folder, TMPDIR=str(short)) as command:
        if moment == "step":
            command.until(lambda: steps_done(folder / "out") >= 5)
        command.until(lambda: read(folder / "out" / "tracker.json").get("phase") and list(short.glob("meshrunner-*/*")))
        command.process.kill()
        command.process.wait()
        command.check_nobody_left()


@slow
def test_a_killed_tracker_leaves_no_temporary_file(folder: Path, short: Path) -> None:
    with Command(*RUN[1:], *SLOW, "tracker=wandb", cwd=folder, TMPDIR=str(short)) as command:
        command.until(lambda: read(folder / "out" / "tracker.json").get("phase") == "following")
        processes = psutil.Process(command.pid).children(recursive=True)
        cores = [process for process in processes if "wandb-core" in process.name()]  # in a session of its own
        assert cores
        for process in cores:
            process.kill()
        ended = command.wait().check_manners()
        command.check_nobody_left()
    assert ended.code == 0 and "the run is not affected" in ended.err, ended
    check_completed(folder, 20)


def test_a_pipe_that_is_slow_and_does_not_block(tmp_path: Path) -> None:
    """Some programs read the output of others through such a pipe: writing waits, and loses nothing."""
    program = """
import os, sys
from meshrunner.runner.process.streams import secure_streams
os.set_blocking(1, False)
secure_streams()
for i in range(20000):
    print("line", i)
sys.stdout.flush()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=tmp_path) as writer:
        assert writer.stdout is not None
        lines = writer.stdout.read().splitlines()
    assert writer.returncode == 0
    assert lines == [f"line {i}".encode() for i in range(20000)]
