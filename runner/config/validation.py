"""pydantic's errors as text for the user: the key, what was expected, the nearest existing name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import did_you_mean, shortened

Known = Callable[[tuple[int | str, ...]], Iterable[str]]
"""The keys that exist at a configuration path."""


def invalid(error: ValidationError, known: Known, prefix: str = "") -> ConfigError:
    """One ConfigError that lists every problem; `prefix` is put before each key."""
    lines = sorted(set(_lines(error.errors(include_url=False), known, prefix)))
    return ConfigError(listed("The configuration is wrong:", lines))


def listed(title: str, lines: Iterable[str]) -> str:
    """A title and indented lines."""
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _lines(errors: list[ErrorDetails], known: Known, prefix: str) -> Iterator[str]:
    for error in errors:
        path = [str(part) for part in error["loc"]]
        where = ".".join([*([prefix] if prefix else []), *path]) or "(whole configuration)"
        if error["type"] == "extra_forbidden":
            yield f"{where}: unknown key.{did_you_mean(path[-1], known(error['loc'][:-1]))}"
        elif error["type"] == "missing":
            yield f"{where}: this key is missing"
        else:
            message = f"{error['msg'][:1].lower()}{error['msg'][1:]}"
            has_input = "got " in message or isinstance(error["input"], dict | list)
            yield f"{where}: {message}" + ("" if has_input else f", got {shortened(error['input'])}")
