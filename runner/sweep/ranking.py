"""`meshrunner plan -m`: every combination of a grid, predicted: the fastest that fits first, what cannot run last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from meshrunner.runner.config.compose import Composer
from meshrunner.runner.config.devices import described
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.overrides import as_typed
from meshrunner.runner.console import naming
from meshrunner.runner.predict.pool import predict_all
from meshrunner.runner.predict.verdict import BORDERLINE, FITS, MISFIT, NOT_PLANNED, Verdict, as_json
from meshrunner.runner.sweep.combinations import ConfiguredTarget, check_batch

SKIPPED = "skipped"
"""The answer for a combination that cannot run, as the state of such a run of a sweep."""
ORDER = (FITS, BORDERLINE, NOT_PLANNED, MISFIT, SKIPPED)


class Ranked(NamedTuple):
    """A combination of a grid and what is predicted of it."""

    overrides: list[str]
    varying: list[str]
    """The overrides that not all combinations have."""
    found: dict[str, Any]
    """As `plan --json`."""

    def as_json(self) -> dict[str, Any]:
        """One object."""
        return {"overrides": self.overrides, **self.found}


class _Described(ConfiguredTarget):
    """The devices that `plan` answers for."""

    def workers(self, experiment: Experiment) -> int:
        return described(experiment).workers


def rank(composer: Composer, *, active_only: bool) -> list[Ranked]:
    """Predict every combination of a command line; raises ConfigError as a sweep over it would."""
    config = composer.compose_sweep()
    target = _Described()
    batch = check_batch(composer.hydra.config_loader, config, composer.grid(config), 0, target)
    jobs = batch.combinations
    possible = [job for job in jobs if not job.runs[0].reason]
    with naming(f"predicting {len(possible):,} combinations"):
        predicted = iter(predict_all([job.runs[0].composed.config for job in possible], active_only=active_only))
    shared = set[str].intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set[str]()
    ranked = []
    for job in jobs:
        if reason := job.runs[0].reason:
            found = as_json(Verdict(SKIPPED, reason))
        else:
            answer = next(predicted)
            found = answer.found or as_json(Verdict(NOT_PLANNED, answer.fault))
        overrides = as_typed(job.overrides)
        varying = [each for each, raw in zip(overrides, job.overrides, strict=True) if raw not in shared]
        ranked.append(Ranked(overrides, varying, found))
    return sorted(ranked, key=_place)


def _place(each: Ranked) -> tuple[int, float, float]:
    """The fastest first; where speeds are not known, what takes least memory."""
    found = each.found
    nothing = float("inf")
    return (
        ORDER.index(found["verdict"]),
        -(found.get("perf/wps") or 0.0),
        found.get("memory/peak_active_gib") or nothing,
    )


def columns(ranked: Sequence[Ranked]) -> dict[str, list[str]]:
    """Title -> cells of the table; a column that is empty in every row is left out."""

    def numbers(key: str, form: str) -> list[str]:
        values = [each.found.get(key) for each in ranked]
        return ["" if value is None else form.format(value) for value in values]

    found = {
        "combination": [" ".join(each.varying) or " ".join(each.overrides) for each in ranked],
        "verdict": [each.found["verdict"] for each in ranked],
        "WPS per device": numbers("perf/wps", "{:,.0f}"),
        "MFU": numbers("perf/mfu", "{:.1f}%"),
        "step time": numbers("perf/step_time_s", "{:.3f} s"),
        "peak active": numbers("memory/peak_active_gib", "{:.2f} GiB"),
        "peak reserved": numbers("memory/peak_reserved_gib", "{:.2f} GiB"),
        "why": ["" if each.found["verdict"] == FITS else each.found["reason"] for each in ranked],
    }
    return {title: cells for title, cells in found.items() if any(cells)}
