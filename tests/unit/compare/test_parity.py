"""Do two curves agree, and is a difference of speeds more than noise?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from meshrunner.runner.compare.parity import Parity, verdict
from meshrunner.runner.compare.runs import read_run
from tests.run_dirs import make_run

LOSSES = (6.0, 5.0, 4.0, 3.0)


def changed(step: int, by: float) -> tuple[float, ...]:
    """LOSSES with a relative change from a step on."""
    return tuple(loss * (1 + by * (i + 1 >= step)) for i, loss in enumerate(LOSSES))


def of(folder: Path, *overrides: str, **mine: Any) -> Parity:
    """The verdict on two runs with the same overrides; what is given by name is of the first."""
    runs = [
        make_run(folder / "mine", *overrides, **{"losses": LOSSES} | mine),
        make_run(folder / "base", *overrides, losses=LOSSES),
    ]
    return verdict([read_run(runs[0])], [read_run(runs[1])])


def test_bit_equal_curves_are_identical(tmp_path: Path) -> None:
    assert str(of(tmp_path)) == "identical"


def test_the_last_bit_counts(tmp_path: Path) -> None:
    assert of(tmp_path, losses=(*LOSSES[:3], math.nextafter(3.0, 4.0))).kind == "agrees"


@pytest.mark.parametrize(
    ("precision", "by", "said"),
    [
        ("fp32", 8e-6, "agrees (8.0e-6)"),
        ("fp32", -8e-6, "agrees (8.0e-6)"),
        ("fp32", 2e-5, "differs from step 3 on (loss 2.0e-5)"),
        ("bf16", 3.1e-3, "agrees (3.1e-3)"),
        ("bf16", 2e-2, "differs from step 3 on (loss 2.0e-2)"),
    ],
)
def test_tolerance_follows_from_the_precision(tmp_path: Path, precision: str, by: float, said: str) -> None:
    assert str(of(tmp_path, f"precision={precision}", losses=changed(3, by))) == said


@pytest.mark.parametrize(("became", "kind"), [("bf16", "agrees"), ("fp32", "differs")])
def test_auto_is_judged_as_what_it_became(tmp_path: Path, became: str, kind: str) -> None:
    environment = {"resolved": {"precision.kind": became}}
    runs = [
        make_run(tmp_path / name, "precision=auto", losses=losses, environment=environment)
        for name, losses in (("mine", changed(3, 3.1e-3)), ("base", LOSSES))
    ]
    assert verdict([read_run(runs[0])], [read_run(runs[1])]).kind == kind


def test_tf32_is_judged_as_bf16(tmp_path: Path) -> None:
    assert of(tmp_path, "precision.matmul=high", losses=changed(2, 1e-3)).kind == "agrees"


def test_gradient_norms_count_too(tmp_path: Path) -> None:
    found = of(tmp_path, norms=(1.0, 1.0, 1.001, 1.001))
    assert str(found) == "differs from step 3 on (grad norm 1.0e-3)"


def test_a_loss_that_is_not_finite_differs(tmp_path: Path) -> None:
    assert str(of(tmp_path, losses=(*LOSSES[:3], None))) == "differs from step 4 on (loss not finite)"


def test_the_steps_in_common_are_compared(tmp_path: Path) -> None:
    assert of(tmp_path, losses=LOSSES[:2]).kind == "identical"
    assert of(tmp_path / "none", losses=None).why == "no step in common"


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("model.dim=64", "different model"),
        ("data.kind=jsonl", "different data"),
        ("seq_len=32", "different seq_len"),
        ("seed=1", "different seeds"),
        ("checkpoint.load=elsewhere", "different checkpoint.load"),
        ("precision.kind=float8", "no tolerance is known for this precision"),
    ],
)
def test_runs_that_are_not_meant_to_agree_get_no_verdict(tmp_path: Path, override: str, why: str) -> None:
    runs = [read_run(make_run(tmp_path / "0", override)), read_run(make_run(tmp_path / "1"))]
    assert verdict(runs[:1], runs[1:]) == Parity("", why=why) and str(verdict(runs[:1], runs[1:])) == ""


def test_another_global_batch_gets_no_verdict(tmp_path: Path) -> None:
    assert of(tmp_path, tokens=128) == Parity("", why="different global batch")


def test_a_run_that_failed_gets_no_verdict(tmp_path: Path) -> None:
    assert of(tmp_path, state="failed") == Parity("", why="no completed run")


def seeds(folder: Path, shift: float, curves: Sequence[Sequence[float]]) -> list[Any]:
    runs = []
    for seed, losses in enumerate(curves):
        shifted = [loss + shift for loss in losses]
        runs.append(read_run(make_run(folder / f"{shift}-{seed}", f"seed={seed}", losses=shifted)))
    return runs


SEEDS = ((6.0, 5.0), (6.1, 5.1), (6.2, 5.2))


def test_runs_are_compared_with_those_of_the_same_seed(tmp_path: Path) -> None:
    assert verdict(seeds(tmp_path, 0.0, SEEDS), seeds(tmp_path / "base", 0.0, SEEDS)).kind == "identical"


def test_the_noise_of_seeds_is_the_measure_where_there_are_three(tmp_path: Path) -> None:
    base = seeds(tmp_path, 0.0, SEEDS)
    assert str(verdict(seeds(tmp_path, 0.09, SEEDS), base)) == "within seeds (1.8e-2)"
    assert str(verdict(seeds(tmp_path, 0.11, SEEDS), base)) == "differs from step 1 on (loss 2.2e-2)"
    assert verdict(seeds(tmp_path, 0.06, SEEDS[:2]), base).kind == "differs", "two seeds are too few"


def test_three_repeats_of_one_seed_are_no_seeds(tmp_path: Path) -> None:
    mine, base = (
        [read_run(make_run(tmp_path / f"{loss}-{i}", losses=(loss,))) for i in range(3)] for loss in (6.0, 6.001)
    )
    assert verdict(mine, base).kind == "differs"


def test_every_repeat_is_judged(tmp_path: Path) -> None:
    """On each side: of three repeats the last one differs."""
    curves = [LOSSES, LOSSES, changed(3, 1e-2)]
    mine = [read_run(make_run(tmp_path / f"mine{i}", losses=curve)) for i, curve in enumerate(curves)]
    base = [read_run(make_run(tmp_path / f"base{i}", losses=LOSSES)) for i in range(3)]
    assert verdict(mine[:2], base).kind == "identical"
    assert str(verdict(mine, base)).startswith("differs from step 3 on")
    assert str(verdict(base, mine)).startswith("differs from step 3 on")


DATA = {"tokenizer_hash": "t", "corpus_hash": "c", "beginning_hash": "b", "complete": True}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "identical"),
        ({"corpus_hash": "d"}, "different data"),
        ({"tokenizer_hash": "d"}, "different data"),
        ({"beginning_hash": "d", "complete": False}, "different data"),
        ({"corpus_hash": "as far as it was read", "complete": False}, "identical"),
    ],
)
def test_data_that_changed_under_the_same_path_is_said(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert str(of(tmp_path, summary={"data": DATA | change})) == "identical", "nothing is known of the other's data"
    for name in ("one", "other"):
        data = DATA | (change if name == "one" else {})
        make_run(tmp_path / name, losses=LOSSES, summary={"data": data})
    assert str(verdict([read_run(tmp_path / "one")], [read_run(tmp_path / "other")])) == said
