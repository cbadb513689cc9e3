"""The type of a row in the table of incompatible options."""

from collections.abc import Callable
from typing import NamedTuple

from meshrunner.recipes.parallelism.base import Degrees, Parallelism
from meshrunner.recipes.recipe import Recipe


class Conflict(NamedTuple):
    """A combination of options that cannot work."""

    when: Callable[[Recipe, Parallelism, Degrees], bool]
    """Whether a recipe with this parallelism and these degrees contains the combination."""
    where: str
    """The configuration key to change."""
    reason: str
    instead: str
    """The nearest combination that works."""
