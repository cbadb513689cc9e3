"""The account of memory: every storage from birth to death, with what it is for and the phase of the step that made it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from meshrunner.runner.profiler.base import CATEGORIES
from meshrunner.runner.profiler.phases import Phase, Phases


class Life:
    """The memory of a storage for as long as it keeps its size."""

    __slots__ = ("born", "category", "died", "nbytes", "number", "phase", "stream")

    def __init__(self, number: int, nbytes: int, category: str, phase: Phase, born: int, stream: int = 0) -> None:
        self.number = number
        """Lives are numbered in the order of birth."""
        self.nbytes = nbytes
        self.category = category
        """One of CATEGORIES, of its whole lifetime; what it is may show only later."""
        self.phase = phase
        """That it was born in."""
        self.born = born
        """Moment of birth; 0: it was there before the account."""
        self.died: int | None = None
        self.stream = stream
        """Stream of the device that it was allocated on."""
