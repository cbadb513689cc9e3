"""Wrap Hydra's private modules, so that no other module imports them. Hide differences between Hydra's releases."""

import traceback
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, Self

import hydra
import omegaconf
from hydra import version
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.core_plugins.bash_completion import BashCompletion
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core import plugins, singleton
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf

from meshrunner.recipes.errors import ConfigError

__all__ = ["BasicSweeper", "Callbacks", "Hydra", "create_config_search_path", "get_args_parser"]

BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
TUNE_SWEEPER = "hydra_plugins.meshrunner.TuneSweeper"
GRID_SWEEPERS = (BASIC_SWEEPER, TUNE_SWEEPER)
"""Sweepers whose combinations are all known before the first run. TUNE_SWEEPER predicts all combinations but runs only a few."""


def set_up_hydra() -> None:
    """Disable Hydra's emulation of version 1.1 and import all plugins. If a plugin fails, raise a ConfigError that names it."""
    # Hydra 1.3 imitates version 1.1 by default. Hydra 1.4 deprecates this call.
    if hydra.__version__.startswith("1.3."):
        version.setbase("1.3")
    try:
        Plugins.instance()
    except (Exception, SystemExit) as error:
        importers = (__file__, plugins.__file__, singleton.__file__)  # these files only import the plugin
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        own = [file for file in files if Path(file).is_file() and file not in importers]
        file = error.filename if isinstance(error, SyntaxError) else next(iter(own), "")
        raise ConfigError(
            f"the Hydra plugin {file} cannot be imported: {type(error).__name__}: {error}; fix or uninstall it"
        ) from None


class ReadOnce(CachingConfigRepository):
    """Repository that reads each YAML file once for all combinations of a sweep. When Hydra deep-copies the repository, the
    copy is the same object. `load_config` returns copies, because Hydra changes the configurations that it loads."""

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def load_config(self, config_path: str) -> ConfigResult | None:
        return deepcopy(super().load_config(config_path))


def register_resolver(name: str, resolver: Callable[..., Any], *, use_cache: bool = False) -> None:
    """Register an interpolation resolver with `register_new_resolver` (OmegaConf 2.3) or `register_resolver` (OmegaConf 2.4)."""
    name_of_function = "register_new_resolver" if omegaconf.__version__.startswith("2.3.") else "register_resolver"
    register: Callable[..., None] = getattr(OmegaConf, name_of_function)
    register(name, resolver, use_cache=use_cache, replace=True)


def complete(program: Hydra, config_name: str, line: str) -> list[str]:
    """Return Hydra's tab completions for the last word of `line`, a command line of overrides."""
    found: list[str] = BashCompletion(program.config_loader)._query(config_name, line)
    return found
