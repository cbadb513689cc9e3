"""
Simulate `meshrunner tune` on a large space, with devices that differ from the devices that predictions assume.

The space is predicted once, for many sets of the device's constants. Some sets form the prior distribution of speeds, as in
`meshrunner tune`. Each other set describes a simulated cluster, on which one layout is also slower than this set predicts.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from meshrunner.runner.calibrate import constants_of, scaled
from meshrunner.runner.config.compose import Composer, grid
from meshrunner.runner.config.devices import expected_devices
from meshrunner.runner.console import naming
from meshrunner.runner.predict import DOES_NOT_FIT, predict_all
from meshrunner.runner.rundir import key_of
from meshrunner.runner.sweep.combinations import Target, check_batch, varying
from meshrunner.runner.tune.belief import DRIFT, Array, Measured, Prior, Response, points_for
from meshrunner.runner.tune.choose import leaders, next_wave, outlook
from meshrunner.runner.tune.search import NOISE as NOISES
from meshrunner.runner.tune.search import UNLIKELY, WAVE

SPACE = (
    *("model=llama3_8b", "hardware=h100_80gb", "launch.workers=8", "seq_len=8192", "global_batch=64"),
    *("parallelism=fsdp1,fsdp2", "parallelism.tensor=1,2,4", "parallelism.reshard_after_forward=always,never"),
    *(
        "activation_checkpoint=none,selective_op,full",
        "compile=eager,per_block",
        "loss=plain,chunked",
        "micro_batch=1,2,4",
    ),
)
CLUSTERS = 100
CONSTANTS = (0.7, 1.3)
"""Range from which the factors for the constants of a cluster are drawn."""
SLOWER = 1.1
"""Factor by which a step with one of the layouts takes longer on each cluster."""
NOISE = NOISES["cuda"]
TOLERANCE = 0.02
BUDGET, REPEATS = 12, 5


def tune(_: Path) -> None:
    """Count the clusters on which the chosen run is within TOLERANCE of the fastest, for three ways to choose a run."""
    options, prior, speeds = _predicted()
    generator = np.random.default_rng(0)
    predicted_best = np.argsort(-prior.after([], NOISE).mean)[:BUDGET]
    found: dict[str, list[float]] = {"tune": [], "the predicted best": [], "random": []}
    holds, spent = [], []
    for truth in speeds.T:
        slow = generator.choice(sorted({each["parallelism"] for each in options}))
        truth = truth - math.log(SLOWER) * np.array([each["parallelism"] == slow for each in options])
        behind, bound, runs = search(prior, truth, generator)
        holds.append(behind <= bound)
        spent.append(runs)
        found["tune"].append(behind)
        for name, chosen in (
            ("the predicted best", predicted_best),
            ("random", generator.choice(len(truth), BUDGET, replace=False)),
        ):
            measured = truth[chosen] + generator.normal(0, NOISE, BUDGET)
            found[name].append(math.expm1(truth.max() - truth[chosen[measured.argmax()]]))
    for name, behind in found.items():
        near = sum(each <= TOLERANCE for each in behind)
        print(
            f"{name}: within {TOLERANCE:.0%} of the fastest on {near} of {CLUSTERS} clusters; at worst {max(behind):.1%}"
        )
    print(f"tune: {np.mean(spent):.1f} runs on average, at most {max(spent)}; its bound holds on {sum(holds)} clusters")


def _predicted() -> tuple[list[dict[str, str]], Prior, Array]:
    """Return the options of each combination that fits, the prior distribution of their speeds, and the logarithms of their
    speeds on the clusters [combinations, CLUSTERS]."""
    composer = Composer("plan", ["-m", *SPACE])
    config, loader = composer.compose_sweep(), composer.hydra.config_loader
    target = Target(lambda experiment: expected_devices(experiment).workers)
    jobs = check_batch(loader, config, grid(loader, config), 0, target).combinations
    possible = [job for job in jobs if not job.reason]
    hardware = expected_devices(possible[0].experiment).hardware
    assert hardware is not None
    constants = constants_of(hardware)
    spread, keys = np.array([each.unknown for each in constants]), [each.key for each in constants]
    points = points_for(spread)
    clusters = np.log(np.random.default_rng(1).uniform(*CONSTANTS, (CLUSTERS, len(spread))))
    devices = [scaled(hardware, dict(zip(keys, np.exp(each), strict=True))) for each in (*points, *clusters)]
    with naming(f"predicting {len(possible)} combinations") as progress:
        forecasts = predict_all(
            [job.runs[0].config for job in possible], active_only=True, variants=devices, progress=progress
        )
    left = [
        (job, each.wps_on)
        for job, each in zip(possible, forecasts, strict=True)
        if each.wps_on and each.verdict.answer != DOES_NOT_FIT
    ]
    print(f"{len(jobs)} combinations, {len(possible)} possible, {len(left)} left to run", flush=True)
    varied = varying([job.overrides for job in jobs])
    options = [{key_of(each): each.partition("=")[2] for each in job.overrides if each in varied} for job, _ in left]
    speeds = np.log([wps for _, wps in left])
    return options, Prior(Response(points, speeds[:, : len(points)]), spread, options), speeds[:, len(points) :]


def search(
    before: Prior, truth: Array, generator: np.random.Generator, budget: int = BUDGET
) -> tuple[float, float, int]:
    """Search as runner/tune/search.py does. Return the fraction by which the fastest combination is faster than the chosen one,
    the search's upper bound on this fraction, and the number of runs. truth: logarithms of the speeds."""
    runs, spent = list[Measured](), 0
    for wave in range(1, 2 * budget):
        belief = before.after(runs, NOISE)
        tried = {run.combination for run in runs}
        chosen = next_wave(belief, tried, WAVE, NOISE)
        if runs:
            found = outlook(belief, tried, TOLERANCE, seed=0)
            room = budget - len(runs)
            if spent or found.chance < UNLIKELY or room < 2:
                spent = spent or len(runs)
                chosen = leaders(belief, tried, seed=0)
                if len(chosen) < 2 or min(sum(run.combination == each for run in runs) for each in chosen) >= REPEATS:
                    break
            else:
                chosen = [found.best, *(each for each in chosen if each != found.best)][: min(WAVE, room)]
        drift = generator.normal(0, DRIFT)
        runs += [Measured(each, truth[each] + drift + generator.normal(0, NOISE), wave) for each in chosen]
    return math.expm1(truth.max() - truth[found.best]), found.bound, spent
