"""Compare the loss and gradient-norm curves of a row (the runs with equal settings) with the curves of its baseline row."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean, stdev
from typing import Any

from meshrunner.recipes.config_keys import flatten
from meshrunner.recipes.data.base import different_data
from meshrunner.runner.compare.keys import emulated
from meshrunner.runner.compare.noise import REPEATS
from meshrunner.runner.compare.runs import Run
from meshrunner.runner.figures import figure_of, number

LOSS, NORM, HELD_OUT = "train/loss", "train/grad_norm", "eval/loss"
BATCH = "different global batch"
"""Reason why the curves of two runs cannot be compared: the number of tokens per step differs."""
TOLERANCE = {"fp32": {LOSS: 1e-5, NORM: 1e-4, HELD_OUT: 1e-5}, "bf16": {LOSS: 1e-2, NORM: 5e-2, HELD_OUT: 1e-2}}
"""Largest relative difference at which two curves agree, for each precision. Even correct runs differ slightly, because each
layout sums in a different order. Rounding to bf16 changes a number by up to 2^-8 = 3.9e-3 of its value. Norms of gradients
differ more than losses do. The bf16 tolerances also apply to TF32, and to an fp32 run that is compared with a bf16 run."""


@dataclass(frozen=True)
class Parity:
    """The verdict on whether the curves of a row agree with the curves of its baseline."""

    kind: str
    """`identical`, `agrees`, `within seeds`, `differs` (see `verdict`) or `different data`; "" if curves cannot be compared."""
    difference: float | None = None
    """Largest relative difference from the baseline at any step; None if it is infinite or was not computed. The difference is
    computed from `curve` if `kind` is `differs`, from mean losses over seeds if `kind` is `within seeds`, or else from losses."""
    curve: str = ""
    """Title of the first curve (loss or gradient norm) to differ by more than TOLERANCE, if `kind` is `differs`; else ""."""
    step: int | None = None
    """First step at which `curve` differs by more than TOLERANCE, if `kind` is `differs`; else None."""
    why: str = ""
    """Reason why `kind` is empty or `different data`; otherwise empty."""

    def __str__(self) -> str:
        size = "not finite" if self.difference is None else short(f"{self.difference:.1e}")
        if self.kind == "differs":
            return f"differs from step {self.step} on ({self.curve} {size})"
        return f"{self.kind} ({size})" if self.kind in ("agrees", "within seeds") else self.kind


def short(number: str) -> str:
    """Drop the leading zero of an exponent: 3.1e-03 becomes 3.1e-3."""
    return number.replace("e-0", "e-").replace("e+0", "e+")


def verdict(runs: Sequence[Run], baseline: Sequence[Run], curves: Sequence[str] = (LOSS, NORM)) -> Parity:
    """Compare each completed run of a row with a completed run of its baseline that has the same seed.

    `curves`: keys of the curves to compare, the loss first. `identical`: all values of the curves are equal, bit by bit.
    `agrees`: every difference is within TOLERANCE.
    `within seeds`: a difference exceeds TOLERANCE, but at every step, the mean losses over all common seeds differ by at most
    the baseline's standard deviation over these seeds. Row and baseline must have at least REPEATS seeds in common.
    """
    mine, theirs = _by_seed(runs), _by_seed(baseline)
    seeds = [seed for seed in mine if seed in theirs]
    if not mine or not theirs:
        return Parity("", why="no completed run")
    if not seeds:
        return Parity("", why="different seeds")
    # Per seed, pair each run of the row with the baseline's first run, and the row's first run with each baseline run.
    pairs = [(run, theirs[seed][0]) for seed in seeds for run in mine[seed]]
    pairs += [(mine[seed][0], run) for seed in seeds for run in theirs[seed][1:]]
    for pair in pairs:
        if why := _incomparable(*pair):
            return Parity("", why=why)
        if what := different_data(*(run.summary.data or {} for run in pair)):
            return Parity("different data", why=f"the {what} differs between two runs with the same data settings")
        if HELD_OUT in curves and not _same_evaluations(*pair):
            return Parity("", why="no step after which both runs evaluated the same data")
    found = [_compare(*pair, curves) for pair in pairs]
    worst = max(found, key=lambda each: (("identical", "agrees", "differs").index(each.kind), each.difference or 0.0))
    if worst.kind == "differs" and len(seeds) >= REPEATS:
        return _within_seeds([mine[seed] for seed in seeds], [theirs[seed] for seed in seeds], curves[0]) or worst
    return worst


def _by_seed(runs: Sequence[Run]) -> dict[Any, list[Run]]:
    completed = [run for run in runs if run.state == "completed"]
    return {
        seed: [run for run in completed if run.seed == seed] for seed in dict.fromkeys(run.seed for run in completed)
    }


def _incomparable(a: Run, b: Run) -> str:
    """Return the reason why the curves of two runs cannot be compared, or "" if the curves can be compared."""
    if emulated(a) or emulated(b):
        return "an emulated rank has no loss"
    for section in ("model", "data", "seq_len"):
        if a.config.get(section) != b.config.get(section):
            return f"different {section}"
    if len({_withheld(run) for run in (a, b)}) > 1:
        return "different held-out documents"
    if flatten(a.config).get("checkpoint.load") != flatten(b.config).get("checkpoint.load"):
        return "different checkpoint.load"
    if any(_precision(run) not in TOLERANCE for run in (a, b)):
        return "no tolerance is known for this precision"
    mine, theirs = _curve(a, "train/tokens"), _curve(b, "train/tokens")
    common = [step for step in mine if step in theirs]
    if not common:
        return "no step in common"
    return BATCH if any(mine[step] != theirs[step] for step in common) else ""


def _withheld(run: Run) -> Any:
    """Return the share of the training documents that a run does not train on, or None if it trains on all documents."""
    flat = flatten(run.config)
    return flat.get("eval.share") if flat.get("eval.data", ...) is None and flat.get("data.kind") != "random" else None


def _same_evaluations(a: Run, b: Run) -> bool:
    """Return whether two runs with the same training data evaluated the same tokens after the same step."""
    chosen = ("eval.data", "eval.sequences", "eval.share")
    mine, theirs = ({k: v for k, v in flatten(run.config).items() if k.startswith(chosen)} for run in (a, b))
    return mine == theirs and not _curve(a, HELD_OUT).keys().isdisjoint(_curve(b, HELD_OUT))


def _precision(run: Run) -> str:
    flat = flatten(run.config)
    return "bf16" if flat.get("precision.matmul", "highest") != "highest" else run.precision


def _curve(run: Run, key: str) -> dict[int, float | None]:
    # Before the first step, all layouts have the same weights, so equal losses would show nothing.
    return {row.step: number(row[key]) for row in (*run.events, *run.evals) if row.step and key in row}


def _compare(a: Run, b: Run, curves: Sequence[str]) -> Parity:
    widest = max((TOLERANCE[_precision(run)] for run in (a, b)), key=itemgetter(LOSS))
    limits = {key: widest[key] for key in curves}
    identical, worst = True, dict.fromkeys(limits, 0.0)
    first: tuple[int, str] | None = None
    for key, limit in limits.items():
        mine, theirs = _curve(a, key), _curve(b, key)
        for step in [step for step in mine if step in theirs]:
            apart = relative(mine[step], theirs[step])
            identical = identical and apart == 0
            worst[key] = max(worst[key], apart)
            if apart > limit and (first is None or step < first[0]):
                first = (step, key)
    if first is not None:
        step, key = first
        return Parity("differs", worst[key] if math.isfinite(worst[key]) else None, figure_of(key).title, step)
    return Parity("identical", 0.0) if identical else Parity("agrees", worst[curves[0]])


def relative(a: float | None, b: float | None) -> float:
    """Return |a - b| / |b|, infinity if exactly one of `a` and `b` is None, or 0 if both are None."""
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    return 0.0 if a == b else abs(a - b) / abs(b) if b else math.inf


def _within_seeds(mine: Sequence[Sequence[Run]], theirs: Sequence[Sequence[Run]], key: str) -> Parity | None:
    """Return the verdict `within seeds`, or None if it does not apply. `mine[i]` and `theirs[i]` hold runs with the same seed."""
    sides = [[[_curve(run, key) for run in runs] for runs in seeds] for seeds in (mine, theirs)]
    largest = 0.0
    for step in sorted(set[int].intersection(*(set(curve) for side in sides for seed in side for curve in seed))):
        values = [[[curve[step] for curve in seed] for seed in side] for side in sides]
        if any(value is None for side in values for seed in side for value in seed):
            return None
        a, b = ([fmean(value for value in seed if value is not None) for seed in side] for side in values)
        if abs(fmean(a) - fmean(b)) > stdev(b):
            return None
        largest = max(largest, relative(fmean(a), fmean(b)))
    return Parity("within seeds", largest)
