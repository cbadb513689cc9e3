"""Cut a network into parts, one for each pipeline stage of this rank."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from meshrunner.recipes.loss.base import to_plain
from meshrunner.recipes.model.network import Network

Computing = Callable[[], AbstractContextManager[None]]


class Part(nn.Module):
    """Some consecutive blocks of a network, with the modules before the first block or after the last one. The modules are shared
    with the network and have the same names."""

    def __init__(self, network: Network, blocks: range, computing: Computing) -> None:
        super().__init__()
        self._forward, self._computing = partial(network.forward_part, blocks), computing
        names = part_names(network, blocks)
        self.network, self.parts = [network], [self]
        """The network, and all of its parts on this rank. Both are lists, because torch would register a plain module."""
        inside = tuple(f"{name}." for name in names)
        self.blocks = {i: block for i, block in enumerate(network.block_names()) if f"{block}.".startswith(inside)}
        """Names of the blocks in this part, keyed by their number in the network."""
        for name in names:
            stack, _, block = name.partition(".")
            if block and not hasattr(self, stack):
                self.add_module(stack, nn.Module())
            self.set_submodule(name, network.get_submodule(name))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the result of `Network.forward_part`. Schedules expect a plain tensor that requires a gradient."""
        with self._computing():
            result = self._forward(x, targets)
        result = to_plain(result)
        if torch.is_grad_enabled() and not result.requires_grad:  # nothing up to here is trained
            result.requires_grad_()
        return result


def part_names(network: Network, blocks: range) -> list[str]:
    """Return the names of a part's modules. The part with the first block also has the modules before all blocks, and the part
    with the last block has the modules after all blocks."""
    names, children = network.block_names(), [name for name, _ in network.named_children()]
    stack = names[0].partition(".")[0]
    before, after = children[: children.index(stack)], children[children.index(stack) + 1 :]
    in_stack = [name for name in names if name.startswith(f"{stack}.")]
    return [
        *before * (blocks.start == 0),
        *in_stack[blocks.start : blocks.stop],
        *after * (blocks.stop == len(in_stack)),
    ]


def cut(network: Network, parts: Iterable[Part]) -> None:
    """Remove from a network, in place, the modules that belong to none of the parts."""
    kept = {module for part in parts for module in part.modules()}
    for name, module in list(network.named_children()):
        if isinstance(module, nn.ModuleDict):
            for block in [name for name, block in module.items() if block not in kept]:
                del module[block]
        elif module not in kept:
            setattr(network, name, None)
