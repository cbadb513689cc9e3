"""The record types of the command table: plain classes, because `dataclasses` and `typing` would slow down `--help`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Literal, TypeAlias

    Value: TypeAlias = Literal["text", "number", "directory", "file", "term", "group"] | tuple[str, ...]
    """Type of a value, which decides what Tab offers: a `term` is a word that `help` explains, a tuple a fixed choice."""


class Argument:
    """
    A positional argument of a verb.

    `name` is the attribute of the parsed arguments that holds its value. A `number` of `any` allows none, `several` requires one.
    """

    def __init__(
        self,
        name: str,
        metavar: str,
        help: str,
        number: Literal["one", "optional", "any", "several"] = "one",
        value: Value = "directory",
    ) -> None:
        self.name, self.metavar, self.help, self.number, self.value = name, metavar, help, number, value

    @property
    def synopsis(self) -> str:
        """The argument in a usage line: `DIR`, `[DIR]`, `[DIR...]` or `DIR [DIR...]`."""
        name = self.metavar
        forms = {"one": name, "optional": f"[{name}]", "any": f"[{name}...]", "several": f"{name} [{name}...]"}
        return forms[self.number]


class Flag:
    """An option of a verb."""

    def __init__(
        self,
        flags: tuple[str, ...],
        help: str,
        metavar: str = "",
        value: Value = "text",
        *,
        default: Any = None,
        repeats: bool = False,
        excludes: str = "",
        hydra: bool = False,
    ) -> None:
        """
        Declare an option.

        Args:
            flags: its spellings, the longest last.
            metavar: name of its value in help texts; empty for an option without a value, `[NAME]` if it may be omitted.
            repeats: whether it may be given several times; its value is then a list.
            excludes: name of a set of options of which only one may be given.
            hydra: whether Hydra parses it, not the verb.
        """
        self.flags, self.help, self.metavar, self.value = flags, help, metavar, value
        self.default, self.repeats, self.excludes, self.hydra = default, repeats, excludes, hydra

    @property
    def name(self) -> str:
        """Attribute of the parsed arguments that holds its value."""
        return self.flags[-1].lstrip("-").replace("-", "_")

    @property
    def synopsis(self) -> str:
        """The option in a list of options: `-m, --multirun`, `--html FILE`."""
        return f"{', '.join(self.flags)} {self.metavar}".rstrip()


HELP = Flag(("-h", "--help"), "show this help")


class Command:
    """A verb, implemented by the function of the same name in `runner/verbs/ROOM/VERB.py`."""

    def __init__(
        self,
        verb: str,
        room: str,
        summary: str,
        arguments: tuple[Argument, ...] = (),
        own_options: tuple[Flag, ...] = (),
        *,
        description: str = "",
        examples: tuple[str, ...] = (),
        fails_if: str = "",
        executes: bool = False,
    ) -> None:
        """
        Declare a verb.

        Args:
            room: directory of its module, and its heading in `meshrunner --help`.
            arguments: positional arguments; a verb that also takes Hydra's overrides takes one or the other.
            fails_if: reason for exit status 1; empty if the verb never fails.
            executes: whether it executes runs. Its result is then a run directory; that of other verbs is their output.
        """
        self.verb, self.room, self.summary, self.description, self.examples = verb, room, summary, description, examples
        self.arguments, self.own_options, self.fails_if, self.executes = arguments, own_options, fails_if, executes

    @property
    def module(self) -> str:
        """Full name of the module that implements it."""
        return f"meshrunner.runner.verbs.{self.room}.{self.verb}"

    @property
    def options(self) -> tuple[Flag, ...]:
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
