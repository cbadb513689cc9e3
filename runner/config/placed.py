"""Find the runs of a sweep directory that can be executed, and say why the others cannot."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from meshrunner.recipes.errors import ConfigError, NotImported
from meshrunner.runner.config.experiment import Experiment, check
from meshrunner.runner.console import one_line, warn
from meshrunner.runner.rundir import RESULTS, find_damage, read_config, read_state, sweep_damage
from meshrunner.runner.rundir.files import is_run


class Usable(NamedTuple):
    """The executable runs of a sweep."""

    run_dirs: list[Path]
    first: Experiment
    """The first run's experiment, which has the settings of the sweep."""
    damaged: int
    """Number of runs that cannot be executed."""


def usable_runs(sweep_dir: Path, names: Sequence[str]) -> Usable:
    """
    Return the executable runs of a sweep, and warn about each that is damaged or missing.

    Raise ConfigError if no run is left, and NotImported if the class of a run cannot be imported from this directory.
    """
    problems = [damage] if (damage := sweep_damage(sweep_dir)) else []
    run_dirs: list[Path] = []
    first: Experiment | None = None
    for name in names:
        run_dir = sweep_dir / name
        if not run_dir.is_symlink() and not run_dir.is_dir():
            warn(f"missing: {one_line(run_dir)}")
            continue
        try:
            if damage := find_damage(run_dir) if is_run(run_dir) else "it has no config.yaml":
                raise ConfigError(damage)
            if first is None or read_state(run_dir) not in RESULTS:  # most commands do not execute others again
                experiment = check(read_config(run_dir))
                first = first or experiment
            run_dirs.append(run_dir)
        except NotImported as error:  # the run is not damaged, and others may need the same class
            raise NotImported(f"{run_dir}: {error}") from None
        except ConfigError as error:
            problems.append(f"damaged: {run_dir}: {error}")
    for problem in problems:
        warn(one_line(problem))
    if first is None:
        raise ConfigError(f"{sweep_dir} holds no run that can be executed")
    return Usable(run_dirs, first, len(problems))


def first_experiment(sweep_dir: Path, names: Sequence[str]) -> Experiment:
    """Return the experiment of a sweep's first readable run; raise ConfigError if there is none."""
    for name in names:
        with suppress(ConfigError):
            return check(read_config(sweep_dir / name))
    raise ConfigError(f"{sweep_dir} holds no run that can be read")
