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

from recipes.option import ConfigError
from runner import rundir


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    rundir.place({"steps": 3, "optimizer": {"lr": 1e-5}}, folder, {"task": [], "choices": {}})
    return folder


def test_placed_is_pending_and_reads_back(run_dir: Path) -> None:
    assert rundir.read_status(run_dir)["state"] == "pending"
    assert rundir.read_config(run_dir) == {"steps": 3, "optimizer": {"lr": 1e-5}}
    with pytest.raises(ConfigError, match="holds a run already"):
        rundir.place({}, run_dir, {})


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the run directory"):
        rundir.place({}, tmp_path / "file" / "run", {})


def test_a_living_owner_keeps_its_run(run_dir: Path) -> None:
    assert rundir.claim(run_dir)["attempt"] == 1
    with pytest.raises(rundir.Busy, match=f"process {os.getpid()} on {socket.gethostname()}"):
        rundir.claim(run_dir)


def claim_and_die(folder: str) -> None:
    rundir.claim(Path(folder))
    os._exit(0)


def test_an_owner_that_is_gone_is_replaced(run_dir: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=claim_and_die, args=(str(run_dir),))
    process.start()
    process.join()
    assert rundir.read_status(run_dir)["state"] == "running"
    assert rundir.claim(run_dir)["attempt"] == 2


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
    owner = rundir.this_process() | changes
    assert rundir.owner_is_alive({"state": "running", "owner": owner, "heartbeat": 0}) is alive


def test_an_owner_on_another_host_lives_by_its_heartbeat() -> None:
    owner = rundir.this_process() | {"host": "another"}
    assert rundir.owner_is_alive({"state": "running", "owner": owner, "heartbeat": time.time()})
    assert not rundir.owner_is_alive({"state": "running", "owner": owner, "heartbeat": time.time() - 1000})
    assert not rundir.owner_is_alive({"state": "completed", "owner": owner, "heartbeat": time.time()})


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    rundir.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        rundir.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_many_processes_claim_one_run_and_one_gets_it(run_dir: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from runner import rundir\n"
        "try: rundir.claim(Path(sys.argv[1])); print('mine', flush=True); sys.stdin.read()\n"
        "except rundir.Busy: print('busy', flush=True)"
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
