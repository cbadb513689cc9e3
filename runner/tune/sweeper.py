"""`hydra/sweeper=tune`: finds the fastest combination that fits. It predicts all, runs a few in waves, and learns from each wave.

The runs of a wave follow each other closely, and each wave runs the best combination so far again. Changes of the machine's speed
from wave to wave thus cancel out. The number of a wave is the number of the repeat in the names of its runs, so that `compare`
treats waves as rounds. All decisions depend on the runs on disk alone, so the same command continues after any interruption.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.console import say, shown
from meshrunner.runner.launch.nodes import workers_here
from meshrunner.runner.rundir.files import MULTIRUN
from meshrunner.runner.sweep.combinations import Target
from meshrunner.runner.sweep.execute_all import execute_all
from meshrunner.runner.sweep.hydra_launchers import StopSweep
from meshrunner.runner.tune.answer import report
from meshrunner.runner.tune.search import Search
from meshrunner.runner.tune.survey import survey

if TYPE_CHECKING:
    from collections.abc import Callable

    from omegaconf import DictConfig


def tune(loader: Any, config: DictConfig, ended: Callable[[int], object]) -> None:
    """Search for the fastest combination and print the answer. Call `ended` with the exit status of each wave of runs.

    Raise ConfigError if settings are wrong, or StopSweep if the sweep must stop.
    """
    if not str(config.hydra.launcher._target_).endswith(".LocalLauncher"):
        raise ConfigError("hydra/launcher: tune executes runs on this machine; use hydra/launcher=local")
    search = Search(Path(config.hydra.sweep.dir).absolute(), survey(loader, config, Target(workers_here)))
    say(f"sweep directory: {shown(search.sweep_dir)}")
    for line in search.survey.lines:
        say(line)
    OmegaConf.save(config, search.sweep_dir / MULTIRUN)
    while batch := search.next_batch():
        status, stop = execute_all(batch.place(), batch.combinations[0].experiment)
        ended(status)
        if stop:
            raise StopSweep
    report(loader, config, search)
