"""Custom operators for the CUDA kernels of mamba_ssm and causal_conv1d. The compiler rejects Triton kernels that have a
`pre_hook`, but it calls custom operators without tracing them. The packages are imported only when an operator runs, so memory
can be predicted without these packages. An operator must return the same strides as its fake implementation, but mamba_ssm
returns gradients with the strides of its inputs. All results are therefore made contiguous."""

import warnings
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("meshrunner::mamba_scan", mutates_args=())
def _scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, chunk: int) -> Tensor:
    """Compute S_t = exp(dt_t a) S_{t-1} + dt_t x_t b_t^T, y_t = S_t c_t + d x_t. `a`, `d`: [heads]; others: see `mamba.scan`."""
    from mamba_ssm.ops.triton.ssd_combined import _mamba_chunk_scan_combined_fwd as forward

    y: Tensor = forward(*_contiguous(x, dt, a, b, c), chunk, D=d.contiguous())[0]
    return y.contiguous()


@torch.library.custom_op("meshrunner::mamba_scan_backward", mutates_args=())
def _scan_backward(
    gradient: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, y: Tensor, chunk: int
) -> list[Tensor]:
    from mamba_ssm.ops.triton.ssd_combined import _mamba_chunk_scan_combined_bwd as backward

    deterministic = torch.are_deterministic_algorithms_enabled()
    # mamba_ssm calls cumsum on tensors of several dimensions, which is deterministic. torch before 2.14 still raises an error.
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "cumsum_cuda_kernel")
            found = backward(*_contiguous(gradient, x, dt, a, b, c, y), chunk, D=d.contiguous())
    finally:
        torch.use_deterministic_algorithms(deterministic)
    return [of.to(each.dtype).contiguous() for of, each in zip(found, (x, dt, a, b, c, d), strict=False)]


@torch.library.custom_op("meshrunner::causal_convolution", mutates_args=())
def _convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute `mamba.CausalConvolution`. x: [batch, seq, c], c a multiple of 8; weight: [c, width], width 2 to 4."""
    from causal_conv1d.cpp_functions import causal_conv1d_fwd_function as forward

    y: Tensor = forward(x.contiguous().transpose(1, 2), *_contiguous(weight, bias), None, None, None, True)
    return y.transpose(1, 2).contiguous()


@torch.library.custom_op("meshrunner::causal_convolution_backward", mutates_args=())
def _convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    from causal_conv1d.cpp_functions import causal_conv1d_bwd_function as backward

    by_channel, gradient = (each.contiguous().transpose(1, 2) for each in (x, gradient))
    found = backward(by_channel, *_contiguous(weight, bias), gradient, None, None, None, None, False, True)
    found = found[0].transpose(1, 2), *found[1:3]
    return [of.to(each.dtype).contiguous() for of, each in zip(found, (x, weight, bias), strict=True)]


def _contiguous(*tensors: Tensor) -> list[Tensor]:
    return [each.contiguous() for each in tensors]


def _empty(*tensors: Tensor) -> list[Tensor]:
    return [torch.empty_like(each, memory_format=torch.contiguous_format) for each in tensors]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:-1], output)
    ctx.chunk = inputs[-1]


_scan.register_fake(lambda x, *_: _empty(x)[0])
_scan_backward.register_fake(lambda gradient, *inputs: _empty(*inputs[:6]))
_scan.register_autograd(
    lambda ctx, of_y: (*_scan_backward(of_y, *ctx.saved_tensors, ctx.chunk), None), setup_context=_setup
)
_convolution.register_fake(lambda x, *_: _empty(x)[0])
_convolution_backward.register_fake(lambda gradient, *inputs: _empty(*inputs))
_convolution.register_autograd(
    lambda ctx, of_y: tuple(_convolution_backward(of_y, *ctx.saved_tensors)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
scan, convolution = torch.ops.meshrunner.mamba_scan, torch.ops.meshrunner.causal_convolution
