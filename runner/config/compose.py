"""Compose one configuration from the YAML files in `conf/` and the overrides on the command line, with Hydra's class `Hydra`.
`@hydra.main` would swallow errors and create run directories for invalid configurations, and Hydra's public compose API supports
neither sweepers nor `--cfg` nor tab completion."""

import logging
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

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
from meshrunner.recipes.weights.hugging_face import expanded
from meshrunner.runner import shipped
from meshrunner.runner.config.hydra import private
from meshrunner.runner.config.hydra.hydra_errors import faults_of_hydra, missing_key
from meshrunner.runner.config.hydra.no_effect import refuse, without_effect
from meshrunner.runner.config.hydra.overrides import as_typed, check_flags, check_number, left_to_jobs, parse
from meshrunner.runner.console import warn
from meshrunner.runner.rundir import key_of

WIDE = 2048
"""Minimum `model.dim` at which the default `seq_len` causes a warning."""


@dataclass(frozen=True)
class Composed:
    """A configuration, its run directory, and the overrides from which it was composed."""

    config: dict[str, Any]
    """The configuration without its section `hydra`. All interpolations are resolved."""
    run_dir: Path
    overrides: dict[str, Any]
    """Mapping with two keys: `task` lists the overrides that the user typed; `choices` maps each group to the chosen option."""
    launcher: dict[str, Any] = field(default_factory=dict)
    """The resolved `hydra.launcher`."""


class Composer:
    """An instance of Hydra for one command line. All methods raise ConfigError or a Hydra exception if an override is invalid."""

    def __init__(self, verb: str, arguments: list[str]) -> None:
        args = parse(verb, arguments)
        check_flags(args)
        self.verb, self.args = verb, args
        overrides = [*args.overrides, *(["hydra.mode=RUN"] if args.run else [])]
        self.given: dict[str, Any] = {"config_name": args.config_name or "run", "overrides": overrides}
        private.set_up_hydra()
        path = private.create_config_search_path("pkg://meshrunner.conf")
        if args.config_dir is not None:
            folder = Path(args.config_dir).absolute()
            if not folder.is_dir():
                raise ConfigError(f"--config-dir: no such directory: {folder}")
            path.prepend(provider="command-line", path=f"file://{folder}", anchor=SearchPathQuery(provider="schema"))
        private.register_resolver("short_id", lambda: secrets.token_hex(3), use_cache=True)
        # ${pick:${parallelism.kind},{fsdp1:always},except_last} is `always` if the kind is fsdp1, else `except_last`.
        private.register_resolver("pick", lambda key, table, default=None: table.get(key, default))
        GlobalHydra.instance().clear()
        self.hydra = private.Hydra.create_main_hydra2("meshrunner", path)

    def answer_query(self) -> bool:
        """Print Hydra's answer to --help, --cfg or --info; return False if none of these flags was given."""
        args, hydra = self.args, self.hydra
        with faults_of_hydra():
            if args.help or args.hydra_help:
                show = hydra.app_help if args.help else hydra.hydra_help
                show(config_name=self.given["config_name"], args_parser=args.parser, args=args)
            elif args.cfg:
                try:
                    hydra.show_cfg(**self.given, cfg_type=args.cfg, package=args.package, resolve=args.resolve)
                except SystemExit:
                    raise ConfigError(f"--package: no such key: {args.package}") from None
            elif args.info:
                logging.raiseExceptions = False  # `--info | head` closes the pipe early
                hydra.show_info(args.info, **self.given)
            else:
                return False
        return True

    def helped(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return the configuration and its section `hydra`, or None if --help was not given or `hydra.help` was customised."""
        if not self.args.help or self.args.hydra_help:
            return None
        mode = RunMode.MULTIRUN if self.args.multirun else RunMode.RUN
        with faults_of_hydra():
            config = self.hydra.compose_config(**self.given, run_mode=mode, with_log_configuration=False)
            hydra: Any = OmegaConf.to_container(config.hydra)
            shipped = OmegaConf.create(files("hydra.conf").joinpath("hydra/help/default.yaml").read_text())
            return (plain(_task(config)), hydra) if hydra["help"] == OmegaConf.to_container(shipped) else None

    def completions(self, word: str) -> list[str]:
        """Return Hydra's completions of a word that follows this command line's overrides."""
        line = " ".join([*["--multirun"] * self.args.multirun, *self.given["overrides"], word])
        return private.complete(self.hydra, self.given["config_name"], line)

    def single_run(self) -> Composed | None:
        """Compose a single run; return None if the flag `-m` or the setting `hydra.mode: MULTIRUN` requests a sweep."""
        if self.args.multirun:
            return None
        config = self._compose(RunMode.RUN)
        if OmegaConf.select(config, "hydra.mode") == RunMode.MULTIRUN:
            return None
        composed = resolve_config(config, None)
        for remark in without_effect(config, sweep=False):
            warn(remark)
        return composed

    def compose_sweep(self) -> DictConfig:
        """Compose a sweep's configuration with its section `hydra`. The keys that the sweep varies keep their defaults."""
        loader: Any = self.hydra.config_loader
        loader.repository = private.ReadOnce(loader.repository)
        config = self._compose(RunMode.MULTIRUN)
        # Refuse secrets before Hydra's sweeper copies the values into the overrides of each job.
        sections: Any = OmegaConf.to_container(config, resolve=False)
        for section in sorted(sections, key="hydra".__eq__):
            refuse_secrets(sections[section], section)
        if config.hydra.sweeper._target_ in private.GRID_SWEEPERS:
            check_number(_of_grid(config))
        if config.hydra.mode == RunMode.RUN:
            warn("hydra.mode=RUN is ignored because -m requests a sweep")
        for remark in without_effect(config, sweep=True):
            warn(remark)
        return config

    def sweep(
        self, config: DictConfig, ended: Callable[[Any], object], jobs: Sequence[Sequence[str]] | None = None
    ) -> None:
        """Run Hydra's sweeper, which passes batches of jobs to the launcher. If `jobs` is given, launch these jobs as one batch
        instead. Each job is a list of overrides. The launcher calls `ended` after each batch."""
        # Hydra.multirun would compose the configuration again and put a later time into the name of the sweep directory.
        callbacks = private.Callbacks(config)
        callbacks.on_multirun_start(config=config, config_name=self.given["config_name"])
        context = HydraContext(config_loader=self.hydra.config_loader, callbacks=callbacks)
        common: dict[str, Any] = {"config": config, "hydra_context": context, "task_function": ended}
        if jobs is not None:
            Plugins.instance().instantiate_launcher(**common).launch(jobs, initial_job_idx=0)
        else:
            sweeper = Plugins.instance().instantiate_sweeper(**common)
            # Hydra's check would compose every combination again, and its errors would not name the combination.
            sweeper.validate_batch_is_legal = lambda batch: None  # type: ignore[method-assign]
            sweeper.sweep(arguments=typed(config.hydra.overrides.task))
        callbacks.on_multirun_end(config=config, config_name=self.given["config_name"])

    def _compose(self, mode: RunMode) -> DictConfig:
        """Compose the configuration, including its section `hydra`. Raise ConfigError if a setting of Hydra is not supported."""
        with faults_of_hydra():
            try:
                config = self.hydra.compose_config(**self.given, run_mode=mode, with_log_configuration=False)
            except ConfigCompositionException as error:
                # If a sweep varies a group, Hydra composes with the default option, which may lack keys of other options.
                given, group = self.given["overrides"], missing_key(error).partition(".")[0]
                if mode != RunMode.MULTIRUN or (left := left_to_jobs(given, group)) == given:
                    raise
                self.given["overrides"] = left
                config = self.hydra.compose_config(**self.given, run_mode=mode, with_log_configuration=False)
        launcher = str(OmegaConf.select(config, "hydra.launcher._target_"))
        # Other launchers would call an empty function for every job and report success.
        if not launcher.startswith("hydra_plugins.meshrunner."):
            raise ConfigError(f"hydra.launcher: {launcher} cannot start workers; use hydra/launcher=local")
        refuse(config, sweep=mode == RunMode.MULTIRUN)
        return config


def grid(loader: Any, config: DictConfig) -> list[list[str]]:
    """Return the overrides of each combination of a sweep. Raise ConfigError if the sweeper chooses combinations as it runs."""
    if config.hydra.sweeper._target_ not in private.GRID_SWEEPERS:
        raise ConfigError("hydra/sweeper: this sweeper chooses combinations while it runs; use hydra/sweeper=basic")
    parser = OverridesParser.create(config_loader=loader)
    (combinations,) = private.BasicSweeper.split_arguments(parser.parse_overrides(_of_grid(config)), None)
    return [list(overrides) for overrides in combinations]


def resolve_config(config: DictConfig, run_dir: Path | None) -> Composed:
    """Resolve the interpolations in a configuration and remove its section `hydra`. `run_dir` defaults to `hydra.run.dir`."""
    task = _task(config)
    if missing := sorted(OmegaConf.missing_keys(task)):
        raise ConfigError("these keys need a value (they are ??? in YAML): " + ", ".join(missing))
    refuse_secrets(OmegaConf.to_container(task, resolve=False))
    choices = plain(config.hydra.runtime.choices)
    return Composed(
        config=expanded(plain(task)),
        run_dir=(run_dir or Path(config.hydra.run.dir)).absolute(),
        overrides={
            "task": as_typed(typed(config.hydra.overrides.task)),
            "choices": {group: choice for group, choice in choices.items() if not re.search("^hydra/|@", group)},
        },
        launcher=plain(config.hydra.launcher),
    )


def warn_of_short_sequences(runs: Iterable[Composed]) -> None:
    """Warn once if a large model has the default seq_len. No option of `model` sets seq_len, so that models stay comparable."""
    default = shipped.top_level()["seq_len"]
    for run in runs:
        dim, typed = run.config["model"].get("dim"), "seq_len" in map(key_of, run.overrides["task"])
        if isinstance(dim, int) and dim >= WIDE and run.config["seq_len"] == default and not typed:
            usual = f"models with model.dim={dim} are usually trained on longer sequences, which take more memory"
            warn(
                f"seq_len={default} is the default for tiny models; {usual}. "
                f"Set seq_len=8192, or seq_len={default} to keep the default"
            )
            return


def _task(config: DictConfig) -> DictConfig:
    """Return a configuration without its section `hydra`. Interpolations such as `${hydra:job.num}` still work."""
    setup_globals()
    HydraConfig.instance().set_config(config)
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


def _of_grid(config: DictConfig) -> list[str]:
    """Return the overrides of a sweep: those in hydra.sweeper.params, then those typed by the user."""
    params = plain(config.hydra.sweeper).get("params") or {}
    return [*(f"{key}={values}" for key, values in params.items()), *typed(config.hydra.overrides.task)]


def typed(overrides: ListConfig) -> list[str]:
    """Return Hydra's list of overrides as text. Do not resolve interpolations: a sweep may vary `seed` in `steps=${seed}`."""
    found: Any = OmegaConf.to_container(overrides, resolve=False)  # iterating would resolve ${seed} once for all jobs
    return [str(override) for override in found]


def plain(config: DictConfig | ListConfig) -> dict[str, Any]:
    """Resolve a configuration and return it as plain dicts and lists."""
    found: Any = OmegaConf.to_container(config, resolve=True)
    return {str(key): value for key, value in found.items()}
