"""Matmuls in float8 through torchao, bf16 everywhere else."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.precision.base import BF16

if TYPE_CHECKING:
    from torch import nn

    from meshrunner.recipes.model.network import Network

ALIGNMENT = 16
"""Number that must divide every dimension of a float8 matmul: both of a weight, and the tokens of a micro batch."""


class Float8(BF16):
    """Inputs, weights and output gradients of linear layers are scaled and cast to float8 for each matmul."""

    scaling: Literal["tensorwise", "rowwise"]
    """One scale per tensor (fastest) or per row (more accurate)."""
    all_gather: bool
    """FSDP2 all-gathers weights in float8: half the bytes. Tensorwise scaling only."""
    skip: list[str]
    """Linear layers that stay in bf16: patterns for their names."""
    emulate: bool
    """Round to float8 but multiply in bf16, on any device. For tests: it is no faster than bf16."""

    @property
    def compute(self) -> str:  # type: ignore[override]
        return "bf16" if self.emulate else "fp8"

    @property
    def gathers_float8(self) -> bool:
        return self.all_gather

    @property
    def scales_rows(self) -> bool:
        return self.scaling == "rowwise"

    @property
    def param_bytes(self) -> int:
        return 1 if self.all_gather else 2

    def unsupported(self, device_type: str) -> str | None:
        if find_spec("torchao") is None:
            return "precision: float8 needs torchao; pip install 'meshrunner[float8]', or use precision=bf16"
        if self.emulate:
            return None
        if device_type != "cuda":
            return "precision: float8 needs a GPU; use precision=bf16, or precision.emulate=true (no faster than bf16)"
        import torch

        needed = (9, 0) if self.scaling == "rowwise" else (8, 9)
        if torch.version.hip is not None or (has := torch.cuda.get_device_capability()) >= needed:
            return None
        return (
            f"precision: float8 with scaling={self.scaling} needs compute capability {needed[0]}.{needed[1]}, "
            f"this GPU has {has[0]}.{has[1]}; use precision=bf16"
        )

    def convert(self, network: Network) -> None:
        from torch import nn
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        chosen = {
            name
            for name, module in network.named_modules(remove_duplicate=False)
            if isinstance(module, nn.Linear)
            and not any(size % ALIGNMENT for size in module.weight.shape)
            and not any(fnmatchcase(name, pattern) for pattern in self.skip)
        }
        if not chosen:
            raise ConfigError(
                f"precision: no linear layer can use float8: both dimensions must be multiples of {ALIGNMENT}, and the "
                f"name must match none of skip({', '.join(self.skip)})"
            )
        config = Float8LinearConfig.from_recipe_name(self.scaling)
        config = replace(config, enable_fsdp_float8_all_gather=self.all_gather, emulate=self.emulate)
        convert_to_float8_training(network, module_filter_fn=lambda _, name: name in chosen, config=config)

    def after_step(self, model: nn.Module) -> None:
        if self.all_gather:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)  # one all-reduce for all weights, not one for each
