"""Models of a user's own that do in forward what tensors without memory cannot do, or what is wrong on any device."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from meshrunner.recipes.model.llama import Llama

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from meshrunner.recipes.model.transformer import Transformer


def without_kernel(x: Tensor) -> Tensor:
    """An operator of the user's own with a kernel for CPUs alone."""
    import torch

    own = torch.library.Library("beyond_meta", "FRAGMENT")
    own.define("copied(Tensor x) -> Tensor")
    own.impl("copied", torch.clone, "CPU")
    return torch.ops.beyond_meta.copied(x)


def by_values(x: Tensor) -> Tensor:
    """The next that is done depends on what was computed."""
    return x if x.sum().item() > 0 else -x


def of_size_by_values(x: Tensor) -> Tensor:
    """The size of a result depends on what was computed."""
    return x * x[x > 0].sum()


def wrong(x: Tensor) -> Tensor:
    """No device could do this."""
    return x @ x.new_empty(1, 3)


class Beyond(Llama):
    """Llama whose last norm is given what one of the functions above makes of its input."""

    made: ClassVar[Callable[[Tensor], Tensor]]

    def network(self, seq_len: int) -> Transformer:
        network = super().network(seq_len)
        network.norm.register_forward_pre_hook(lambda _, inputs: type(self).made(*inputs))
        return network


class WithoutKernel(Beyond):
    made = staticmethod(without_kernel)


class ByValues(Beyond):
    made = staticmethod(by_values)


class OfSizeByValues(Beyond):
    made = staticmethod(of_size_by_values)


class Wrong(Beyond):
    made = staticmethod(wrong)


class Killed(Llama):
    """
    Ends its process, as when the system runs out of memory, unless sequences have 16 tokens.

    A network for sequences of 1 token, with which FLOPs are counted, does not.
    """

    def network(self, seq_len: int) -> Transformer:
        if seq_len not in (1, 16):
            os._exit(137)
        return super().network(seq_len)
