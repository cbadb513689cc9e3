"""Hybrid models as a user runs them: what is recorded, shown and refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshrunner.runner.rundir.events import read_events
from tests.e2e.command import SCREEN, TINY, meshrunner, read

HYBRID = (
    "run",
    "model=hybrid_tiny",
    *(word for word in TINY if not word.startswith("model.n_layers")),
    "model.head_dim=16",
    "model.mamba={heads:2,head_dim:8,groups:2,state:8}",
    "model.experts.ffn_dim=32",
    "hydra.run.dir=out",
)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "parallelism=ep precision=bf16 activation_checkpoint=selective_op loss=chunked"])
def test_a_hybrid_is_trained_and_the_further_tokens_have_a_loss(words: str, tmp_path: Path) -> None:
    ended = meshrunner(*HYBRID, "model.mtp.depth=2", *words.split(), cwd=tmp_path)
    assert ended.code == 0 and ended.err == "", ended
    rows, summary = read_events(tmp_path / "out"), read(tmp_path / "out" / "summary.json")
    assert all(5 < row["train/mtp_loss"] < 6.5 and "experts/max_violation" in row for row in rows)
    assert summary["train/final_mtp_loss"] == rows[-1]["train/mtp_loss"] != summary["train/final_loss"]
    assert read(tmp_path / "out" / "environment.json")["resolved"]["model.mamba.kernel"] == "torch"


@pytest.mark.slow
def test_without_further_tokens_there_is_no_such_loss(tmp_path: Path) -> None:
    ended = meshrunner(*HYBRID, "model.pattern=M*", "model.experts=null", cwd=tmp_path)
    assert ended.code == 0 and ended.err == "", ended
    assert not any("mtp" in key or "experts" in key for row in read_events(tmp_path / "out") for key in row)
    assert not any("mtp" in key for key in read(tmp_path / "out" / "summary.json"))


@pytest.mark.slow
def test_show_knows_every_class_of_block(tmp_path: Path) -> None:
    words = ("model.mtp.depth=1", "activation_checkpoint=full", "precision=bf16")
    ended = meshrunner("show", "model=hybrid_tiny", *words, cwd=tmp_path, COLUMNS="120")
    assert ended.code == 0, ended
    assert len(ended.out.splitlines()) <= SCREEN
    said = " ".join(ended.out.split())
    for block in ("MambaBlock", "AttentionBlock", "FeedForwardBlock", "ExpertsBlock", "PredictionBlock"):
        kept = rf"each {block} keeps only its input for backward \([\d.]+ MiB without recomputation\)"
        assert re.search(kept, said)
    assert "mamba.scan.a_log, mamba.scan.dt_bias, mamba.scan.d, feed_forward.router.weight" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model.mamba.kernel=fused", "fused needs a GPU; use model.mamba.kernel=torch"),
        ("model.mtp.depth=16", "model.mtp.depth: seq_len must be greater than the number of tokens predicted ahead"),
        ("parallelism=tp model.mamba.groups=1", "parallelism.tensor(2) does not divide model.mamba.groups(1)"),
        ("model.pattern=MX", "the letters are M (Mamba-2)"),
        ("model.n_layers=3", "n_layers"),
    ],
)
def test_what_does_not_go_together_is_said(words: str, said: str, tmp_path: Path) -> None:
    ended = meshrunner(*HYBRID, *words.split(), cwd=tmp_path)
    assert ended.code == 2 and said in " ".join(ended.err.split()) and "Traceback" not in ended.err, ended
