"""Runs that start from the weights of a Hugging Face folder or of another run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from meshrunner.runner.rundir.events import read_events
from tests.e2e.command import TINY, Command, meshrunner, run, status, steps_done
from tests.hugging_face import saved

pytestmark = pytest.mark.usefixtures("cache")
HF = ("model=hf", "model.path=folder", *(word for word in TINY if not word.startswith("model.")))
SAVED = ("steps=12", "checkpoint=dcp", "checkpoint.every=1", "checkpoint.keep=2", "deterministic=true")


def curve(run_dir: Path) -> list[tuple[int, float, float]]:
    """Return (step, loss, norm) of every step."""
    return [(row["step"], row["train/loss"], row["train/grad_norm"]) for row in read_events(run_dir)]


@pytest.mark.slow(sampled=True)
def test_a_killed_run_resumes_without_the_folder(tmp_path: Path) -> None:
    shutil.copytree(saved("qwen3"), tmp_path / "folder")
    straight = meshrunner("run", *HF, *SAVED, "hydra.run.dir=straight", cwd=tmp_path)
    assert straight.code == 0, straight
    with Command("run", *HF, *SAVED, "hydra.run.dir=killed", cwd=tmp_path) as command:
        command.until(lambda: steps_done(tmp_path / "killed") > 2)
        command.process.kill()
    shutil.rmtree(tmp_path / "folder")
    assert steps_done(tmp_path / "killed") < 12
    resumed = meshrunner("resume", "killed", cwd=tmp_path)
    assert resumed.code == 0 and "the run continues after step" in resumed.out, resumed
    assert curve(tmp_path / "killed") == curve(tmp_path / "straight")
    compared = meshrunner("compare", "straight", "killed", cwd=tmp_path)
    assert compared.code == 0 and not compared.err, compared
    missing = meshrunner("run", *HF, cwd=tmp_path)
    assert missing.code == 2 and "model.path: cannot read" in missing.err, missing


@pytest.mark.slow
def test_a_run_starts_from_the_weights_of_another(tmp_path: Path) -> None:
    text = ("data=stdlib", "model.vocab_size=600", "optimizer.lr=1e-2")
    assert run("steps=30", "checkpoint=dcp", *text, cwd=tmp_path).code == 0
    again = run("steps=3", "model.weights=out", *text, cwd=tmp_path, run_dir="again")
    assert again.code == 0 and status(tmp_path / "again")["state"] == "completed", again
    first, second = (curve(tmp_path / name) for name in ("out", "again"))
    assert [step for step, *_ in second] == [1, 2, 3] and second[0][1] < first[0][1] - 0.5
    assert run("model.weights=out", *text, "data.vocab_size=500", cwd=tmp_path).code == 2
    other = run("model.weights=out", "model.ffn_dim=80", cwd=tmp_path, run_dir="other")
    assert other.code == 2 and "model.ffn_dim: 64 in the checkpoint, 80 now" in other.err, other
