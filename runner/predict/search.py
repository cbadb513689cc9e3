"""The largest value of a setting with which a run still fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.compose import Composer, parse
from meshrunner.runner.predict.single import fitting, predicted
from meshrunner.runner.predict.verdict import FITS, NOT_PLANNED

if TYPE_CHECKING:
    from meshrunner.runner.predict.replay.timeline import Timeline

A_WHOLE_NUMBER = "a key whose value is a whole number, such as --max micro_batch"
MOST = 2**16
"""Where the search ends."""
SCANNED = 2**12
"""Values in a row that are looked at for one that is allowed."""


def largest_that_fits(
    overrides: Sequence[str], key: str, *, active_only: bool, over_time: bool
) -> tuple[dict[str, Any], Timeline | None]:
    """
    The prediction with the largest value of a key that fits, as `predicted`.

    It has two keys more: `max`, the key and that value, None if none fits, and `tried`, the values that were predicted; but not
    where the run cannot be planned.

    Raises:
        ConfigError: the key is none of a whole number, or no value of it can be configured.
    """
    found: dict[int, dict[str, Any]] = {}

    def allowed(value: int) -> bool:
        try:
            fitting(_with(config, key, value))
        except ConfigError:
            return False
        return True

    def fits(value: int) -> bool:
        found[value], _ = predicted(_composed([*overrides, f"{key}={value}"]), active_only=active_only)
        return bool(found[value]["verdict"] == FITS)

    config = _composed([*overrides, f"{key}=1"])
    _refuse_other_than_whole(_composed(overrides), key)
    value = largest(fits, allowed)
    if not found:
        fitting(config)  # says why
    shown = value or next(iter(found))
    if found[shown]["verdict"] == NOT_PLANNED:
        return found[shown], None
    drawn = None
    if over_time:
        drawn = predicted(_composed([*overrides, f"{key}={shown}"]), active_only=active_only, over_time=True)[1]
    return {"max": {key: value}, "tried": list(found), **found[shown]}, drawn


def _composed(overrides: Sequence[str]) -> dict[str, Any]:
    run = Composer(parse("plan", list(overrides))).single_run()
    assert run is not None, "a grid has no --max"
    return run.config


def _refuse_other_than_whole(config: dict[str, Any], key: str) -> None:
    """Raises ConfigError where the value of a key is something else than a whole number."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name, "not set") if isinstance(value, dict) else "not set"
    if isinstance(value, bool) or not (value is None or value == "auto" or isinstance(value, int)):
        raise ConfigError(f"plan: --max needs {A_WHOLE_NUMBER}; {key} is {value}")


def _with(config: dict[str, Any], key: str, value: int) -> dict[str, Any]:
    """A configuration that differs in one key, dotted."""
    name, _, rest = key.partition(".")
    return config | {name: _with(config[name], rest, value) if rest else value}


def largest(fits: Callable[[int], bool], allowed: Callable[[int], bool] = lambda value: True) -> int | None:
    """
    The largest allowed whole number that fits, None if the least does not. What is above one that does not fit is taken not
    to fit either.

    Args:
        fits: what takes time; asked of allowed numbers alone.
        allowed: others are passed over, such as those that do not divide something.
    """
    below, end = 0, 1
    for least in (2**power for power in range(MOST.bit_length())):
        value = _first(range(least, min(2 * least, MOST + 1)), allowed)
        if value is None:
            continue
        if not fits(value):
            break
        below, end = value, min(2 * least, MOST + 1)
    # No power of two lies between, so what is left has the same leading digit.
    while below:
        middle = (below + end + 1) // 2
        value = _first(range(middle, end), allowed) or _first(range(middle - 1, below, -1), allowed)
        if value is None:
            return below
        if fits(value):
            below = value
        else:
            end = value
    return None


def _first(values: Iterable[int], allowed: Callable[[int], bool]) -> int | None:
    return next(filter(allowed, islice(values, SCANNED)), None)
