"""Write the texts of `meshrunner help` and `run --help` about keys, groups and options."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from meshrunner.recipes.config_keys import value_at
from meshrunner.runner import shipped
from meshrunner.runner.config.reference.catalog import Key, in_yaml, lacks, plain
from meshrunner.runner.console import in_two_columns, paragraph

MANY = 4
"""Maximum number of keys to explain in full. If more keys match, each key gets one line."""
LONGEST_VALUE, LONGEST_DEFAULT = 60, 160
"""Maximum numbers of characters of a value and of a default's description in a list of keys. Longer text is cut."""


def explain_key(key: Key) -> str:
    """Explain one key: its meaning, the values it accepts and its default."""
    documentation = key.documentation()
    parts = [
        paragraph(f"{', '.join(kinds)}: {text}" if len(documentation) > 1 else text)
        for text, kinds in documentation.items()
    ]
    facts = [("expected", key.expected(whole=True)), ("default", default_of(key))]
    if (having := key.defaults()) and key.group in shipped.groups() and set(having) < set(shipped.options(key.group)):
        facts.append(("a key of", f"{key.group}={','.join(having)}"))
    return "\n".join([key.name, *parts, in_two_columns(fact for fact in facts if fact[1])])


def explain_keys(keys: list[Key], every: list[Key]) -> str:
    """Explain `keys`, which match the user's word, and the keys nested below them. If there are more than
    MANY `keys`, each gets a single line."""
    if len(keys) > MANY:
        return in_two_columns(((key.name, _row(key, default_of(key))) for key in keys), 0)
    texts = []
    for key in keys:
        inner = [each for each in every if plain(each.name).startswith(f"{plain(key.name)}.")]
        section = bool(inner) and "." not in key.name  # a section such as launch has no value of its own
        about = f"{key.name}\n{paragraph(next(iter(key.documentation())))}" if section else explain_key(key)
        rows = in_two_columns((each.name, _row(each, default_of(each) if section else "")) for each in inner)
        texts.append(f"{about}\n\n{rows}" if inner else about)
    others = [key.name for key in every if key not in keys and key.leaf == keys[0].name]
    return "\n\n".join([*texts, *[f"See also {', '.join(others)}."] * bool(others)])


def default_of(key: Key, chosen: str | None = None) -> str:
    """Describe a key's default in the option `chosen`. If `chosen` lacks the key, describe the defaults in all options."""
    alike: dict[str, list[str]] = {}
    defaults = {} if key.field == "kind" else key.defaults()
    for option, value in {chosen: defaults[chosen]}.items() if chosen in defaults else defaults.items():
        alike.setdefault(value_text(value), []).append(option)
    first = shipped.defaults().get(key.group)
    return "; ".join(
        text if len(alike) == 1 or first in options else f"{text} with {key.group}={','.join(options)}"
        for text, options in alike.items()
    )


def value_text(value: Any) -> str:
    """Describe a value from a YAML file in words. For example, `${seed}` becomes `the value of seed`."""
    if value == "???":
        return "none; you must set it"
    if picked := list(shipped.picked(value)):
        return "; ".join(f"{each} with {where}" if where else f"else {each}" for where, each in picked)
    if isinstance(value, str) and value.startswith("${") and value.endswith("}") and value.count("$") == 1:
        return f"the value of {value[2:-1]}"
    return in_yaml(value)


def explain_group(group: str, about: str, keys: list[Key]) -> str:
    """Explain a group: its options and their keys."""
    first = shipped.defaults().get(group)
    options = [(f"{name}{' (default)' * (name == first)}", text) for name, text in shipped.options(group).items()]
    parts = [f"{group}=OPTION", paragraph(about), "", "options", in_two_columns(options)]
    if rows := [(key.name, _row(key, default_of(key))) for key in keys if key.field != "kind"]:
        parts += ["", "keys", in_two_columns(rows)]
    return "\n".join(parts)


def explain_option(group: str, option: str, keys: list[Key]) -> str:
    """Explain an option and show the values that it sets, or its whole YAML file if the option may set any key."""
    parts = [f"{group}={option}", paragraph(shipped.about(group, option))]
    if group in shipped.GLOBAL:
        body = [line for line in shipped.file_text(group, option).splitlines() if not line.startswith("#")]
        return "\n".join([*parts, "", *(f"  {line}".rstrip() for line in body)])
    kind = str(shipped.values(group, option).get("kind"))
    # If several classes have the key, show only the text of the chosen class.
    own = [key._replace(owners={kind: key.owners[kind]}) if kind in key.owners else key for key in keys]
    if owner := next((key.owners[kind] for key in own if kind in key.owners), None):
        parts.append(paragraph(" ".join(inspect.cleandoc(owner.__doc__ or "").split("\n\n")[0].split())))
    values = [(key, key.defaults().get(option, ...)) for key in own]
    rows = [(_assigned(key, value), _row(key)) for key, value in values if _is_shown(key, value, keys)]
    return "\n".join([*parts, "", in_two_columns(rows)]) if rows else "\n".join(parts)


def explain_configuration(config: Mapping[str, Any], keys: Iterable[Key], chosen: Mapping[str, Any]) -> Iterator[str]:
    """Yield a paragraph for each section of a configuration: keys, values and meanings. `chosen` maps groups to options."""
    every = list(keys)
    sections = {key.group for key in every if "." in key.name}
    parts: dict[str, list[Key]] = {"": []}
    for key in every:
        parts.setdefault(key.group if key.group in sections else "", []).append(key)
    for name, part in parts.items():
        rows = []
        for key in part:
            value = value_at(config, key.name)
            if lacks(config, key.name):
                value = key.defaults().get(chosen.get(key.group, ""), ...)
            if key.name != name and _is_shown(key, value, every):
                default = default_of(key, chosen.get(key.group))
                rows.append((_assigned(key, value), _row(key, "" if default == in_yaml(value) else default)))
        lines = []
        if name:
            about = next((f": {text}" for key in part if key.name == name for text in key.documentation()), "")
            lines.append(paragraph(f"{name}={chosen[name]}{about}" if chosen.get(name) else f"{name}{about}", 0))
        if name in shipped.groups():
            lines.append(in_two_columns([("options:", ", ".join(shipped.options(name)))]))
        yield "\n".join([*lines, in_two_columns(rows)] if rows else lines)


def _assigned(key: Key, value: Any) -> str:
    return f"{key.name} = {_cut(in_yaml(value), LONGEST_VALUE)}"


def _row(key: Key, default: str = "") -> str:
    text = " / ".join(filter(None, key.documentation()))
    return f"{text} [{key.expected()}{f'; default {_cut(default, LONGEST_DEFAULT)}' if default else ''}]"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."


def _is_shown(key: Key, value: Any, keys: list[Key]) -> bool:
    """Return whether to list a key. Do not list `kind`, keys without a value, and mappings whose inner keys are listed."""
    has_inner = isinstance(value, dict) and any(each.name.startswith(f"{key.name}.") for each in keys)
    return value is not ... and key.field != "kind" and not has_inner
