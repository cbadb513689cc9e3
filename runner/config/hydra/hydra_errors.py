"""Turn Hydra's errors into messages that say where the configuration is wrong and name the nearest existing key."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf

from meshrunner.recipes.config_keys import flatten
from meshrunner.recipes.option import did_you_mean
from meshrunner.runner import shipped
from meshrunner.runner.config.validation import did_you_mean_key, listed
from meshrunner.runner.console import printable

NOISE = ("full_key:", "object_type=", "reference_type=", "Set the environment", "See https")
"""Prefixes of lines to remove from messages of Hydra and OmegaConf, because these lines help only programmers."""
MAX_WIDTH = 300
CLOSE = 0.75
"""Minimum similarity, from 0 to 1, of an unknown key to the key that is suggested instead."""


def explain(error: BaseException, overrides: list[str]) -> str:
    """Return a message that explains an error of Hydra, OmegaConf or YAML to the user and names the wrong key or override."""
    text = printable(str(error)).strip()
    if missing := missing_key(error):
        return _unknown_key(missing, error.__cause__)
    if isinstance(error, MissingConfigException):
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        known = sorted(map(str, error.options or []))
        if known:
            return f"{group}: unknown option '{option}'.{did_you_mean(option, known)} Known: {', '.join(known)}"
        text = text.partition("\n")[0]
    if isinstance(error, RecursionError) or text.startswith("Recursive interpolation"):
        text = "a value refers to itself or is nested too deeply"
    elif (cause := printable(str(error.__cause__ or "")).partition("\n")[0]) not in text:
        text += f"\n{cause}"
    lines = [line for line in text.splitlines() if line.strip() and not line.strip().startswith(NOISE)]
    if key := getattr(error, "full_key", None):
        lines[0] = f"{key}: {lines[0]}"
    elif override := getattr(error, "override", None) or _unreadable(overrides):
        if f"'{override}'" not in text:
            lines.insert(0, f"in '{override}':")
        name, _, value = override.partition("=")
        if "'='" in text and re.fullmatch(r"[\w./@-]+=[\w./@-]*", value):
            lines.append(
                f"a value with an equals sign must be quoted for the shell and for Hydra: '{name}=\"{value}\"'"
            )
    lines = [line if len(line) <= MAX_WIDTH else f"{line[:MAX_WIDTH]}..." for line in lines]
    return listed("The configuration is wrong:", lines)


@contextmanager
def faults_of_hydra() -> Iterator[None]:
    """Convert some errors in the `with` block to ConfigCompositionException: internal errors of Hydra and OmegaConf, such as
    AttributeError, and Hydra's warning about a missing search path."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "provider=hydra.searchpath", UserWarning)
            yield
    except UserWarning as warning:
        path = str(warning).partition("path=")[2].removesuffix(" is not available.")
        raise ConfigCompositionException(f"hydra.searchpath: no such directory: {path}") from None
    except (AttributeError, TypeError, AssertionError, LookupError) as error:
        key = re.search(r"full_key: (\S+)", str(error))
        where = f"{key[1]}: " if key else ""
        text = f"{where}Hydra cannot read the configuration: {type(error).__name__}: {error}"
        raise ConfigCompositionException(text.partition("\n")[0]) from None


def missing_key(error: BaseException) -> str:
    """Return the unknown key that a Hydra error reports, or an empty string for any other error."""
    found = re.search(r"Could not override '(?P<key>[^']+)'", printable(str(error)))
    return found["key"] if found else ""


def _unreadable(overrides: list[str]) -> str | None:
    """Return the first override that cannot be parsed or that chooses a number or null as an option: `model=1`, `tracker=[1]`."""
    parser = OverridesParser.create()
    for override in overrides:
        try:
            parsed = parser.parse_override(override)
        except (HydraException, ValueError, RecursionError):
            return override
        key, value = parsed.key_or_group, parsed.value()
        is_group = key in ("", *shipped.groups()) or "/" in key
        chosen = value if isinstance(value, list) else [value]
        if is_group and any(isinstance(each, int | float | None) for each in chosen):
            return override
    return None


def _unknown_key(key: str, cause: Any) -> str:
    full = getattr(cause, "full_key", None) or key  # in launch={x: 1} the unknown key is launch.x
    parent, _, name = full.rpartition(".")
    node = getattr(cause, "parent_node", None)
    known = [str(each) for each in node if each != "hydra"] if isinstance(node, DictConfig) and node else []
    if parent == key and not known:  # such as launch.env={A: 1}
        return f"{key}: cannot be set as a whole; use {full}=VALUE"
    complete = not parent and {*known, "hydra"} >= shipped.top_level().keys()
    if complete and get_close_matches(name, known, 1, CLOSE):  # usual typing error: no need to import all options
        return f"{full}: unknown key.{did_you_mean(name, known)} Keys of the configuration: {', '.join(sorted(known))}"
    from meshrunner.runner.config.reference import catalog  # not at the top: it imports options

    root: Any = OmegaConf.to_container(node._get_root(), resolve=False) if isinstance(node, DictConfig) else {}
    # keys that the classes of the chosen options define, but the YAML files lack
    absent = [each.name for each in catalog.every_key(root) if catalog.lacks(root, each.name)]
    if full in absent:
        return f"{full}: the YAML file of the chosen option lacks this key. Use +{full}=VALUE"
    known += [each.rpartition(".")[2] for each in absent if each.rpartition(".")[0] == parent]
    reason = f"{full}: unknown key.{_nearest(name, known, [*flatten(root), *absent])}"
    return f"{reason} Keys of {parent or 'the configuration'}: {', '.join(sorted(known))}" if known else reason


def _nearest(name: str, siblings: list[str], chosen: list[str]) -> str:
    """Return a hint `Did you mean ...?` with a similar key from `siblings`, else from `chosen`, else from all keys."""
    if get_close_matches(name, siblings, 1, CLOSE):
        return did_you_mean(name, siblings)
    if hint := did_you_mean_key(name, [], chosen):
        return hint
    from meshrunner.runner.config.reference.catalog import every_key

    keys = {key.name: key for key in every_key() if "[]" not in key.name}.values()
    if same := [key for key in keys if key.leaf == name]:
        options = [f"{key.name} (with {key.group}={','.join(key.defaults())})" for key in same]
        return f" Did you mean {' or '.join(options)}?"
    leaves = {key.leaf: key.name for key in keys}
    near = get_close_matches(name, leaves, 1, CLOSE)
    return f" Did you mean '{leaves[near[0]]}'?" if near else ""
