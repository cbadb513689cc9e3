"""Hydra's launchers `local`, `slurm` and `place`, and its sweeper `tune`.

Every Hydra program in the environment imports this file, so keep its imports few. Do not use
`from __future__ import annotations` or dataclasses, because Hydra executes this file before adding it to sys.modules.
"""

from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper

for name, launcher in (("local", "LocalLauncher"), ("place", "PlaceLauncher")):
    ConfigStore.instance().store(
        group="hydra/launcher",
        name=name,
        node={"_target_": f"hydra_plugins.meshrunner.{launcher}"},
        provider="meshrunner",
    )

ConfigStore.instance().store(
    group="hydra/sweeper",
    name="tune",
    node={"_target_": "hydra_plugins.meshrunner.TuneSweeper", "params": None},
    provider="meshrunner",
)


class LocalLauncher(Launcher):
    """Runs the jobs of a sweep on this node."""

    def setup(self, *, hydra_context, task_function, config):
        # Jobs do not call task_function. The launcher calls it with each batch of jobs that has ended.
        self.context, self.config, self.ended = hydra_context, config, task_function

    def launch(self, job_overrides, initial_job_idx):
        from meshrunner.runner.sweep.hydra_launchers import launch_local

        return launch_local(self.context.config_loader, self.config, job_overrides, initial_job_idx, self.ended)


class SlurmLauncher(LocalLauncher):
    """Submits the jobs of a sweep to SLURM."""

    def __init__(self, **_):
        """Ignore the instantiated settings. The launcher reads plain values from the configuration."""

    def launch(self, job_overrides, initial_job_idx):
        from meshrunner.runner.sweep.hydra_launchers import launch_slurm

        return launch_slurm(self.context.config_loader, self.config, job_overrides, initial_job_idx, self.ended)


class PlaceLauncher(LocalLauncher):
    """Writes the run directories of a sweep without starting any run."""

    def launch(self, job_overrides, initial_job_idx):
        from meshrunner.runner.sweep.hydra_launchers import launch_place

        return launch_place(self.context.config_loader, self.config, job_overrides, initial_job_idx)


class TuneSweeper(Sweeper):
    """Predicts all combinations of a sweep, and runs a few to find the fastest."""

    def __init__(self, **_):
        """Ignore the instantiated settings. The sweeper reads plain values from the configuration."""

    def setup(self, *, hydra_context, task_function, config):
        self.context, self.config, self.ended = hydra_context, config, task_function

    def sweep(self, arguments):
        from meshrunner.runner.tune.sweeper import tune

        tune(self.context.config_loader, self.config, self.ended)
