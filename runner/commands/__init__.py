"""The command line, declared once in `COMMANDS`: help texts, parsers and Tab completion follow from it."""

from __future__ import annotations

from meshrunner.runner.commands.command_table import COMMANDS
from meshrunner.runner.commands.declaration import Argument, Command, Flag

__all__ = ["COMMANDS", "Argument", "Command", "Flag"]
