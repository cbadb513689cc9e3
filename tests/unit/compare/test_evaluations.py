"""Evaluations in summaries, tables, verdicts, the report page and trackers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from meshrunner.recipes.errors import Incompatible
from meshrunner.runner.compare.comparison import compare_runs
from meshrunner.runner.compare.export import records
from meshrunner.runner.compare.page.charted import as_json
from meshrunner.runner.compare.runs import read_run
from meshrunner.runner.compare.table import markdown
from meshrunner.runner.config.consistency import fit
from meshrunner.runner.measure.evaluations import reason_to_end, record
from meshrunner.runner.rundir import StepRow, read_events, summarise
from meshrunner.runner.rundir.files import EVALS
from meshrunner.runner.trackers.follow import RowBuffer
from tests.composed import experiment
from tests.run_dirs import make_run

LOSSES = (6.0, 5.0, 5.5)


def row(step: int, loss: float | None = 6.0, attempt: int = 1, seconds: float = 2.0) -> StepRow:
    return StepRow({"step": step, "attempt": attempt, "eval/loss": loss, "eval/time_s": seconds})


def evaluated(folder: Path, *overrides: str, losses: Sequence[float] = LOSSES) -> Path:
    make_run(folder, *overrides, summary={"eval/loss": losses[-1], "eval/best_loss": min(losses)})
    for i, loss in enumerate(losses):
        record(folder, 1, 2 * i, loss, 100, 0.5)
    return folder


def test_summary_has_the_last_and_the_lowest_loss() -> None:
    steps = [StepRow({"step": i, "attempt": 1, "time": 20.0 + i, "perf/wps": 1.0}) for i in (1, 2)]
    found = summarise(steps, 0, 10.0, 1, evals=[row(0), row(1, 5.0), row(2, 5.5)]).figures
    assert (found["eval/loss"], found["eval/best_loss"]) == (5.5, 5.0)
    assert found["perf/time_to_first_step_s"] == 9.0, "the evaluation before the first step does not count"
    assert "eval/loss" not in summarise(steps, 0, 10.0, 1).figures


def test_run_ends_after_evaluations_without_a_new_lowest_loss(tmp_path: Path) -> None:
    def ends(patience: int) -> str:
        return reason_to_end(tmp_path, experiment("eval=held_out", f"eval.stop_after={patience}", "steps=8"))

    for step, loss in ((0, 6.0), (2, 5.0), (4, math.nan)):
        record(tmp_path, 1, step, loss, 100, 0.5)
    assert ends(2) == ""
    record(tmp_path, 1, 6, 5.0, 100, 0.5)
    assert ends(3) == ""
    assert ends(2).startswith("eval.stop_after: the held-out loss of step 2 (5.0000)")


def test_a_reader_takes_the_last_row_of_a_step(tmp_path: Path) -> None:
    for attempt, step in ((1, 0), (1, 2), (1, 4), (2, 2)):
        record(tmp_path, attempt, step, 800.0, 100, 0.5)
    rows = read_events(tmp_path, EVALS)
    assert [(each.step, each.attempt) for each in rows] == [(0, 1), (2, 2)]
    assert rows[0]["eval/loss"] == 800.0 and rows[0]["eval/perplexity"] is None


@pytest.mark.parametrize(
    ("change", "verdict"),
    [(1.0, "identical"), (1 + 8e-6, "agrees (8.0e-6)"), (1.1, "differs from step 4 on (held-out loss 1.0e-1)")],
)
def test_held_out_losses_have_a_column_a_verdict_and_a_chart(tmp_path: Path, change: float, verdict: str) -> None:
    folders = [
        evaluated(tmp_path / "base", "parallelism=fsdp1"),
        evaluated(tmp_path / "mine", "parallelism=fsdp2", losses=(*LOSSES[:2], LOSSES[2] * change)),
    ]
    comparison = compare_runs([read_run(folder) for folder in folders], "parallelism=fsdp1")
    table = markdown(comparison)
    assert "held-out loss (best)" in table and "5.5000 (5.0000)" in table
    assert "held-out loss vs fsdp1" in table and verdict in table
    assert records(comparison)[1]["held_out_loss_verdict"] == verdict.split()[0]
    assert records(comparison)[1]["loss_verdict"] == "identical"
    page = json.loads(as_json(comparison))
    place, values = page["rows"][0]["held_out"]
    assert page["steps"][place] == [0, 2, 4] and values == list(LOSSES)


def test_losses_of_other_seeds_are_judged_by_the_noise_between_seeds(tmp_path: Path) -> None:
    folders = [
        evaluated(
            tmp_path / f"{name}{seed}", f"parallelism={name}", f"seed={seed}", losses=[6.0, 5.0 + 0.1 * seed + more]
        )
        for seed in range(3)
        for name, more in (("fsdp1", 0.0), ("fsdp2", 0.01))
    ]
    comparison = compare_runs([read_run(folder) for folder in folders], "parallelism=fsdp1")
    assert records(comparison)[1]["held_out_loss_verdict"] == "within seeds"


def test_losses_of_other_held_out_data_or_before_the_first_step_are_not_compared(tmp_path: Path) -> None:
    base = evaluated(tmp_path / "base", "parallelism=fsdp1")
    other = evaluated(tmp_path / "other", "parallelism=fsdp2")
    start = evaluated(tmp_path / "start", "parallelism=ddp", losses=LOSSES[:1])
    for folder, sequences in ((base, 8), (other, 16), (start, 8)):
        with (folder / "config.yaml").open("a") as file:
            file.write(f"eval: {{kind: held_out, sequences: {sequences}}}\n")
    comparison = compare_runs([read_run(folder) for folder in (base, other, start)], "parallelism=fsdp1")
    assert [row["held_out_loss_verdict"] for row in records(comparison)] == [None, None, None]


def test_runs_without_evaluation_have_no_column(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, f"parallelism={name}") for name in ("fsdp1", "fsdp2")]
    comparison = compare_runs([read_run(folder) for folder in folders], "parallelism=fsdp1")
    assert "held-out" not in markdown(comparison)


def append(run_dir: Path, attempt: int, *steps: int) -> None:
    with (run_dir / "events.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "attempt": attempt}) + "\n" for step in steps)


def test_trackers_get_an_evaluation_after_the_row_of_its_step(tmp_path: Path) -> None:
    rows = RowBuffer(tmp_path, attempt=1)

    def read(final: bool = False) -> list[tuple[int, bool]]:
        return [(each.step, "eval/loss" in each) for each in rows.read(final)]

    record(tmp_path, 1, 0, 6.0, 100, 0.5)
    assert read() == [(0, True)]
    record(tmp_path, 1, 2, 6.0, 100, 0.5)
    assert read() == []
    append(tmp_path, 1, 1, 2, 3)
    assert read() == [(1, False), (2, False), (2, True), (3, False)]
    append(tmp_path, 1, 4)
    record(tmp_path, 1, 4, 6.0, 100, 0.5)
    assert read(final=True) == [(4, False), (4, True)]


def test_trackers_get_no_evaluation_that_a_resumed_run_repeats(tmp_path: Path) -> None:
    append(tmp_path, 1, 1, 2, 3)
    for step in (0, 2, 3):
        record(tmp_path, 1, step, 6.0, 100, 0.5)
    rows = RowBuffer(tmp_path, attempt=2)
    append(tmp_path, 2, 3, 4)
    assert [(each.step, each.attempt) for each in rows.read(final=False)] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (2, 1),
        (3, 2),
        (4, 2),
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        "parallelism=fsdp2_pp parallelism.pipeline_schedule=zbv",
        "parallelism=fsdp2_pp parallelism.pipeline_schedule=dualpipe_v",
        "parallelism=fsdp2 parallelism.buffers=max_pool",
        "parallelism=megatron_fsdp",
        "parallelism=fsdp2 launch.emulate=0",
    ],
)
def test_layouts_that_cannot_evaluate_are_refused(overrides: str) -> None:
    with pytest.raises(Incompatible, match=r"(?m)eval: .*eval=none"):
        fit(experiment("eval=held_out", "micro_batch=1", *overrides.split()), 4)
