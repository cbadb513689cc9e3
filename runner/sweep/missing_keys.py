"""Advice for a sweep over options of which only some have a given key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

Overrides = Sequence[str]


def advice(jobs_without: Mapping[str, Sequence[Overrides]], jobs: Sequence[Overrides]) -> Iterator[str]:
    """
    Yield lines that explain how to sweep over options with and without a key.

    Args:
        jobs_without: key -> the overrides of the combinations that do not have it.
        jobs: the overrides of all combinations.
    """
    for key, incomplete in jobs_without.items():
        group = key.partition(".")[0]
        without = _values(group, incomplete)
        having = [option for option in _values(group, jobs) if option not in without]
        if not without or not having:
            continue
        yield f"{group}={','.join(without)} has no {key}, but a sweep sets every key in every combination. Use two sweeps:"
        yield f"  meshrunner run -m {group}={','.join(without)} hydra.sweep.dir=DIR"
        yield f"  meshrunner run -m {group}={','.join(having)} {key}={','.join(_values(key, jobs))} hydra.sweep.dir=OTHER"
        yield f"  meshrunner compare DIR OTHER --baseline {group}={without[0]}"


def _values(key: str, jobs: Sequence[Overrides]) -> list[str]:
    """Return the distinct values that the jobs give a key or group."""
    pairs = (override.lstrip("+").partition("=") for overrides in jobs for override in overrides)
    return list(dict.fromkeys(value for name, _, value in pairs if name == key))
