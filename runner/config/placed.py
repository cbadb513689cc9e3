"""The runs of a sweep on disk that can be executed, and a sentence for each that cannot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshrunner.recipes.errors import ConfigError, NotImported
from meshrunner.runner.config.experiment import Experiment, check
from meshrunner.runner.console import one_line, printable, warn
from meshrunner.runner.rundir import RESULTS, find_damage, find_yaml_damage, read_config, read_state, sweep_damage
from meshrunner.runner.rundir.files import is_run


class Usable(NamedTuple):
    """The runs that can be executed."""

    run_dirs: list[Path]
    first: Experiment
    """Of the first of them: the settings of the sweep."""
    damaged: int
    """How many others there are."""


def usable_runs(sweep_dir: Path, names: Sequence[str]) -> Usable:
    """
    The runs of a sweep, without those that are damaged or gone: of each of these it warns.

    Raises:
        ConfigError: none is left.
        NotImported: the class of a run cannot be imported here.
    """
    problems = sweep_damage(sweep_dir)
    run_dirs: list[Path] = []
    first: Experiment | None = None
    for name in names:
        run_dir = sweep_dir / name
        if not run_dir.is_symlink() and not run_dir.is_dir():
            warn(f"missing: {one_line(run_dir)}")
        elif why := _damage(run_dir):
            problems.append(f"damaged: {run_dir}: {why}")
        elif first is not None and read_state(run_dir) in RESULTS:
            run_dirs.append(run_dir)  # as a rule it is not executed again
        else:
            try:
                experiment = check(read_config(run_dir))
                first = first or experiment
                run_dirs.append(run_dir)
            except NotImported as error:  # the run is not to blame, and others may need the same class
                raise NotImported(f"{run_dir}: {error}") from None
            except ConfigError as error:
                problems.append(f"damaged: {run_dir}: {error}")
    for problem in problems:
        warn(one_line(problem))
    if first is None:
        raise ConfigError(f"{sweep_dir} holds no run that can be executed")
    return Usable(run_dirs, first, len(problems))


def first_experiment(sweep_dir: Path, names: Sequence[str]) -> Experiment:
    """The experiment of a sweep's first run that can be read; raises ConfigError where none can."""
    for name in names:
        try:
            return check(read_config(sweep_dir / name))
        except ConfigError:
            continue
    raise ConfigError(f"{sweep_dir} holds no run that can be read")


def _damage(run_dir: Path) -> str:
    """Why a run cannot be executed, whatever its configuration says; empty where it can."""
    if run_dir.is_symlink():
        return "it is a link; the runs of a sweep are folders in it"
    if printable(run_dir.name) != run_dir.name:
        return "its name has control characters"
    if not is_run(run_dir):
        return "it has no config.yaml"
    return find_damage(run_dir) or find_yaml_damage(run_dir)
