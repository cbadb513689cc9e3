"""Turn overrides as a person types them into overrides that Hydra can parse, and refuse those it cannot."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Quote, QuotedString, RangeSweep

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.console import printable
from meshrunner.runner.rundir import key_of

MAX_DEPTH = 50
"""Most nested brackets. Hydra's parser reaches Python's recursion limit at about a hundred."""
MAX_DIGITS = 100
"""Most digits of a number."""
MAX_LENGTH = 100_000
"""Most characters of an override."""
MAX_RUNS = 100_000
"""Most runs of a sweep."""

QUOTED_KEYS = re.compile(r"(?P<key>\+{0,2}sweep\.(?P<name>exclude|baseline))=(?P<value>.*)", re.DOTALL)
WITHOUT_SECTION = re.compile(r"\+{0,2}(?P<rule>(exclude|baseline)=.*=.*)", re.DOTALL)
SEVERAL = re.compile(r"tracker=\[\s*([A-Za-z_]\w*(?:\s*,\s*[A-Za-z_]\w*)+)\s*\]", re.ASCII)
"""A list of trackers, which Hydra would merge into one."""
MEMBER = re.compile(r"\+tracker@tracker\.of\.(\w+)=(\w+)", re.ASCII)
RULE_BEGINS = re.compile(r"\s*[\w./@-]+=")


def prepared(overrides: Iterable[str]) -> list[str]:
    """Return the overrides of a command line in Hydra's syntax; raise ConfigError that names an unreadable one."""
    return [each for override in overrides for each in _several(_unless_known(_quoted(_readable(override))))]


def _key_in_a_message(override: str) -> str:
    key = key_of(override)
    return printable(key if len(key) <= 100 else f"{key[:100]}...")


def _readable(override: str) -> str:
    key = _key_in_a_message(override)
    if printable(override) != override:
        raise ConfigError(
            f"{key}: remove the control character or the byte that is not UTF-8: {printable(override)[:200]!r}"
        )
    if len(override) > MAX_LENGTH:
        raise ConfigError(f"{key}: {len(override):,} characters; an override has at most {MAX_LENGTH:,}")
    if (deepest := _depth(override)) > MAX_DEPTH:
        raise ConfigError(f"{key}: brackets are nested {deepest} deep; nest them at most {MAX_DEPTH} deep")
    if found := re.search(rf"(?<![A-Za-z_\d])\d[\d_]{{{MAX_DIGITS},}}", override):
        raise ConfigError(f"{key}: a number of {len(found[0]):,} digits; a number has at most {MAX_DIGITS}")
    return override


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character in "[{(":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]})":
            depth = max(0, depth - 1)
    return deepest


def _quoted(override: str) -> str:
    """Quote a rule of `sweep.exclude` or `sweep.baseline` for Hydra: it has a second equals sign."""
    if bare := WITHOUT_SECTION.fullmatch(override):
        meant = shlex.quote(f"sweep.{bare['rule']}")
        raise ConfigError(f"{bare['rule'].partition('=')[0]}: unknown key. Did you mean {meant}?")
    found = QUOTED_KEYS.fullmatch(override)
    if found is None or "=" not in found["value"] or found["value"].lstrip().startswith(("'", '"')):
        return override
    value = found["value"].strip()
    if found["name"] == "baseline":
        return f"{found['key']}={_in_quotes(value)}"
    rules: list[str] = []
    for part in split_outside(value[1:-1] if value.startswith("[") and value.endswith("]") else value, ","):
        # A comma separates rules and also the values of one rule: micro_batch=8,16 is one rule.
        if rules and not RULE_BEGINS.match(part) and not part.strip().startswith(("'", '"')):
            rules[-1] += f",{part}"
        else:
            rules.append(part)
    texts = [rule if rule.strip().startswith(("'", '"')) else _in_quotes(rule.strip()) for rule in rules]
    return f"{found['key']}=[{','.join(texts)}]"


def _in_quotes(text: str) -> str:
    quoted: str = QuotedString(text, Quote.single).with_quotes()
    return quoted


def _unless_known(override: str) -> str:
    """Add the plus signs that Hydra wants for a variable of launch.env, which takes any name."""
    return f"++{override}" if override.startswith("launch.env.") else override


def _several(override: str) -> list[str]:
    """Turn `tracker=[wandb,tensorboard]` into the option `several` with an option below `tracker.of` for each."""
    found = SEVERAL.fullmatch(override)
    if found is None:
        return [override]
    names = [name.strip() for name in found[1].split(",")]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"tracker: {override} lists {twice} twice; list each tracker once")
    return ["tracker=several", *(f"+tracker@tracker.of.{name}={name}" for name in names)]


def as_typed(overrides: Sequence[str]) -> list[str]:
    """Return overrides with the list of trackers as the user typed it, the inverse of `prepared`."""
    names = [found[1] for override in overrides if (found := MEMBER.fullmatch(override)) and found[1] == found[2]]
    if "tracker=several" not in overrides or not names:
        return list(overrides)
    rest = [override for override in overrides if not (found := MEMBER.fullmatch(override)) or found[1] != found[2]]
    return [f"tracker=[{','.join(names)}]" if override == "tracker=several" else override for override in rest]


def split_outside(text: str, separators: str) -> list[str]:
    """Split a text at separators outside brackets and quotes."""
    parts, start, depth, quote = [], 0, 0, ""
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote and text[index - 1] != "\\" else quote
        elif character in "'\"":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        elif character in separators and depth <= 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def left_to_jobs(overrides: Sequence[str], group: str) -> list[str]:
    """Leave keys of a group whose option varies to the jobs: turn each into a sweep over its single value."""
    parser = OverridesParser.create()
    if not any(each.startswith(f"{group}=") and parser.parse_override(each).is_sweep_override() for each in overrides):
        return list(overrides)
    found = []
    for override in overrides:
        key, _, value = override.partition("=")
        inside = key.startswith(f"{group}.") and value and not parser.parse_override(override).is_sweep_override()
        found.append(f"{key}=choice({value})" if inside else override)
    return found


def check_number(overrides: Sequence[str]) -> None:
    """Raise ConfigError if the overrides of a grid make more than MAX_RUNS runs, before Hydra lists all of them."""
    counts = {}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.is_interval_sweep():
            raise ConfigError(
                f"{override.key_or_group}: a grid has no intervals; list values, or choose another hydra/sweeper"
            )
        counts[override.get_key_element()] = _count(override.value())
    if (total := math.prod(counts.values())) > MAX_RUNS:
        varying = " x ".join(f"{key}({count:,})" for key, count in counts.items() if count > 1)
        raise ConfigError(f"{varying} = {total:,} combinations; a sweep has at most {MAX_RUNS:,} runs")


def _count(value: object) -> int:
    """Return the number of values of a sweep over one key."""
    if isinstance(value, ChoiceSweep):
        return len(value.list)
    if not isinstance(value, RangeSweep) or value.start is None or value.stop is None or not value.step:
        return 1
    steps = (float(value.stop) - float(value.start)) / float(value.step)
    return max(1, math.ceil(min(steps, 1e30)))
