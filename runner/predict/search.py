"""Predicts one configuration, or finds the largest value of a configuration key with which the run fits its devices."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from meshrunner.recipes.config_keys import value_at, with_value
from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.compose import Composer
from meshrunner.runner.config.devices import check_on_devices
from meshrunner.runner.predict.forecast import BORDERLINE, FITS, NOT_PLANNED, Forecast, not_planned
from meshrunner.runner.predict.pool import predict_all

MOST = 2**16
"""Largest value that the search tries."""
SCANNED = 2**12
"""Maximum number of consecutive values to check in order to find an allowed value."""


@dataclass(frozen=True)
class Planned:
    """A forecast and, with `plan --max`, the result of the search for the largest value of `key`."""

    forecast: Forecast
    """Forecast of the run. After a search, `forecast` is for `value` or, if no value fits, for the first value tried."""
    key: str = ""
    value: int | None = None
    """Largest value that fits, or None if no value fits."""
    tried: Sequence[int] = ()
    """Values that the search tried, in order; empty if there was no search or if the run cannot be predicted."""

    @property
    def findings(self) -> list[str]:
        """List with one sentence that states the result of the search, or an empty list if the search tried no value."""
        if self.value:
            found = "fits; the search tries no larger value" if self.value == MOST else "is the largest that fits"
            return [f"{self.key}={self.value} {found}"]
        certain = "is certain to fit" if self.forecast.verdict.answer == BORDERLINE else "fits"
        return [f"not even {self.key}={each} {certain}" for each in self.tried[:1]]

    def as_json(self) -> dict[str, Any]:
        searched = {"max": {self.key: self.value}, "tried": self.tried} if self.tried else {}
        return searched | self.forecast.as_json()


def predict_config(config: dict[str, Any], *, active_only: bool, with_timeline: bool = False) -> Forecast:
    """Predict a configuration in this process. See `predict` for the arguments and errors."""
    experiment, device = check_on_devices(config)
    # Importing torch takes seconds, so check the configuration first.
    from meshrunner.runner.predict.predict import predict

    return predict(experiment, device, active_only=active_only, with_timeline=with_timeline)


def largest_that_fits(overrides: Sequence[str], key: str, *, active_only: bool, with_timeline: bool) -> Planned:
    """Find the largest whole number for `key` with which a run fits. Raise ConfigError if every number tried is invalid. Also
    raise it if the configuration that `overrides` describe sets `key` to anything but a whole number, null or auto."""

    def composed(value: int) -> dict[str, Any]:
        return _composed([*overrides, f"{key}={value}"])

    smallest = composed(1)
    check_whole(_composed(overrides), key)
    (planned,) = largest_of_each([composed], key, active_only=active_only)
    if not planned.tried:
        check_on_devices(smallest)  # raises ConfigError with the reason why 1 is not allowed
    if planned.forecast.verdict.answer == NOT_PLANNED:
        return Planned(planned.forecast)
    if with_timeline:
        drawn = predict_config(composed(planned.value or planned.tried[0]), active_only=active_only, with_timeline=True)
        return replace(planned, forecast=replace(planned.forecast, timeline=drawn.timeline))
    return planned


def largest_of_each(
    configs: Sequence[Callable[[int], dict[str, Any]]], key: str, *, active_only: bool
) -> list[Planned]:
    """For each run, find the largest whole number for `key` with which the run fits. The searches run at the same time, and
    several processes predict the values to try next. If no number is allowed for a run, `tried` is empty in its result.
    `configs`: one function per run that takes a value of `key` and returns the run's configuration."""
    tried: list[dict[int, Forecast]] = [{} for _ in configs]
    largest: list[int | None] = [None] * len(configs)
    searches = [trials(partial(_is_allowed, config(1), key)) for config in configs]
    asked = {i: value for i, search in enumerate(searches) if (value := next(search, None)) is not None}
    while asked:
        forecasts = predict_all([configs[i](value) for i, value in asked.items()], active_only=active_only)
        for (i, value), forecast in zip(list(asked.items()), forecasts, strict=True):
            tried[i][value] = forecast
            try:
                asked[i] = searches[i].send(forecast.verdict.answer == FITS)
            except StopIteration as end:
                del asked[i]
                largest[i] = end.value
    planned = []
    for value, found in zip(largest, tried, strict=True):
        first = next(iter(found.values()), not_planned(f"no value of {key} is allowed"))
        planned.append(Planned(found.get(value or 0, first), key, value, list(found)))
    return planned


def check_whole(config: dict[str, Any], key: str) -> None:
    """Raise ConfigError unless the value of a key is a whole number, null or auto."""
    given = value_at(config, key)
    if isinstance(given, bool) or not (given is None or given == "auto" or isinstance(given, int)):
        value_given = "not set" if given is ... else given
        raise ConfigError(
            f"plan: --max searches whole numbers, but {key} is {value_given}; use a key such as micro_batch"
        )


def _is_allowed(config: dict[str, Any], key: str, value: int) -> bool:
    try:
        check_on_devices(with_value(config, key, value))
    except ConfigError:
        return False
    return True


def trials(allowed: Callable[[int], bool]) -> Generator[int, bool, int | None]:
    """Search for the largest allowed whole number that fits. Yield each number to try, and receive whether the number fits.
    Return None if the smallest allowed number does not fit.

    If a number does not fit, larger numbers are assumed not to fit either. Each number is yielded at most once. Numbers that are
    not `allowed` are skipped, such as a micro batch that does not divide the batch.
    """
    below, end = 0, 1
    for least in (2**power for power in range(MOST.bit_length())):
        above = min(2 * least, MOST + 1)
        value = _first(range(least, above), allowed)
        if value is not None:
            if not (yield value):
                break
            below, end = value, above
    # Bisect between powers of two.
    while below:
        middle = (below + end + 1) // 2
        value = _first(range(middle, end), allowed) or _first(range(middle - 1, below, -1), allowed)
        if value is None:
            return below
        if (yield value):
            below = value
        else:
            end = value
    return None


def _first(values: range, allowed: Callable[[int], bool]) -> int | None:
    return next(filter(allowed, values[:SCANNED]), None)


def _composed(overrides: Sequence[str]) -> dict[str, Any]:
    run = Composer("plan", list(overrides)).single_run()
    assert run is not None, "the overrides must describe a single run"
    return run.config
