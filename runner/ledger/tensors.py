"""Tensors inside arguments, and plain tensors inside tensor subclasses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments or results, including those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that hold a tensor's memory: a DTensor has none itself."""
    if type(tensor) is Tensor or not is_traceable_wrapper_subclass(tensor):
        if tensor.layout == torch.strided:
            yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):  # torch 2.13 lists a DTensor's mesh, too
            yield from plain_tensors(part)
