"""The run directory: placed once, owned by one living process."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshrunner.recipes.errors import AlreadyRunning, ConfigError
from meshrunner.runner.rundir import files, run, states


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    run.place_run({"steps": 3, "optimizer": {"lr": 1e-5}}, folder, {"task": [], "choices": {}})
    return folder


def test_placed_is_pending_and_reads_back(run_dir: Path) -> None:
    assert states.read_status(run_dir).state == "pending"
    assert run.read_config(run_dir) == {"steps": 3, "optimizer": {"lr": 1e-5}}
    with pytest.raises(ConfigError, match="holds a run already"):
        run.place_run({}, run_dir, {})


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the run directory"):
        run.place_run({}, tmp_path / "file" / "run", {})


def test_a_living_owner_keeps_its_run(run_dir: Path) -> None:
    assert states.claim(run_dir).attempt == 1
    with pytest.raises(AlreadyRunning, match=f"process {os.getpid()} on {socket.gethostname()}"):
        states.claim(run_dir)


def claim_and_die(folder: str) -> None:
    states.claim(Path(folder))
    os._exit(0)


def test_an_owner_that_is_gone_is_replaced(run_dir: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=claim_and_die, args=(str(run_dir),))
    process.start()
    process.join()
    assert states.read_status(run_dir).state == "running"
    assert states.claim(run_dir).attempt == 2


@pytest.mark.parametrize(
    ("changes", "alive"),
    [
        ({}, True),
        ({"boot_id": "another"}, False),
        ({"pid_started": 1}, False),
        ({"pid": 2**22 + 1}, False),
    ],
)
def test_an_owner_on_this_host_is_known_beyond_its_pid(changes: dict[str, object], alive: bool) -> None:
    holder = states.this_process() | changes
    assert states.owner_is_alive(states.Status(state="running", owner=holder, heartbeat=0)) is alive


def test_an_owner_on_another_host_lives_by_its_heartbeat() -> None:
    holder = states.this_process() | {"host": "another"}
    status = states.Status(state="running", owner=holder, heartbeat=time.time())
    assert states.owner_is_alive(status)
    assert not states.owner_is_alive(status | {"heartbeat": time.time() - 1000})
    assert not states.owner_is_alive(status | {"state": "completed"})


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        files.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_many_processes_claim_one_run_and_one_gets_it(run_dir: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from meshrunner.runner.rundir import states\n"
        "from meshrunner.recipes.errors import AlreadyRunning\n"
        "try: states.claim(Path(sys.argv[1])); print('mine', flush=True); sys.stdin.read()\n"
        "except AlreadyRunning: print('busy', flush=True)"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", program, run_dir], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    said = []
    for racer in racers:
        assert racer.stdout is not None
        said.append(racer.stdout.readline().strip())
    for racer in racers:
        racer.communicate()
    assert sorted(said) == ["busy", "busy", "busy", "mine"]
