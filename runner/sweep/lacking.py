"""A key that is given in a sweep over options of which only some have it: what to say, and how to ask for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

Overrides = Sequence[str]


def advice(lacking: Mapping[str, Sequence[Overrides]], every: Sequence[Overrides]) -> Iterator[str]:
    """
    Lines for keys that some combinations lack and others have.

    Args:
        lacking: key -> the overrides of the combinations that lack it.
        every: the overrides of all combinations.
    """
    for key, jobs in lacking.items():
        group = key.partition(".")[0]
        without = _values(group, jobs)
        having = [option for option in _values(group, every) if option not in without]
        if not without or not having:
            continue
        yield f"{group}={','.join(without)} has no {key}, and every combination is given every key. Two sweeps can do it:"
        yield f"  meshrunner run -m {group}={','.join(without)} hydra.sweep.dir=DIR"
        yield f"  meshrunner run -m {group}={','.join(having)} {key}={','.join(_values(key, every))} hydra.sweep.dir=OTHER"
        yield f"  meshrunner compare DIR OTHER --baseline {group}={without[0]}"


def _values(key: str, jobs: Sequence[Overrides]) -> list[str]:
    """Return the values that a key or group is given in some combinations."""
    given = (override.lstrip("+").partition("=") for overrides in jobs for override in overrides)
    return list(dict.fromkeys(value for name, _, value in given if name == key))
