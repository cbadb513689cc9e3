"""Command line and `conf/` -> one configuration, by Hydra. The only module that uses Hydra's internals.

`@hydra.main` would create the run directory before the configuration is checked and swallow errors; the public compose
API has no sweepers, no `--cfg` and no tab completion. So the `Hydra` object is driven directly.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.core_plugins.bash_completion import BashCompletion
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.secrets import FROM_ENVIRONMENT, WHERE, is_secret

PRIMARY_CONFIG = "run"


@dataclass(frozen=True)
class Composed:
    """A configuration and where it came from."""

    config: dict[str, Any]
    """The resolved configuration, without Hydra's section."""
    run_dir: Path
    overrides: dict[str, Any]
    """The overrides that the user typed (`task`) and the option chosen of each group (`choices`)."""
    launcher: dict[str, Any] = field(default_factory=dict)
    """`hydra.launcher`, resolved."""

    @property
    def submits(self) -> bool:
        """Whether the launcher submits runs to SLURM."""
        return str(self.launcher.get("_target_")).endswith(".SlurmLauncher")


def parse(verb: str, arguments: list[str]) -> argparse.Namespace:
    """Parse Hydra's command line: overrides and Hydra's own flags."""
    parser = get_args_parser()
    parser.prog = f"meshrunner {verb}"
    args: argparse.Namespace = parser.parse_intermixed_args(arguments)  # flags may stand between overrides
    args.parser = parser
    # launch.env takes any variable: one that is not in the configuration yet needs no plus sign.
    args.overrides = [f"++{o}" if o.startswith("launch.env.") else o for o in args.overrides]
    return args


class Composer:
    """Hydra, set up for one command line. Raises ConfigError, or Hydra's own exceptions, for wrong overrides."""

    def __init__(self, args: argparse.Namespace) -> None:
        version.setbase("1.3")
        if args.config_path:
            raise ConfigError("--config-path would replace meshrunner's own options; --config-dir adds yours")
        self.args = args
        self.given = {"config_name": args.config_name or PRIMARY_CONFIG, "overrides": args.overrides}
        path = create_config_search_path("pkg://meshrunner.conf")
        if args.config_dir is not None:
            folder = Path(args.config_dir).absolute()
            if not folder.is_dir():
                raise ConfigError(f"--config-dir: there is no folder {folder}")
            path.prepend(provider="command-line", path=f"file://{folder}", anchor=SearchPathQuery(provider="schema"))
        OmegaConf.register_new_resolver("short_id", lambda: secrets.token_hex(3), use_cache=True, replace=True)
        OmegaConf.register_new_resolver("pick", _pick, replace=True)
        GlobalHydra.instance().clear()
        self.hydra = Hydra.create_main_hydra2("meshrunner", path)

    def answer_query(self) -> bool:
        """Answer a query that Hydra answers itself (--help, --cfg, --info, tab completion); False when there is none."""
        args, hydra = self.args, self.hydra
        if args.help or args.hydra_help:
            show = hydra.app_help if args.help else hydra.hydra_help
            show(config_name=self.given["config_name"], args_parser=args.parser, args=args)
        elif args.cfg:
            hydra.show_cfg(**self.given, cfg_type=args.cfg, package=args.package, resolve=args.resolve)
        elif args.shell_completion:
            hydra.shell_completion(**self.given)
        elif args.info:
            hydra.show_info(args.info, **self.given)
        else:
            return False
        return True

    def completions(self, word: str) -> list[str]:
        """What a shell may complete an override to, after the overrides of this command line."""
        mode = ["--multirun"] if self.args.multirun else []
        line = " ".join([*mode, *self.given["overrides"], word])
        found: list[str] = BashCompletion(self.hydra.config_loader)._query(self.given["config_name"], line)
        return found

    def single_run(self) -> Composed | None:
        """The configuration of a single run; None for a sweep (`-m`, or `hydra.mode: MULTIRUN` in a file)."""
        if self.args.multirun:
            return None
        config = self._compose(RunMode.RUN)
        return None if OmegaConf.select(config, "hydra.mode") == RunMode.MULTIRUN else resolve_config(config, None)

    def sweep(self, ended: Callable[[Any], object]) -> None:
        """Run the sweeper: it passes batches of jobs to the launcher, which calls `ended` after each."""
        self._compose(RunMode.MULTIRUN)
        self.hydra.multirun(**self.given, task_function=ended, with_log_configuration=False)

    def _compose(self, mode: RunMode) -> DictConfig:
        """The configuration with Hydra's section; raises ConfigError for any launcher but meshrunner's."""
        config = self.hydra.compose_config(**self.given, run_mode=mode, with_log_configuration=False)
        launcher = str(OmegaConf.select(config, "hydra.launcher._target_"))
        # Another one would call an empty function for every job and report success.
        if not launcher.startswith("hydra_plugins.meshrunner."):
            raise ConfigError(f"hydra/launcher: {launcher} starts no workers; use hydra/launcher=local")
        return config


def _pick(key: Any, table: DictConfig, default: Any = None) -> Any:
    """`${pick:${parallelism.kind},{fsdp1:always},except_last}`: the table's value for a key, or the default."""
    return table.get(key, default)


def resolve_config(config: DictConfig, run_dir: Path | None) -> Composed:
    """Remove Hydra's section from a composed configuration and resolve the rest. run_dir None: `hydra.run.dir`."""
    setup_globals()
    HydraConfig.instance().set_config(config)
    task = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    if missing := sorted(OmegaConf.missing_keys(task)):
        raise ConfigError("These keys have no value yet (???): " + ", ".join(missing))
    _refuse_secrets(OmegaConf.to_container(task, resolve=False))
    choices = plain(config.hydra.runtime.choices)
    return Composed(
        config=plain(task),
        run_dir=(run_dir or Path(config.hydra.run.dir)).absolute(),
        overrides={
            "task": list(config.hydra.overrides.task),
            "choices": {group: choice for group, choice in choices.items() if not group.startswith("hydra/")},
        },
        launcher=plain(config.hydra.launcher),
    )


def _refuse_secrets(value: Any, key: str = "") -> None:
    """Raise ConfigError where a secret would be copied from the environment into the configuration."""
    if isinstance(value, dict | list):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_secrets(each, f"{key}.{name}".lstrip("."))
    elif isinstance(value, str):
        for name in filter(is_secret, FROM_ENVIRONMENT.findall(value)):
            raise ConfigError(f"{key}: ${{oc.env:{name}}}: the value is secret, as the name says: {WHERE}")


def plain(config: DictConfig | ListConfig) -> dict[str, Any]:
    """A configuration as dicts and lists, resolved."""
    found = OmegaConf.to_container(config, resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}
