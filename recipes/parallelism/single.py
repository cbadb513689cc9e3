"""One device, nothing spread: the reference every layout is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshrunner.recipes.parallelism.base import Parallelism

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshrunner.recipes.init_weights import Initial
    from meshrunner.recipes.parallelism.wrap_plan import WrapPlan
    from meshrunner.recipes.precision import Precision


class Single(Parallelism):
    """The model as it is, on one device."""

    def apply(
        self, model: nn.Module, mesh: DeviceMesh, plan: WrapPlan, precision: Precision, initial: Initial
    ) -> nn.Module:
        initial.materialise(model)
        return model
