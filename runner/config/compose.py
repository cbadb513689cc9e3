"""Command line and `conf/` -> one configuration, by Hydra. The only module that uses Hydra's internals.

`@hydra.main` would create the run directory before the configuration is checked and swallow errors; the public compose
API has no sweepers, no `--cfg` and no tab completion. So the `Hydra` object is driven directly.
"""

from __future__ import annotations

import argparse
import io
import logging
import secrets
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

from hydra import version
from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.bash_completion import BashCompletion
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core import plugins, singleton
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.errors import ConfigCompositionException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.secrets import refuse_secrets
from meshrunner.runner.commands import COMMANDS
from meshrunner.runner.commands.parser import suggestion
from meshrunner.runner.config.hydra_errors import faults_of_hydra, missing_key
from meshrunner.runner.config.no_effect import refuse, without_effect
from meshrunner.runner.config.overrides import as_typed, check_number, left_to_jobs, prepared
from meshrunner.runner.console import warn

PRIMARY_CONFIG = "run"
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
OF_THE_SCAN = (plugins.__file__, singleton.__file__)
"""Files of Hydra's that import its plugins."""


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
    parser.error = partial(_usage_error, verb)  # type: ignore[method-assign]
    args: argparse.Namespace = parser.parse_intermixed_args(arguments)  # flags may stand between overrides
    args.parser = parser
    args.overrides = prepared(args.overrides)
    return args


def _usage_error(verb: str, message: str) -> NoReturn:
    hint = suggestion(COMMANDS[verb], message)
    if "--baseline" in message:  # a flag of `compare`
        message += "; the baseline of a sweep is a key: sweep.baseline=KEY=VALUE"
    raise ConfigError(f"{message}.{hint} `meshrunner {verb} --help` lists flags and keys")


def _check_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that would have no effect."""
    if args.config_path:
        raise ConfigError("--config-path would replace meshrunner's own options; --config-dir adds yours")
    if args.experimental_rerun:
        raise ConfigError("--experimental-rerun: `meshrunner resume DIR` executes a run or sweep directory again")
    if args.resolve and not (args.cfg or args.help):
        raise ConfigError("--resolve belongs to --cfg or --help")
    if args.package and not args.cfg:
        raise ConfigError("--package belongs to --cfg")
    modes = {"--run": args.run, "--multirun": args.multirun, "--cfg": args.cfg, "--info": args.info}
    if len(given := [flag for flag, value in modes.items() if value]) > 1 and not (args.help or args.hydra_help):
        raise ConfigError(f"{' and '.join(given)} exclude each other")


class Composer:
    """Hydra, set up for one command line. Raises ConfigError, or Hydra's own exceptions, for wrong overrides."""

    def __init__(self, args: argparse.Namespace) -> None:
        version.setbase("1.3")
        _check_flags(args)
        self.args = args
        overrides = [*args.overrides, *(["hydra.mode=RUN"] if args.run else [])]
        self.given: dict[str, Any] = {"config_name": args.config_name or PRIMARY_CONFIG, "overrides": overrides}
        _load_plugins()
        path = create_config_search_path("pkg://meshrunner.conf")
        if args.config_dir is not None:
            folder = Path(args.config_dir).absolute()
            if not folder.is_dir():
                raise ConfigError(f"--config-dir: no such directory: {folder}")
            path.prepend(provider="command-line", path=f"file://{folder}", anchor=SearchPathQuery(provider="schema"))
        OmegaConf.register_new_resolver("short_id", lambda: secrets.token_hex(3), use_cache=True, replace=True)
        OmegaConf.register_new_resolver("pick", _pick, replace=True)
        GlobalHydra.instance().clear()
        self.hydra = Hydra.create_main_hydra2("meshrunner", path)

    def answer_query(self) -> bool:
        """Answer a query that Hydra answers itself (--help, --cfg, --info, tab completion); False when there is none."""
        with faults_of_hydra():
            return self._answer()

    def helped(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """
        The configuration that --help is to explain, resolved, and Hydra's section as it stands.

        None without --help, and where `hydra.help` is the user's own.
        """
        if not self.args.help or self.args.hydra_help:
            return None
        mode = RunMode.MULTIRUN if self.args.multirun else RunMode.RUN
        with faults_of_hydra():
            config = self.hydra.compose_config(**self.given, run_mode=mode, with_log_configuration=False)
            hydra: Any = OmegaConf.to_container(config.hydra)
            shipped = OmegaConf.create(files("hydra.conf").joinpath("hydra/help/default.yaml").read_text())
            return (plain(_task(config)), hydra) if hydra["help"] == OmegaConf.to_container(shipped) else None

    def _answer(self) -> bool:
        args, hydra = self.args, self.hydra
        if args.help or args.hydra_help:
            show = hydra.app_help if args.help else hydra.hydra_help
            show(config_name=self.given["config_name"], args_parser=args.parser, args=args)
        elif args.cfg:
            self._show_config()
        elif args.shell_completion:
            hydra.shell_completion(**self.given)
        elif args.info:
            logging.raiseExceptions = False  # `--info | head`
            hydra.show_info(args.info, **self.given)
        else:
            return False
        return True

    def _show_config(self) -> None:
        args = self.args
        said = io.StringIO()
        try:
            with redirect_stderr(said):
                self.hydra.show_cfg(**self.given, cfg_type=args.cfg, package=args.package, resolve=args.resolve)
        except SystemExit:
            raise ConfigError(f"--package: {said.getvalue().strip()}") from None

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
        if OmegaConf.select(config, "hydra.mode") == RunMode.MULTIRUN:
            return None
        refuse(config, sweep=False)
        composed = resolve_config(config, None)
        for remark in without_effect(config, sweep=False):
            warn(remark)
        return composed

    def compose_sweep(self) -> DictConfig:
        """The configuration that the combinations of a sweep have in common, with Hydra's section."""
        config = self._compose(RunMode.MULTIRUN)
        refuse(config, sweep=True)
        # Here: Hydra's own sweeper puts the values into the overrides of each job.
        sections = OmegaConf.to_container(config, resolve=False)
        assert isinstance(sections, dict)
        hydra = sections.pop("hydra")
        refuse_secrets(sections)
        refuse_secrets({"hydra": hydra})
        if config.hydra.mode == RunMode.RUN:
            warn("-m makes it a sweep, whatever hydra.mode says")
        if config.hydra.runtime.choices["hydra/sweeper"] == "basic":
            grid = plain(config.hydra.sweeper)["params"] or {}
            if not isinstance(grid, dict):
                raise ConfigError("hydra.sweeper.params: expected keys with their values, such as {seed: '1,2'}")
            check_number([*(f"{key}={values}" for key, values in grid.items()), *typed(config.hydra.overrides.task)])
        for remark in without_effect(config, sweep=True):
            warn(remark)
        return config

    def sweep(self, config: DictConfig, ended: Callable[[Any], object]) -> None:
        """Run the sweeper: it passes batches of jobs to the launcher, which calls `ended` after each."""
        # As Hydra.multirun, which would compose the configuration again, with another time in the folder's name.
        callbacks = Callbacks(config)
        callbacks.on_multirun_start(config=config, config_name=self.given["config_name"])
        context = HydraContext(config_loader=self.hydra.config_loader, callbacks=callbacks)
        sweeper = Plugins.instance().instantiate_sweeper(config=config, hydra_context=context, task_function=ended)
        # It would compose every combination once more, and not say of which one an error is.
        sweeper.validate_batch_is_legal = lambda batch: None  # type: ignore[method-assign]
        sweeper.sweep(arguments=typed(config.hydra.overrides.task))
        callbacks.on_multirun_end(config=config, config_name=self.given["config_name"])

    def grid(self, config: DictConfig) -> list[list[str]]:
        """
        The overrides of every combination of a sweep, without starting any.

        Raises:
            ConfigError: the sweeper chooses as results come in; HydraException as it raises it for overrides that are wrong.
        """
        if config.hydra.sweeper._target_ != BASIC_SWEEPER:
            raise ConfigError("hydra/sweeper: only a grid has combinations that are known before anything runs")
        params = plain(config.hydra.sweeper).get("params") or {}
        given = [*(f"{key}={values}" for key, values in params.items()), *typed(config.hydra.overrides.task)]
        overrides = OverridesParser.create(config_loader=self.hydra.config_loader).parse_overrides(given)
        (combinations,) = BasicSweeper.split_arguments(overrides, None)
        return [list(overrides) for overrides in combinations]

    def _compose(self, mode: RunMode) -> DictConfig:
        """The configuration with Hydra's section; raises ConfigError for any launcher but meshrunner's."""
        with faults_of_hydra():
            try:
                config = self.hydra.compose_config(**self.given, run_mode=mode, with_log_configuration=False)
            except ConfigCompositionException as error:
                # Hydra composes what combinations have in common with the default option of a group that varies.
                given, group = self.given["overrides"], missing_key(error).partition(".")[0]
                if mode != RunMode.MULTIRUN or (left := left_to_jobs(given, group)) == given:
                    raise
                self.given["overrides"] = left
                config = self.hydra.compose_config(**self.given, run_mode=mode, with_log_configuration=False)
        launcher = str(OmegaConf.select(config, "hydra.launcher._target_"))
        # Another one would call an empty function for every job and report success.
        if not launcher.startswith("hydra_plugins.meshrunner."):
            raise ConfigError(f"hydra.launcher: {launcher} starts no workers; use hydra/launcher=local")
        return config


def _load_plugins() -> None:
    """Let Hydra scan its plugins; raises ConfigError that names one that cannot be imported."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            Plugins.instance()
        except (Exception, SystemExit) as error:
            files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
            own = [file for file in files if Path(file).is_file() and file not in (__file__, *OF_THE_SCAN)]
            file = error.filename if isinstance(error, SyntaxError) else next(iter(own), "")
            raise ConfigError(
                f"the Hydra plugin {file} cannot be imported: {type(error).__name__}: {error}; mend or uninstall it"
            ) from None
    for each in caught:
        warn(" ".join(str(each.message).split()))


def _pick(key: Any, table: DictConfig, default: Any = None) -> Any:
    """`${pick:${parallelism.kind},{fsdp1:always},except_last}`: the table's value for a key, or the default."""
    return table.get(key, default)


def resolve_config(config: DictConfig, run_dir: Path | None) -> Composed:
    """Remove Hydra's section from a composed configuration and resolve the rest. run_dir None: `hydra.run.dir`."""
    task = _task(config)
    if missing := sorted(OmegaConf.missing_keys(task)):
        raise ConfigError("These keys have no value yet (???): " + ", ".join(missing))
    refuse_secrets(OmegaConf.to_container(task, resolve=False))
    choices = plain(config.hydra.runtime.choices)
    return Composed(
        config=plain(task),
        run_dir=(run_dir or Path(config.hydra.run.dir)).absolute(),
        overrides={
            "task": as_typed(typed(config.hydra.overrides.task)),
            "choices": {
                group: choice
                for group, choice in choices.items()
                if not group.startswith("hydra/") and "@" not in group
            },
        },
        launcher=plain(config.hydra.launcher),
    )


def _task(config: DictConfig) -> DictConfig:
    """A composed configuration without Hydra's section, to which it may refer nevertheless."""
    setup_globals()
    HydraConfig.instance().set_config(config)
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


def typed(overrides: ListConfig) -> list[str]:
    """Hydra's record of overrides, not resolved: in `seed=1,2 micro_batch=${seed}` each job has a value of its own."""
    found = OmegaConf.to_container(overrides, resolve=False)  # iterating over it would resolve them, once for all jobs
    assert isinstance(found, list)
    return [str(override) for override in found]


def plain(config: DictConfig | ListConfig) -> dict[str, Any]:
    """A configuration as dicts and lists, resolved."""
    found = OmegaConf.to_container(config, resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}
