"""`Option`, the base class of all options that YAML can choose, and validators for the fields of options. A config group, such as
`model`, has a base class, such as `Model`. Its subclasses, such as `Llama`, are the options, and their fields are YAML keys.
Option modules import torch only inside functions, so that most configurations can be checked without torch."""

import difflib
import importlib
import sys
from collections.abc import Iterable
from enum import Flag, auto
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, WithJsonSchema
from pydantic_core import InitErrorDetails, PydanticCustomError


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` with the nearest known name, or "" if no name is near."""
    near = difflib.get_close_matches(word, list(known), 1, 0.5)
    return f" Did you mean '{near[0]}'?" if near else ""


def shortened(value: Any, length: int = 80) -> str:
    """Return the repr of a value, cut to `length` characters."""
    try:
        text = repr(value)
    except ValueError:  # an int with thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= length else f"{text[:length]}..."


def own_or_installed(module_name: str) -> ModuleType:
    """Import a module that the user named, preferably from the current directory. The current directory is last on sys.path, so
    that it does not shadow libraries. A plain import would therefore find a library's package `recipes` before the user's."""
    top = module_name.partition(".")[0]
    file = Path.cwd().joinpath(*module_name.split("."))
    here = file.with_suffix(".py").is_file() or (file / "__init__.py").is_file()
    spec = PathFinder.find_spec(top, [str(Path.cwd())]) if here and top not in sys.modules else None
    if spec is not None:
        sys.modules[top] = module_from_spec(spec)
        try:
            if spec.loader is not None:  # a directory without __init__.py has no loader
                spec.loader.exec_module(sys.modules[top])
        except BaseException:
            del sys.modules[top]
            raise
    return importlib.import_module(module_name)


NOT_IMPORTED = "kind_import"
"""Type of the pydantic error for a class that cannot be imported in the current directory."""


class Affects(Flag):
    """Effects of changing a configuration key. A field overrides its section's effects with `Annotated[int, Affects.SPEED]`."""

    NOTHING = 0
    SPEED = auto()
    """Time or memory of a step."""
    RESULT = auto()
    """The trained weights, or the steps that are measured. A run cannot be resumed after a change with this effect."""
    FIGURES = auto()
    """Results of the whole run, such as the final loss, but not the results of a single step."""
    CHANCE = auto()
    """Random numbers. Runs that differ only in keys with the effect CHANCE are repeats of each other."""
    FILES = auto()
    """Files that the run leaves behind."""
    DISPLAY = auto()
    """Output of a command on the terminal."""
    SWEEP = auto()
    """Execution of a sweep. A key with only the effect SWEEP does not change any single run."""


class Section(BaseModel):
    """An immutable part of the configuration that rejects unknown keys and wrong types, such as "3" or true for a number."""

    affects: ClassVar[Affects | None] = None
    """Effects of changing the section's keys; None: the same effects as in the enclosing section."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


class Option(Section):
    """Base class of all options of all config groups."""

    kinds: ClassVar[dict[str, str]] = {}

    kind: str
    """Class of this option: one of the group's short names, or `package.module:Class`."""

    def unsupported(self, device_type: str) -> str | None:
        """Return a reason and an alternative if devices of this type (`cpu` or `cuda`) cannot use the option, else None."""
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the class by name, so that a worker imports the class in the same way as `resolve` does."""
        return _blank, (type(self).__module__, type(self).__qualname__), self.__getstate__()

    @classmethod
    def resolve(cls, kind: Any) -> "type[Option]":
        """Return the class that `kind` names. Raise PydanticCustomError with a suggested name if no class has this name."""
        if not isinstance(kind, str):
            raise PydanticCustomError("kind_type", f"expected a name, got {kind!r}")
        path = cls.kinds.get(kind, kind)
        if ":" not in path:
            raise PydanticCustomError(
                "kind_unknown",
                f"unknown kind '{kind}'.{did_you_mean(kind, cls.kinds)} Known: {', '.join(sorted(cls.kinds))}; "
                "or 'package.module:Class' for your own class",
            )
        module_name, _, class_name = path.partition(":")
        try:
            module = own_or_installed(module_name)
        except (Exception, SystemExit) as error:  # a user's module may raise anything
            why = f"{type(error).__name__}: {error}"
            if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
                top = module_name.partition(".")[0]
                why += f"; run the command in the directory that contains '{top}', or add that directory to PYTHONPATH"
            raise PydanticCustomError(NOT_IMPORTED, f"cannot import '{module_name}': {why}") from error
        found = getattr(module, class_name, None)
        if found is None:
            hint = did_you_mean(class_name, vars(module))
            raise PydanticCustomError(NOT_IMPORTED, f"module '{module_name}' has no '{class_name}'.{hint}")
        if not (isinstance(found, type) and issubclass(found, cls)):
            raise PydanticCustomError("kind_class", f"'{path}' is not a class derived from {cls.__name__}")
        if missing := ", ".join(sorted(getattr(found, "__abstractmethods__", ()))):
            raise PydanticCustomError(
                "kind_class", f"'{path}' does not define {missing}; see {cls.__module__}:{cls.__name__}"
            )
        return found


def _blank(module_name: str, class_name: str) -> Option:
    option: type[Option] = attrgetter(class_name)(own_or_installed(module_name))
    return option.__new__(option)


def chosen(base: type[Option], *, optional: bool = False) -> BeforeValidator:
    """Return a validator that builds an option of the class that `kind` names. Use: `model: Annotated[Model, chosen(Model)]`.
    optional: whether to accept null."""

    def choose(value: Any) -> Any:
        if isinstance(value, base) or (optional and value is None):
            return value
        if not isinstance(value, dict) or "kind" not in value:
            known = f"known kinds: {', '.join(sorted(base.kinds))}"
            raise PydanticCustomError(
                "kind_missing", f"expected a mapping with 'kind', got {shortened(value)}; {known}"
            )
        try:
            option = base.resolve(value["kind"])
        except PydanticCustomError as error:
            details = InitErrorDetails(type=error, loc=("kind",), input=value["kind"])
            raise ValidationError.from_exception_data(base.__name__, [details]) from None
        return option.model_validate(value)

    return BeforeValidator(choose)


def whole(*words: str | None, at_least: int = 1, at_most: int = 2**63 - 1) -> BeforeValidator:
    """Return a validator that accepts `words` (None is null) and whole numbers from `at_least` to `at_most`. `at_most` rejects
    probable typos: numbers that would fail late or exhaust memory. Use: `workers: Annotated[int | Auto, whole("auto")]`."""
    names = ["null" if word is None else f"'{word}'" for word in words]
    expected = " or ".join([f"a whole number of at least {at_least}", *names])
    number = {"type": "integer", "minimum": at_least, "maximum": at_most}
    others = [{"type": "null"} if word is None else {"const": word} for word in words]
    schema = WithJsonSchema({"anyOf": [number, *others]} if others else number)

    def check(value: Any) -> Any:
        right = type(value) is int and value >= at_least if not isinstance(value, str | None) else value in words
        if not right:
            raise PydanticCustomError("whole", f"expected {expected}, got {shortened(value)}")
        if isinstance(value, int) and value > at_most:
            raise PydanticCustomError("whole", f"expected at most {at_most:,}, got {shortened(value)}")
        return value

    return BeforeValidator(check, json_schema_input_type=Annotated[Any, schema])


Auto = Literal["auto"]
AutoCount = Annotated[int | Auto, whole("auto")]
Count = Annotated[int, whole()]
