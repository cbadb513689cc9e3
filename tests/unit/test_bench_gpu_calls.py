"""Calls of `python -m bench gpu` with a fake clock and fake commands: their order, budget, continuation and merging."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import bench, emulate, figures, grid, jobs
from bench.gpu.bench import gpu
from bench.gpu.commands import Commands, Ended
from bench.gpu.jobs import Job, Jobs, Stage
from bench.gpu.machine import Machine
from bench.gpu.results import FILE, Result, Results, read
from bench.gpu.rows import OUT_OF_MEMORY

VERSIONS = ("torch 2.11.0+cu130", "Python 3.12.3", "CUDA 13.0", "driver 580.95")
ONE = Machine("NVIDIA H100 80GB HBM3", 1, 79.1, 16, VERSIONS, exclusive=True)  # a single lane, so a single order


class Killed(BaseException):
    """The machine is taken away."""


class Fake(Commands):
    """Commands that take `seconds` of a clock that only they advance, and write what a run writes."""

    now, seconds = 0.0, 10.0
    ran: list[str] = []
    kill_at: int | None = None
    broken: Callable[[str], bool] = staticmethod(lambda line: False)

    def __init__(self, folder: Path, until: float, limit: float) -> None:
        super().__init__(folder, Fake.now + until - time.monotonic(), limit, clock=lambda: Fake.now)

    def run(self, name: str, *command: str, **environment: str) -> Ended:
        line = " ".join(command[2:])
        if len(Fake.ran) == Fake.kill_at:
            raise Killed
        Fake.ran.append(line)
        begin, log, left = Fake.now, self.folder / f"{name}.log", self.left
        log.write_text("")
        Fake.now += min(Fake.seconds, left)
        code = None if Fake.seconds > left else int(self.broken(line))
        if code == 0:
            self._write(line, log)
        else:
            log.write_text("it broke")
        return Ended(code, log, begin, Fake.now - begin)

    def _write(self, line: str, log: Path) -> None:
        for folder in re.findall(r"hydra.run.dir=(\S+)", line):
            assert "=" not in folder, "Hydra refuses it"
            self._run(Path(folder), 4 if "steps=4" in line.split() else 8)
            if "launch.emulate=0" in line.split():
                plan = {"perf/wps": 90.0, "memory/peak_reserved_gib": 2.5}
                (Path(folder) / "plan.json").write_text(json.dumps(plan))
            for leaf in (grid.LEAVES[word].replace("*", ".html") for word in grid.LEAVES if word in line.split()):
                (Path(folder) / "trace").mkdir()
                (Path(folder) / leaf).write_text("")
        for folder in re.findall(r"meshrunner resume (\S+)", line):
            self._run(Path(folder), 8)
            log.write_text("continues after step 4")
        for folder in re.findall(r"hydra.sweep.dir=(\S+)", line):
            for number, state in enumerate(("completed", "oom", "completed")):
                self._run(Path(folder) / str(number), 8, state)
        for out in re.findall(r"--out (\S+\.json)", line):
            found = {"first_step": 5.0, "losses": [1.0], "wps": 100.0, "flops_per_token": 10, "peak_active_gib": 1.0}
            Path(out).write_text(json.dumps(found))
        if line.startswith("meshrunner plan"):
            log.write_text('warning\n{\n "perf/wps": 90.0, "perf/error_pct": 20, "memory/peak_active_gib": 2.0}\nmore')

    def _run(self, folder: Path, steps: int, state: str = "completed") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{"step": i, "time": 5.0 + i, "train/loss": 2.0, "train/grad_norm": 1.0} for i in range(1, steps + 1)]
        (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "config.yaml").write_text("seed: 0\nsteps: 4\n")
        (folder / "status.json").write_text(
            json.dumps({"state": state, "reason": "" if state == "completed" else state})
        )
        summary = {
            "perf/wps_median": 99.0,
            "peak_tflops": 989.4,
            "memory/peak_active_gib": 1.0,
            "memory/peak_reserved_gib": 2.0,
            "perf/compute_step_time_s_median": 0.8,
            "perf/communication_s_median": 0.1,
            "perf/checkpoint_time_s": 0.1,
        }
        (folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Fake, "now", 0.0)
    monkeypatch.setattr(Fake, "ran", [])
    monkeypatch.setattr(bench, "Commands", Fake)
    monkeypatch.setattr(bench, "_commit", lambda: "1234567")
    monkeypatch.setattr(bench.signal, "signal", lambda *_: None)
    monkeypatch.setattr(bench.Document, "write", once_ended(bench.Document.write))
    on(monkeypatch, ONE)


def once_ended(write: Callable[..., None]) -> Callable[..., None]:
    """Write the document only at the end of a call. That it is written after every row is tested elsewhere."""
    return lambda document, calls, results: write(document, calls, results) if document.ended else None


def on(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    monkeypatch.setattr(bench, "this_machine", lambda: machine)


def call(*words: str, minutes: float = 1000) -> int:
    return gpu([*words, "--minutes", str(minutes)])


def found(folder: str = "a") -> list[Result]:
    return read(Path(folder) / FILE)[1]


def keys(folder: str = "a", *states: str) -> list[tuple[str, str, int]]:
    return [each.key for each in found(folder) if not states or each.state in states]


def test_first_rows_and_speeds_precede_the_rest() -> None:
    assert call("--folder", "a") == 0
    order = [(each.part, each.what, each.round) for each in found()]
    first, second = (figures.FIRST[i] for i in (0, 2))
    measured = [("figures", first.what, round) for round in (1, 2, 3)]
    wanted = [("grid", grid.REFERENCE, 1), ("grid", grid.FIRST[0], 1)]
    wanted += [("proofs", f"resume, {jobs.RESUMED[-1]}", 1), measured[0], ("proofs", OUT_OF_MEMORY, 1)]
    wanted += [("grid", grid.REST[0], 1), ("figures", figures.SETTINGS[0].what, 1), *measured[1:]]
    places = [order.index(key) for key in wanted]
    assert places == sorted(places)
    assert order.index(measured[2]) < order.index(("figures", figures.REST[0].what, 1))
    # the loop follows both layouts that do the same work
    place = order.index(measured[0])
    single = figures.FIRST[1].what
    assert order[place : place + 3] == [measured[0], ("figures", single, 1), ("loop", first.loop, 1)]
    assert order[place + 3 : place + 5] == [("figures", second.what, 1), ("loop", second.loop, 1)]
    assert {("grid", row) for row in (*grid.REST, *grid.HYBRIDS, *grid.SEVERAL)} <= {key[:2] for key in order}
    assert {case.what for case in figures.MODELS} <= {what for part, what, _ in order if part == "figures"}


def test_a_row_that_the_machine_cannot_run_is_skipped_with_its_reason() -> None:
    assert call("--folder", "a") == 0
    skipped = {each.what: each.reason for each in found() if each.state == "skipped"}
    fused = "model=hybrid_tiny model.mamba.kernel=fused precision=bf16"
    assert skipped[fused] == "the package mamba-ssm is not installed"
    assert (
        skipped["parallelism=megatron_fsdp precision=bf16 launch.workers=1"]
        == "the package megatron-fsdp is not installed"
    )
    assert skipped["parallelism=hsdp1 precision=bf16 compile=per_block"] == "this row needs 4 GPUs"
    assert skipped[f"{figures.FIRST[0].loop} cuda_graphs=on"] == "the package torchtitan is not installed"
    assert not any("kernel=fused" in line or "loops.titan" in line for line in Fake.ran)
    text = (Path("a") / "gpu.md").read_text()
    assert f"- `{fused}`: the package mamba-ssm is not installed" in text and "0 not run" in text


def test_parts_run_on_their_own_and_merge() -> None:
    assert call("--folder", "a", "--part", "options") == 0
    assert {each.part for each in found("a")} == {"grid", "proofs"}
    assert call("--folder", "b", "--part", "figures") == 0
    assert {"figures", "loop", "torchtitan", "plan"} <= {each.part for each in found("b")}
    assert call("--folder", "d", "--part", "emulate") == 0
    assert {each.part for each in found("d")} == {"emulate"}
    assert call("--folder", "c") == 0
    assert {*keys("a"), *keys("b"), *keys("d")} == {*keys("c")} and not {*keys("a")} & {*keys("b")}
    assert gpu(["--document", "a", "b", "--out", "gpu.md"]) == 0
    text = Path("gpu.md").read_text()
    assert f"| `{grid.REST[0]}` | works |" in text and f"| `{figures.REST[0].what}` | 99 " in text
    assert text.count("- 20") == 2 and "--part options" in text and "commit 1234567" in text
    for version in VERSIONS:
        assert version in text


def test_published_runs_are_emulated_on_a_gpu_of_the_same_type(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, ONE._replace(versions=(*VERSIONS, "torchao 0.14")))
    assert call("--folder", "a", "--part", "emulate") == 0
    skipped = {each.what: each.reason for each in found() if each.state == "skipped"}
    large = "titan 2024-12: Llama 3 8B, selective_op, 8,192 tokens, 8 GPUs"
    assert skipped[large] == "this row needs 83.9 GiB, but this GPU has 79.1 GiB"
    fits = [row for row in emulate.ROWS if row.reserved_gib is not None and row.reserved_gib < 79.1 - 1.5]
    assert keys("a", "works") == [("emulate", emulate.what(row), 1) for row in fits]
    text = (Path("a") / "gpu.md").read_text()
    measured = "99 | 0.80 s | 0.10 s"
    assert f"| PR 165: Llama 2 7B, fsdp1, full, 2,048 tokens, 8 GPUs | 6,150 (6,100-6,200) | 90 | {measured} |" in text
    assert f", 128 GPUs | 5,605 | 90 | {measured} | 67.00 | 2.50 | 2.00 |" in text
    assert f"- emulate: `{large}`: this row needs 83.9 GiB" in text and "H100s with a power limit of 500 W" in text
    monkeypatch.setattr(Fake, "ran", [])
    assert call("--resume", "a", "--part", "emulate") == 0 and Fake.ran == []
    on(monkeypatch, ONE._replace(name="NVIDIA H200", memory_gib=139.8))
    assert call("--folder", "b", "--part", "emulate") == 0 and Fake.ran == []
    assert {each.reason for each in found("b")} == {"this row needs the GPU of the published run, H100 96GB"}


def test_no_row_starts_that_cannot_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fake, "seconds", 20.0)
    assert call("--folder", "a", "--part", "options", minutes=9) == 0
    assert 520 - 20 < Fake.now <= 540, Fake.now
    late = [each for each in found() if each.state == "not run"]
    assert late and {each.reason for each in late} == {"the bench had too little time left for this row"}
    assert len(late) + len(keys("a", "works", "skipped", "refused")) == len(found())


def test_a_short_row_runs_where_a_long_one_does_not_fit(tmp_path: Path) -> None:
    commands = Fake(tmp_path, time.monotonic() + 100.0, 300.0)
    runner = bench.Bench(ONE, commands, Results(tmp_path / FILE, lambda *_: None))

    def job(what: str, kind: str, seconds: float) -> Job:
        def run(_: dict[str, str]) -> Result:
            Fake.now += seconds
            if what == "broken":
                raise KeyError("x")
            return Result("grid", what, "works", seconds=seconds)

        return Job("grid", what, run, kind)

    made = [
        job("a", "eager", 45.0),
        job("b", "whole_model", 1.0),
        job("broken", "per_block", 0.0),
        job("c", "eager", 45.0),
    ]
    runner.run(Stage([*made, job("d", "eager", 45.0), job("e", "per_block", 1.0)]))
    states = {each.what: each.state for each in runner.results.all}
    assert states == {"a": "works", "b": "not run", "broken": "failed", "c": "works", "d": "not run", "e": "not run"}
    broken = next(each for each in runner.results.all if each.what == "broken")
    assert broken.reason == "error in the bench: KeyError: 'x'"


@pytest.mark.parametrize("commands", [1, 30, 75])
def test_a_call_that_is_killed_is_continued(commands: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("--folder", "whole") == 0
    whole, ran = keys("whole"), [*Fake.ran]
    monkeypatch.setattr(Fake, "ran", [])
    monkeypatch.setattr(Fake, "kill_at", commands)
    with pytest.raises(Killed):
        call("--folder", "a")
    kept = keys("a")
    with (Path("a") / FILE).open("a") as file:
        file.write('{"part": "grid", "what": "cut o')  # the last write was cut off
    monkeypatch.setattr(Fake, "kill_at", None)
    assert kept == keys("a") and call("--resume", "a") == 0
    assert keys("a")[: len(kept)] == kept and {*keys("a")} == {*whole}
    rows = [line for line in Fake.ran if "calibrate" not in line]
    assert (
        len(rows) <= len([line for line in ran if "calibrate" not in line]) + 2
    )  # a row of two commands may begin again
    text = (Path("a") / "gpu.md").read_text()
    assert text.count("- 20") == 2 and "has not ended" not in text
    assert len(read(Path("a") / FILE)[0]) == 2


def test_rows_for_which_time_was_short_run_in_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fake, "seconds", 19.0)
    words, calls = ["--folder", "a"], 0
    while calls < 10 and (not calls or "not run" in {each.state for each in found()}):
        assert call(*words, "--part", "options", minutes=9) == 0
        words, calls = ["--resume", "a"], calls + 1
    assert 2 <= calls < 10 and Fake.now <= calls * 540
    starts = [line for line in Fake.ran if "hydra.run.dir" in line]
    assert len(starts) == len({re.sub(r"hydra.run.dir=\S+", "", line) for line in starts})  # no row ran twice
    reference = next(each for each in found() if each.what == grid.REFERENCE)
    assert len(reference.figures["steps"]) == 8
    assert not any("not compared" in each.reason for each in found())


def test_a_resumed_call_compares_with_the_reference_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fake, "kill_at", 6)
    with pytest.raises(Killed):
        call("--folder", "a", "--part", "options")
    monkeypatch.setattr(Fake, "kill_at", None)
    lines = (Path("a") / FILE).read_text().splitlines()
    changed = [re.sub(r'"steps": \[\[2.0', '"steps": [[3.0', line) for line in lines]
    (Path("a") / FILE).write_text("\n".join(changed) + "\n")
    assert call("--resume", "a", "--part", "options") == 1
    assert sum("the loss of step 1 is 2.00000, in the reference 3.00000" in each.reason for each in found()) > 30


def test_failed_rows_run_again_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = grid.FIRST[2]
    monkeypatch.setattr(Fake, "broken", staticmethod(lambda line: broken in line))
    assert call("--folder", "a", "--part", "options") == 1
    assert keys("a", "failed") == [("grid", broken, 1)]
    [failed] = [each for each in found() if each.state == "failed"]
    assert failed.tail == ["it broke"]
    monkeypatch.setattr(Fake, "broken", staticmethod(lambda line: False))
    before = len(Fake.ran)
    assert call("--resume", "a", "--part", "options") == 1 and len(Fake.ran) == before
    assert call("--resume", "a", "--part", "options", "--repeat-failed") == 0 and len(Fake.ran) == before + 1


def test_a_failure_of_torchtitan_does_not_fail_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, ONE._replace(versions=(*VERSIONS, "torchtitan 0.3.0")))
    monkeypatch.setattr(Fake, "broken", staticmethod(lambda line: "loops.titan" in line))
    assert call("--folder", "a", "--part", "figures") == 0
    rows = [each for each in found() if each.part == "torchtitan"]
    assert len(rows) == 4 and {(each.state, each.reason) for each in rows} == {("failed", "it broke")}
    assert "torchtitan 0.3.0" in (Path("a") / "gpu.md").read_text()


@pytest.mark.parametrize(
    ("machine", "change"),
    [
        (ONE._replace(name="NVIDIA H200"), "1 x NVIDIA H100 80GB HBM3 there, 1 x NVIDIA H200 here"),
        (ONE._replace(versions=("torch 2.12.0", *VERSIONS[1:])), "torch 2.11.0+cu130 there, torch 2.12.0 here"),
    ],
)
def test_results_of_another_machine_are_not_merged(
    machine: Machine, change: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--folder", "a", "--part", "options", minutes=2) == 0
    before = (Path("a") / FILE).read_text()
    on(monkeypatch, machine)
    assert call("--resume", "a") == 2
    said = capsys.readouterr().err.splitlines()
    prefix = "python -m bench gpu: --resume: a has results of another machine or version: "
    assert said == [f"{prefix}{change}; use a new --folder"]
    assert (Path("a") / FILE).read_text() == before
    assert call("--folder", "b", "--part", "options", minutes=2) == 0
    assert gpu(["--document", "a", "b"]) == 2 and "different machines or versions" in capsys.readouterr().err


def test_the_document_is_written_from_the_results() -> None:
    assert call("--folder", "a", minutes=9) == 0
    written = (Path("a") / "gpu.md").read_text()
    (Path("a") / "gpu.md").unlink()
    assert gpu(["--document", "a"]) == 0 and (Path("a") / "gpu.md").read_text() == written
    assert (Path("a") / FILE).exists() and list(Path("a").glob("*-trace.json.gz")) == []


def test_rates_are_fitted_to_the_runs_of_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, ONE._replace(versions=(*VERSIONS, "scipy 1.17.1")))
    monkeypatch.setattr(Fake, "kill_at", 20)
    with pytest.raises(Killed):
        call("--folder", "a", "--part", "figures")
    monkeypatch.setattr(Fake, "kill_at", None)
    assert call("--resume", "a", "--part", "figures") == 0
    [line] = [line for line in Fake.ran if "calibrate" in line]
    assert (
        "/call-1/figures-" in line
        and "/call-2/figures-" in line
        and f"--out {Path('a/hardware.yaml').absolute()}" in line
    )
    [calibrated] = [each for each in found() if each.what == "calibrate"]
    assert calibrated.state == "works" and calibrated.reason == "12 runs, hardware.yaml"


def test_a_trace_lies_beside_the_document() -> None:
    assert call("--folder", "a", "--part", "figures", "--scratch", "elsewhere") == 0
    [trace] = [each for each in found() if "profiler=trace" in each.what]
    name = trace.reason.removeprefix("trace: ")
    assert (Path("a") / name).is_file() and [each.name for each in Path("a").iterdir() if each.is_dir()] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--folder", "new"], "torch finds no GPU on this machine; --cpu tests the bench itself with toy models"),
        (["--resume", "new", "--cpu"], "--resume: new has no results.jsonl with results; start with --folder new"),
        (["--document", "new"], "new: no results.jsonl with results"),
    ],
)
def test_a_mistake_is_a_sentence(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on(monkeypatch, Machine("a processor", 0, None, 2, VERSIONS))
    assert gpu(words) == 2
    assert capsys.readouterr().err.splitlines() == [f"python -m bench gpu: {message}"] and not Path("new").exists()


def test_a_folder_with_results_is_resumed_only_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--folder", "a", "--part", "options", minutes=2) == 0
    assert call("--folder", "a") == 2
    assert "--folder: a has results already; use --resume a" in capsys.readouterr().err


def test_every_combination_is_added(tmp_path: Path) -> None:
    results: Any = Results(tmp_path / FILE, lambda *_: None)
    made = [Jobs(ONE, Fake(tmp_path, 0.0, 1.0), results, tmp_path).stages(jobs.PARTS, every) for every in (False, True)]
    few, all_of_them = ([job.what for stage in stages for job in stage.jobs] for stages in made)
    assert len(all_of_them) - len(few) == len(list(grid.all_combinations()))
