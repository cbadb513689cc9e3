"""Replaces parts of torch temporarily."""

from contextlib import ExitStack
from typing import Any

from meshrunner.recipes.errors import ConfigError


class Replacements(ExitStack):
    """Context manager that restores every replaced attribute when it ends."""

    def replace(self, owner: Any, name: str, value: Any) -> Any:
        """Replace an attribute and return its previous value. Raise ConfigError if the installed torch lacks the attribute."""
        held = vars(owner)
        if name not in held:
            import torch

            where = getattr(owner, "__name__", owner)
            raise ConfigError(
                f"plan: torch {torch.__version__} has no {where}.{name}, which tracing needs; use another release of torch"
            )
        before = held[name]
        setattr(owner, name, value)
        self.callback(setattr, owner, name, before)
        return before
