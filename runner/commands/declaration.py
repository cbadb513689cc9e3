"""The record types of the command table: NamedTuples, because importing `dataclasses` would double the time of `--help`."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Value = Literal["text", "number", "directory", "file", "term", "group"] | tuple[str, ...]
"""Type of a value, which decides what Tab offers: a `term` is a word that `help` explains, a tuple a fixed choice."""


class Argument(NamedTuple):
    """A positional argument of a verb."""

    name: str
    """Attribute of the parsed arguments that holds its value."""
    metavar: str
    help: str
    number: Literal["one", "optional", "any", "several"] = "one"
    """`any` allows none, `several` requires at least one."""
    value: Value = "directory"

    @property
    def synopsis(self) -> str:
        """The argument in a usage line: `DIR`, `[DIR]`, `[DIR...]` or `DIR [DIR...]`."""
        name = self.metavar
        forms = {"one": name, "optional": f"[{name}]", "any": f"[{name}...]", "several": f"{name} [{name}...]"}
        return forms[self.number]


class Option(NamedTuple):
    """An option of a verb."""

    flags: tuple[str, ...]
    """Its spellings, the longest last."""
    help: str
    metavar: str = ""
    """Name of its value in help texts; empty for an option without a value, `[NAME]` if the value may be omitted."""
    value: Value = "text"
    default: Any = None
    repeats: bool = False
    """Whether it may be given several times. Its value is then a list."""
    excludes: str = ""
    """Name of a set of options of which only one may be given."""
    hydra: bool = False
    """Whether Hydra parses it, not the verb."""

    @property
    def name(self) -> str:
        """Attribute of the parsed arguments that holds its value."""
        return self.flags[-1].lstrip("-").replace("-", "_")

    @property
    def synopsis(self) -> str:
        """The option in a list of options: `-m, --multirun`, `--html FILE`."""
        return f"{', '.join(self.flags)} {self.metavar}".rstrip()


HELP = Option(("-h", "--help"), "show this help")


class Command(NamedTuple):
    """A verb, implemented by the function of the same name in `runner/verbs/ROOM/VERB.py`."""

    verb: str
    room: str
    """Directory of its module, and its heading in `meshrunner --help`."""
    summary: str
    """One line about what it does."""
    arguments: tuple[Argument, ...] = ()
    """Positional arguments. A verb that also takes Hydra's overrides takes one or the other."""
    own_options: tuple[Option, ...] = ()
    """Options other than --help."""
    description: str = ""
    """More about it, in paragraphs separated by empty lines."""
    examples: tuple[str, ...] = ()
    fails_if: str = ""
    """Reason for exit status 1; empty if the verb never fails."""
    executes: bool = False
    """Whether it executes runs. Its result is then a run directory; that of other verbs is the text they print."""

    @property
    def module(self) -> str:
        """Full name of the module that implements it."""
        return f"meshrunner.runner.verbs.{self.room}.{self.verb}"

    @property
    def options(self) -> tuple[Option, ...]:
        """All options, --help included."""
        return (*self.own_options, HELP)

    @property
    def overrides(self) -> bool:
        """Whether it takes Hydra's overrides."""
        return any(option.hydra for option in self.own_options)

    @property
    def synopsis(self) -> str:
        """The verb with its arguments: `submit [OVERRIDES] [-m] | DIR`."""
        given = " ".join(argument.synopsis for argument in self.arguments)
        if self.overrides:
            sweeps = any("-m" in option.flags for option in self.own_options)
            given = f"[OVERRIDES]{' [-m]' * sweeps}{f' | {given}' if given else ''}"
        return f"{self.verb} {given}".rstrip()
