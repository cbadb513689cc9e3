"""`meshrunner resume`: whatever happened to a run, it continues as if nothing had."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from meshrunner.runner.rundir.events import read_events
from tests.e2e.command import TINY, Command, Ended, meshrunner, own_classes, read, run, status, steps_done, until

EVERY_STEP = ("checkpoint=dcp", "checkpoint.every=1", "checkpoint.keep=null")


pytestmark = pytest.mark.usefixtures("cache")


def curve(run_dir: Path) -> list[tuple[int, float, float, int]]:
    """(step, loss, norm, tokens so far) of every step, the last row of each."""
    rows = read_events(run_dir)
    return [(row["step"], row["train/loss"], row["train/grad_norm"], row["train/tokens"]) for row in rows]


def completed(ended: Ended, run_dir: Path) -> Ended:
    assert ended.code == 0, ended
    assert status(run_dir)["state"] == "completed"
    return ended


def kept(run_dir: Path) -> list[str]:
    """What lies in the folder of checkpoints."""
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def edit(run_dir: Path, old: str, new: str) -> None:
    """Edit config.yaml as a person does."""
    path = run_dir / "config.yaml"
    text = path.read_text()
    assert text.count(old) == 1, (old, text)
    path.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps that nothing happened to, a checkpoint after each."""
    folder = tmp_path_factory.mktemp("straight")
    completed(run("steps=6", *EVERY_STEP, cwd=folder), folder / "out")
    return folder / "out"


def resume(run_dir: Path, *arguments: str) -> Ended:
    return meshrunner("resume", str(run_dir), *arguments, cwd=run_dir.parent)


def cut_back(straight: Path, folder: Path, step: int) -> Path:
    """A copy of the run as it was after a step, when its power went."""
    run_dir = folder / "out"
    shutil.copytree(straight, run_dir)
    for later in range(step + 1, 7):
        shutil.rmtree(run_dir / "checkpoints" / f"step-{later:08}")
    state = read(run_dir / "status.json") | {"state": "running", "heartbeat": 0}
    state["owner"]["pid_started"] = -1
    (run_dir / "status.json").write_text(json.dumps(state))
    return run_dir


@pytest.mark.slow
def test_keep_keeps_the_newest_and_the_last_step_is_saved(tmp_path: Path) -> None:
    for kind in ("dcp", "dcp_async"):
        overrides = ("steps=7", f"checkpoint={kind}", "checkpoint.every=2", "checkpoint.keep=2")
        completed(run(*overrides, cwd=tmp_path, run_dir=kind), tmp_path / kind)
        assert kept(tmp_path / kind) == ["step-00000006", "step-00000007"]


@pytest.mark.slow
def test_a_run_without_checkpoints_has_no_folder_for_them(tmp_path: Path) -> None:
    completed(run(cwd=tmp_path), tmp_path / "out")
    assert not (tmp_path / "out" / "checkpoints").exists()


def truncated(newest: Path) -> None:
    os.truncate(newest / "__1_0.distcp", 100)


def missing(newest: Path) -> None:
    (newest / "__0_0.distcp").unlink()


def other_metadata(newest: Path) -> None:
    path = newest / ".metadata"
    path.write_bytes(bytes(reversed(path.read_bytes())))


def garbage_record(newest: Path) -> None:
    (newest / "checkpoint.json").write_text("{not json")


def without_record(newest: Path) -> None:
    (newest / "checkpoint.json").unlink()


def flipped_bit(newest: Path) -> None:
    path = newest / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [truncated, missing, other_metadata, garbage_record, without_record, flipped_bit],
    ids=lambda f: f.__name__,
)
def test_a_damaged_newest_checkpoint_is_skipped(damage: Callable[[Path], None], straight: Path, tmp_path: Path) -> None:
    run_dir = cut_back(straight, tmp_path, 4)
    damage(run_dir / "checkpoints" / "step-00000004")
    ended = completed(resume(run_dir), run_dir)
    said = ended.err + (run_dir / "logs" / "rank0.log").read_text()
    assert f"skipping the checkpoint {run_dir / 'checkpoints' / 'step-00000004'}: " in said, ended
    assert [row["step"] for row in read_events(run_dir) if row["attempt"] == 2] == [4, 5, 6]
    assert curve(run_dir) == curve(straight)
    assert kept(run_dir) == kept(straight), "the damaged one was written again"


@pytest.mark.slow
def test_what_was_half_written_is_removed(straight: Path, tmp_path: Path) -> None:
    run_dir = cut_back(straight, tmp_path, 3)
    shutil.copytree(run_dir / "checkpoints" / "step-00000003", run_dir / "checkpoints" / ".tmp-step-00000004")
    ended = completed(resume(run_dir), run_dir)
    assert "after step 3" in ended.out
    assert kept(run_dir) == kept(straight)


@pytest.mark.slow
def test_without_a_good_checkpoint_a_run_begins_again(straight: Path, tmp_path: Path) -> None:
    run_dir = cut_back(straight, tmp_path, 1)
    missing(run_dir / "checkpoints" / "step-00000001")
    ended = completed(resume(run_dir), run_dir)
    assert "step-00000001: __0_0.distcp is missing" in ended.err
    assert curve(run_dir) == curve(straight)


@pytest.mark.slow
def test_rows_that_were_not_read_out_are_before_the_checkpoint(straight: Path, tmp_path: Path) -> None:
    """With log_every=100 the rows of steps 2 and 3 wait; a rank fails in its fourth step, after the checkpoint."""
    own_classes(tmp_path)
    overrides = ("steps=6", "log_every=100", "checkpoint=dcp", "checkpoint.every=3")
    ended = run(*overrides, "model.kind=faulty:Raises", "+model.step=4", cwd=tmp_path)
    assert ended.code == 1, ended
    rows = (tmp_path / "out" / "events.jsonl").read_text()
    assert rows.count("\n") == 3
    completed(resume(tmp_path / "out"), tmp_path / "out")
    assert (tmp_path / "out" / "events.jsonl").read_text().startswith(rows)
    assert curve(tmp_path / "out") == curve(straight)


@pytest.mark.slow
def test_more_steps_for_a_completed_run(straight: Path, tmp_path: Path) -> None:
    completed(run("steps=3", "checkpoint=dcp", cwd=tmp_path), tmp_path / "out")
    assert "nothing to do" in resume(tmp_path / "out").out
    edit(tmp_path / "out", "steps: 3\n", "steps: 6\n")
    ended = completed(resume(tmp_path / "out"), tmp_path / "out")
    assert "continues after step 3" in ended.out
    assert curve(tmp_path / "out") == curve(straight)


@pytest.mark.slow
def test_more_steps_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    completed(run(cwd=tmp_path), tmp_path / "out")
    edit(tmp_path / "out", "steps: 3\n", "steps: 6\n")
    ended = resume(tmp_path / "out")
    assert ended.code == 2 and "completed 3 steps and has no usable checkpoint" in ended.err, ended
    assert status(tmp_path / "out")["state"] == "completed"


@pytest.mark.slow
def test_changes_that_decide_what_is_trained_need_force(straight: Path, tmp_path: Path) -> None:
    run_dir = cut_back(straight, tmp_path, 4)
    edit(run_dir, "eps: 1.0e-08", "eps: 1.0e-06")
    edit(run_dir, "seed: 0", "seed: 7")
    before = status(run_dir)
    ended = resume(run_dir)
    assert ended.code == 2, ended
    assert "optimizer.eps: was 1e-08, is 1e-06" in ended.err and "seed: was 0, is 7" in ended.err
    assert "--force" in ended.err and status(run_dir) == before, "nothing was started"
    completed(resume(run_dir, "--force"), run_dir)
    assert curve(run_dir)[:4] == curve(straight)[:4] and curve(run_dir)[4:] != curve(straight)[4:]


def test_another_model_is_refused_with_force_too(straight: Path, tmp_path: Path) -> None:
    run_dir = cut_back(straight, tmp_path, 4)
    edit(run_dir, "n_layers: 1", "n_layers: 2")
    ended = resume(run_dir, "--force")
    assert ended.code == 2 and "model.n_layers: 1 in the checkpoint, 2 now" in ended.err, ended


@pytest.mark.slow
def test_changes_that_do_not_decide_what_is_trained_need_nothing(straight: Path, tmp_path: Path) -> None:
    run_dir = cut_back(straight, tmp_path, 4)
    edit(run_dir, "log_every: auto", "log_every: 2")
    edit(run_dir, "workers: 2", "workers: 1")
    edit(run_dir, "micro_batch: 1", "micro_batch: 2")
    edit(run_dir, "every: 1\n", "every: 3\n")
    edit(run_dir, "reshard_after_forward: auto", "reshard_after_forward: never")
    completed(resume(run_dir), run_dir)
    assert curve(run_dir)[:4] == curve(straight)[:4]
    for one, two in zip(curve(run_dir)[4:], curve(straight)[4:], strict=True):
        assert one == pytest.approx(two, rel=1e-5), "one worker takes the two sequences that two workers took"
    check_figures_of_the_last_layout(run_dir)


def check_figures_of_the_last_layout(run_dir: Path) -> None:
    """Steps 1 to 4 were done by two workers, 5 and 6 by one."""
    own = [row["perf/wps"] for row in read_events(run_dir) if row["step"] > 4]
    (row,) = json.loads(meshrunner("compare", "--json", str(run_dir), cwd=run_dir.parent).out)
    assert min(own) <= row["perf/wps_median"] <= max(own)
    assert row["runs"][0]["earlier_layouts"][0]["steps"] == [1, 4]
    table = meshrunner("compare", str(run_dir), cwd=run_dir.parent).out
    assert "from step 5 on" in table
    assert (
        "steps 1 to 4 are not in the figures, because they ran with parallelism.reshard_after_forward=auto, "
        "micro_batch=1, launch.workers=2, world_size=2" in table
    )


@pytest.mark.slow
def test_other_text_under_the_same_path_needs_force(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"line {i} of the text"}) + "\n" for i in range(500)))
    data = ("data=jsonl", f"data.path={text}", "data.shuffle=8")
    completed(run("steps=3", *EVERY_STEP, *data, cwd=tmp_path), tmp_path / "out")
    edit(tmp_path / "out", "steps: 3", "steps: 5")
    text.write_text(text.read_text().replace("line", "word"))
    ended = resume(tmp_path / "out")
    assert ended.code == 2 and "has changed since this run last trained" in ended.err, ended
    assert len(read_events(tmp_path / "out")) == 3
    completed(resume(tmp_path / "out", "--force"), tmp_path / "out")


def test_a_global_batch_that_the_ranks_cannot_share_is_refused(straight: Path, tmp_path: Path) -> None:
    run_dir = cut_back(straight, tmp_path, 4)
    edit(run_dir, "workers: 2", "workers: 3")
    ended = resume(run_dir)
    assert ended.code == 2, ended
    assert "global_batch(2) is not a multiple of micro_batch(1) x data-parallel ranks(3) = 3" in ended.err
    assert "global_batch is null, so the checkpoint's global batch" in ended.err


@pytest.mark.slow
def test_load_continues_another_run_in_a_new_directory(straight: Path, tmp_path: Path) -> None:
    run_dir = cut_back(straight, tmp_path, 4)
    for name, load in (("run", run_dir), ("one", run_dir / "checkpoints" / "step-00000003")):
        completed(run("steps=6", f"checkpoint.load={load}", cwd=tmp_path, run_dir=name), tmp_path / name)
        first = 5 if name == "run" else 4
        assert curve(tmp_path / name) == curve(straight)[first - 1 :]


@pytest.mark.slow_but("overrides0*")
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["checkpoint.load=nowhere"], "checkpoint.load: no such directory"),
        (["checkpoint.load=."], "contains no usable checkpoint"),
        (["checkpoint.load={straight}", "steps=6"], "at step 6 and steps=6, so nothing is left to train"),
        (["checkpoint.load={straight}", "steps=9", "model.dim=64"], "model.dim: 32 in the checkpoint, 64 now"),
        (["checkpoint=dpc"], "Did you mean 'dcp'?"),
        (["checkpoint=dcp", "checkpoint.every=0"], "checkpoint.every: expected a whole number of at least 1, got 0"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(
    overrides: list[str], said: str, straight: Path, tmp_path: Path
) -> None:
    ended = run(*(override.format(straight=straight) for override in overrides), cwd=tmp_path)
    assert ended.code == 2 and said in ended.err, ended
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dcp", "dcp_async"])
def test_killed_at_any_moment_a_run_continues_as_if_nothing_had_happened(kind: str, tmp_path: Path) -> None:
    """kill -9, ten times, of the launching process or of a worker, now and then while a checkpoint is being written."""
    own_classes(tmp_path)
    overrides = ("steps=40", "log_every=3", "optimizer.kind=faulty:SlowAdamW")
    saved = (f"checkpoint={kind}", "checkpoint.every=2", "checkpoint.keep=2")
    completed(run(*overrides, cwd=tmp_path, run_dir="straight"), tmp_path / "straight")
    run_dir, dice = tmp_path / "out", random.Random(kind)
    arguments = ("run", *TINY, f"hydra.run.dir={run_dir}", *overrides, *saved)
    for attempt in range(1, 11):
        with Command(*arguments, cwd=tmp_path) as command:
            rows, wanted = steps_done(run_dir), dice.randint(1, 5)
            until(lambda: steps_done(run_dir) >= rows + wanted or command.process.poll() is not None)  # noqa: B023
            until(lambda: len(read(run_dir / "status.json")["workers"]) == 2)
            if dice.random() < 0.5:
                command.process.kill()
            else:
                psutil.Process(dice.choice(status(run_dir)["workers"])["pid"]).kill()
                assert command.wait().code == 1
            command.process.wait()
            command.check_nobody_left()
        assert status(run_dir)["attempt"] == attempt
        assert not is_complete(run_dir, 40), "all ten must hit a run that is not at its end"
        arguments = ("resume", str(run_dir))
    completed(resume(run_dir), run_dir)
    assert curve(run_dir) == curve(tmp_path / "straight")
    assert kept(run_dir) == ["step-00000038", "step-00000040"]


@pytest.mark.slow
def test_killed_under_a_pipeline_a_run_continues_under_another(tmp_path: Path) -> None:
    """kill -9 of a worker, first under two pipeline ranks, then under four stages, then under none."""
    own_classes(tmp_path)
    overrides = ("steps=16", "model.n_layers=4", "global_batch=4", "optimizer.kind=faulty:SlowAdamW")
    completed(run(*overrides, "parallelism=single", "launch.workers=1", cwd=tmp_path, run_dir="one"), tmp_path / "one")
    run_dir, pipeline = tmp_path / "out", ("parallelism=fsdp2_pp", "launch.workers=2")
    arguments = (
        "run",
        *TINY,
        f"hydra.run.dir={run_dir}",
        *overrides,
        *pipeline,
        "checkpoint=dcp",
        "checkpoint.every=2",
    )
    for old, new in (("schedule: 1f1b", "schedule: interleaved_1f1b"), ("pipeline: 2", "pipeline: 1")):
        with Command(*arguments, cwd=tmp_path) as command:
            rows = steps_done(run_dir)
            until(lambda: steps_done(run_dir) >= rows + 4)  # noqa: B023
            psutil.Process(status(run_dir)["workers"][1]["pid"]).kill()
            assert command.wait().code == 1
        assert not is_complete(run_dir, 16)
        edit(run_dir, old, new)
        arguments = ("resume", str(run_dir))
    completed(resume(run_dir), run_dir)
    losses = ([row[1] for row in curve(each)] for each in (run_dir, tmp_path / "one"))
    assert next(losses) == pytest.approx(next(losses), rel=1e-6)


def is_complete(run_dir: Path, steps: int) -> bool:
    return (run_dir / "checkpoints" / f"step-{steps:08}").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("grows", "state"), [("true", "completed"), ("false", "timeout")])
def test_a_slow_save_is_not_taken_for_a_hang_and_a_hang_is_not_taken_for_a_slow_save(
    grows: str, state: str, tmp_path: Path
) -> None:
    """A save takes 6 s, the patience is 2 s: it begins anew while the files of the checkpoint grow."""
    own_classes(tmp_path)
    overrides = ("checkpoint=dcp", "checkpoint.kind=faulty:SlowSave", f"+checkpoint.grows={grows}")
    ended = run(*overrides, "checkpoint.every=2", "launch.timeout_minutes=0.033", cwd=tmp_path)
    assert status(tmp_path / "out")["state"] == state, ended
