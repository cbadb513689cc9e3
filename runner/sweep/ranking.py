"""Predicts and ranks the combinations of a grid for `meshrunner plan -m`. The fastest combination that fits comes first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from meshrunner.runner.config.compose import Composer
from meshrunner.runner.config.devices import expected_devices
from meshrunner.runner.config.hydra.overrides import as_typed
from meshrunner.runner.console import naming
from meshrunner.runner.predict import BORDERLINE, DOES_NOT_FIT, FITS, NOT_PLANNED, Forecast, Verdict, predict_all
from meshrunner.runner.sweep.combinations import Target, check_batch, varying

SKIPPED = "skipped"
"""Verdict (fits, does not fit, ...) on a combination that the sweep would skip, for example because of `sweep.exclude`."""
ORDER = (FITS, BORDERLINE, NOT_PLANNED, DOES_NOT_FIT, SKIPPED)


class Ranked(NamedTuple):
    """A combination of a grid and its forecast."""

    overrides: list[str]
    varying: list[str]
    """Overrides of this combination that not all combinations of the grid have."""
    forecast: Forecast

    def as_json(self) -> dict[str, Any]:
        """Return the combination and its forecast as a flat dict."""
        return {"overrides": self.overrides, **self.forecast.as_json()}


def rank(composer: Composer, *, active_only: bool) -> list[Ranked]:
    """Predict all combinations of a grid, and sort them. Raise ConfigError if `run -m` would reject the command line."""
    config = composer.compose_sweep()
    target = Target(lambda experiment: expected_devices(experiment).workers)
    batch = check_batch(composer.hydra.config_loader, config, composer.grid(config), 0, target)
    jobs = batch.combinations
    possible = [job for job in jobs if not job.reason]
    with naming(f"predicting {len(possible):,} combinations"):
        predicted = iter(predict_all([job.runs[0].config for job in possible], active_only=active_only))
    varied = varying([job.overrides for job in jobs])
    ranked = []
    for job in jobs:
        if reason := job.reason:
            forecast = Forecast(Verdict(SKIPPED, reason))
        else:
            found = next(predicted)
            forecast = found.forecast or Forecast(Verdict(NOT_PLANNED, found.fault))
        overrides = as_typed(job.overrides)
        own = [each for each, raw in zip(overrides, job.overrides, strict=True) if raw in varied]
        ranked.append(Ranked(overrides, own, forecast))
    return sorted(ranked, key=_sort_key)


def _sort_key(each: Ranked) -> tuple[int, float, float]:
    forecast = each.forecast
    return (
        ORDER.index(forecast.verdict.answer),
        -forecast.speed.wps if forecast.speed is not None else 0.0,
        forecast.memory.peak_active_gib if forecast.memory is not None else float("inf"),
    )


def columns(ranked: Sequence[Ranked]) -> dict[str, list[str]]:
    """Return the table's columns, keyed by title, with a cell for each combination. Omit columns without any text."""
    rows = [each.as_json() for each in ranked]

    def numbers(key: str, template: str) -> list[str]:
        return ["" if row[key] is None else template.format(row[key]) for row in rows]

    found = {
        "combination": [" ".join(each.varying) or " ".join(each.overrides) for each in ranked],
        "verdict": [row["verdict"] for row in rows],
        "WPS per device": numbers("perf/wps", "{:,.0f}"),
        "MFU": numbers("perf/mfu", "{:.1f}%"),
        "step time": numbers("perf/step_time_s", "{:.3f} s"),
        "peak active": numbers("memory/peak_active_gib", "{:.2f} GiB"),
        "peak reserved": numbers("memory/peak_reserved_gib", "{:.2f} GiB"),
        "why": ["" if row["verdict"] == FITS else row["reason"] for row in rows],
    }
    return {title: cells for title, cells in found.items() if any(cells)}
