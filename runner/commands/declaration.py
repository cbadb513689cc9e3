"""Classes that declare verbs, arguments and options, written without `dataclasses`, whose import would slow `--help` down."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Literal, TypeAlias

    Value: TypeAlias = Literal["text", "number", "directory", "file", "term", "group"] | tuple[str, ...]
    """Type of a value, for Tab completion: `term` is a word that `meshrunner help` explains; a tuple lists the valid values."""


class Argument:
    """A positional argument, stored as `name` in the parser's result. `number`: `any` means 0 or more, `several` 1 or more."""

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
        """The argument as a usage line shows it: `DIR`, `[DIR]`, `[DIR...]` or `DIR [DIR...]`."""
        name = self.metavar
        forms = {"one": name, "optional": f"[{name}]", "any": f"[{name}...]", "several": f"{name} [{name}...]"}
        return forms[self.number]


class Flag:
    """An option of a verb, such as `--html FILE`. Hydra parses the option if `hydra` is true; otherwise meshrunner does.

    `spellings` are separated by commas, the longest last: `-m, --multirun`. `metavar` names the value in help texts: "" if the
    option takes no value, `[NAME]` if the value may be omitted. If `repeats` is true, the option may be given several times,
    and its value is a list. A user may give at most one of a verb's options that have `exclusive` set."""

    def __init__(
        self,
        spellings: str,
        help: str,
        metavar: str = "",
        value: Value = "text",
        *,
        default: Any = None,
        repeats: bool = False,
        exclusive: bool = False,
        hydra: bool = False,
    ) -> None:
        self.flags, self.help, self.metavar, self.value = spellings.split(", "), help, metavar, value
        self.default, self.repeats, self.exclusive, self.hydra = default, repeats, exclusive, hydra
        self.synopsis = f"{spellings} {metavar}".rstrip()
        """The option as a list of options shows it: `-m, --multirun` or `--html FILE`."""


HELP = Flag("-h, --help", "show this help")


class Command:
    """A verb, implemented by the function of the same name in `runner/verbs/PATH.py`. `path`: for example `launching/run`.

    A verb that takes Hydra overrides accepts either overrides or `arguments`. `fails_if` is the reason for exit status 1,
    `found_if` for exit status 3. A status whose reason is "" never occurs. `executes`: whether the verb executes runs.
    """

    def __init__(
        self,
        path: str,
        summary: str,
        arguments: tuple[Argument, ...] = (),
        own_options: tuple[Flag, ...] = (),
        *,
        description: str = "",
        examples: tuple[str, ...] = (),
        fails_if: str = "",
        found_if: str = "",
        executes: bool = False,
    ) -> None:
        self.room, _, self.verb = path.partition("/")
        self.summary, self.description, self.examples = summary, description, examples
        self.arguments, self.own_options = arguments, own_options
        self.fails_if, self.found_if, self.executes = fails_if, found_if, executes
        self.module = f"meshrunner.runner.verbs.{self.room}.{self.verb}"
        self.options = (*own_options, HELP)
        self.overrides = any(option.hydra for option in own_options)
        """Whether the verb takes Hydra's overrides."""

    @property
    def synopsis(self) -> str:
        """The verb and its arguments in a list of verbs: `submit [OVERRIDES] [-m] | DIR`."""
        given = " ".join(argument.synopsis for argument in self.arguments)
        if self.overrides:
            sweeps = any("-m" in option.flags for option in self.own_options)
            given = f"[OVERRIDES]{' [-m]' * sweeps}{f' | {given}' if given else ''}"
        return f"{self.verb} {given}".rstrip()
