"""The `precision` group: dtypes of parameters in compute and of the gradient reduction. Master weights are fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from meshrunner.recipes.option import Option

if TYPE_CHECKING:
    import torch
    from torch import nn

    from meshrunner.recipes.model.network import Network


class Precision(Option):
    """Which dtypes a model computes and communicates in."""

    kinds: ClassVar[dict[str, str]] = {
        "fp32": "meshrunner.recipes.precision:FP32",
        "bf16": "meshrunner.recipes.precision:BF16",
        "float8": "meshrunner.recipes.float8:Float8",
    }
    compute: ClassVar[str] = "fp32"
    """The dtype of the matrix products: its peak FLOP/s is what MFU is divided by."""

    def unsupported(self, device_type: str) -> str | None:
        """Why the devices of this node, `cpu` or `cuda`, cannot do it, and what they can do instead; None when they can."""
        return None

    def convert(self, network: Network) -> None:
        """Replace modules of a network on meta by others of the same parameters."""

    def after_step(self, model: nn.Module) -> None:
        """What has to be done once the optimizer has changed the parameters."""

    @property
    def param_dtype(self) -> torch.dtype | None:
        """dtype that sharded fp32 parameters are gathered in; None: as they are."""
        return None

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """dtype that gradients are reduced in; None: fp32 as the parameters."""
        return None

    @property
    def param_bytes(self) -> int:
        """Bytes of a parameter as it is gathered."""
        return 4 if self.compute == "fp32" else 2

    @property
    def reduce_bytes(self) -> int:
        """Bytes of a gradient as it is reduced."""
        return 4


class FP32(Precision):
    """Everything in fp32. On an accelerator, `matmul` decides whether matrix products may round their inputs to TF32."""

    compute: ClassVar[str] = "fp32"

    matmul: Literal["highest", "high"] = "highest"
    """torch.set_float32_matmul_precision: highest is true fp32, high allows TF32."""


class BF16(Precision):
    """Parameters gathered and used in bf16, fp32 master weights and optimizer state."""

    compute: ClassVar[str] = "bf16"

    reduce: Literal["fp32", "bf16"] = "fp32"
    """dtype of the gradient reduction."""

    @property
    def param_dtype(self) -> torch.dtype:
        import torch

        return torch.bfloat16

    @property
    def reduce_dtype(self) -> torch.dtype:
        import torch

        return torch.float32 if self.reduce == "fp32" else torch.bfloat16

    @property
    def reduce_bytes(self) -> int:
        return 4 if self.reduce == "fp32" else 2
