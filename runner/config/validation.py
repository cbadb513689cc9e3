"""Turn pydantic's errors into messages that name the key, the expected value, and the nearest existing name."""

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ValidationError

from meshrunner.recipes.config_keys import flatten
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import Option, Section, did_you_mean, shortened


def invalid(error: ValidationError, section: type[Section], config: dict[str, Any], prefix: str = "") -> ConfigError:
    """Return one ConfigError that lists all reasons why `config` is not a valid `section`. `prefix` precedes each key."""
    lines = set()
    for problem in error.errors(include_url=False):
        path = [str(part) for part in problem["loc"]]
        where = ".".join([*([prefix] if prefix else []), *path]) or "(whole configuration)"
        if problem["type"] == "extra_forbidden":
            others = [key for key in flatten(config) if key != ".".join(path)]
            hint = did_you_mean_key(path[-1], _fields_at(path[:-1], section, config), others)
            lines.add(f"{where}: unknown key.{hint}")
        elif problem["type"] == "missing":
            lines.add(f"{where}: this key is missing")
        else:
            message = f"{problem['msg'][:1].lower()}{problem['msg'][1:]}"
            has_input = "got " in message or isinstance(problem["input"], dict | list)
            lines.add(f"{where}: {message}" + ("" if has_input else f", got {shortened(problem['input'])}"))
    return ConfigError(listed("The configuration is wrong:", sorted(lines)))


def listed(title: str, lines: Iterable[str]) -> str:
    """Return a title followed by indented lines."""
    return "\n".join([title, *(f"  {line}" for line in lines)])


def did_you_mean_key(name: str, siblings: Iterable[str], keys: Iterable[str]) -> str:
    """Return a hint such as ` Did you mean optimizer.lr?`. Suggest keys whose last part is `name`, or else similar `siblings`."""
    same = [key for key in keys if key == name or key.endswith(f".{name}")]
    return f" Did you mean {' or '.join(same)}?" if same else did_you_mean(name, siblings)


def _fields_at(path: list[str], section: type[Section], config: dict[str, Any]) -> list[str]:
    """Return the keys of the section at a path such as ["launch"], for `Did you mean ...?` after an unknown key."""
    here: Any = section
    for part in path:
        field = here.model_fields.get(part) if isinstance(here, type) and issubclass(here, BaseModel) else None
        here = field.annotation if field else None
        if isinstance(here, type) and issubclass(here, Option):
            here = here.resolve(config[part]["kind"])
    return list(here.model_fields) if isinstance(here, type) and issubclass(here, BaseModel) else []
