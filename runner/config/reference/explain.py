"""Texts of `meshrunner help` and `run --help` about keys, groups and options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from meshrunner.runner import shipped
from meshrunner.runner.config.reference.catalog import Key, plain, value_at
from meshrunner.runner.config.reference.docstrings import summary
from meshrunner.runner.config.reference.expected import in_yaml
from meshrunner.runner.console import in_two_columns, paragraph

MANY = 4
"""Most keys that are explained one by one."""
LONGEST_VALUE, LONGEST_DEFAULT = 60, 160
"""Characters of a value, and of the defaults of all options, in a list of keys."""


def explain_key(key: Key) -> str:
    """Explain one key: its meaning, the values it takes and its default."""
    documentation = key.documentation()
    parts = []
    for text, kinds in documentation.items():
        parts.append(paragraph(f"{', '.join(kinds)}: {text}" if len(documentation) > 1 else text))
    facts = [("expected", key.expected(whole=True)), ("default", default_of(key))]
    if (having := key.defaults()) and key.group in shipped.groups() and set(having) < set(shipped.options(key.group)):
        facts.append(("a key of", f"{key.group}={','.join(having)}"))
    return "\n".join([key.name, *parts, in_two_columns(fact for fact in facts if fact[1])])


def explain_keys(keys: list[Key], every: list[Key]) -> str:
    """Explain the keys that a word matches, and the keys below them; a line each if they are many."""
    if len(keys) > MANY:
        return in_two_columns(((key.name, _row(key, default_of(key))) for key in keys), 0)
    texts = []
    for key in keys:
        inner = [each for each in every if plain(each.name).startswith(f"{plain(key.name)}.")]
        if inner and "." not in key.name:  # launch, sweep
            texts.append(_explain_section(key.name, next(iter(key.documentation())), inner))
            continue
        rows = in_two_columns((each.name, _row(each)) for each in inner)
        texts.append(f"{explain_key(key)}\n\n{rows}" if inner else explain_key(key))
    others = [key.name for key in every if key not in keys and key.leaf == keys[0].name]
    if others:
        texts.append(f"See also {', '.join(others)}.")
    return "\n\n".join(texts)


def default_of(key: Key, chosen: str | None = None) -> str:
    """Return the default of a key in words, for the chosen option or for all options that have it."""
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
    """Return a value of a YAML file in words."""
    if value == "???":
        return "none; you must set it"
    if picked := list(shipped.picked(value)):
        return "; ".join(f"{each} with {where}" if where else f"else {each}" for where, each in picked)
    if isinstance(value, str) and value.startswith("${") and value.endswith("}") and value.count("$") == 1:
        return f"that of {value[2:-1]}"
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
    """Explain an option and show the values it sets. For an experiment, show the file."""
    parts = [f"{group}={option}", paragraph(shipped.about(group, option))]
    if group == shipped.EXPERIMENT:
        body = [line for line in shipped.file_text(group, option).splitlines() if not line.startswith("#")]
        return "\n".join([*parts, "", *(f"  {line}".rstrip() for line in body)])
    values = shipped.values(group, option)
    kind = str(values.get("kind"))
    owners = [key.owners[kind] for key in keys if kind in key.owners]
    parts += [paragraph(summary(owners[0]))] if owners else []
    rows = [
        (_assigned(key, value), _row(key._replace(owners={kind: key.owners[kind]}) if kind in key.owners else key))
        for key in keys
        if key.field != "kind"
        and (value := key.defaults().get(option, ...)) is not ...
        and not _has_inner(key, value, keys)
    ]
    return "\n".join([*parts, "", in_two_columns(rows)]) if rows else "\n".join(parts)


def _explain_section(name: str, about: str, inner: list[Key]) -> str:
    """Explain a section, which is only a name for the keys below it."""
    return "\n".join(
        [name, paragraph(about), "", in_two_columns((key.name, _row(key, default_of(key))) for key in inner)]
    )


def explain_configuration(config: Mapping[str, Any], keys: Iterable[Key], chosen: Mapping[str, Any]) -> Iterator[str]:
    """
    Yield a paragraph for each part of a configuration: its keys with their values and meanings.

    Args:
        chosen: group -> the chosen option.
    """
    every = list(keys)
    sections = {key.group for key in every if "." in key.name}
    parts: dict[str, list[Key]] = {"": []}
    for key in every:
        parts.setdefault(key.group if key.group in sections else "", []).append(key)
    for name, part in parts.items():
        rows = []
        for key in part:
            value = value_at(config, key.name)
            if value is not ... and key.name != name and key.field != "kind" and not _has_inner(key, value, every):
                default = default_of(key, chosen.get(key.group))
                rows.append((_assigned(key, value), _row(key, "" if default == in_yaml(value) else default)))
        head = [_heading(name, part, chosen)] if name else []
        yield "\n".join([*head, in_two_columns(rows)] if rows else head)


def _heading(name: str, part: list[Key], chosen: Mapping[str, Any]) -> str:
    about = next((next(iter(key.documentation())) for key in part if key.name == name), "")
    if name not in shipped.groups():
        return paragraph(f"{name}: {about}" if about else name, 0)
    heading = f"{name}={chosen.get(name)}" if chosen.get(name) else name
    options = in_two_columns([("options:", ", ".join(shipped.options(name)))])
    return "\n".join([paragraph(f"{heading}: {about}" if about else heading, 0), options])


def _assigned(key: Key, value: Any) -> str:
    return f"{key.name} = {_cut(in_yaml(value), LONGEST_VALUE)}"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."


def _row(key: Key, default: str = "") -> str:
    text = " / ".join(filter(None, key.documentation()))
    return f"{text} [{key.expected()}{f'; default {_cut(default, LONGEST_DEFAULT)}' if default else ''}]"


def _has_inner(key: Key, value: Any, keys: list[Key]) -> bool:
    """Return whether the keys below a key are listed instead of it."""
    return isinstance(value, dict) and any(each.name.startswith(f"{key.name}.") for each in keys)
