"""Options of the group `activation_checkpoint`. Each option chooses the activations to save; backward recomputes the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from meshrunner.recipes.option import Count, Option, Section, did_you_mean

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
"""Operators of all supported versions of torch. A config that lists only these operators is checked without importing torch."""


class ActivationCheckpoint(Option):
    """Base class of the options. Each option chooses the activations that backward recomputes (Chen et al. 2016)."""

    kinds: ClassVar[dict[str, str]] = {
        "none": "meshrunner.recipes.activation_checkpoint.base:NoRecompute",
        "full": "meshrunner.recipes.activation_checkpoint.base:Full",
        "selective_layer": "meshrunner.recipes.activation_checkpoint.base:SelectiveLayer",
        "selective_op": "meshrunner.recipes.activation_checkpoint.base:SelectiveOp",
        "memory_budget": "meshrunner.recipes.activation_checkpoint.base:MemoryBudget",
    }

    inside_compile: ClassVar[bool] = False
    """Whether blocks are checkpointed first and compiled second, so that the compiler sees the recomputation."""

    @property
    def recomputes_attention(self) -> bool:
        """Whether compiled code recomputes attention in backward. False if the whole compiled forward reruns, as with `full`."""
        return False

    @property
    def repeats_exchange(self) -> bool:
        """Whether recomputing a block repeats the all-to-all that sends tokens to experts on other ranks."""
        return False

    def problems(self) -> list[str]:
        """Return one sentence for each invalid setting that only torch can detect, such as an unknown operator."""
        return []

    def configure(self) -> None:
        """Change torch's process-wide settings. Every worker calls this method before compiling anything."""

    def recomputes(self, block: int) -> bool:
        """Whether any part of block number `block`, counted from 0, is recomputed."""
        return False

    def wrap(self, block: nn.Module, *, preserve_rng_state: bool) -> nn.Module:
        """Return the module that replaces a block. preserve_rng_state: whether recomputation repeats forward's random numbers."""
        return block


class NoRecompute(ActivationCheckpoint):
    """Every activation that backward needs is saved."""


class Recompute(ActivationCheckpoint):
    """Base class of the options that wrap blocks in torch's checkpoint_wrapper."""

    early_stop: bool
    """Whether to stop recomputing a block as soon as backward has all tensors it needs, instead of at the end of the block."""
    determinism_check: bool
    """Whether to raise an error if a recomputed tensor differs from the original in shape, dtype or device."""

    @property
    def repeats_exchange(self) -> bool:
        return True

    def recomputes(self, block: int) -> bool:
        return True

    def wrap(self, block: nn.Module, *, preserve_rng_state: bool, **how: Any) -> nn.Module:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        return checkpoint_wrapper(
            block,
            preserve_rng_state=preserve_rng_state,
            early_stop=self.early_stop,
            determinism_check="default" if self.determinism_check else "none",
            **how,
        )


class Full(Recompute):
    """Only the input of each block is saved, which needs the least memory but costs a second forward pass."""


class SelectiveLayer(Recompute):
    """Every k-th block is recomputed. The other blocks save all activations."""

    every: Count
    """k: the first of every k consecutive blocks is recomputed. 1: all blocks; 2: every second block."""

    def recomputes(self, block: int) -> bool:
        return block % self.every == 0


class SavedOperator(Section):
    """An operator whose results are saved."""

    op: str
    """Name under torch.ops without the overload, such as `aten.mm`."""
    every: Count = 1
    """k: of every k calls in a block, save only the first call's result. 1: save all results. torchtitan uses 2 for `mm`."""


class SelectiveOp(Recompute):
    """Only the results of the listed operators are saved. In compiled blocks, the compiler applies the list `save`."""

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
            if saved.op not in KNOWN_OPERATORS and _packet(saved.op) is None:
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
        """Return a function that counts calls to decide which results to save, for one forward pass and its recomputation."""
        from torch.utils.checkpoint import CheckpointPolicy

        every: dict[OpOverload[..., Any], int] = {}
        for saved in self.save:
            packet = _packet(saved.op)
            assert packet is not None  # `problems` has checked that the operator exists
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


class MemoryBudget(ActivationCheckpoint):
    """The compiler chooses the activations to save within a memory budget (functorch's knapsack partitioner)."""

    budget: float = Field(ge=0, le=1)
    """Allowed activation memory, as a fraction of the memory that compiled code uses by default. 0: recompute all; 1: default."""

    def configure(self) -> None:
        import torch._functorch.config

        torch._functorch.config.activation_memory_budget = self.budget

    def recomputes(self, block: int) -> bool:
        return self.budget < 1


def _packet(name: str) -> OpOverloadPacket[..., Any] | None:
    """Return the operator with a name such as `aten.mm`, or None if torch has no such operator."""
    import torch

    from meshrunner.recipes.model.experts import grouped_rows  # noqa: F401 (registers an operator)

    namespace, _, op = name.partition(".")
    return getattr(getattr(torch.ops, namespace), op, None) if op else None
