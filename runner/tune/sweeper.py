"""`hydra/sweeper=tune`: finds the fastest combination that fits. It predicts all combinations and runs a few of them in waves.

The runs of a wave follow each other closely, and each wave repeats the best combination so far. Changes of the machine's speed
between waves thus cancel out. The repeat number in a run's name is the number of its wave, so `compare` treats waves as
rounds. All decisions depend only on the runs on disk, so the same command continues an interrupted search.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.compose import grid, plain, resolve_config
from meshrunner.runner.config.experiment import check
from meshrunner.runner.console import say, shown
from meshrunner.runner.launch.nodes import workers_of_sweep
from meshrunner.runner.rundir.files import MULTIRUN, TUNE, write_json
from meshrunner.runner.slurm.settings import Slurm
from meshrunner.runner.slurm.submit import submit_search
from meshrunner.runner.sweep.combinations import Target
from meshrunner.runner.sweep.execute_all import execute_all
from meshrunner.runner.sweep.hydra_launchers import StopSweep
from meshrunner.runner.tune.answer import report
from meshrunner.runner.tune.search import Search
from meshrunner.runner.tune.survey import survey


def tune(loader: Any, config: DictConfig, ended: Callable[[int], object]) -> None:
    """Search for the fastest combination and print the answer. Call `ended` with the exit status of each wave of runs.
    Raise ConfigError if settings are wrong, or StopSweep if the sweep must stop."""
    sweep_dir = Path(config.hydra.sweep.dir).absolute()
    launcher = str(config.hydra.launcher._target_)
    if launcher.endswith(".SlurmLauncher"):
        return _submit(loader, config, sweep_dir)
    if not launcher.endswith(".LocalLauncher"):
        raise ConfigError(
            "hydra/launcher: tune must execute its runs; use hydra/launcher=local or hydra/launcher=slurm"
        )
    search = Search(sweep_dir, survey(loader, config, Target(workers_of_sweep)))
    say(f"sweep directory: {shown(search.sweep_dir)}")
    say("\n".join(search.survey.lines))
    OmegaConf.save(config, search.sweep_dir / MULTIRUN)
    while batch := search.next_batch():
        status, stop = execute_all(batch.place(), batch.combinations[0].experiment)
        ended(status)
        if stop:
            raise StopSweep
    report(loader, config, search)
    return None


def _submit(loader: Any, config: DictConfig, sweep_dir: Path) -> None:
    """Submit the search as one job. The job carries out the search in the sweep directory and executes the runs on its nodes."""
    settings = Slurm.read(plain(config.hydra.launcher))
    if settings.nodes is not None:
        raise ConfigError("hydra.launcher.nodes: not supported by tune; use launch.nodes")
    first = resolve_config(loader.load_sweep_config(config, grid(loader, config)[0]), None)
    if not settings.dry_run:
        sweep_dir.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(config, sweep_dir / MULTIRUN)
        if not (sweep_dir / TUNE).exists():
            write_json(sweep_dir / TUNE, {})
    submit_search(sweep_dir, check(first.config), settings)
