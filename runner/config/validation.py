"""Turn pydantic's errors into messages that name the key, the expected value, and the nearest existing name."""

from collections.abc import Callable, Collection, Iterable, Iterator

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import did_you_mean, shortened

Known = Callable[[tuple[int | str, ...]], Iterable[str]]
"""Function from the path of a section, such as `("optimizer",)`, to the keys that exist in this section."""


def invalid(error: ValidationError, known: Known, prefix: str = "", keys: Collection[str] = ()) -> ConfigError:
    """Return one ConfigError that lists all problems in `error`. `prefix` precedes each key. `keys` are full names to suggest."""
    lines = sorted(set(_lines(error.errors(include_url=False), known, prefix, keys)))
    return ConfigError(listed("The configuration is wrong:", lines))


def listed(title: str, lines: Iterable[str]) -> str:
    """Return a title followed by indented lines."""
    return "\n".join([title, *(f"  {line}" for line in lines)])


def did_you_mean_key(name: str, siblings: Iterable[str], keys: Iterable[str]) -> str:
    """Return a hint such as ` Did you mean optimizer.lr?`. Suggest keys whose last part is `name`, or else a similar sibling."""
    same = [key for key in keys if key == name or key.endswith(f".{name}")]
    return f" Did you mean {' or '.join(same)}?" if same else did_you_mean(name, siblings)


def _lines(errors: list[ErrorDetails], known: Known, prefix: str, keys: Collection[str]) -> Iterator[str]:
    for error in errors:
        path = [str(part) for part in error["loc"]]
        where = ".".join([*([prefix] if prefix else []), *path]) or "(whole configuration)"
        if error["type"] == "extra_forbidden":
            others = [key for key in keys if key != where]
            yield f"{where}: unknown key.{did_you_mean_key(path[-1], known(error['loc'][:-1]), others)}"
        elif error["type"] == "missing":
            yield f"{where}: this key is missing"
        else:
            message = f"{error['msg'][:1].lower()}{error['msg'][1:]}"
            has_input = "got " in message or isinstance(error["input"], dict | list)
            yield f"{where}: {message}" + ("" if has_input else f", got {shortened(error['input'])}")
