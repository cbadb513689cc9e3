"""The command line, declared once.

`COMMANDS` lists every verb with its arguments, options, help text and what Tab completes. `usage` renders help texts,
`parser` builds argparse parsers, and `runner/completion.py` answers the shell, all from that table.
"""

from __future__ import annotations

from meshrunner.runner.commands.command_table import COMMANDS
from meshrunner.runner.commands.declaration import Argument, Command, Flag

__all__ = ["COMMANDS", "Argument", "Command", "Flag"]
