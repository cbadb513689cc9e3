"""Searches for the change that made a run bad: among commits, in a list of combinations, or among the overrides of a run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.bisect.referee import Variant

IsBad = Callable[[Variant], bool | None]
"""Function that returns whether a variant is bad, or None if the variant cannot run."""


def first_of_list(variants: Sequence[Variant], is_bad: IsBad) -> list[str]:
    """Return the name of the first bad variant of a list that starts with a good one and ends with a bad one. If variants
    directly before the first bad one cannot run, also return their names."""
    good, bad = _boundary(len(variants) - 1, lambda i: is_bad(variants[i]))
    return [each.name for each in variants[good + 1 : bad + 1]]


def fewest_overrides(good: Mapping[str, str], bad: Mapping[str, str], is_bad: IsBad) -> list[str]:
    """Return a minimal set of a bad run's overrides that makes a good run bad (QuickXplain, Junker 2004). An item `~key` means
    that the bad run lacks the good run's override of this key. good, bad: overrides, keyed by key."""
    keys = [key for key in dict.fromkeys([*good, *bad]) if good.get(key) != bad.get(key)]
    found: list[str] = []

    def bad_with(changed: Sequence[str]) -> bool | None:
        kept = [each for key, each in good.items() if key not in changed]
        own = [bad[key] for key in changed if key in bad]
        return is_bad(Variant(" ".join(named(changed)), [*kept, *own]))

    def named(changed: Sequence[str]) -> list[str]:
        return [bad.get(key, f"~{key}") for key in changed]

    def bad_with_first(count: int) -> bool | None:
        return bad_with([*keys[:count], *found])

    while True:
        low, high = _boundary(len(keys), bad_with_first)
        found += keys[low:high]
        keys = keys[:low]
        if not keys or bad_with(found):
            return named(found)


def first_commit(control: Path, good: str, bad: str, is_bad: Callable[[str], bool | None]) -> list[str]:
    """Return the first bad commit between two revisions. If commits before the first bad one cannot run, also return them.
    control: a worktree without files that holds the state of `git bisect`."""
    output = git(control, "bisect", "start", "--no-checkout", bad, good)
    while "is the first bad commit" not in output:
        if "only 'skip'ped commits left" in output:
            return [line for line in output.splitlines() if len(line) == 40]
        verdict = is_bad(git(control, "rev-parse", "BISECT_HEAD"))
        output = git(control, "bisect", {True: "bad", False: "good", None: "skip"}[verdict])
    return [output.split()[0]]


def git(directory: Path, *arguments: str) -> str:
    """Run git in a directory and return its output. Raise ConfigError with git's message if git fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError("bisect: git is not installed") from None
    if done.returncode not in (0, 2):  # 2: `git bisect` found only commits that were skipped
        raise ConfigError(f"bisect: git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def _boundary(end: int, is_bad: Callable[[int], bool | None]) -> tuple[int, int]:
    """Return the last good number and the first bad one, between 0 (good) and `end` (bad). Skip numbers that cannot run."""
    low, high, skipped = 0, end, set[int]()
    while between := [i for i in range(low + 1, high) if i not in skipped]:
        middle = between[len(between) // 2]
        verdict = is_bad(middle)
        if verdict is None:
            skipped.add(middle)
        elif verdict:
            high = middle
        else:
            low = middle
    return low, high
