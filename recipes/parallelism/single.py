"""One device, nothing distributed: the reference for every other layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from meshrunner.recipes.parallelism.base import Parallelism

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshrunner.recipes.model.init_weights import Initialiser
    from meshrunner.recipes.parallelism.wrap_plan import WrapPlan
    from meshrunner.recipes.precision.base import Precision


class Single(Parallelism):
    """The unwrapped model on one device."""

    autocasts: ClassVar[bool] = True

    def apply(
        self, model: nn.Module, mesh: DeviceMesh, plan: WrapPlan, precision: Precision, initialiser: Initialiser
    ) -> nn.Module:
        initialiser.materialise(model)
        return model
