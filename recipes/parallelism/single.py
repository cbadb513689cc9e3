"""One device, nothing spread: the reference every layout is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipes.parallelism.base import Parallelism

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from recipes.init import Initial
    from recipes.parallelism.plan import WrapPlan
    from recipes.precision import Precision


class Single(Parallelism):
    """The model as it is, on one device."""

    def apply(
        self, model: nn.Module, mesh: DeviceMesh, plan: WrapPlan, precision: Precision, initial: Initial
    ) -> nn.Module:
        initial.materialise(model)
        return model
