"""Autocast on meta, which has none: functions that it would run in lower precision, or in fp32, get their arguments so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from meshrunner.runner.predict.meta.replacements import Replacements

LOWER = {
    *(F.linear, F.scaled_dot_product_attention, F.conv1d, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.einsum),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm, torch.baddbmm),
}
"""In the lower precision, on CPU and CUDA."""
FP32_ON_CPU: set[Any] = {F.cross_entropy, F.nll_loss, F.binary_cross_entropy_with_logits, F.mse_loss}
FP32_ON_CUDA = FP32_ON_CPU | {
    *(
        F.softplus,
        F.layer_norm,
        F.rms_norm,
        torch.layer_norm,  # what the compiler sees of them
        torch.rms_norm,
        F.softmax,
        F.log_softmax,
        torch.softmax,
        torch.log_softmax,
        torch.logsumexp,
    ),
    *(
        torch.exp,
        torch.expm1,
        torch.log,
        torch.log1p,
        torch.pow,
        torch.rsqrt,
        torch.reciprocal,
        torch.sum,
        torch.cumsum,
    ),
    *(torch.cumprod, torch.prod, torch.linalg.vector_norm),
    *(Tensor.exp, Tensor.expm1, Tensor.log, Tensor.log1p, Tensor.pow, Tensor.__pow__, Tensor.rsqrt, Tensor.reciprocal),
    *(Tensor.sum, Tensor.cumsum, Tensor.cumprod, Tensor.prod, Tensor.softmax, Tensor.log_softmax, Tensor.logsumexp),
}
"""In fp32; aten/src/ATen/autocast_mode.h, as far as a language model has a use for it."""


class _Autocast(TorchFunctionMode):
    """As torch.autocast: a parameter is cast once until the context ends."""

    def __init__(self, dtype: torch.dtype, *, on_cuda: bool) -> None:
        super().__init__()
        self.dtype, self.on_cuda, self.suspended = dtype, on_cuda, False
        self.casts: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.suspended or (torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu")):
            return func(*args, **(kwargs or {}))
        fp32 = FP32_ON_CUDA if self.on_cuda else FP32_ON_CPU
        dtype = self.dtype if func in LOWER else torch.float32 if func in fp32 else None
        if dtype is None:
            return func(*args, **(kwargs or {}))
        return func(
            *self._cast(args, dtype), **{key: self._cast_one(value, dtype) for key, value in (kwargs or {}).items()}
        )

    def _cast(self, values: Any, dtype: torch.dtype) -> Any:
        return type(values)(self._cast_one(value, dtype) for value in values)

    def _cast_one(self, value: Any, dtype: torch.dtype) -> Any:
        if type(value) in (list, tuple):
            return self._cast(value, dtype)
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype in (dtype, torch.float64):
            return value
        is_weight = value.is_leaf and value.requires_grad and dtype == self.dtype and value.dtype == torch.float32
        if torch.compiler.is_compiling() or not is_weight:
            return value.to(dtype)
        if id(value) not in self.casts:
            self.casts[id(value)] = value, value.to(dtype)
        return self.casts[id(value)][1]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.casts.clear()


@contextmanager
def rehearsed_autocast(torch_own: Replacements, device_type: str) -> Iterator[None]:
    """Have `torch.autocast("meta", dtype)` do as on the device, and recomputation do as the forward that it repeats."""
    before = torch.autocast
    active: list[_Autocast] = []

    class Followed(_Autocast):
        def __enter__(self) -> _Autocast:
            active.append(self)
            super().__enter__()  # type: ignore[no-untyped-call]
            return self

        def __exit__(self, *error: Any) -> None:
            active.remove(self)
            super().__exit__(*error)

    @contextmanager
    def suspended() -> Iterator[None]:
        states = [(each, each.suspended) for each in active]
        for each in active:
            each.suspended = True
        try:
            yield
        finally:
            for each, state in states:
                each.suspended = state

    def autocast(device: str, dtype: torch.dtype | None = None, *, enabled: bool = True, **kwargs: Any) -> Any:
        if device != "meta":
            return before(device, dtype, enabled=enabled, **kwargs)
        if torch.compiler.is_compiling():  # it is traced on the CPU
            return before("cpu", dtype, enabled=enabled)
        return Followed(dtype or torch.bfloat16, on_cuda=device_type == "cuda") if enabled else suspended()

    def autocast_again(device: str, dtype: torch.dtype | None = None, *, enabled: bool = True, **kwargs: Any) -> Any:
        if active_then := kwargs.pop("rehearsed", None):
            return autocast("meta", active_then)
        return before(device, dtype, enabled=enabled, **kwargs)

    def present(device_type: str = "cuda") -> tuple[dict[str, Any] | None, dict[str, Any]]:
        of_device, of_cpu = kwargs_before(device_type)
        return of_device, {**of_cpu, "rehearsed": present_dtype()}

    def present_dtype() -> torch.dtype | None:
        return active[-1].dtype if active and not active[-1].suspended else None

    def is_enabled(device: str | None = None) -> bool:
        if device == "meta" or (device is None and device_type == "cuda"):  # which torch takes for meant
            return present_dtype() is not None
        return bool(enabled_before(*([device] if device else [])))

    def dtype_of(device: str) -> torch.dtype:
        return present_dtype() or torch.float32 if device == "meta" else dtype_before(device)

    enabled_before = torch_own.replace(torch, "is_autocast_enabled", is_enabled)
    dtype_before = torch_own.replace(torch, "get_autocast_dtype", dtype_of)
    torch_own.replace(torch, "autocast", autocast)
    torch_own.replace(torch.amp, "autocast", autocast_again)
    kwargs_before = torch_own.replace(checkpoint, "_get_autocast_kwargs", present)
    yield
