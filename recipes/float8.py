"""Matrix products in float8, by torchao: bf16 everywhere else."""

from __future__ import annotations

from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.precision import BF16

if TYPE_CHECKING:
    from torch import nn

    from meshrunner.recipes.model.network import Network

MULTIPLE = 16
"""Both sides of a weight must be multiples of this, or the device has no product for it."""


class Float8(BF16):
    """Inputs, weights and output gradients of linear layers are scaled and rounded to float8 for each product."""

    scaling: Literal["tensorwise", "rowwise"]
    """One scale for a tensor (fastest), or one for each of its rows (more accurate)."""
    all_gather: bool
    """FSDP2 gathers weights that are float8 already: half the bytes. Tensorwise scaling only."""
    skip: list[str]
    """Linear layers that stay in bf16: patterns over their names."""
    emulate: bool
    """Round as float8 would and multiply in bf16, on any device: for tests, no faster."""

    @property
    def compute(self) -> str:  # type: ignore[override]
        """The dtype of the matrix products: its peak FLOP/s is what MFU is divided by."""
        return "bf16" if self.emulate else "fp8"

    @property
    def param_bytes(self) -> int:
        return 1 if self.all_gather else 2

    def unsupported(self, device_type: str) -> str | None:
        if find_spec("torchao") is None:
            return (
                "precision: float8 needs torchao, which is not installed: pip install 'meshrunner[float8]'; or use bf16"
            )
        if self.emulate:
            return None
        if device_type != "cuda":
            return "precision: float8 needs a GPU; use precision=bf16, or precision.emulate=true, which is no faster"
        import torch

        needed = (9, 0) if self.scaling == "rowwise" else (8, 9)
        if torch.version.hip is None and torch.cuda.get_device_capability() < needed:
            have = ".".join(map(str, torch.cuda.get_device_capability()))
            return (
                f"precision: float8 with scaling={self.scaling} needs compute capability {needed[0]}.{needed[1]}, "
                f"this GPU has {have}; use precision=bf16"
            )
        return None

    def convert(self, network: Network) -> None:
        from torch import nn
        from torchao.float8 import convert_to_float8_training

        converted = []

        def wanted(module: nn.Module, name: str) -> bool:
            fits = isinstance(module, nn.Linear) and not any(n % MULTIPLE for n in module.weight.shape)
            if fits and not any(fnmatchcase(name, pattern) for pattern in self.skip):
                converted.append(name)
                return True
            return False

        convert_to_float8_training(network, module_filter_fn=wanted, config=self._config())
        if not converted:
            raise ConfigError(
                f"precision: no linear layer can be float8: both sides must be multiples of {MULTIPLE}, and the name "
                f"must match none of skip({', '.join(self.skip)})"
            )

    def _config(self) -> Any:
        from dataclasses import replace

        from torchao.float8 import Float8LinearConfig

        config = Float8LinearConfig.from_recipe_name(self.scaling)
        return replace(config, enable_fsdp_float8_all_gather=self.all_gather, emulate=self.emulate)

    def after_step(self, model: nn.Module) -> None:
        if self.all_gather:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)  # one all-reduce for all weights, not one for each
