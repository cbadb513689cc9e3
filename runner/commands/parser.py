"""Parse the arguments of verbs with argparse. For a wrong argument, raise a ConfigError that suggests the nearest option."""

import argparse
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.commands.command_table import COMMANDS
from meshrunner.runner.commands.declaration import Argument, Command, Flag
from meshrunner.runner.commands.usage import usage_lines

UNKNOWN = "unrecognized arguments: "
VALUE_MISSING = re.compile(r"argument (?:\S+/)?(?P<flag>\S+): expected one argument")
NUMBERS = {"one": None, "optional": "?", "any": "*", "several": "+"}


def parse(verb: str, arguments: Iterable[str]) -> argparse.Namespace:
    """Parse the arguments of a verb that takes no overrides; raise ConfigError for wrong arguments."""
    parser = Parser(COMMANDS[verb])
    return parser.parse_intermixed_args(parser.with_values(arguments))


def split(verb: str, arguments: Iterable[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse a verb's own options. Return the options and the remaining arguments, which Hydra parses."""
    parser = Parser(COMMANDS[verb])
    return parser.parse_known_args(parser.with_values(arguments))


def existing(directory: Path) -> Path:
    """Return the absolute path of a directory; raise ConfigError if the directory does not exist."""
    if not directory.is_dir():
        raise ConfigError(f"no such directory: {directory}")
    return directory.absolute()


def suggestion(command: Command, message: str) -> str:
    """Return ` Did you mean OPTION?` with the option nearest to a rejected word, or "" if no option is similar."""
    from meshrunner.recipes.option import did_you_mean  # not at the top: it imports pydantic

    unknown = message.removeprefix(UNKNOWN).split() if message.startswith(UNKNOWN) else []
    flags = [flag for option in command.options for flag in option.flags if flag.startswith("--")]
    found = (did_you_mean(word.partition("=")[0], flags) for word in unknown if word.startswith("--"))
    return next(filter(None, found), "")


class Parser(argparse.ArgumentParser):
    """Parser for the options of a verb and, if the verb takes no overrides, for its positional arguments."""

    def __init__(self, command: Command) -> None:
        super().__init__(prog=f"meshrunner {command.verb}", add_help=False, allow_abbrev=False)
        self.command = command
        self.own = [option for option in command.own_options if not option.hydra]
        for argument in () if command.overrides else command.arguments:
            number, convert = NUMBERS[argument.number], partial(_converted, argument)
            self.add_argument(argument.name, metavar=argument.metavar, nargs=number, type=convert)
        exclusive = self.add_mutually_exclusive_group() if any(each.exclusive for each in self.own) else self
        for option in self.own:
            target = exclusive if option.exclusive else self
            if option.metavar:
                action, default = ("append", []) if option.repeats else ("store", option.default)
                target.add_argument(*option.flags, action=action, default=default, type=partial(_converted, option))
            else:
                target.add_argument(*option.flags, action="store_true")

    def with_values(self, arguments: Iterable[str]) -> list[str]:
        """Join an option with its value if the value starts with `-`: argparse would read `--sort -mfu` as two options."""
        flags = {flag for option in self.own if option.metavar for flag in option.flags}
        found: list[str] = []
        for word in arguments:
            if found and found[-1] in flags and word.startswith("-") and not word.startswith("--"):
                found[-1] += f"={word}"
            else:
                found.append(word)
        return found

    def error(self, message: str) -> NoReturn:
        if missing := VALUE_MISSING.fullmatch(message):
            (option,) = (each for each in self.own if missing["flag"] in each.flags)
            message = f"{missing['flag']} needs a value: {missing['flag']} {option.metavar}"
        usage = "\n".join(usage_lines(self.command))
        raise ConfigError(f"{self.prog}: {message}.{suggestion(self.command, message)}\n{usage}")


def _converted(given: Argument | Flag, text: str) -> Any:
    if not text:
        raise argparse.ArgumentTypeError(f"expected {given.metavar}, got an empty string")
    if given.value == "number":
        try:
            return int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    return Path(text) if given.value in ("directory", "file") else text
