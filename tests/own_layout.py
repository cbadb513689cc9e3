"""A layout as a user's own class: FSDP2 that keeps every second unit gathered between its forward and its backward."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from meshrunner.recipes.parallelism.fsdp2 import FSDP2

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshrunner.recipes.model.init_weights import Initialiser
    from meshrunner.recipes.parallelism.wrap_policy import WrapPlan
    from meshrunner.recipes.precision.base import Precision


class EverySecondKept(FSDP2):
    """Half of FSDP2's second all-gathers, half of the memory that none of them takes."""

    def apply(
        self, model: nn.Module, mesh: DeviceMesh, plan: WrapPlan, precision: Precision, initialiser: Initialiser
    ) -> nn.Module:
        kept = {
            name: replace(unit, reshard_after_forward=False) if number % 2 else unit
            for number, (name, unit) in enumerate(plan.items())
        }
        return super().apply(model, mesh, kept, precision, initialiser)
