"""Explain Hydra's errors to a user: what is wrong, where, and the nearest existing name."""

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
"""Prefixes of lines that OmegaConf adds for programmers."""
MAX_LINES, MAX_WIDTH = 20, 300
"""Limits of an explanation: lines, and characters in a line."""


def explain(error: BaseException, overrides: list[str]) -> str:
    """
    Explain an exception of Hydra, OmegaConf, YAML or Hydra's override parser in at most a screen of text.

    Args:
        overrides: the command line, from which to name the override if the exception does not.
    """
    text = printable(str(error)).strip()
    circular = isinstance(error, RecursionError) or text.startswith("Recursive interpolation")
    if circular:
        text = "a value refers to itself or is nested too deeply"
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
    """Return a hint on quoting a value of the form NAME=VALUE, "" for any other value."""
    key, _, value = override.partition("=")
    if not re.fullmatch(r"[\w./@-]+=[\w./@-]*", value):
        return ""
    return f"a value with an equals sign must be quoted for the shell and for Hydra: '{key}=\"{value}\"'"


@contextmanager
def faults_of_hydra() -> Iterator[None]:
    """Raise ConfigCompositionException for input on which Hydra or OmegaConf fails with an internal error."""
    try:
        yield
    except KeyError as error:  # hydra.job.env_copy
        raise ConfigCompositionException(f"hydra.job.env_copy: no such environment variable: {error}") from None
    except (AttributeError, TypeError, AssertionError, IndexError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise ConfigCompositionException(
            f"Hydra cannot read the configuration: {type(error).__name__}: {first}"
        ) from error


def missing_key(error: BaseException) -> str:
    """Return the unknown key that an error of Hydra is about, "" for any other error."""
    found = re.search(r"Could not override '(?P<key>[^']+)'", printable(str(error)))
    return found["key"] if found else ""


def _cut(line: str) -> str:
    return line if len(line) <= MAX_WIDTH else f"{line[:MAX_WIDTH]}..."


def _suspect(overrides: list[str], *, interpolated: bool) -> str | None:
    """Return the likely culprit: an override that does not parse, chooses no option of a group, or has an interpolation."""
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
    if within and within[1] != name:  # the value is a mapping
        return f"{key}: cannot be set as a whole; use {key}.{within[1]}=VALUE"
    node = getattr(cause, "parent_node", None) if isinstance(cause, OmegaConfBaseException) else None
    known = [str(k) for k in node] if isinstance(node, DictConfig) and not OmegaConf.is_missing(node, "") else []
    reason = f"{key}: unknown key.{_nearest(name, known, node)}"
    if known:
        reason += f" Keys of {parent or 'the configuration'}: {', '.join(sorted(k for k in known if k != 'hydra'))}"
    elif cause is not None:
        reason += f" {str(cause).splitlines()[0]}"
    return reason


HYDRAS_OWN = ("run.dir", "sweep.dir", "sweeper.", "launcher.")
"""Prefixes of keys below `hydra` that are suggested to a user who gave only the last part."""
CLOSE = 0.75
"""Similarity, from 0 to 1, at which a word counts as a misspelling of another."""


def _nearest(name: str, siblings: list[str], node: Any) -> str:
    """Return a hint: a similar sibling, or a key with this name elsewhere, including options that are not chosen."""
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
    """Return all keys of the configuration around a node; of Hydra's section only those that a user sets."""
    root = node._get_root() if isinstance(node, DictConfig) else None
    if not isinstance(root, DictConfig):
        return []
    sections = OmegaConf.to_container(root, resolve=False)
    assert isinstance(sections, dict)
    hydra = flatten(sections.pop("hydra", None) or {})
    own = [f"hydra.{key}" for key in hydra if key.startswith(HYDRAS_OWN)]
    return [*flatten({str(key): value for key, value in sections.items()}), *own]
