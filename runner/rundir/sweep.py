"""Read and write sweep.json and runs.txt, which list the runs of a sweep."""

import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from meshrunner.recipes.storage import replace_file
from meshrunner.runner.rundir.files import SWEEP, SWEEP_RUNS, is_run, is_sweep
from meshrunner.runner.rundir.records import JsonFile, Text, unreadable
from meshrunner.runner.rundir.run import key_of

NUMBERED = re.compile(r"(\d+)(?:_|$)")
"""Pattern for the number at the start of a run directory's name. Runs that differ only in seed or repeat share a number."""
REPEATED = re.compile(r"(?:_seed-(?P<seed>\d+))?(?:_repeat-(?P<repeat>\d+))?$")
"""Pattern for the end of a run directory's name, such as `_seed-1_repeat-2`. Both parts are optional."""
IN_TITLE = 4
"""Maximum number of keys in the title of a sweep."""
OPTION = re.compile(r"(?!(true|false|null)$)[A-Za-z_][\w./-]*")
"""Pattern for values that the label of a run shows without their key, such as `fsdp2`."""


class PlacedRun(JsonFile):
    """A run listed in `sweep.json`."""

    name: Text
    overrides: list[Text] | None = None


class PlacedSweep(JsonFile):
    """The content of `sweep.json`."""

    command: list[Text] = []
    """The command that most recently added runs to the sweep, in the form of sys.argv."""
    created: Text | None = None
    """Time in ISO format at which the first runs were added."""
    varies: list[Text] | None = None
    """Keys whose values differ between the runs of the first batch (the first call of `add_runs`)."""
    jobs: list[PlacedRun] = []
    """The runs in the order of execution. A run that was added again with different overrides is listed twice."""


def run_names(sweep_dir: Path) -> list[str]:
    """Return the distinct names of a sweep's run directories, in the order of sweep.json, or sorted if sweep.json is damaged."""
    if not is_sweep(sweep_dir):
        return []
    try:
        return list(dict.fromkeys(run.name for run in PlacedSweep.load(sweep_dir / SWEEP).jobs))
    except (OSError, ValueError):
        return sorted(path.name for path in sweep_dir.iterdir() if is_run(path))


def sweep_damage(sweep_dir: Path) -> str:
    """Return a phrase that says why sweep.json cannot be read, or "" if sweep.json is readable or missing."""
    try:
        PlacedSweep.load(sweep_dir / SWEEP)
    except (OSError, ValueError) as error:
        return f"damaged: {unreadable(sweep_dir / SWEEP, error)}"
    return ""


def add_runs(sweep_dir: Path, added: Sequence[tuple[str, list[str]]]) -> None:
    """Add runs to a sweep's sweep.json and runs.txt. `added`: (directory name, overrides) of each run, in order of execution. An
    adaptive sweeper adds one batch at a time. Skip runs that are already listed because of an earlier call."""
    before = PlacedSweep.read(sweep_dir / SWEEP)
    runs = [PlacedRun(name=name, overrides=overrides) for name, overrides in added]
    PlacedSweep(
        command=sys.argv,
        created=before.created or datetime.now().astimezone().isoformat(timespec="seconds"),
        varies=before.varies or _varying_keys(added),  # from the first batch, because the title must not change
        jobs=[*before.jobs, *(run for run in runs if run not in before.jobs)],
    ).write(sweep_dir / SWEEP)
    write_run_list(sweep_dir)


def _varying_keys(added: Sequence[tuple[str, list[str]]]) -> list[str]:
    """Return keys whose overrides differ between runs. If all are equal, return the keys of overrides that sys.argv lacks."""
    combinations = {tuple(overrides) for _, overrides in added}
    shared = set[str].intersection(*map(set, combinations)) if len(combinations) > 1 else set(sys.argv)
    keys = [key_of(override) for _, overrides in added for override in overrides if override not in shared]
    seeds = {found["seed"] for name, _ in added if (found := REPEATED.search(name))}
    keys += ["seed"] * (len(seeds) > 1)
    return [key for key in dict.fromkeys(keys) if not key.startswith(("tracker", "sweep."))]


def repeat_of(name: str) -> str:
    """Return the seed and repeat from a run directory's name, such as `_seed-1_repeat-2`; "" if the name has neither."""
    found = REPEATED.search(name)
    return found[0] if found else ""


def repeat_ending(seed: int | None, repeat: int | None) -> str:
    """Return the end of a run directory's name, such as `_seed-1_repeat-2`. Leave out a part that is None."""
    parts = {"seed": seed, "repeat": repeat}
    return "".join(f"_{key}-{value}" for key, value in parts.items() if value is not None)


def repeat_number(name: str) -> int:
    """Return the number of the repeat at the end of a run directory's name, or 0 if the name has no such number."""
    found = REPEATED.search(name)
    return int(found["repeat"] or 0) if found else 0


def in_round(name: str, repeat: int) -> str:
    """Return the name of the run directory for repeat number `repeat` of the run `name`."""
    before, _, _ = name.rpartition(repeat_ending(None, repeat_number(name)))
    return before + repeat_ending(None, repeat)


def sweep_title(sweep_dir: Path) -> str:
    """Return a title such as `2026-01-31 14:05 parallelism x lr`, or the folder's name if the time or the keys are unknown."""
    found = PlacedSweep.read(sweep_dir / SWEEP)
    if found.created is None or found.varies is None:
        return sweep_dir.name
    names = [key.rpartition(".")[2] for key in found.varies] or [sweep_dir.name]
    more = f" and {len(names) - IN_TITLE} more" if len(names) > IN_TITLE else ""
    return f"{found.created[:16].replace('T', ' ')} {' x '.join(names[:IN_TITLE])}{more}"


def write_run_list(sweep_dir: Path) -> None:
    """Rewrite runs.txt from sweep.json."""
    replace_file(sweep_dir / SWEEP_RUNS, os.fsencode("".join(f"{name}\n" for name in run_names(sweep_dir))))


def run_labels(sweep_dir: Path) -> dict[str, str]:
    """Return labels keyed by directory name. A label has the run's number and the varying values: `#3 fsdp2 full repeat=2`."""
    varying = varying_overrides(sweep_dir)
    runs = Counter(map(tuple, varying.values()))
    return {name: _label(name, own, repeated=runs[tuple(own)] > 1) for name, own in varying.items()}


def varying_overrides(sweep_dir: Path) -> dict[str, list[str]]:
    """Return each run's overrides, except those that all runs share, keyed by directory name. Unknown overrides count as []."""
    runs = PlacedSweep.read(sweep_dir / SWEEP).jobs
    overrides = {run.name: run.overrides for run in runs if run.overrides is not None}
    shared = set[str].intersection(*map(set, overrides.values())) if overrides else set[str]()
    return {
        name: [override for override in overrides.get(name, []) if override not in shared]
        for name in run_names(sweep_dir)
    }


def short_override(override: str) -> str:
    """Return an override as labels show it: `fsdp2` for `parallelism=fsdp2`, `shard=2` for `parallelism.shard=2`."""
    key, _, value = override.lstrip("+~").partition("=")
    return value if OPTION.fullmatch(value) else f"{key.rpartition('.')[2]}={value}"


def _label(name: str, varying: Sequence[str], *, repeated: bool) -> str:
    number = NUMBERED.match(name)
    if number is None:
        return name
    parts = [f"#{int(number[1])}", *map(short_override, varying)]
    if repeated and (found := REPEATED.search(name)):
        parts += [f"{key}={value}" for key, value in found.groupdict().items() if value is not None]
    return " ".join(parts)
