"""The `precision` group: dtypes of compute and of gradient reduction. The optimizer always updates fp32 master weights."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, Literal

from meshrunner.recipes.errors import ConfigError
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
        "float8": "meshrunner.recipes.precision.base:Float8",
    }
    compute: ClassVar[str] = "fp32"
    """dtype of the matmuls. MFU is relative to the device's peak FLOP/s in the matmul dtype."""

    @property
    def fp32_matmul(self) -> Literal["highest", "high"]:
        """Argument that every worker passes to torch.set_float32_matmul_precision."""
        return "highest"

    @property
    def gathers_float8(self) -> bool:
        """Whether sharded weights are all-gathered in float8."""
        return False

    @property
    def scales_rows(self) -> bool:
        """Whether the rows of a float8 tensor have separate scales, one or more per row."""
        return False

    @property
    def token_alignment(self) -> int:
        """Number that must divide the token count of a micro batch on a rank."""
        return 1

    def on(self, device_type: str) -> Precision:
        """Return the option itself. `auto` instead returns fp32 on `cpu` devices and bf16 on `cuda` devices."""
        return self

    def untraceable(self) -> str | None:
        """Return the reason why a step cannot be traced on the meta device, or None if tracing is possible."""
        return None

    def convert(self, network: Network, tensor: int) -> None:
        """Replace linear layers of a meta-device network by float8 layers with the same parameters, if this option uses float8.
        tensor: tensor-parallel degree, by which the weights will be split."""

    def after_step(self, model: nn.Module) -> None:
        """Update values derived from the parameters, such as float8 scales. Called after every optimizer step."""

    @property
    def param_dtype(self) -> torch.dtype | None:
        """dtype to which parameters are cast before they are all-gathered and used; None: parameters stay in fp32."""
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

    matmul: Literal["highest", "high"] = "highest"
    """Argument of torch.set_float32_matmul_precision. highest: true fp32; high: TF32 allowed."""

    @property
    def fp32_matmul(self) -> Literal["highest", "high"]:
        return self.matmul


class BF16(Precision):
    """Parameters are all-gathered and used in bf16; master weights and optimizer state are fp32. `parallelism=single` and `ddp`
    keep fp32 parameters and use autocast. The residual stream and the norms are in bf16 with any parallelism."""

    compute: ClassVar[str] = "bf16"

    reduce: Literal["fp32", "bf16"] = "fp32"
    """dtype of the gradient reduction. ddp always reduces in fp32."""

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


class Float8(BF16):
    """Linear layers multiply in float8: inputs, weights and output gradients are scaled and cast before each matmul."""

    scaling: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"]
    """tensorwise: one scale per tensor (fastest). rowwise: one per row (more accurate). rowwise_with_gw_hp: like rowwise, with
    weight gradients in bf16. mxfp8 (only Blackwell): a power of two per 32 elements of a row (OCP Microscaling Formats 1.0)."""
    all_gather: bool
    """Whether to all-gather weights in float8 instead of bf16, which halves the traffic. Needs FSDP2 and tensorwise scaling."""
    skip: list[str]
    """Patterns for the names of linear layers that stay in bf16."""
    emulate: bool
    """Whether to round to float8 but multiply in bf16. Works on any device, but is no faster than bf16. Meant for tests."""

    @property
    def compute(self) -> str:  # type: ignore[override]
        return "bf16" if self.emulate else "fp8"

    @property
    def gathers_float8(self) -> bool:
        return self.all_gather

    @property
    def scales_rows(self) -> bool:
        return self.scaling != "tensorwise"

    @property
    def alignment(self) -> int:
        """Number that must divide both dimensions of a float8 weight. For the token count, see `token_alignment`."""
        return 32 if self.scaling == "mxfp8" else 16

    @property
    def token_alignment(self) -> int:
        return 1 if self.emulate and self.scaling != "mxfp8" else self.alignment

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

        needed = {"tensorwise": (8, 9), "mxfp8": (10, 0)}.get(self.scaling, (9, 0))
        if torch.version.hip is not None or (has := torch.cuda.get_device_capability()) >= needed:
            return None
        return (
            f"precision: float8 with scaling={self.scaling} needs compute capability {needed[0]}.{needed[1]}, "
            f"but this GPU has {has[0]}.{has[1]}; use precision=bf16"
        )

    def untraceable(self) -> str | None:
        mxfp8 = self.scaling == "mxfp8" and not self.emulate
        return "precision.scaling=mxfp8 uses Triton kernels of torchao, which run only on a GPU" if mxfp8 else None

    def convert(self, network: Network, tensor: int) -> None:
        from torch import nn

        multiple = self.alignment * tensor
        chosen = {
            name
            for name, module in network.named_modules(remove_duplicate=False)
            if isinstance(module, nn.Linear)
            and not any(size % multiple for size in module.weight.shape)
            and not any(fnmatchcase(name, pattern) for pattern in self.skip)
        }
        if not chosen:
            raise ConfigError(
                f"precision: no linear layer can use float8. A layer needs dimensions that are multiples of {multiple} "
                f"and a name that no pattern of precision.skip matches ({', '.join(self.skip)}); use precision=bf16"
            )
        if self.scaling == "mxfp8":
            _convert_to_mxfp8(network, chosen, emulate=self.emulate)
            return
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(self.scaling)
        config = replace(config, enable_fsdp_float8_all_gather=self.all_gather, emulate=self.emulate)
        convert_to_float8_training(network, module_filter_fn=lambda _, name: name in chosen, config=config)

    def after_step(self, model: nn.Module) -> None:
        if self.all_gather:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)  # one all-reduce for all weights instead of one per weight


def _convert_to_mxfp8(network: Network, names: set[str], *, emulate: bool) -> None:
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common import KernelPreference

    kernels = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
    for name in names:
        old = network.get_submodule(name)
        sizes = old.in_features, old.out_features, old.bias is not None
        new = MXFP8Linear(*sizes, device="meta", kernel_preference=kernels)
        new.weight, new.bias = old.weight, old.bias
        network.set_submodule(name, new)


class AutoPrecision(Precision):
    """bf16 on CUDA, fp32 on CPU. The choice depends on the machine that executes the run, and is recorded in environment.json."""

    def on(self, device_type: str) -> Precision:
        return BF16(kind="bf16") if device_type == "cuda" else FP32(kind="fp32")
