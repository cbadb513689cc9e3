"""`meshrunner submit`: write run directories and submit their runs to SLURM, or submit unfinished runs again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner import shipped
from meshrunner.runner.commands.parser import split
from meshrunner.runner.config.compose import Composed, Composer
from meshrunner.runner.config.experiment import check
from meshrunner.runner.config.hydra.overrides import parse
from meshrunner.runner.config.resumable import usable_runs
from meshrunner.runner.launch.outcome import exit_status
from meshrunner.runner.rundir import JsonFile, read_config, read_state, run_names, unreadable, write_run_list
from meshrunner.runner.rundir.files import SLURM_SETTINGS, TUNE, is_run
from meshrunner.runner.slurm.settings import Slurm
from meshrunner.runner.slurm.submit import submit_runs, to_submit, wait
from meshrunner.runner.sweep.hydra_launchers import composer_of, run_sweep
from meshrunner.runner.sweep.results import finish_sweep
from meshrunner.runner.verbs.launching.place import write_run
from meshrunner.runner.verbs.reference.queries import answered

USAGE = "usage: meshrunner submit [OVERRIDES] [-m], or meshrunner submit DIR [hydra.launcher.KEY=VALUE]"


def submit(arguments: list[str]) -> int:
    """Submit runs and return the exit status. Raise ConfigError if the arguments are invalid or SLURM rejects a script."""
    options, arguments = split("submit", arguments)
    dry_run = ["hydra.launcher.dry_run=true"] * options.dry_run
    overrides = parse("submit", arguments).overrides
    directories = [each for each in overrides if "=" not in each and not each.startswith("~")]
    if directories:
        if len(directories) > 1 or len(overrides) < len(arguments):
            raise ConfigError(USAGE)
        if not Path(directories[0]).is_dir():
            raise ConfigError(f"no such directory: {directories[0]}\n{USAGE}")
        rest = [each for each in overrides if each != directories[0]]
        return submit_again(Path(directories[0]).absolute(), rest + dry_run)
    if {"hydra/launcher=local", "hydra/launcher=place"} & set(arguments):
        raise ConfigError(
            "hydra/launcher: `submit` hands runs over to SLURM; use `meshrunner run` or `meshrunner place` instead"
        )
    if not any(argument.startswith("hydra/launcher=") for argument in arguments):
        arguments = [*arguments, "hydra/launcher=slurm"]
    composer = Composer("submit", arguments + dry_run)
    if answered(composer):
        return 0
    composed = composer.single_run()
    return run_sweep(composer) if composed is None else submit_one(composed)


def submit_one(composed: Composed) -> int:
    """Submit a single run and return the exit status."""
    settings = Slurm.read(composed.launcher)
    composed = settings.apply_to(composed)
    experiment, plan = write_run(composed, settings.workers, here=False, dry_run=settings.dry_run)
    submit_runs(composed.run_dir, {composed.run_dir: experiment}, settings, plans={composed.run_dir: plan})
    return _wait_for_one(composed.run_dir) if settings.wait and not settings.dry_run else 0


def submit_again(folder: Path, overrides: Sequence[str]) -> int:
    """Submit the unfinished runs of a directory. `overrides` change the settings of the directory's last submission."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    # A run of a sweep has the settings of the sweep, unless it was submitted separately.
    known = shipped.values(shipped.LAUNCHER, "slurm") | (_settings(folder) or _settings(folder.parent))
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        prefix, _, key = str(override.key_or_group).rpartition(".")
        if prefix != "hydra.launcher":
            raise ConfigError(
                f"{override.key_or_group}: the run directories already exist; only hydra.launcher.KEY=VALUE can be changed"
            )
        known[key] = override.value()
    settings = Slurm.read(known)
    if (folder / TUNE).exists():
        return run_sweep(composer_of(folder, ["hydra/launcher=slurm", *overrides]))
    single = is_run(folder)
    if single:
        run_dirs, names, rerun, damaged = [folder], [], [], 0
    else:
        names = run_names(folder)
        if not names:
            raise ConfigError(f"{folder} is neither a run directory nor a sweep directory")
        if not settings.dry_run:
            write_run_list(folder)  # runs.txt may be missing or out of date
        run_dirs, first, damaged = usable_runs(folder, names)
        rerun = first.sweep.rerun
    todo = to_submit(run_dirs, rerun, quiet=settings.dry_run)
    if todo or not single:
        submit_runs(folder, {run_dir: check(read_config(run_dir)) for run_dir in todo}, settings, names)
    if not settings.wait or settings.dry_run:
        return int(damaged > 0)
    if single:
        return _wait_for_one(folder)
    status = wait(run_dirs)
    finish_sweep(folder)
    return status or int(damaged > 0)


def _settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a directory's last submission, or {} if there is none. Raise ConfigError if the file is damaged."""
    try:
        return JsonFile.load(folder / SLURM_SETTINGS).as_json()
    except (OSError, ValueError) as error:
        why = unreadable(SLURM_SETTINGS, error)
        raise ConfigError(f"{folder}: {why}; delete {SLURM_SETTINGS} to use the defaults") from None


def _wait_for_one(run_dir: Path) -> int:
    wait([run_dir])
    return exit_status(read_state(run_dir))
