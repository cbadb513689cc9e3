"""A sweeper as Optuna's is: it hands over one batch, looks at what came of it, goes on, and returns nothing."""

import json
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

ConfigStore.instance().store(
    group="hydra/sweeper",
    name="tells",
    node={"_target_": "hydra_plugins.tells.Tells", "direction": "maximize", "key": "seed", "batches": [[1, 2], [3]]},
    provider="tests",
)


class Tells(Sweeper):
    """Writes what it is told to told.json: the value of every job."""

    def __init__(self, direction, key, batches):
        self.key, self.batches = key, batches

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        told = []
        for batch in self.batches:
            jobs = [(*arguments, f"{self.key}={value}") for value in batch]
            told += [job.return_value for job in self.launcher.launch(jobs, initial_job_idx=len(told))]
            Path("told.json").write_text(json.dumps(told))
