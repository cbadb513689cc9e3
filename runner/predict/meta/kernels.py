"""Makes attention and RMSNorm on meta keep the same tensors for backward as on a GPU or CPU, unlike torch's meta kernels."""

from functools import partial
from typing import Any

import torch
import torch.distributed.tensor
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention import bias

from meshrunner.runner.predict.meta.replacements import Replacements

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


def device_kernels(in_torch: Replacements, device_type: str, *, compiles: bool, cudnn: bool) -> None:
    """Make attention and RMSNorm on meta keep the same tensors and cause the same memory traffic as on `device_type`. `compiles`:
    whether any part of the model is compiled. `cudnn`: whether the device prefers cuDNN's attention to FlashAttention."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    own = torch.library.Library("meshrunner_plan", "FRAGMENT")  # type: ignore[no-untyped-call]
    in_torch.callback(library._destroy)
    in_torch.callback(own._destroy)
    own.define("touch(Tensor[] read, Tensor(a!)[] written) -> ()")  # type: ignore[no-untyped-call]
    own.impl("touch", lambda read, written: None, "Meta")  # type: ignore[no-untyped-call]
    attention = partial(_attention, device_type, cudnn)
    library.impl("scaled_dot_product_attention", attention, "AutogradMeta")  # type: ignore[no-untyped-call]
    if device_type == "cuda":
        # The original functions reject tensors that are not on a GPU.
        in_torch.replace(bias, "can_use_flash_attention", lambda params: params.query.dtype in HALF)
        in_torch.replace(bias, "can_use_efficient_attention", lambda params: not params.enable_gqa)
        library.impl("_fused_rms_norm", _FusedRMSNorm.apply, "AutogradMeta")  # type: ignore[no-untyped-call]
        if compiles:  # the compiler traces code on the CPU and decomposes RMSNorm there
            library.impl("scaled_dot_product_attention", attention, "AutogradCPU")  # type: ignore[no-untyped-call]


def _attention(
    device_type: str,
    cudnn: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run the meta version of the attention kernel that torch would choose on `device_type`."""
    grouped, needs_gradient = query.shape[-3] != key.shape[-3], torch.is_grad_enabled()
    qkv, settings, head_dim = (query, key, value), (dropout_p, is_causal), query.shape[-1]
    if device_type == "cpu":
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            # The CPU kernel adds the mask to the scores, so masked keys need -inf.
            attn_mask = torch.where(
                attn_mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=query.dtype, device=query.device)
            )
        results = aten._scaled_dot_product_flash_attention_for_cpu(*qkv, *settings, attn_mask=attn_mask, scale=scale)
    elif cudnn and query.dtype in HALF and head_dim <= 128 and head_dim % 8 == 0:  # limits of torch up to 2.13
        results = aten._scaled_dot_product_cudnn_attention(*qkv, attn_mask, needs_gradient, *settings, scale=scale)
    elif attn_mask is None and query.dtype in HALF and head_dim <= 256:
        results = aten._scaled_dot_product_flash_attention(*qkv, *settings, False, scale=scale)
    elif query.dtype in (*HALF, torch.float32) and not grouped:
        results = aten._scaled_dot_product_efficient_attention(*qkv, attn_mask, needs_gradient, *settings, scale=scale)
    else:
        results = aten._scaled_dot_product_attention_math(
            *qkv, attn_mask, *settings, scale=scale, enable_gqa=enable_gqa
        )
    return results[0]  # type: ignore[no-any-return]


class _FusedRMSNorm(torch.autograd.Function):
    """RMSNorm on CUDA: one kernel that keeps the input, the weight and each row's reciprocal norm for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():  # the ledger then counts the results as kept for backward
            result, rstd = torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        _touch((x, weight), (result, rstd))
        ctx.mark_non_differentiable(rstd)
        ctx.save_for_backward(x, weight, rstd)
        return result, rstd

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        x_gradient = torch.empty_like(x)
        weight_gradient = torch.empty_like(weight) if weight is not None else None
        _touch((gradient, x, weight, rstd), (x_gradient, weight_gradient))
        return x_gradient, None, weight_gradient, None


def _touch(read: tuple[Tensor | None, ...], written: tuple[Tensor | None, ...]) -> None:
    """Call an operator that computes nothing, so that the recorder logs the memory traffic of a kernel on the given tensors."""

    def local(tensors: tuple[Tensor | None, ...]) -> list[Tensor]:
        return [each.to_local() if isinstance(each, DTensor) else each for each in tensors if each is not None]

    torch.ops.meshrunner_plan.touch(local(read), local(written))
