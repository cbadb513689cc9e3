"""Parse Hydra's command line: overrides and Hydra's own flags."""

from __future__ import annotations

import argparse
from functools import partial
from typing import NoReturn

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.commands import COMMANDS
from meshrunner.runner.commands.parser import suggestion
from meshrunner.runner.config.hydra.overrides import prepared
from meshrunner.runner.config.hydra.private import get_args_parser


def parse(verb: str, arguments: list[str]) -> argparse.Namespace:
    """Parse overrides and Hydra's own flags; raise ConfigError if they cannot be read."""
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
        message += "; for a sweep use the key sweep.baseline=KEY=VALUE"
    raise ConfigError(f"{message}.{hint} `meshrunner {verb} --help` lists flags and keys")


def check_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that would have no effect."""
    if args.config_path:
        raise ConfigError("--config-path would replace meshrunner's own options; use --config-dir to add yours")
    if args.experimental_rerun:
        raise ConfigError("--experimental-rerun is not supported; `meshrunner resume DIR` runs a directory again")
    if args.resolve and not (args.cfg or args.help):
        raise ConfigError("--resolve has no effect without --cfg or --help")
    if args.package and not args.cfg:
        raise ConfigError("--package has no effect without --cfg")
    modes = {"--run": args.run, "--multirun": args.multirun, "--cfg": args.cfg, "--info": args.info}
    if len(given := [flag for flag, value in modes.items() if value]) > 1 and not (args.help or args.hydra_help):
        raise ConfigError(f"{' and '.join(given)} cannot be combined; use one of them")
