"""`python -m bench gpu` in small form: every part of it runs on a CPU, with the code that runs on GPUs."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from bench.gpu import emulate, figures, grid
from bench.gpu.bench import CPU_LIMIT_S, Bench
from bench.gpu.commands import REPOSITORY, Commands
from bench.gpu.document import Document
from bench.gpu.jobs import RESUMED, Job, Jobs, Stage
from bench.gpu.loops import plain_loop
from bench.gpu.loops.plain_llama import PlainLlama
from bench.gpu.machine import this_machine
from bench.gpu.results import Call, Result, Results, read
from bench.published_rows import Row
from meshrunner.recipes.model.init_weights import initial_value
from tests.composed import experiment
from tests.e2e.command import BOUND_S, Command

if (machine := this_machine()).gpus:
    pytest.skip("the small form is that of a machine without GPUs", allow_module_level=True)


class Made(NamedTuple):
    """A bench whose reference row has run."""

    bench: Bench
    jobs: Jobs

    @property
    def folder(self) -> Path:
        return self.jobs.keep

    def found(self, *jobs: Job) -> list[Result]:
        """Run jobs, and return their results."""
        self.bench.run(Stage([*jobs], True))
        keys = {job.key for job in jobs}
        return [each for each in self.bench.results.all if each.key in keys]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """On this machine."""
    folder = tmp_path_factory.mktemp("bench")
    commands = Commands(folder, time.monotonic() + 86400, CPU_LIMIT_S)
    results = Results(folder / "results.jsonl", Document(folder / "gpu.md").write)
    results.begin(Call("2026-11-26 12:00", "python -m bench gpu --cpu", "", machine))
    made = Made(Bench(machine, commands, results), Jobs(machine, commands, results, folder))
    [reference] = made.found(made.jobs.row(grid.REFERENCE))
    assert reference.state == "works" and len(reference.figures["steps"]) == 8, reference
    return made


WORK = {
    "parallelism=fsdp2 parallelism.cpu_offload=true precision=bf16": None,
    "precision=bf16 profiler=trace": None,
    "precision=bf16 profiler=memory": None,
    "precision=float8 parallelism=fsdp2": None,
    "parallelism=fsdp1_tp precision=fp32 micro_batch=2": 4,
    grid.EXPERT_REFERENCE: None,
    "model=moe_tiny parallelism=ep precision=fp32": 2,
    "model=hybrid_tiny model.mamba.kernel=torch precision=bf16 deterministic=true": None,
    "model=hybrid_tiny model.mamba.kernel=torch model.mtp.depth=2 precision=fp32": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("row", WORK)
def test_a_row_works(row: str, made: Made) -> None:
    [reference] = made.found(made.jobs.row(grid.reference_of(row)))
    [result] = made.found(made.jobs.row(row, WORK[row]))
    assert reference.state == "works" and (result.state, result.reason) == ("works", ""), result


@pytest.mark.slow
def test_a_row_is_refused_with_the_reason(made: Made) -> None:
    [result] = made.found(made.jobs.row("precision=fp32 compile=eager activation_checkpoint=memory_budget"))
    assert result.state == "refused" and result.reason.startswith("These settings do not go together:"), result
    assert "the compiler enforces the memory budget" in result.reason


@pytest.mark.slow
def test_a_row_fails_with_the_reason_and_the_log(made: Made) -> None:
    [result] = made.found(made.jobs.row("precision=fp32 model.kind=tests.e2e.faulty:Raises +model.rank=1"))
    assert result.state == "failed" and result.reason.startswith("failed: rank 1: "), result
    assert Path(result.log).name == "rank1.log" and "Traceback" in Path(result.log).read_text()


@pytest.mark.slow
def test_a_row_that_is_trained_otherwise_fails(made: Made) -> None:
    [result] = made.found(made.jobs.row("precision=fp32 seed=1"))
    assert result.state == "failed" and "in the reference" in result.reason, result


@pytest.mark.slow
@pytest.mark.parametrize("kind", RESUMED)
def test_a_run_is_resumed(kind: str, made: Made) -> None:
    [result] = made.found(made.jobs.resumed(kind))
    assert result.state == "works" and result.reason.startswith("saving a checkpoint stops training for "), result


@pytest.mark.slow
def test_memory_runs_out(made: Made) -> None:
    [result] = made.found(made.jobs.out_of_memory())
    assert result.state == "works" and "out of host memory in step 1 (forward of output)" in result.reason, result


@pytest.mark.slow
def test_meshrunner_and_the_loop_do_the_same(made: Made) -> None:
    """The same parameters and FLOPs; losses that fall alike."""
    ours, loop = made.found(*made.jobs.in_turn([figures.Case("8B", "none", "eager")]))
    assert ours.state == loop.state == "works", (ours, loop)
    for key in ("parameters", "flops_per_token"):
        assert ours.figures[key] == loop.figures[key] > 0
    for result in (ours, loop):
        losses = result.figures["losses"]
        assert len(losses) == figures.STEPS and result.figures["wps"] > 0
        mfu = result.figures["mfu"]  # None if other programs slowed down the measurement of the peak
        assert mfu is None or mfu > 0
        assert losses[-1] < losses[0] - 0.2
    text = (made.folder / "gpu.md").read_text()
    assert "## Speed and memory" in text and "## Start" in text


@pytest.mark.slow
def test_memory_is_predicted_and_measured(made: Made) -> None:
    case = figures.Case("nemotron", "none", "eager")
    [run] = made.found(made.jobs.measured(case))
    [plan] = made.found(made.jobs.planned(case))
    assert run.state == plan.state == "works" and plan.figures["peak_active_gib"] > 0, (run, plan)


@pytest.mark.slow
@pytest.mark.parametrize("row", [emulate.ROWS[0], emulate.ROWS[-1]], ids=["eager FSDP1", "compiled float8 FSDP2"])
def test_a_rank_of_a_published_run_is_emulated(row: Row, made: Made) -> None:
    [result] = made.found(made.jobs.emulated(row))
    assert result.state == "works" and result.figures["compute_s"] > 0, result
    assert f"| {emulate.what(row)} |" in (made.folder / "gpu.md").read_text()


@pytest.mark.slow
def test_a_row_needs_only_the_packages_that_contributing_names(
    made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("datasets", "pandas", "wandb", "tensorboard", "scipy", "torchao"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not installed')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    [result] = made.found(made.jobs.row("precision=fp32 log_every=3"))
    assert (result.state, result.reason) == ("works", ""), result


@pytest.mark.slow
def test_from_the_same_weights_the_loop_has_the_losses_of_meshrunner(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, over all steps: the same dtypes, clipping, learning rates and optimizer."""
    case = figures.Case("8B", "selective_op", "eager")
    subject = figures.subjects(machine)["8B"]
    [ours] = made.found(made.jobs.measured(case))
    expected = torch.tensor(ours.figures["losses"])
    arguments = {"recompute": case.recompute, "compile": case.compile, "device": "cpu", "lr": subject.lr}
    arguments |= {"steps": figures.STEPS, "read_every": figures.READ_EVERY}
    shape = {"shape": subject.shape, "seq_len": subject.seq_len, "micro_batch": subject.micro_batch}

    @torch.no_grad()
    def initialise(plain: PlainLlama, _: object) -> None:
        with torch.device("meta"):
            network = experiment(*subject.overrides.split()).model.network(subject.seq_len)
        for name, weight in plain.named_parameters():
            weight.copy_(initial_value(name, weight.shape, network.initial(name), 0, weight.device))

    monkeypatch.setattr(PlainLlama, "_initialise", initialise)
    losses = torch.tensor(plain_loop.train(Namespace(**arguments, **shape))["losses"])
    assert ((losses - expected).abs() / expected).max() < 5e-3 < expected[0] - expected[-1]


@pytest.mark.slow
def test_a_bench_that_is_stopped_has_written_what_it_found(tmp_path: Path) -> None:
    folder = tmp_path / "found"
    out = folder / "gpu.md"
    words = ("-m", "bench", "gpu", "--cpu", "--minutes", "1000", "--folder", str(folder))
    paths = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'package'}"}
    with Command(*words, cwd=tmp_path, program=(sys.executable,), **paths) as command:
        command.until(lambda: out.exists() and grid.REFERENCE in out.read_text())
        command.process.terminate()
        ended = command.wait(BOUND_S)
        command.check_nobody_left()
    assert ended.code == 143, ended
    text = out.read_text()
    assert "has not ended" in text and f"| `{grid.REFERENCE}` | works |" in text
    assert any(each.what == grid.REFERENCE and each.state == "works" for each in read(folder / "results.jsonl")[1])


@pytest.mark.slow
def test_in_its_own_time(tmp_path: Path) -> None:
    """As many rows as the time is for, the most telling first: none fails, and those that are left are listed."""
    out = tmp_path / "found" / "gpu.md"
    words = ("-m", "bench", "gpu", "--cpu", "--part", "options", "--minutes", "6", "--folder", str(out.parent))
    paths = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'package'}"}
    with Command(*words, cwd=tmp_path, program=(sys.executable,), **paths) as command:
        ended = command.wait(3600)
    assert ended.code == 0, ended
    text = out.read_text()
    assert " 0 failed" in text and f"| `{grid.REFERENCE}` | works |" in text
