"""Selective activation checkpointing by operator: a block saves expensive results and recomputes the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from meshrunner.recipes.activation_checkpoint.base import Recompute
from meshrunner.recipes.option import Count, Section, did_you_mean

if TYPE_CHECKING:
    from torch import nn
    from torch._ops import OpOverload, OpOverloadPacket

KNOWN_OPERATORS = (
    "_c10d_functional.all_to_all_single",
    "_c10d_functional.reduce_scatter_tensor",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_mm",
    "aten._grouped_mm",
    "aten.max",
    "aten.mm",
    "aten.topk",
    "meshrunner.grouped_mm",
)
"""Operators that every supported torch has, so that checking a config with these does not import torch."""


class SavedOperator(Section):
    """An operator whose results are saved."""

    op: str
    """Name under torch.ops, without the overload: `aten.mm`."""
    every: Count = 1
    """One in this many calls per block is saved, beginning with the first; 1: all. torchtitan saves every second mm."""


class SelectiveOp(Recompute):
    """The results of listed operators are saved, in compiled blocks too, where the partitioner follows the list."""

    inside_compile: ClassVar[bool] = True

    save: list[SavedOperator]
    """Operators whose results are saved in every block."""

    @property
    def recomputes_attention(self) -> bool:
        return not any("attention" in saved.op for saved in self.save)

    @property
    def repeats_exchange(self) -> bool:
        return not any("all_to_all" in saved.op for saved in self.save)

    def problems(self) -> list[str]:
        found = []
        for number, saved in enumerate(self.save):
            if saved.op in KNOWN_OPERATORS:
                continue
            try:
                _packet(saved.op)
            except AttributeError:
                import torch

                schemas = torch._C._jit_get_all_schemas()
                hint = did_you_mean(saved.op, {schema.name.replace("::", ".") for schema in schemas})
                found.append(f"activation_checkpoint.save[{number}]: torch has no operator '{saved.op}'.{hint}")
        return found

    def wrap(self, block: nn.Module, *, preserve_rng_state: bool, **how: Any) -> nn.Module:
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        how["context_fn"] = lambda: create_selective_checkpoint_contexts(self.policy())  # type: ignore[no-untyped-call]
        return super().wrap(block, preserve_rng_state=preserve_rng_state, **how)

    def policy(self) -> Callable[..., Any]:
        """Return the policy for one forward and its recomputation. It counts the calls of each separately."""
        from torch.utils.checkpoint import CheckpointPolicy

        every: dict[OpOverload[..., Any], int] = {}
        for saved in self.save:
            packet = _packet(saved.op)
            every |= {getattr(packet, overload): saved.every for overload in packet.overloads()}  # type: ignore[no-untyped-call]
        calls: Counter[tuple[bool, str]] = Counter()

        def decide(context: Any, op: OpOverload[..., Any], *_: Any, **__: Any) -> CheckpointPolicy:
            if op not in every:
                return CheckpointPolicy.PREFER_RECOMPUTE
            key = context.is_recompute, str(op.overloadpacket)
            calls[key] += 1
            keep = (calls[key] - 1) % every[op] == 0
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return decide


def _packet(name: str) -> OpOverloadPacket[..., Any]:
    """Return the operator with a name such as `aten.mm`; raise AttributeError if there is none."""
    import torch

    from meshrunner.recipes.model.experts import grouped_mm  # noqa: F401 (registers an operator)

    namespace, _, op = name.partition(".")
    if not op:
        raise AttributeError(name)
    found: OpOverloadPacket[..., Any] = getattr(getattr(torch.ops, namespace), op)
    return found
