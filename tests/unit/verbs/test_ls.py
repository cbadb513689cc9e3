"""`meshrunner ls`: runs and sweeps below a folder, as far as they can be read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.verbs.records.ls import ls
from tests.run_dirs import make_run, write


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert ls([*arguments, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def began(run_dir: Path, when: float) -> Path:
    status = json.loads((run_dir / "status.json").read_text())
    write(run_dir / "status.json", status | {"started": when})
    return run_dir


def make_sweep(folder: Path, when: float) -> Path:
    """Four runs, of which one ran out of memory."""
    jobs = []
    for i, (layout, steps) in enumerate((layout, steps) for layout in ("fsdp1", "fsdp2") for steps in (4, 5)):
        overrides = [f"parallelism={layout}", f"steps={steps}", "model=llama_large"]
        state, wps = ("oom", 900.0) if i == 3 else ("completed", 100.0 + i)
        began(make_run(folder / f"{i:03}", *overrides, state=state, wps=wps), when + i)
        jobs.append({"name": f"{i:03}", "overrides": overrides})
    write(folder / "sweep.json", {"command": [], "jobs": jobs})
    return folder


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/ and sweeps/ in the current directory, and a run elsewhere."""
    monkeypatch.chdir(tmp_path)
    began(make_run(Path("runs/2026-11-01/a"), "steps=7", "seed=3", wps=50.0), 1000.0)
    began(make_run(Path("runs/2026-11-02/b"), state="failed", reason="rank 0: no"), 3000.0)
    make_sweep(Path("sweeps/2026-11-01/c"), 2000.0)
    began(make_run(Path("elsewhere/d")), 4000.0)
    return tmp_path


def test_newest_first_with_what_was_run_and_what_became_of_it(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    b, c, a = listed(capsys)
    assert [each["path"] for each in (a, b, c)] == [
        str(tree / path) for path in ("runs/2026-11-01/a", "runs/2026-11-02/b", "sweeps/2026-11-01/c")
    ]
    assert (c["type"], c["what"], c["states"], c["best_wps"]) == (
        "sweep",
        "4 runs: parallelism, steps",
        {"completed": 3, "oom": 1},
        102.0,
    )
    assert (a["type"], a["what"], a["states"], a["best_wps"]) == ("run", "steps=7 seed=3", {"completed": 1}, 50.0)
    assert (b["states"], b["best_wps"]) == ({"failed": 1}, None), "what failed has no speed"
    assert [each["path"] for each in listed(capsys, "elsewhere")] == [str(tree / "elsewhere/d")]
    assert len(listed(capsys, ".")) == 4 and len(listed(capsys, "runs", "elsewhere")) == 3


def test_the_current_folder_where_there_are_neither_runs_nor_sweeps(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree / "elsewhere")
    assert [each["what"] for each in listed(capsys)] == [""]


@pytest.mark.parametrize(
    ("where", "left"),
    [
        (["state=oom"], "c"),
        (["state=failed,oom"], "bc"),
        (["wps>60"], "c"),
        (["runs>1"], "c"),
        (["model=llama_large"], "c"),
        (["model=llama_tiny"], "ba"),
        (["steps=7,5"], "ca"),
        (["parallelism=fsdp1"], "c"),
        (["dim=64", "state!=failed"], "c"),
        (["state=timeout"], ""),
    ],
)
def test_only_those_asked_for(tree: Path, where: list[str], left: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys, *(word for each in where for word in ("--where", each)))
    assert [Path(each["path"]).name for each in found] == list(left)


def test_what_is_wrong_is_said(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["nowhere"], "no such directory: nowhere"),
        (["--where", "stat=oom"], "there is no key 'stat'. Did you mean 'state'?"),
        (["--where", "model=llama_tinny"], "no run has model=llama_tinny. Did you mean 'llama_tiny'?"),
        (["--limit", "-1"], "--limit: expected a number of at least 0"),
        (["--jsn"], "--jsn"),
    ):
        with pytest.raises(ConfigError) as error:
            ls(arguments)
        assert said in str(error.value)
    (tree / "empty").mkdir()
    assert ls(["empty"]) == 0
    assert capsys.readouterr() == ("", "no runs below empty\n")
    assert ls(["--where", "state=timeout"]) == 0
    assert capsys.readouterr() == ("", "none of the 3 runs and sweeps meets state=timeout\n")


def test_a_limit_says_what_it_hides(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ls(["--limit", "1"]) == 0
    out, err = capsys.readouterr()
    assert "runs/2026-11-02/b" in out and "sweeps" not in out and err == "listed 1 of 3; --limit 0 lists all\n"
    assert ls(["--limit", "0"]) == 0
    assert capsys.readouterr().err == ""


def test_damage_is_a_state(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = Path("sweeps/damaged")
    for name, content in (("0", "]"), ("1", '{"state": 5}'), ("2", "{}"), ("3", "")):
        (make_run(damaged / name) / "status.json").write_text(content)
    (make_run(damaged / "4") / "summary.json").write_text('{"perf/wps_median": "fast"')
    make_run(damaged / "5", state="running")
    write(damaged / "sweep.json", {"jobs": [{"name": f"{i}"} for i in range(7)]})
    (make_run(Path("runs/f")) / "status.json").unlink()
    os.mkfifo(Path("runs/f/summary.json.x"))
    (Path("runs/g")).mkdir()
    (Path("runs/g/config.yaml")).symlink_to("nowhere")
    (Path("runs/h")).symlink_to(Path("runs").absolute())
    (Path("sweeps/i")).mkdir()
    (Path("sweeps/i/sweep.json")).write_text("[")
    make_run(Path("runs/.trash/j"))
    entries = listed(capsys, "--limit", "0")
    assert not [each["path"] for each in entries if "/h/" in each["path"] or "trash" in each["path"]]
    found = {Path(each["path"]).name: each["states"] for each in entries}
    assert found["damaged"] == {"damaged": 5, "stale": 1, "missing": 1}, "as status says"
    assert found["f"] == found["g"] == {"damaged": 1} and found["i"] == {} and "h" not in found
    assert ls(["--limit", "0"]) == 0
    assert ls(["--where", "model=llama_tiny"]) == 0


def test_piped_it_is_markdown_with_whole_paths(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ls([]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in head.split("|")[1:-1]] == ["began", "what", "state", "best WPS", "path"]
    assert [row.split("|")[3].strip() for row in rows] == ["failed", "3 completed, 1 oom", "completed"]
    assert rows[1].split("|")[5].strip() == "sweeps/2026-11-01/c"


def test_neither_torch_nor_yaml_is_read_for_it(tree: Path) -> None:
    """Of a thousand runs two small files each are read."""
    program = (
        "import sys, meshrunner.runner.rundir.run as run\n"
        "from meshrunner.runner.verbs.records.ls import ls\n"
        "run.load_config = run.load_overrides = None\n"
        "ls(['sweeps', '--json'])\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'hydra', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
