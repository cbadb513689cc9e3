"""Something of torch is replaced for a while."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from meshrunner.recipes.errors import ConfigError


class Replacements(ExitStack):
    """Context manager at whose end everything is as before."""

    def replace(self, owner: Any, name: str, value: Any) -> Any:
        """
        Replace an attribute; returns what it was.

        Raises:
            ConfigError: there is none of that name: another torch.
        """
        held = vars(owner)
        if name not in held:
            import torch

            where = getattr(owner, "__name__", owner)
            raise ConfigError(f"plan: torch {torch.__version__} has no {where}.{name}, which a rehearsal stands in for")
        before = held[name]
        setattr(owner, name, value)
        self.callback(setattr, owner, name, before)
        return before
