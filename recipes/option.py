"""The base class of everything that can be chosen in YAML.

A config group is a base class (`Model`, `Parallelism`, ...), and each of its options is a subclass: its pydantic fields are
the YAML keys, its methods do the work. The YAML names the class by `kind`: a short name from the `kinds` table of the base
class, or `my_package.module:MyClass` for a user's own class, which needs no registration.

The modules of options do not import torch at the top: a configuration is checked without it.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Flag, auto
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` with the nearest known name, or an empty string."""
    near = difflib.get_close_matches(word, list(known), 1, 0.5)
    return f" Did you mean '{near[0]}'?" if near else ""


def shortened(value: Any, length: int = 80) -> str:
    """A value as text that fits on a line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, a list inside itself
        text = f"a {type(value).__name__}"
    return text if len(text) <= length else f"{text[:length]}..."


def own_or_installed(module_name: str) -> ModuleType:
    """
    Import a module that a user named, from the current directory if it is there.

    The current directory is the last entry of sys.path, so that nothing in it shadows a library. For the user's own names
    that is too late: other distributions install a top-level `recipes`, and a folder without `__init__.py` loses to any.
    """
    top = module_name.partition(".")[0]
    file = Path.cwd().joinpath(*module_name.split("."))
    here = file.with_suffix(".py").is_file() or (file / "__init__.py").is_file()
    spec = PathFinder.find_spec(top, [str(Path.cwd())]) if here and top not in sys.modules else None
    if spec is not None:
        sys.modules[top] = module_from_spec(spec)
        try:
            if spec.loader is not None:  # a folder without __init__.py has none
                spec.loader.exec_module(sys.modules[top])
        except BaseException:
            del sys.modules[top]
            raise
    return importlib.import_module(module_name)


INT64 = 2**63 - 1
"""The largest number that torch, numpy and the file formats take."""


NOT_IMPORTED = "kind_import"
"""The error of a class that cannot be imported from where the command runs."""


class Affects(Flag):
    """
    The effects that a change of a configuration key has on a run.

    A section declares the effects of its keys in `affects`; a single field overrides them with `Annotated[int, Affects.SPEED]`.
    """

    NOTHING = 0
    SPEED = auto()
    """Time or memory of a step."""
    RESULT = auto()
    """The weights that are trained, or which steps are measured: a run does not continue with another value."""
    FIGURES = auto()
    """Figures of a whole run, such as its final loss, but of no single step."""
    CHANCE = auto()
    """Random numbers: runs that differ in nothing else are repeats of each other."""
    FILES = auto()
    """The files that are kept."""
    DISPLAY = auto()
    """The lines that a command prints."""
    SWEEP = auto()
    """The course of a sweep. A key that affects nothing else has no effect on a single run."""


class Section(BaseModel):
    """A part of the configuration: frozen, no unknown keys, no silent conversion ("3" is not 3, true is not 1)."""

    affects: ClassVar[Affects | None] = None
    """The effects of its keys; None: those of the section around it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


class Option(Section):
    """Base class of every option of every group."""

    kinds: ClassVar[dict[str, str]] = {}

    kind: str
    """The class of this option: a short name of this group, or `package.module:Class`."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the name of the class: a worker imports it as `resolve` did."""
        return _blank, (type(self).__module__, type(self).__qualname__), self.__getstate__()

    @classmethod
    def resolve(cls, kind: Any) -> type[Option]:
        """The class that `kind` names; raises PydanticCustomError with the known names and the nearest one."""
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
        except (Exception, SystemExit) as error:  # importing a user's module may raise anything
            why = f"{type(error).__name__}: {error}"
            if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
                top = module_name.partition(".")[0]
                why += f"; run the command in the folder in which '{top}' lies, or set PYTHONPATH to that folder"
            raise PydanticCustomError(NOT_IMPORTED, f"cannot import '{module_name}': {why}") from error
        found = getattr(module, class_name, None)
        if found is None:
            hint = did_you_mean(class_name, vars(module))
            raise PydanticCustomError(NOT_IMPORTED, f"module '{module_name}' has no '{class_name}'.{hint}")
        if not (isinstance(found, type) and issubclass(found, cls)):
            raise PydanticCustomError("kind_class", f"'{path}' is not a class derived from {cls.__name__}")
        if missing := sorted(getattr(found, "__abstractmethods__", ())):
            where = f"see {cls.__module__}:{cls.__name__}"
            raise PydanticCustomError("kind_class", f"'{path}' lacks {', '.join(missing)} ({where})")
        return found


def _blank(module_name: str, class_name: str) -> Option:
    """An option without its state."""
    option: type[Option] = attrgetter(class_name)(own_or_installed(module_name))
    return option.__new__(option)


def chosen(base: type[Option]) -> BeforeValidator:
    """A validator that builds the class named by `kind`: `model: Annotated[Model, chosen(Model)]`."""

    def choose(value: Any) -> Any:
        if isinstance(value, base):
            return value
        known = f"known kinds: {', '.join(sorted(base.kinds))}"
        if not isinstance(value, dict):
            raise PydanticCustomError("not_a_mapping", f"expected a mapping with 'kind', got {value!r}; {known}")
        if "kind" not in value:
            raise PydanticCustomError("kind_missing", f"the key 'kind' is missing; {known}")
        try:
            option = base.resolve(value["kind"])
        except PydanticCustomError as error:
            details = InitErrorDetails(type=error, loc=("kind",), input=value["kind"])
            raise ValidationError.from_exception_data(base.__name__, [details]) from None
        return option.model_validate(value)

    return BeforeValidator(choose)


@dataclass(frozen=True)
class WholeNumbers(BeforeValidator):
    """The validator that `whole` returns; it knows what it accepts, for the JSON schema."""

    words: tuple[str | None, ...] = ()
    at_least: int = 1
    at_most: int = INT64

    def __get_pydantic_json_schema__(self, _: CoreSchema, __: GetJsonSchemaHandler) -> JsonSchemaValue:
        number = {"type": "integer", "minimum": self.at_least, "maximum": self.at_most}
        others = [{"type": "null"} if word is None else {"const": word} for word in self.words]
        return {"anyOf": [number, *others]} if others else number


def whole(*words: str | None, at_least: int = 1, at_most: int = INT64) -> WholeNumbers:
    """
    A validator of whole numbers and given words (None: null): `workers: Annotated[int | Auto, whole("auto")]`.

    at_most: what nobody can mean is more; it would take hours to refuse, or memory that is not there.
    """
    names = ["null" if word is None else f"'{word}'" for word in words]
    expected = " or ".join([f"a whole number of at least {at_least}", *names])
    too_large = f"expected at most {at_most:,}"

    def check(value: Any) -> Any:
        right = type(value) is int and value >= at_least if not isinstance(value, str | None) else value in words
        if not right:
            raise PydanticCustomError("whole", f"expected {expected}, got {shortened(value)}")
        if isinstance(value, int) and value > at_most:
            raise PydanticCustomError("whole", f"{too_large}, got {shortened(value)}")
        return value

    return WholeNumbers(check, words=words, at_least=at_least, at_most=at_most)


Auto = Literal["auto"]
AutoCount = Annotated[int | Auto, whole("auto")]
Count = Annotated[int, whole()]
