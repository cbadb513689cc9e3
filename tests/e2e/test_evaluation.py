"""The held-out loss as a user sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrunner.runner.rundir import read_events
from meshrunner.runner.rundir.files import EVALS
from tests.e2e.command import meshrunner, read, run, status

EVAL = ("eval=held_out", "eval.every=2", "eval.sequences=7", "steps=6", "model.dim=48")

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.slow(sampled=True)
def test_held_out_loss_is_printed_recorded_and_leaves_training_as_it_is(tmp_path: Path) -> None:
    ended = run(*EVAL, run_dir="with", cwd=tmp_path)
    assert ended.code == 0, ended
    assert "eval.sequences: 7 is rounded up to 8" in ended.err
    assert [line.split()[1] for line in ended.out.splitlines() if "perplexity" in line] == ["0/6", "2/6", "4/6", "6/6"]
    rows = read_events(tmp_path / "with", EVALS)
    assert [(row.step, row["eval/tokens"]) for row in rows] == [(step, 8 * 16) for step in (0, 2, 4, 6)]
    summary = read(tmp_path / "with" / "summary.json")
    losses = [row["eval/loss"] for row in rows]
    assert (summary["eval/loss"], summary["eval/best_loss"]) == (losses[-1], min(losses))
    assert run("steps=6", "model.dim=48", run_dir="plain", cwd=tmp_path).code == 0
    curves = [[row["train/loss"] for row in read_events(tmp_path / name)] for name in ("with", "plain")]
    assert curves[0] == curves[1]


@pytest.mark.slow
def test_stop_after_ends_the_run_as_completed_and_a_resume_repeats_no_evaluation(tmp_path: Path) -> None:
    saved = ("checkpoint=dcp", "checkpoint.every=4")
    assert run(*EVAL, *saved, "steps=4", run_dir="a", cwd=tmp_path).code == 0
    config = tmp_path / "a" / "config.yaml"
    config.write_text(config.read_text().replace("steps: 4\n", "steps: 8\n", 1))
    assert meshrunner("resume", "a", cwd=tmp_path).code == 0
    rows = read_events(tmp_path / "a", EVALS)
    assert [(row.step, row.attempt) for row in rows] == [(0, 1), (2, 1), (4, 1), (6, 2), (8, 2)]
    ended = run(*EVAL, "optimizer.lr=10", "eval.stop_after=1", run_dir="b", cwd=tmp_path)
    assert ended.code == 0, ended
    found = status(tmp_path / "b")
    assert found["state"] == "completed" and found["reason"].startswith("eval.stop_after: the held-out loss of step 0")
    assert read_events(tmp_path / "b")[-1].step == 2
    again = meshrunner("resume", "b", cwd=tmp_path)
    assert again.code == 0 and "nothing to do" in again.out, again
    assert read(tmp_path / "b" / "summary.json")["data"]["kind"] == "random"


def test_text_too_short_to_evaluate_is_refused(tmp_path: Path) -> None:
    text = ("data=stdlib", "data.text=prose", "model.vocab_size=400", "eval.share=1e-9")
    ended = run(*EVAL, *text, cwd=tmp_path)
    assert ended.code == 2 and "raise eval.share" in ended.err and "Traceback" not in ended.err
