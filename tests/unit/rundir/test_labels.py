"""Short names of a sweep's runs."""

from __future__ import annotations

import json
from pathlib import Path

from meshrunner.runner.rundir.sweep import run_labels


def labels(folder: Path, *jobs: tuple[str, str]) -> list[str]:
    record = {"jobs": [{"name": name, "overrides": overrides.split()} for name, overrides in jobs]}
    (folder / "sweep.json").write_text(json.dumps(record))
    found = run_labels(folder)
    assert list(found) == [name for name, _ in jobs]
    return list(found.values())


def test_what_varies_and_the_repeat(tmp_path: Path) -> None:
    jobs = [
        (
            f"{i:03}_parallelism-{kind}_micro_batch-{batch}_repeat-{repeat}",
            f"steps=5 parallelism={kind} micro_batch={batch}",
        )
        for i, (kind, batch) in enumerate([("fsdp1", 1), ("fsdp2", 2)])
        for repeat in (1, 2)
    ]
    assert labels(tmp_path, *jobs) == [
        "#0 fsdp1 micro_batch=1 repeat=1",
        "#0 fsdp1 micro_batch=1 repeat=2",
        "#1 fsdp2 micro_batch=2 repeat=1",
        "#1 fsdp2 micro_batch=2 repeat=2",
    ]


def test_a_seed_that_is_swept_over_is_said_once(tmp_path: Path) -> None:
    assert labels(tmp_path, ("000_seed-1", "seed=1"), ("001_seed-2", "seed=2")) == ["#0 seed=1", "#1 seed=2"]
    assert labels(tmp_path, ("000_seed-1", "x=a"), ("000_seed-2", "x=a")) == ["#0 seed=1", "#0 seed=2"]


def test_options_need_no_key_and_other_values_do(tmp_path: Path) -> None:
    jobs = (
        ("000_a", "activation_checkpoint=none model.tie_embeddings=true"),
        ("001_b", "+model.x=null optimizer.lr=1e-3"),
    )
    assert labels(tmp_path, *jobs) == ["#0 none tie_embeddings=true", "#1 x=null lr=1e-3"]


def test_damaged_records(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text('{"jobs": [{"name": "x"}, {"name": "007_y"}]}')
    assert run_labels(tmp_path) == {"x": "x", "007_y": "#7"}
    (tmp_path / "008_z").mkdir()
    (tmp_path / "008_z" / "config.yaml").touch()
    (tmp_path / "sweep.json").write_text('{"jobs": [{"name": "007_y", "overrides": 3}]}')
    assert run_labels(tmp_path) == {"008_z": "#8"}
