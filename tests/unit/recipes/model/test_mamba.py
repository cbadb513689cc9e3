"""Mamba-2 in chunks, compared with the recurrence token by token."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshrunner.recipes.model.base import Model
from meshrunner.recipes.model.hybrid import hybrid
from meshrunner.recipes.model.hybrid.mamba import Mamba, scan
from meshrunner.recipes.model.network import InverseSoftplus, LogOfUniform, TruncatedNormal
from tests.composed import experiment

HEADS, GROUPS, HEAD_DIM, STATE = 4, 2, 8, 16


def recurrence(x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Compute `scan` token by token."""
    b, c = (part.repeat_interleave(x.shape[2] // part.shape[2], 2) for part in (b, c))
    state, out = x.new_zeros(*x.shape[:1], *x.shape[2:], b.shape[-1]), []
    for t in range(x.shape[1]):
        state = state * decay[:, t].exp()[..., None, None] + x[:, t].unsqueeze(-1) * b[:, t].unsqueeze(-2)
        out.append((state * c[:, t].unsqueeze(-2)).sum(-1))
    return torch.stack(out, 1)


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item() if b.norm() > 0 else a.norm().item()


def inputs(seq: int, decay: float, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return x, decay, b and c. decay: the strongest decay of a step."""
    torch.manual_seed(seq)
    shapes = (HEADS, HEAD_DIM), (HEADS,), (GROUPS, STATE), (GROUPS, STATE)
    x, decays, b, c = (torch.randn(2, seq, *shape, dtype=dtype) for shape in shapes)
    return [each.requires_grad_() for each in (x, -decay * torch.rand_like(decays), b, c)]


@pytest.mark.parametrize("decay", [1.0, 50.0])
@pytest.mark.parametrize("chunk", [8, 16, 64])
@pytest.mark.parametrize("seq", [1, 7, 33, 50, 64])
def test_scan_in_chunks_equals_the_recurrence(seq: int, chunk: int, decay: float) -> None:
    given = inputs(seq, decay)
    y, expected = scan(*given, chunk), recurrence(*given)
    assert relative(y, expected) < 1e-10
    weight = torch.randn_like(y)
    own, others = (torch.autograd.grad((each * weight).sum(), given) for each in (y, expected))
    for gradient, other in zip(own, others, strict=True):
        assert gradient.isfinite().all() and relative(gradient, other) < 1e-10


def test_decays_are_summed_in_fp32() -> None:
    """In bf16, with its 8 bits, 500 steps of 0.01 would sum to 2, because 2 + 0.01 = 2."""
    x, _, b, c = (each.detach().bfloat16() for each in inputs(512, 1.0))
    decay = torch.full((2, 512, HEADS), -0.01)
    expected = recurrence(*(each.double() for each in (x, decay, b, c)))
    for given in (decay, decay.bfloat16()):
        exact = recurrence(*(each.double() for each in (x, given, b, c))) if given.dtype != decay.dtype else expected
        assert relative(scan(x, given, b, c, 512).double(), exact) < 2e-2


def mamba(dtype: torch.dtype = torch.float64, **keys: object) -> Mamba:
    """Build a mixer of dim 12 with random parameters."""
    section = hybrid.MambaConfig(heads=HEADS, head_dim=HEAD_DIM, groups=GROUPS, state=STATE, chunk=8, **keys)  # type: ignore[arg-type]
    layer, generator = Mamba(12, section, 1e-5), torch.Generator().manual_seed(0)
    special = {"a_log": LogOfUniform(1, 16), "dt_bias": InverseSoftplus(0.001, 0.1)}
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            initial = special.get(name.rpartition(".")[2], TruncatedNormal(0.5))
            parameter.copy_(initial.draw(parameter.shape, generator, parameter.device))
    return layer.to(dtype)


def token_by_token(layer: Mamba, u: Tensor) -> Tensor:
    """Compute a mixer without chunks, with heads, groups and convolutions written out (Dao and Gu 2024)."""
    s, seq = layer.scan, u.shape[1]

    def convolved(x: Tensor, conv: torch.nn.Module) -> Tensor:
        weight, bias = conv.get_parameter("weight"), conv.get_parameter("bias")
        past = torch.cat((x.new_zeros(x.shape[0], 3, x.shape[2]), x), 1)
        return F.silu(sum(past[:, k : k + seq] * weight[:, k] for k in range(4)) + bias)

    x = convolved(u @ layer.wx.weight.T, s.conv_x).unflatten(2, (HEADS, HEAD_DIM))
    b = convolved(u @ layer.wb.weight.T, s.conv_b).unflatten(2, (GROUPS, STATE))
    c = convolved(u @ layer.wc.weight.T, s.conv_c).unflatten(2, (GROUPS, STATE))
    dt = F.softplus(u @ layer.wdt.weight.T + s.dt_bias)
    y = recurrence(x * dt.unsqueeze(-1), -s.a_log.exp() * dt, b, c) + x * s.d.unsqueeze(-1)
    gated = (y.flatten(2) * F.silu(u @ layer.wz.weight.T)).unflatten(2, (GROUPS, -1))
    normed = gated / (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return normed.flatten(2) * s.norm @ layer.wo.weight.T


def test_mixer_equals_the_recurrence_of_the_paper() -> None:
    layer, u = mamba(), torch.randn(2, 21, 12, dtype=torch.float64)
    y, expected = layer(u), token_by_token(layer, u)
    assert relative(y, expected) < 1e-10
    parameters = dict(layer.named_parameters())
    own, others = (torch.autograd.grad(each.square().sum(), list(parameters.values())) for each in (y, expected))
    for name, gradient, other in zip(parameters, own, others, strict=True):
        assert other.norm() > 0 and relative(gradient, other) < 1e-10, name


def test_no_token_sees_a_later_one() -> None:
    layer, u = mamba(), torch.randn(1, 21, 12, dtype=torch.float64)
    before = layer(u)
    u[:, 13] += 1
    after = layer(u)
    assert torch.equal(before[:, :13], after[:, :13]) and not torch.equal(before[:, 13:], after[:, 13:])


def test_mixer_compiles_into_one_graph() -> None:
    torch._dynamo.reset()
    layer, u = mamba(torch.float32), torch.randn(2, 21, 12)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    parameters = list(layer.parameters())
    y, expected = compiled(u), layer(u)
    own, others = (torch.autograd.grad(each.square().sum(), parameters) for each in (y, expected))
    assert max(relative(*pair) for pair in ((y, expected), *zip(own, others, strict=True))) < 1e-5


def test_fused_kernel_gets_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for mamba_ssm's function, by its documented arguments."""

    def mamba_chunk_scan_combined(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor
    ) -> Tensor:
        assert chunk_size == 8 and A.shape == D.shape == (HEADS,) and dt.shape == x.shape[:3]
        return recurrence(x * dt.unsqueeze(-1), dt * A, B, C) + x * D.unsqueeze(-1)

    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "mamba_ssm.ops.triton.ssd_combined"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[name], "mamba_chunk_scan_combined", mamba_chunk_scan_combined, raising=False)
    u = torch.randn(2, 21, 12, dtype=torch.float64)
    assert relative(mamba(kernel="fused")(u), mamba(kernel="torch")(u)) < 1e-10


def test_kernel_is_resolved_by_device_and_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(model: Model, device_type: str) -> str:
        return model.on(device_type).resolved()["mamba.kernel"]

    auto, fused = (experiment("model=hybrid_tiny", f"model.mamba.kernel={key}").model for key in ("auto", "fused"))
    assert kernel(auto, "cpu") == kernel(auto, "cuda") == "torch"
    assert auto.unsupported("cpu") is auto.unsupported("cuda") is None
    assert fused.unsupported("cpu") == "model.mamba.kernel: fused needs a GPU; use model.mamba.kernel=torch"
    assert "fused needs package mamba_ssm" in str(fused.unsupported("cuda"))
    monkeypatch.setattr(hybrid, "find_spec", lambda name: name == "mamba_ssm")
    assert kernel(auto, "cpu") == "torch" and kernel(auto, "cuda") == kernel(fused, "cuda") == "fused"
    assert fused.unsupported("cuda") is None
