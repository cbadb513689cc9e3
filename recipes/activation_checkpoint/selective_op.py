"""Selective activation checkpointing by operator: a block keeps what is expensive to compute, the rest is recomputed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from meshrunner.recipes.activation_checkpoint.base import Recompute
from meshrunner.recipes.option import Count, Section, did_you_mean

if TYPE_CHECKING:
    from torch import nn
    from torch._ops import OpOverload, OpOverloadPacket


OPERATORS = frozenset(
    {
        "_c10d_functional.all_to_all_single",
        "_c10d_functional.reduce_scatter_tensor",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten.max",
        "aten.mm",
    }
)
"""Operators of every supported torch: for others torch is imported and asked."""


class Saved(Section):
    """An operator whose results are kept."""

    op: str
    """Name below torch.ops, without overload: `aten.mm`."""
    every: Count = 1
    """Length of a group of consecutive calls in a block of which the first is kept; 1: all. torchtitan keeps every second."""


class SelectiveOp(Recompute):
    """Compilation honours the same list: the partitioner of the compiled block keeps what is listed."""

    compiled_with_block: ClassVar[bool] = True

    save: list[Saved]
    """What is kept of every block."""

    @property
    def recomputes_attention(self) -> bool:
        return not any("attention" in saved.op for saved in self.save)

    def problems(self) -> list[str]:
        found = []
        for number, saved in enumerate(self.save):
            if saved.op in OPERATORS:
                continue
            try:
                _packet(saved.op)
            except AttributeError:
                hint = did_you_mean(saved.op, _operators())
                found.append(f"activation_checkpoint.save[{number}]: torch has no operator '{saved.op}'.{hint}")
        return found

    def wrap(self, block: nn.Module, *, draws: bool) -> nn.Module:
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        return self._checkpointed(
            block,
            draws=draws,
            context_fn=lambda: create_selective_checkpoint_contexts(self.policy()),  # type: ignore[no-untyped-call]
        )

    def policy(self) -> Callable[..., Any]:
        """What torch asks about every operator of one forward, and again of its recomputation."""
        from torch.utils.checkpoint import CheckpointPolicy

        every: dict[OpOverload[..., Any], int] = {}
        for saved in self.save:
            packet = _packet(saved.op)
            every |= {getattr(packet, overload): saved.every for overload in packet.overloads()}  # type: ignore[no-untyped-call]
        met: Counter[tuple[bool, str]] = Counter()

        def decide(context: Any, op: OpOverload[..., Any], *_: Any, **__: Any) -> CheckpointPolicy:
            if op not in every:
                return CheckpointPolicy.PREFER_RECOMPUTE
            key = context.is_recompute, str(op.overloadpacket)
            met[key] += 1
            keep = (met[key] - 1) % every[op] == 0
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return decide


def _packet(name: str) -> OpOverloadPacket[..., Any]:
    """The operator of a name such as `aten.mm`; raises AttributeError when there is none."""
    import torch

    namespace, _, op = name.partition(".")
    if not op:
        raise AttributeError(name)
    found: OpOverloadPacket[..., Any] = getattr(getattr(torch.ops, namespace), op)
    return found


def _operators() -> set[str]:
    import torch

    return {schema.name.replace("::", ".") for schema in torch._C._jit_get_all_schemas()}
