"""Predicts one configuration, or finds the largest value of a configuration key with which the run fits its devices."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshrunner.recipes.config_keys import value_at, with_value
from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.compose import Composer
from meshrunner.runner.config.devices import check_on_devices
from meshrunner.runner.predict.forecast import BORDERLINE, FITS, NOT_PLANNED, Forecast
from meshrunner.runner.predict.pool import predict_all

MOST = 2**16
"""Largest value that the search tries."""
SCANNED = 2**12
"""Maximum number of consecutive values that the search checks to find one that is allowed for the key."""


@dataclass(frozen=True)
class Planned:
    """A forecast and, with `plan --max`, the search for the largest value of `key`. Its JSON has the keys of a forecast, after a
    search preceded by `max` and `tried`."""

    forecast: Forecast
    """After a search: the forecast for `value`, or for the first value tried if no value fits."""
    key: str = ""
    value: int | None = None
    """Largest value that fits, or None if no value fits."""
    tried: Sequence[int] = ()
    """Values for which the run was predicted, in this order. Empty without a search, and if the run cannot be predicted."""

    @property
    def findings(self) -> list[str]:
        """A sentence with the result of the search. The list is empty if the search tried no value."""
        if self.value:
            found = "fits; the search stops there" if self.value == MOST else "is the largest that fits"
            return [f"{self.key}={self.value} {found}"]
        certain = " for certain" if self.forecast.verdict.answer == BORDERLINE else ""
        return [f"not even {self.key}={each} fits{certain}" for each in self.tried[:1]]

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
    """Find the largest whole number for a key with which a run fits. Raise ConfigError if every number tried is invalid, or if
    the key's value in the composed configuration is not a whole number, null or auto."""
    found: dict[int, Forecast] = {}

    def fits(value: int) -> bool:
        found[value] = predict_config(_composed([*overrides, f"{key}={value}"]), active_only=active_only)
        return found[value].verdict.answer == FITS

    config = _composed([*overrides, f"{key}=1"])
    check_whole(_composed(overrides), key)
    value = largest(fits, _allowed(config, key))
    if not found:
        check_on_devices(config)  # raises ConfigError with the reason why 1 is not allowed
    shown = value or next(iter(found))
    forecast = found[shown]
    if forecast.verdict.answer == NOT_PLANNED:
        return Planned(forecast)
    if with_timeline:
        config = _composed([*overrides, f"{key}={shown}"])
        drawn = predict_config(config, active_only=active_only, with_timeline=True)
        forecast = replace(forecast, timeline=drawn.timeline)
    return Planned(forecast, key, value, list(found))


def largest_of_each(
    configs: Sequence[Callable[[int], dict[str, Any]]], key: str, *, active_only: bool
) -> list[int | None]:
    """Return what `largest_that_fits` finds for each of several runs. Each step of all searches is predicted in processes.

    configs: functions that compose the configuration of a run for a value of `key`.
    """
    found: list[int | None] = [None] * len(configs)
    searches = [_trials(_allowed(config(1), key)) for config in configs]
    asked = {i: value for i, search in enumerate(searches) if (value := next(search, None)) is not None}
    while asked:
        forecasts = predict_all([configs[i](value) for i, value in asked.items()], active_only=active_only)
        for i, forecast in zip(list(asked), forecasts, strict=True):
            try:
                asked[i] = searches[i].send(isinstance(forecast, Forecast) and forecast.verdict.answer == FITS)
            except StopIteration as end:
                del asked[i]
                found[i] = end.value
    return found


def check_whole(config: dict[str, Any], key: str) -> None:
    """Raise ConfigError unless the value of a key is a whole number, null or auto."""
    given = value_at(config, key)
    if isinstance(given, bool) or not (given is None or given == "auto" or isinstance(given, int)):
        value_given = "not set" if given is ... else given
        raise ConfigError(
            f"plan: --max searches whole numbers, but {key} is {value_given}; use a key such as micro_batch"
        )


def _allowed(config: dict[str, Any], key: str) -> Callable[[int], bool]:
    def allowed(value: int) -> bool:
        try:
            check_on_devices(with_value(config, key, value))
        except ConfigError:
            return False
        return True

    return allowed


def largest(fits: Callable[[int], bool], allowed: Callable[[int], bool] = lambda value: True) -> int | None:
    """Return the largest allowed whole number that fits, or None if the smallest allowed number does not fit.

    If a number does not fit, larger numbers are assumed not to fit either. `fits` is expensive, so it is called at most once per
    number. Numbers that are not `allowed` are skipped; for example, a micro batch must divide the batch.
    """
    search = _trials(allowed)
    try:
        value = next(search)
        while True:
            value = search.send(fits(value))
    except StopIteration as end:
        found: int | None = end.value
        return found


def _trials(allowed: Callable[[int], bool]) -> Generator[int, bool, int | None]:
    """Yield the numbers that `largest` tries, and receive whether they fit. Return the result."""
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
    assert run is not None, "a grid has no --max"
    return run.config
