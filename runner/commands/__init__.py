"""The command line, declared once in `COMMANDS`. Help texts, parsers and Tab completion are generated from `COMMANDS`."""

from meshrunner.runner.commands.command_table import COMMANDS
from meshrunner.runner.commands.declaration import Argument, Command, Flag

__all__ = ["COMMANDS", "Argument", "Command", "Flag"]
