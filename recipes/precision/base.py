"""The `precision` group: dtypes of compute and of gradient reduction. Master weights are fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from meshrunner.recipes.option import Option

if TYPE_CHECKING:
    import torch
    from torch import nn

    from meshrunner.recipes.model.network import Network


class Precision(Option):
    """The dtypes that a model computes and communicates in."""

    kinds: ClassVar[dict[str, str]] = {
        "auto": "meshrunner.recipes.precision.base:AutoPrecision",
        "fp32": "meshrunner.recipes.precision.base:FP32",
        "bf16": "meshrunner.recipes.precision.base:BF16",
        "float8": "meshrunner.recipes.precision.float8:Float8",
    }
    compute: ClassVar[str] = "fp32"
    """dtype of the matmuls; MFU is relative to its peak FLOP/s."""

    @property
    def fp32_matmul(self) -> Literal["highest", "high"]:
        """Argument of torch.set_float32_matmul_precision, with which every worker starts."""
        return "highest"

    @property
    def gathers_float8(self) -> bool:
        """Whether sharded weights are all-gathered in float8."""
        return False

    @property
    def scales_rows(self) -> bool:
        """Whether each row of a float8 tensor has its own scale."""
        return False

    def on(self, device_type: str) -> Precision:
        """Return the option that `auto` resolves to on `cpu` or `cuda` devices; any other option returns itself."""
        return self

    def unsupported(self, device_type: str) -> str | None:
        """Return why `cpu` or `cuda` devices of this node do not support it, with an alternative; None if they do."""
        return None

    def convert(self, network: Network) -> None:
        """Replace modules of a network on meta by others with the same parameters."""

    def after_step(self, model: nn.Module) -> None:
        """Update state that depends on the parameters, after every optimizer step."""

    @property
    def param_dtype(self) -> torch.dtype | None:
        """dtype to which parameters are cast for compute, and in which shards are all-gathered; None: unchanged."""
        return None

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """dtype in which gradients are reduced; None: fp32, like the parameters."""
        return None

    @property
    def element_bytes(self) -> int:
        """Bytes per element of activations, and of weights whose matmuls are not in float8."""
        return 4 if self.compute == "fp32" else 2

    @property
    def param_bytes(self) -> int:
        """Bytes per parameter in an all-gather."""
        return self.element_bytes

    @property
    def reduce_bytes(self) -> int:
        """Bytes per gradient element in a reduction."""
        return 4


class FP32(Precision):
    """Everything is in fp32. `matmul` decides whether an accelerator may use TF32 for matmuls."""

    compute: ClassVar[str] = "fp32"

    matmul: Literal["highest", "high"] = "highest"
    """Argument of torch.set_float32_matmul_precision: highest is true fp32, high allows TF32."""

    @property
    def fp32_matmul(self) -> Literal["highest", "high"]:
        return self.matmul


class BF16(Precision):
    """Parameters are all-gathered and used in bf16; master weights and optimizer state are fp32.

    `single` and `ddp` gather nothing. They use autocast, which computes matmuls and attention in bf16 and the rest in fp32.
    """

    compute: ClassVar[str] = "bf16"

    reduce: Literal["fp32", "bf16"] = "fp32"
    """dtype of the gradient reduction; ddp reduces in fp32."""

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


class AutoPrecision(Precision):
    """bf16 on CUDA, fp32 on CPU. It is resolved where the run starts and recorded in environment.json."""

    def on(self, device_type: str) -> Precision:
        return BF16(kind="bf16") if device_type == "cuda" else FP32(kind="fp32")
