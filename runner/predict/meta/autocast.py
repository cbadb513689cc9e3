"""Adds autocast to the meta device. A TorchFunctionMode casts arguments to the dtypes that autocast uses on a GPU or CPU."""

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from meshrunner.runner.predict.meta.replacements import Replacements

LOWER = {
    *(F.linear, F.scaled_dot_product_attention, F.conv1d, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.einsum),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm, torch.baddbmm),
}
"""Functions whose arguments are cast to autocast's dtype, such as bf16, on CPU and on CUDA."""
FP32_ON_CPU: set[Any] = {F.cross_entropy, F.nll_loss, F.binary_cross_entropy_with_logits, F.mse_loss}
FP32_ON_CUDA = FP32_ON_CPU | {
    *(F.softplus, F.layer_norm, F.rms_norm, F.softmax, F.log_softmax),
    *(torch.layer_norm, torch.rms_norm),  # the compiler traces into F.layer_norm and F.rms_norm, which call these
    *(torch.softmax, torch.log_softmax, torch.logsumexp, torch.exp, torch.expm1, torch.log, torch.log1p, torch.pow),
    *(torch.rsqrt, torch.reciprocal, torch.sum, torch.cumsum, torch.cumprod, torch.prod, torch.linalg.vector_norm),
    *(Tensor.exp, Tensor.expm1, Tensor.log, Tensor.log1p, Tensor.pow, Tensor.__pow__, Tensor.rsqrt, Tensor.reciprocal),
    *(Tensor.sum, Tensor.cumsum, Tensor.cumprod, Tensor.prod, Tensor.softmax, Tensor.log_softmax, Tensor.logsumexp),
}
"""Functions that language models use and that autocast on CUDA runs in fp32 (from aten/src/ATen/autocast_mode.h)."""


class _Autocast(TorchFunctionMode):
    """Autocast context on meta. Like torch.autocast, it keeps the cast copy of each parameter until the context ends."""

    def __init__(self, dtype: torch.dtype | None, active: "list[_Autocast]", *, on_cuda: bool) -> None:
        """Create a context that casts to `dtype` (None: casts nothing). `active`: all open contexts, innermost last."""
        super().__init__()
        self.dtype, self.active, self.on_cuda = dtype, active, on_cuda
        self.casts: dict[int, tuple[Tensor, Tensor]] = {}

    def __enter__(self) -> Self:
        self.active.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self.active.remove(self)
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.casts.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            off = not torch.is_autocast_enabled("cpu")
        else:
            off = self.dtype is None or self.active[-1] is not self
        if off:
            return func(*args, **kwargs)
        fp32 = FP32_ON_CUDA if self.on_cuda else FP32_ON_CPU  # dynamo cannot guard attributes that hold these sets
        dtype = self.dtype if func in LOWER else torch.float32 if func in fp32 else None
        if dtype is None:
            return func(*args, **kwargs)
        return func(*self._cast(args, dtype), **{key: self._cast(value, dtype) for key, value in kwargs.items()})

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if type(value) in (list, tuple):
            return type(value)(self._cast(each, dtype) for each in value)
        if not isinstance(value, Tensor) or isinstance(value, CausalBias):  # CausalBias holds no values
            return value
        if not value.is_floating_point() or value.dtype in (dtype, torch.float64):
            return value
        is_weight = value.is_leaf and value.requires_grad and dtype == self.dtype and value.dtype == torch.float32
        if torch.compiler.is_compiling() or not is_weight:
            return value.to(dtype)
        if id(value) not in self.casts:
            self.casts[id(value)] = value, value.to(dtype)
        return self.casts[id(value)][1]


def autocast_on_meta(in_torch: Replacements, device_type: str) -> None:
    """Make `torch.autocast("meta", dtype)` cast like autocast on `device_type`, in forward and in recomputation."""
    device_autocast = torch.autocast
    active: list[_Autocast] = []

    # torch 2.11 passes all arguments by position when it compiles an autocast context.
    def autocast(
        device: str, dtype: torch.dtype | None = None, enabled: bool = True, *cache_enabled: bool | None, **kwargs: Any
    ) -> Any:
        # Checkpointing stores the autocast arguments of the forward pass and passes them to the autocast of the recomputation.
        if forward_dtype := kwargs.pop("dtype_on_meta", None):
            return autocast("meta", forward_dtype)
        if device != "meta":
            return device_autocast(device, dtype, enabled, *cache_enabled, **kwargs)
        if torch.compiler.is_compiling():  # the compiler traces code on the CPU
            return device_autocast("cpu", dtype, enabled)
        return _Autocast((dtype or torch.bfloat16) if enabled else None, active, on_cuda=device_type == "cuda")

    def autocast_arguments(device_type: str = "cuda") -> tuple[dict[str, Any] | None, dict[str, Any]]:
        on_device, on_cpu = arguments_before(device_type)
        return on_device, {**on_cpu, "dtype_on_meta": current_dtype()}

    def current_dtype() -> torch.dtype | None:
        return active[-1].dtype if active else None

    def is_enabled(device: str | None = None) -> bool:
        if device == "meta" or (device is None and device_type == "cuda"):  # torch's default is CUDA
            return current_dtype() is not None
        return bool(enabled_before(*([device] if device else [])))

    def dtype_of(device: str) -> torch.dtype:
        return current_dtype() or torch.float32 if device == "meta" else dtype_before(device)

    enabled_before = in_torch.replace(torch, "is_autocast_enabled", is_enabled)
    dtype_before = in_torch.replace(torch, "get_autocast_dtype", dtype_of)
    for module in (torch, torch.amp):
        in_torch.replace(module, "autocast", autocast)
    arguments_before = in_torch.replace(checkpoint, "_get_autocast_kwargs", autocast_arguments)
