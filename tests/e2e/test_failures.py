"""What goes wrong is said on one screen, with the right exit status, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from tests.e2e.command import (
    BOUND_S,
    SCREEN,
    TINY,
    Command,
    Ended,
    meshrunner,
    own_classes,
    read,
    run,
    status,
    steps_done,
)

pytestmark = pytest.mark.usefixtures("cache")


# --- the configuration is wrong: exit status 2, nothing was started


def refused(*overrides: str, cwd: Path) -> str:
    """What a refused `run` says; nothing may lie where the run would have been."""
    flags = [word for word in overrides if word.startswith("-")]
    ended = run(*(word for word in overrides if not word.startswith("-")), flags=flags, cwd=cwd)
    assert ended.code == 2, ended
    assert not (cwd / "out").exists(), ended
    assert not ended.out.strip(), ended
    return ended.err


WRONG: dict[str, tuple[list[str], list[str]]] = {
    "option": (["model=lama_tiny"], ["model", "'lama_tiny'", "Did you mean 'llama_tiny'?", "llama3_8b"]),
    "key at the top": (["stepps=3"], ["stepps: unknown key. Did you mean 'steps'?"]),
    "key in a group": (["model.dimm=3"], ["model.dimm: unknown key. Did you mean 'dim'?"]),
    "added key": (["+model.n_layer=3"], ["model.n_layer: unknown key. Did you mean 'n_layers'?"]),
    "removed key": (["~seed"], ["seed: this key is missing"]),
    "group": (["modle=llama_tiny"], ["modle", "Did you mean 'model'?"]),
    "word for a number": (["steps=abc"], ["steps", "whole number", "'abc'"]),
    "quoted number": (["steps='3'"], ["steps", "whole number", "'3'"]),
    "bool for a number": (["steps=true"], ["steps", "whole number", "True"]),
    "fraction for a number": (["seq_len=2.5"], ["seq_len", "whole number", "2.5"]),
    "nothing for a number": (["steps="], ["steps", "whole number"]),
    "no workers": (["launch.workers=0"], ["launch.workers", "at least 1", "got 0"]),
    "nan": (["optimizer.lr=nan"], ["optimizer.lr", "finite number", "nan"]),
    "inf": (["max_grad_norm=inf"], ["max_grad_norm", "finite number", "inf"]),
    "group set to a number": (["launch=3"], ["launch", "3"]),
    "shard": (
        ["parallelism.shard=4", "parallelism.replicate=3", "launch.workers=8"],
        ["shard(4) x replicate(3)", "= 12", "launch.nodes(1) x launch.workers(8) = 8"],
    ),
    "auto shard": (["parallelism.replicate=3"], ["replicate(3)", "= 3 does not divide", "launch.workers(2) = 2"]),
    "heads": (["model.n_heads=3"], ["model", "dim(32) is not a multiple of n_heads(3)"]),
    "batch": (["global_batch=3"], ["global_batch(3)", "micro_batch(1) x data-parallel ranks(2) = 2"]),
    "reshard word": (
        ["parallelism.reshard_after_forward=sometimes"],
        ["parallelism.reshard_after_forward", "always", "never", "except_last", "'sometimes'"],
    ),
    "reshard bool": (["parallelism.reshard_after_forward=true"], ["parallelism.reshard_after_forward", "always"]),
    "reshard number": (
        ["launch.workers=4", "parallelism.reshard_after_forward=3"],
        ["reshard_after_forward(3)", "divisor of shard(4)"],
    ),
    "reshard all": (["parallelism.reshard_after_forward=2"], ["reshard_after_forward(2)", "shard(2)", "always"]),
    "kind": (["model.kind=lama"], ["model.kind", "'lama'", "Did you mean 'llama'?", "package.module:Class"]),
    "kind is a number": (["model.kind=3"], ["model.kind", "expected a name", "3"]),
    "no such module": (["model.kind=nowhere:Model"], ["model.kind", "'nowhere'", "No module named"]),
    "no such class": (["model.kind=faulty:Rises"], ["model.kind", "faulty", "Did you mean 'Raises'?"]),
    "class of another group": (["model.kind=faulty:SlowAdamW"], ["model.kind", "faulty:SlowAdamW", "Model"]),
    "no class": (["model.kind=faulty:local"], ["model.kind", "faulty:local", "Model"]),
    "own class, unknown key": (["model.kind=faulty:Raises", "+model.stap=3"], ["model.stap", "Did you mean 'step'?"]),
    "without a key": (["=3"], ["'=3'"]),
    "without a value": (["steps"], ["'steps'"]),
    "several words": (["a b"], ["'a b'"]),
    "open bracket": (["parallelism=["], ["'parallelism=['"]),
    "open brace": (["launch.env={A: 1"], ["'launch.env={A: 1'"]),
    "open range": (["seed=range(1,"], ["'seed=range(1,'"]),
    "number for a group": (["model=3"], ["model", "3"]),
    "null for a group": (["model=null"], ["model", "null"]),
    "interpolation": (["steps=${stepps}"], ["steps", "stepps"]),
    "environment variable": (["steps=${oc.env:NOT_THERE}"], ["steps", "NOT_THERE"]),
    "configuration folder": (["--config-dir=nowhere"], ["--config-dir", "no such directory"]),
    "configuration name": (["--config-name=nowhere"], ["nowhere"]),
    "another launcher": (["hydra/launcher=basic"], ["hydra/launcher", "local"]),
    "unknown launcher": (["hydra/launcher=lokal"], ["hydra/launcher", "Did you mean 'local'?"]),
    "another launcher's sweep": (["hydra/launcher=basic", "-m"], ["hydra/launcher", "local"]),
    "missing value": (["data=jsonl"], ["data.path", "???"]),
    "frozen": (["model.freeze=[nothing.*]"], ["model.freeze", "'nothing.*' matches no parameter", "tok_embeddings"]),
}


@pytest.mark.slow_but(
    "option",
    "key in a group",
    "word for a number",
    "group",
    "auto shard",
    "heads",
    "batch",
    "kind",
    "no class",
    "several words",
    "interpolation",
    "another launcher",
    "missing value",
)
@pytest.mark.parametrize("overrides, said", WRONG.values(), ids=WRONG)
def test_wrong_configuration(overrides: list[str], said: list[str], folder: Path) -> None:
    """The message names the place, what was expected and the nearest name that is right."""
    text = refused(*overrides, cwd=folder)
    for words in said:
        assert words in text


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    """A person does not have to come back for every single mistake."""
    overrides = ["steps=abc", "model.dim=true", "seq_len=0", "optimizer.lr=nan", "launch.workers=0", "+model.dimm=3"]
    text = refused(*overrides, cwd=tmp_path)
    for override in overrides:
        assert override.lstrip("+").partition("=")[0] in text
    assert len(text.splitlines()) == 1 + len(overrides)


@pytest.mark.slow
def test_flags_may_stand_anywhere(tmp_path: Path) -> None:
    """Hydra's parser refuses overrides on both sides of a flag, with ten lines of usage and no word on why."""
    text = meshrunner("run", *TINY, "steps=abc", "--multirun", "hydra.sweep.dir=out", cwd=tmp_path).err
    assert "usage" not in text
    assert "steps: expected a whole number" in text


MODULES = {
    "raises": ("raise RuntimeError('not today')", "RuntimeError: not today"),
    "has a syntax error": ("def broken(:", "SyntaxError"),
    "exits": ("raise SystemExit('not today')", "not today"),
    "exits with 0": ("import sys; sys.exit()", "SystemExit"),
}


@pytest.mark.slow_but("raises")
@pytest.mark.parametrize("text, said", MODULES.values(), ids=MODULES)
def test_own_module_that_cannot_be_imported(text: str, said: str, tmp_path: Path) -> None:
    """Whatever a user's module does while it is imported is a mistake in the configuration."""
    (tmp_path / "own.py").write_text(text)
    words = refused("model.kind=own:Model", cwd=tmp_path)
    assert "model.kind: cannot import 'own'" in words
    assert said in words


FILES = {
    "broken YAML": ("a: [\nb: {", ["own.yaml", "line"]),
    "no mapping": ("- 1\n- 2\n", ["own"]),
    "not text": ("\x00\x01", ["own"]),
    "unknown option": ("# @package _global_\ndefaults:\n  - override /model: lama\n", ["model", "'lama'"]),
    "unknown group": ("# @package _global_\ndefaults:\n  - override /modle: llama_tiny\n", ["modle"]),
    "unknown key": ("# @package _global_\nstepps: 3\n", ["stepps", "Did you mean 'steps'?"]),
}


@pytest.mark.parametrize("text, said", FILES.values(), ids=FILES)
def test_own_experiment_file_that_is_wrong(text: str, said: list[str], tmp_path: Path) -> None:
    """A user's YAML file is named when it is wrong."""
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "own.yaml").write_text(text)
    words = refused("--config-dir=mine", "experiment=own", cwd=tmp_path)
    for each in said:
        assert each in words


@pytest.mark.slow
def test_own_experiment_sets_top_level_keys(tmp_path: Path) -> None:
    """What an experiment file says about `seed` wins over the default; what the command line says wins over both."""
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "own.yaml").write_text("# @package _global_\nseed: 7\nsteps: 99\n")
    ended = run("experiment=own", flags=["--config-dir=mine"], cwd=tmp_path)
    assert ended.code == 0, ended
    config = (tmp_path / "out" / "config.yaml").read_text()
    assert "\nseed: 7\n" in config
    assert "\nsteps: 3\n" in config


def test_a_run_directory_is_used_once(tmp_path: Path) -> None:
    """A second run into the same directory would overwrite the first; the message says how to go on."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.yaml").write_text("steps: 3\n")
    ended = run(cwd=tmp_path)
    assert ended.code == 2, ended
    assert "holds a run already" in ended.err
    assert "meshrunner resume" in ended.err
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["config.yaml"]


@pytest.mark.slow_but("not writable-run")
@pytest.mark.parametrize("sweep", [False, True], ids=["run", "sweep"])
@pytest.mark.parametrize("kind", ["file in the way", "not writable"])
def test_a_place_that_cannot_be_written(sweep: bool, kind: str, tmp_path: Path) -> None:
    """Said before anything starts, without a traceback."""
    place = tmp_path / "place"
    if kind == "file in the way":
        place.write_text("")
    elif not Path("/proc/sys/kernel").is_dir():
        pytest.skip("no folder that even root cannot write to")
    else:
        place = Path("/proc/sys/kernel")
    where = f"{place}/out"
    options = [f"hydra.sweep.dir={where}", "seed=1,2"] if sweep else []
    ended = run(*options, flags=["-m"] if sweep else [], cwd=tmp_path, run_dir=where)
    assert ended.code == 2, ended
    assert str(where) in ended.err


def sweep(*overrides: str, cwd: Path) -> Ended:
    """A sweep of tiny runs into cwd/sweep, to its end."""
    return run("hydra.sweep.dir=sweep", *overrides, flags=["-m"], cwd=cwd)


@pytest.mark.slow
def test_one_wrong_job_of_a_sweep(tmp_path: Path) -> None:
    """Every wrong job is listed, by what varies, and none starts."""
    ended = sweep("steps=3,abc,4,0", cwd=tmp_path)
    assert ended.code == 2, ended
    wrong = [line for line in ended.err.splitlines() if line.startswith("job ")]
    assert len(wrong) == 2, ended
    assert "steps=abc" in wrong[0] and "steps=0" in wrong[1]
    assert not (tmp_path / "sweep").exists(), list((tmp_path / "sweep").iterdir())


@pytest.mark.slow
def test_many_wrong_jobs_fit_on_a_screen(tmp_path: Path) -> None:
    """The same mistake in 20 jobs is not told 20 times."""
    ended = sweep("seed=range(20)", "optimizer.lr=nan", cwd=tmp_path)
    assert ended.code == 2, ended
    assert "optimizer.lr" in ended.err
    assert len(ended.err.splitlines()) <= SCREEN


@pytest.mark.slow
def test_a_job_that_does_not_fit_is_skipped(tmp_path: Path) -> None:
    """Wrong only in combination: a row of the sweep with its reason, and the others run."""
    ended = sweep("parallelism.shard=1,2", cwd=tmp_path)
    assert ended.code == 0, ended
    first, second = sorted(path for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    assert status(first)["state"] == "skipped"
    assert "shard(1) x replicate(1) x tensor(1) = 1, but" in status(first)["reason"]
    assert status(second)["state"] == "completed"
    assert "shard-1" in first.name and "dim" not in first.name  # named after what varies
    assert read(tmp_path / "sweep" / "sweep.json")["jobs"][0]["name"] == first.name


@pytest.mark.slow
def test_a_failed_job_does_not_end_the_sweep(folder: Path) -> None:
    """The next job runs, and the sweep's exit status is 1."""
    ended = sweep("model.kind=faulty:Raises", "+model.step=2,9", cwd=folder)
    assert ended.code == 1, ended
    states = [status(path)["state"] for path in sorted((folder / "sweep").iterdir()) if path.is_dir()]
    assert states == ["failed", "completed"]


@pytest.mark.slow
def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path) -> None:
    """Ten thousand runs leave ten thousand folders otherwise."""
    with TemporaryDirectory() as folder:  # the name of a socket in it has at most 107 characters
        run("stepps=3", cwd=tmp_path, TMPDIR=folder)
        run(cwd=tmp_path, TMPDIR=folder)
        assert not [path for path in Path(folder).iterdir() if "torchinductor" not in path.name]


# --- the run fails: exit status 1, state and reason on disk


def failed(*overrides: str, cwd: Path, state: str = "failed", within: float = BOUND_S) -> Ended:
    """A run that starts and does not complete; what is on disk agrees with what is shown."""
    ended = run(*overrides, cwd=cwd, within=within)
    assert ended.code == 1, ended
    record = status(cwd / "out")
    assert record["state"] == state, ended
    assert record["ended"] >= record["started"]
    assert record["reason"] and "\n" not in record["reason"]
    assert record["reason"] in ended.err
    assert read(cwd / "out" / "summary.json")["state"] == state
    return ended


ONE_RANK = {
    "raises": ("Raises", "rank 1: RuntimeError: the user's own mistake", "with a second line"),
    "raises, and where": (
        "Raises",
        "rank 1: RuntimeError: ",
        "before raised RuntimeError: the user's own mistake with",
    ),
    "raises much text": ("RaisesLongText", "rank 1: RuntimeError: line 0", "line 199"),
    "segfaults": ("Segfaults", "rank 1 was killed by signal SIGSEGV", "faulty.py"),
    "aborts": (
        "Aborts",
        "rank 1: Process group watchdog thread terminated with exception: CUDA error: device-",
        "in fail",
    ),
    "leaves": ("Exits", "rank 1 ended with exit code 3", "about to leave"),
    "leaves by sys.exit": ("ExitsInPython", "rank 1: SystemExit: the user's module had enough", "faulty.py"),
}


@pytest.mark.slow_cases("aborts", "leaves*", "raises", "raises much text", "segfaults", "raises, and where")
@pytest.mark.parametrize("kind, reason, shown", ONE_RANK.values(), ids=ONE_RANK)
def test_the_rank_that_failed_is_named(kind: str, reason: str, shown: str, folder: Path) -> None:
    """Not the others, which fail right after with connection errors."""
    ended = failed(f"model.kind=faulty:{kind}", cwd=folder)
    assert status(folder / "out")["reason"].startswith(reason), ended
    assert read(folder / "out" / "error.json")["rank"] == 1
    quoted = ended.err.partition("logs/rank1.log:\n")[2]
    assert shown in quoted, ended
    assert steps_done(folder / "out") == 1


@pytest.mark.slow
def test_what_a_failing_rank_says_fits_on_a_screen(folder: Path) -> None:
    """Lines of a thousand characters are cut, and a terminal is 120 wide."""
    ended = failed("model.kind=faulty:RaisesLongText", cwd=folder)
    assert sum(1 + len(line) // 120 for line in ended.err.splitlines()) <= SCREEN


def test_killed_worker(folder: Path) -> None:
    """`kill -9` of one worker is noticed at once, that rank is named and its last words are shown."""
    slow = ["model.kind=faulty:Faulty", "optimizer.kind=faulty:SlowAdamW", "steps=1000"]
    with Command("run", *TINY, "hydra.run.dir=out", *slow, cwd=folder) as command:
        command.until(lambda: steps_done(folder / "out") >= 2)
        os.kill(status(folder / "out")["workers"][1]["pid"], signal.SIGKILL)
        ended = command.wait().check_manners()
        command.check_nobody_left()
    assert ended.code == 1
    assert status(folder / "out")["state"] == "failed"
    assert status(folder / "out")["reason"] == "rank 1 was killed by signal SIGKILL"
    assert "before step 2: weights" in ended.err.partition("logs/rank1.log:\n")[2], ended


@pytest.mark.slow
def test_killed_forkserver(folder: Path) -> None:
    """Without the process that started them the workers end, and the run has failed."""
    slow = ["optimizer.kind=faulty:SlowAdamW", "steps=1000"]
    with Command("run", *TINY, "hydra.run.dir=out", *slow, cwd=folder) as command:
        command.until(lambda: steps_done(folder / "out") >= 2)
        forkserver = command.forkserver()
        assert forkserver is not None
        forkserver.kill()
        ended = command.wait().check_manners()
        command.check_nobody_left()
    assert ended.code == 1, ended
    assert status(folder / "out")["state"] == "failed"
    assert "process that starts the workers" in status(folder / "out")["reason"]


HANGS = {
    "in a step": ("Hangs", "launch.timeout_minutes=0.05", "in fail"),
    "before the first step": ("HangsWhileBuilt", "launch.start_timeout_minutes=0.1", "in built"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind, limit, where", HANGS.values(), ids=HANGS)
def test_hanging_rank(kind: str, limit: str, where: str, folder: Path) -> None:
    """The reason names the setting and the rank that hangs, not one that waits for it; its stack is in its log."""
    failed(f"model.kind=faulty:{kind}", limit, cwd=folder, state="timeout")
    log = (folder / "out" / "logs" / "rank1.log").read_text()
    assert re.search(rf"Current thread.*\n  File \".*faulty.py\", line \d+ {where}", log), log
    reason = status(folder / "out")["reason"]
    assert limit.partition("=")[0] in reason, reason
    assert "rank 1" in reason or "rank1" in reason, reason


@pytest.mark.slow_cases("one rank", "all ranks")
@pytest.mark.parametrize("rank", [1, -1], ids=["one rank", "all ranks"])
def test_out_of_memory(rank: int, folder: Path) -> None:
    """The host's allocator failing is `oom`, also when the other ranks then fail with connection errors."""
    limits = ["launch.host_memory_gib=0.5", f"+model.rank={rank}"]
    ended = failed("model.kind=faulty:TakesMemory", *limits, cwd=folder, state="oom")
    error = read(folder / "out" / "error.json")
    assert error["rank"] in ([1] if rank == 1 else [0, 1]), ended
    assert re.search(r"out of host memory in step 2 \(forward\): tried to allocate 0.25 GiB", error["message"]), error
    assert "can't allocate memory" in error["traceback"]


NOT_FINITE = {
    "loss": ("NotFiniteLoss", "the loss is nan on rank 1"),
    "gradient": ("NotFiniteGradient", "the gradient norm"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind, reason", NOT_FINITE.values(), ids=NOT_FINITE)
def test_not_finite(kind: str, reason: str, folder: Path) -> None:
    """The run stops and says in which step; that step did not touch the weights, although the next one was begun."""
    failed(f"model.kind=faulty:{kind}", "log_every=3", cwd=folder)
    assert f"step 2: {reason}" in status(folder / "out")["reason"]
    for rank in range(2):
        log = (folder / "out" / "logs" / f"rank{rank}.log").read_text()
        first, second, third = re.findall(r"before step \d: weights (.*)", log)
        assert first != second
        assert second == third


@pytest.mark.slow
def test_port_that_is_taken(tmp_path: Path) -> None:
    """The reason names the port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        failed(f"launch.port={port}", cwd=tmp_path)
    assert str(port) in status(tmp_path / "out")["reason"]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with hardly any space left."""
    place = tmp_path / "full"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("only root may mount a small file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(place: Path) -> None:
    with (place / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
        while ballast.write(b"x" * 512):
            pass


@pytest.mark.slow
def test_events_on_a_full_disk(full_disk: Path, tmp_path: Path) -> None:
    """A figure that cannot be written fails the run, and the reason is the disk, not the other ranks' connections."""
    (tmp_path / "out").mkdir()
    (full_disk / "events.jsonl").touch()
    (tmp_path / "out" / "events.jsonl").symlink_to(full_disk / "events.jsonl")
    fill(full_disk)
    failed(cwd=tmp_path)
    reason = status(tmp_path / "out")["reason"]
    assert reason.startswith("rank 0:") and "events.jsonl: No space left on device" in reason


@pytest.mark.slow
def test_run_directory_on_a_full_disk(full_disk: Path, tmp_path: Path) -> None:
    """Nothing at all can be written: said before anything starts."""
    fill(full_disk)
    ended = run(cwd=tmp_path, run_dir=str(full_disk / "out"))
    assert ended.code == 2, ended
    assert "No space left on device" in ended.err


@pytest.mark.slow
def test_disk_that_fills_while_the_run_goes_on(full_disk: Path, folder: Path) -> None:
    """State and summary cannot be written any more: the command still ends, says so, and leaves nobody behind."""
    slow = ["optimizer.kind=faulty:SlowAdamW", "steps=1000"]
    where = full_disk / "out"
    with Command("run", *TINY, f"hydra.run.dir={where}", *slow, cwd=folder) as command:
        command.until(lambda: steps_done(where) >= 2)
        fill(full_disk)
        ended = command.wait().check_manners()
        command.check_nobody_left()
    assert ended.code == 1, ended
    assert "No space left on device" in ended.err


# --- what the workers see


@pytest.mark.slow
def test_environment_reaches_the_workers(folder: Path) -> None:
    """`launch.env`, and what was exported in the shell, which the forkserver's environment may not hide."""
    ended = run("model.kind=faulty:ShowsEnvironment", "+launch.env.MINE=there", cwd=folder)
    assert ended.code == 0, ended
    for rank in range(2):
        assert "MINE is there" in (folder / "out" / "logs" / f"rank{rank}.log").read_text()
    assert read(folder / "out" / "environment.json")["launch.env"] == {"MINE": "there"}


@pytest.mark.slow
def test_environment_value_that_looks_like_a_number(folder: Path) -> None:
    """`launch.env.OMP_NUM_THREADS=1`: environment variables are often numbers, and adding one needs no plus sign."""
    ended = run("model.kind=faulty:ShowsEnvironment", "launch.env.MINE=1", cwd=folder)
    assert ended.code == 0, ended
    assert "MINE is 1" in (folder / "out" / "logs" / "rank0.log").read_text()


NAMES = [
    "runner",
    "recipes",
    "conf",
    "torch",
    "yaml",
    "json",
    "socket",
    "multiprocessing",
    "omegaconf",
]


def shadow(folder: Path) -> None:
    for name in NAMES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise RuntimeError('the user has a folder {name}, too')")
    (folder / "conf" / "run.yaml").write_text("steps: nothing of ours")


@pytest.mark.slow
def test_names_of_ours_in_the_current_directory(tmp_path: Path) -> None:
    """A user's folders `runner`, `conf`, ... are not taken for ours, in no process of a run."""
    shadow(tmp_path)
    ended = run(cwd=tmp_path)
    assert ended.code == 0, ended
    assert status(tmp_path / "out")["state"] == "completed"


@pytest.mark.slow
def test_own_sources_on_pythonpath(tmp_path: Path) -> None:
    """A user's classes may lie where PYTHONPATH says, in launcher and workers."""
    (tmp_path / "sources").mkdir()
    own_classes(tmp_path / "sources")
    ended = run("model.kind=faulty:Faulty", cwd=tmp_path, PYTHONPATH=f"{tmp_path}/sources")
    assert ended.code == 0, ended
    assert "before step 3" in (tmp_path / "out" / "logs" / "rank1.log").read_text()


@pytest.mark.slow
def test_python_dash_m(folder: Path) -> None:
    """`python -m meshrunner` is the same program, own classes included."""
    program = (sys.executable, "-m", "meshrunner")
    with Command("run", *TINY, "hydra.run.dir=out", "model.kind=faulty:Faulty", cwd=folder, program=program) as command:
        ended = command.wait().check_manners()
        command.check_nobody_left()
    assert ended.code == 0, ended


@pytest.mark.slow
def test_memory_stays_small(folder: Path) -> None:
    """The launching process does not import torch where there is no GPU; the user's own class may."""
    slow = ["steps=1000"]
    with Command("run", *TINY, "hydra.run.dir=out", *slow, cwd=folder) as command:
        command.until(lambda: steps_done(folder / "out") >= 2)
        assert psutil.Process(command.pid).memory_info().rss < 150 * 2**20
        command.interrupt()
        assert command.wait().code == 130


# --- resume: a directory as it stands on disk


DIRECTORIES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no such directory": (Path.rmdir, ["no such directory"]),
    "no config.yaml": (lambda place: None, ["not a run directory", "no config.yaml"]),
    "broken YAML": (lambda place: (place / "config.yaml").write_text("steps: [}"), ["config.yaml", "line 1"]),
    "a list": (lambda place: (place / "config.yaml").write_text("- steps\n"), ["config.yaml", "not a mapping"]),
    "a sentence": (lambda place: (place / "config.yaml").write_text("hello"), ["config.yaml", "not a mapping"]),
    "not text": (lambda place: (place / "config.yaml").write_bytes(b"\xdc\xff\x00"), ["config.yaml", "cannot be read"]),
    "an empty file": (lambda place: (place / "config.yaml").write_text(""), ["config.yaml"]),
    "a folder": (lambda place: (place / "config.yaml").mkdir(), ["config.yaml", "cannot be read"]),
    "an unknown reference": (lambda place: (place / "config.yaml").write_text("steps: ${stepps}"), ["steps", "stepps"]),
}


@pytest.mark.parametrize("damage, said", DIRECTORIES.values(), ids=DIRECTORIES)
def test_resume_of_what_is_no_run(damage: Callable[[Path], object], said: list[str], tmp_path: Path) -> None:
    """Exit status 2, one sentence, and nothing is written."""
    place = tmp_path / "place"
    place.mkdir()
    damage(place)
    ended = meshrunner("resume", "place", cwd=tmp_path)
    assert ended.code == 2, ended
    for words in said:
        assert words in ended.err
    assert not (place / "status.json").exists()


@pytest.mark.slow
def test_resume_of_a_completed_run_and_of_an_edited_one(tmp_path: Path) -> None:
    """A completed run is left alone; a wrong key in an edited config.yaml is refused; a damaged status.json is no obstacle."""
    assert run(cwd=tmp_path).code == 0
    out = tmp_path / "out"
    before = status(out)
    ended = meshrunner("resume", "out", cwd=tmp_path)
    assert ended.code == 0 and "completed" in ended.out, ended
    assert status(out) == before

    (out / "status.json").write_text("{")
    config = (out / "config.yaml").read_text()
    (out / "config.yaml").write_text(config.replace("steps: 3", "stepps: 3"))
    ended = meshrunner("resume", "out", cwd=tmp_path)
    assert ended.code == 2, ended
    assert "stepps: unknown key. Did you mean 'steps'?" in ended.err

    (out / "config.yaml").write_text(config)
    ended = meshrunner("resume", "out", cwd=tmp_path)
    assert ended.code == 0, ended
    assert status(out)["state"] == "completed"
    rows = [json.loads(line)["step"] for line in (out / "events.jsonl").read_text().splitlines()]
    assert rows == [1, 2, 3, 1, 2, 3]


@pytest.mark.slow
def test_resume_after_a_failure(folder: Path) -> None:
    """The second attempt counts as such, and nothing of the first one's error stays behind."""
    failed("model.kind=faulty:Raises", cwd=folder)
    config = folder / "out" / "config.yaml"
    config.write_text(config.read_text().replace("faulty:Raises", "faulty:Faulty"))
    ended = meshrunner("resume", "out", cwd=folder)
    assert ended.code == 0, ended
    assert (status(folder / "out")["state"], status(folder / "out")["attempt"]) == ("completed", 2)
    assert not (folder / "out" / "error.json").exists()


@pytest.mark.slow(sampled=True)
def test_a_model_that_exceeds_the_hosts_memory_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    ended = meshrunner("run", *TINY, "launch.host_memory_gib=1e-5", "hydra.run.dir=out", cwd=tmp_path)
    assert ended.code == 1 and status(tmp_path / "out")["state"] == "oom", ended
    assert "out of host memory (building the model): parameters and optimizer state take 0.0 GiB per rank" in ended.err
    assert "Traceback" not in ended.err + (tmp_path / "out" / "logs" / "rank0.log").read_text()
