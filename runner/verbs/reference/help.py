"""`meshrunner help TERM`: explain a key, group or option. The command line itself answers `help VERB`."""

from __future__ import annotations

from meshrunner.runner.commands.parser import parse
from meshrunner.runner.console import say
from meshrunner.runner.shipped import also_in
from meshrunner.runner.verbs.reference.terms import explanation


def help(arguments: list[str]) -> int:
    """Explain a term; raises ConfigError with the nearest name for an unknown one."""
    given = parse("help", arguments)
    with also_in(given.config_dir):
        say(explanation(given.term))
    return 0
