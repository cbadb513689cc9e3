"""The direction in which an adaptive sweeper optimizes the objective."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.compose import typed
from meshrunner.runner.config.hydra.private import BASIC_SWEEPER
from meshrunner.runner.console import warn
from meshrunner.runner.figures import higher_is_better

MAXIMIZE = {
    "hydra.sweeper.direction": "maximize",
    "hydra.sweeper.optim.maximize": "true",
    "hydra.sweeper.ax_config.experiment.minimize": "false",
}
"""Key of the direction in the Optuna, Nevergrad and Ax sweepers -> the value that maximizes."""


def minimizes(config: DictConfig) -> bool:
    """Return whether the Optuna, Nevergrad or Ax sweeper minimizes."""
    direction, maximize, minimize = (OmegaConf.select(config, key) for key in MAXIMIZE)
    return getattr(direction, "name", direction) == "minimize" or maximize is False or minimize is True


def check_direction(config: DictConfig) -> None:
    """
    Warn if an adaptive sweeper searches for the worst objective.

    Raises:
        ConfigError: it minimizes an objective that is better when high, by its own default.
    """
    if config.hydra.sweeper._target_ == BASIC_SWEEPER:
        return
    objective, given = str(config.get("objective")), " ".join(typed(config.hydra.overrides.hydra))
    if minimizes(config) and higher_is_better(objective):
        if not any(key in given for key in MAXIMIZE):
            override = next(
                f"{key}={value}" for key, value in MAXIMIZE.items() if OmegaConf.select(config, key) is not None
            )
            raise ConfigError(f"hydra.sweeper minimizes, but a higher {objective} is better. Add {override}")
        warn(f"the sweeper minimizes {objective}, although higher is better")
    elif not minimizes(config) and not higher_is_better(objective):
        warn(f"the sweeper maximizes {objective}, although lower is better")
