"""Hydra's errors, as a user reads them: what is wrong, where, and the nearest name that exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.resources import files
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from meshrunner.recipes.config_diff import flatten
from meshrunner.recipes.option import did_you_mean
from meshrunner.runner.config.validation import did_you_mean_key, listed
from meshrunner.runner.console import printable

NOISE = ("full_key:", "object_type=", "reference_type=")
"""Beginnings of lines that OmegaConf adds for programmers."""
MAX_LINES, MAX_WIDTH = 20, 300
"""Lines of an error and characters of a line that are shown."""


def explain(error: BaseException, overrides: list[str]) -> str:
    """
    One screen for an exception of Hydra, OmegaConf, YAML or Hydra's override parser.

    Args:
        overrides: the command line, to name the override that a message leaves out.
    """
    text = printable(str(error)).strip()
    circular = isinstance(error, RecursionError) or text.startswith("Recursive interpolation")
    if circular:
        text = "it refers to itself, or is nested too deeply to be read"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_option(error)
    if missing := missing_key(error):
        return _missing_key(missing, error)
    lines = [line for line in text.splitlines() if line and not line.startswith(("Set the environment", "See https"))]
    cause = error.__cause__
    if cause is not None and str(cause) not in text:
        lines.append(str(cause).splitlines()[0])
    lines = [_cut(line) for line in lines[:MAX_LINES] if not line.strip().startswith(NOISE)]
    if key := getattr(error, "full_key", None):
        return listed("The configuration is wrong:", [f"{key}: {lines[0]}", *lines[1:]])
    suspects = [
        getattr(error, "override", None) or _suspect(overrides, interpolated="interpolation" in text or circular)
    ]
    where = [f"in '{_cut(suspect)}':" for suspect in suspects if suspect and f"'{suspect}'" not in text]
    hints = [hint for suspect in suspects if suspect and "'='" in text and (hint := _quoted(suspect))]
    return listed("The configuration is wrong:", [*where, *lines, *hints])


def _quoted(override: str) -> str:
    """How a value with an equals sign is given; empty where there is none, or it is more than one name and value."""
    key, _, value = override.partition("=")
    if not re.fullmatch(r"[\w./@-]+=[\w./@-]*", value):
        return ""
    return f"a value with an equals sign needs quotes, for the shell and for Hydra: '{key}=\"{value}\"'"


@contextmanager
def faults_of_hydra() -> Iterator[None]:
    """Turn what Hydra and OmegaConf trip over, of which hostile input finds much, into an error of the configuration."""
    try:
        yield
    except KeyError as error:  # hydra.job.env_copy
        raise ConfigCompositionException(f"there is no environment variable {error}") from None
    except (AttributeError, TypeError, AssertionError, IndexError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise ConfigCompositionException(f"Hydra cannot read it: {type(error).__name__}: {first}") from error


def missing_key(error: BaseException) -> str:
    """The key that was given and does not exist; empty for any other error."""
    found = re.search(r"Could not override '(?P<key>[^']+)'", printable(str(error)))
    return found["key"] if found else ""


def _cut(line: str) -> str:
    return line if len(line) <= MAX_WIDTH else f"{line[:MAX_WIDTH]}..."


def _suspect(overrides: list[str], *, interpolated: bool) -> str | None:
    """The first override that refers to others, or does not parse, or gives a group something else than a name."""
    if interpolated:
        return next((override for override in overrides if "${" in override), None)
    parser = OverridesParser.create()
    groups = {path.name for path in files("meshrunner.conf").iterdir() if path.is_dir()}
    for override in overrides:
        try:
            parsed = parser.parse_override(override)
        except (HydraException, ValueError, RecursionError):
            return override
        group = str(parsed.key_or_group)
        if not group or ((group in groups or "/" in group) and not isinstance(parsed.value(), str)):
            return override
    return next((override for override in overrides if "${" in override), None)


def _missing_option(error: MissingConfigException) -> str:
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    known = [str(name) for name in error.options or []]
    if not known:
        return f"The configuration is wrong:\n  {str(error).splitlines()[0]}"
    return f"{group}: unknown option '{option}'.{did_you_mean(option, known)} Known: {', '.join(sorted(known))}"


def _missing_key(key: str, error: BaseException) -> str:
    cause: Any = error.__cause__
    parent, _, name = key.rpartition(".")
    within = re.match(r"Key '([^']+)' is not in struct", str(cause or ""))
    if within and within[1] != name:  # the value was a mapping
        return f"{key}: what is in it is set one by one: {key}.{within[1]}=VALUE"
    node = getattr(cause, "parent_node", None) if isinstance(cause, OmegaConfBaseException) else None
    known = [str(k) for k in node] if isinstance(node, DictConfig) and not OmegaConf.is_missing(node, "") else []
    reason = f"{key}: unknown key.{_nearest(name, known, node)}"
    if known:
        reason += f" Keys of {parent or 'the configuration'}: {', '.join(sorted(k for k in known if k != 'hydra'))}"
    elif cause is not None:
        reason += f" {str(cause).splitlines()[0]}"
    return reason


HYDRAS_OWN = ("run.dir", "sweep.dir", "sweeper.", "launcher.")
"""Beginnings of keys below `hydra` that a person may mean by their last part alone."""
CLOSE = 0.75
"""Likeness of words, of which one is a typing mistake."""


def _nearest(name: str, siblings: list[str], node: Any) -> str:
    """What was meant: a key beside it, a key of the same name in another place, also of an option that is not chosen."""
    if get_close_matches(name, siblings, 1, CLOSE):
        return did_you_mean(name, siblings)
    hint = did_you_mean_key(name, [], _keys(node))
    if hint:
        return hint
    from meshrunner.runner.config.reference.catalog import every_key  # imports every option

    others = {key.name: key for key in every_key() if "[]" not in key.name}
    if same := [key for key in others.values() if key.leaf == name]:
        options = [f"{key.name} (with {key.group}={','.join(key.defaults())})" for key in same]
        return f" Did you mean {' or '.join(options)}?"
    if hint := did_you_mean(name, siblings):
        return hint
    leaves = {key.leaf: key.name for key in others.values()}
    near = get_close_matches(name, leaves, 1, CLOSE)
    return f" Did you mean '{leaves[near[0]]}'?" if near else ""


def _keys(node: Any) -> list[str]:
    """All keys of the configuration that a node is part of, of Hydra's own those that are not set by Hydra itself."""
    root = node._get_root() if isinstance(node, DictConfig) else None
    if not isinstance(root, DictConfig):
        return []
    sections = OmegaConf.to_container(root, resolve=False)
    assert isinstance(sections, dict)
    hydra = flatten(sections.pop("hydra", None) or {})
    own = [f"hydra.{key}" for key in hydra if key.startswith(HYDRAS_OWN)]
    return [*flatten({str(key): value for key, value in sections.items()}), *own]
