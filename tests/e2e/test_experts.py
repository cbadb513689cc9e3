"""Models with experts as a user runs them: what is recorded, shown and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrunner.runner.rundir.events import read_events
from tests.e2e.command import SCREEN, meshrunner, read, run

EXPERTS = ("model=moe_tiny", "model.n_layers=2", "model.experts.ffn_dim=32", "model.experts.shared_ffn_dim=32")
KEYS = {"experts/max_violation", "experts/mean_violation", "experts/unused"}


@pytest.mark.slow_cases("layout1", "layout0")
@pytest.mark.parametrize("layout", [(), ("parallelism=ep", "model.experts.balance=sequence_loss", "precision=bf16")])
def test_how_busy_experts_are_is_recorded(layout: tuple[str, ...], tmp_path: Path) -> None:
    ended = run(*EXPERTS, *layout, cwd=tmp_path)
    assert ended.code == 0 and ended.err == "", ended
    keys = KEYS | ({"experts/balance_loss", "experts/rank_violation"} if layout else set())
    rows, summary = read_events(tmp_path / "out"), read(tmp_path / "out" / "summary.json")
    for row in rows:
        assert {key for key in row if key.startswith("experts/")} == keys
        assert row["experts/max_violation"] >= row["experts/mean_violation"] > 0
    assert all(summary[f"{key}_median"] is not None for key in keys)
    inactive = 6 * 3 * 32 * 32
    assert summary["model/params"] - summary["model/active_params"] == inactive
    assert "expert imbalance" in ended.out


@pytest.mark.slow
def test_a_dense_model_has_no_figures_of_experts(tmp_path: Path) -> None:
    ended = run(cwd=tmp_path)
    assert ended.code == 0 and "expert" not in ended.out, ended
    assert not any("expert" in key for row in read_events(tmp_path / "out") for key in row)
    summary = read(tmp_path / "out" / "summary.json")
    assert summary["model/active_params"] == summary["model/params"]
    assert not any("expert" in key for key in summary)
    assert "expert" not in meshrunner("compare", "out", cwd=tmp_path).out


@pytest.mark.slow_cases("parallelism.expert*", "")
@pytest.mark.parametrize("words", ["", "parallelism.expert=2 activation_checkpoint=selective_op"])
def test_show_is_one_screen(words: str, tmp_path: Path) -> None:
    ended = meshrunner("show", "model=moe_tiny", *words.split(), cwd=tmp_path, COLUMNS="120")
    assert ended.code == 0, ended
    assert len(ended.out.splitlines()) <= SCREEN
    assert "13,120,768, 7,222,528 active per token" in ended.out
    if words:
        assert "expert_shard(1) x expert(2)" in ended.out and "exchanged among experts" in ended.out
        said = " ".join(ended.out.split())  # the line is wrapped
        assert "meshrunner.grouped_mm 3 of 3" in said and "topk 2 of 2" in said


def test_what_does_not_go_together_is_said(tmp_path: Path) -> None:
    ended = run(*EXPERTS, "parallelism=fsdp1", "parallelism.expert=2", cwd=tmp_path)
    assert ended.code == 2 and "only FSDP2 can shard" in ended.err and "Traceback" not in ended.err
