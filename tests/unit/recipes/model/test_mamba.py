"""Mamba-2 in chunks, compared with the recurrence token by token."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshrunner.recipes.compatibility import problems
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.base import Model
from meshrunner.recipes.model.hybrid import hybrid, mamba_kernel
from meshrunner.recipes.model.hybrid.mamba import CausalConvolution, Mamba, scan
from meshrunner.recipes.model.network import InverseSoftplus, LogOfUniform, TruncatedNormal
from tests.composed import experiment

# torch itself instantiates autograd Functions that it compiles.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
BACKENDS = (
    "eager",
    "aot_eager",
    pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]),
)

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


@pytest.mark.slow
def test_mixer_compiles_into_one_graph() -> None:
    torch._dynamo.reset()
    layer, u = mamba(torch.float32), torch.randn(2, 21, 12)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    parameters = list(layer.parameters())
    y, expected = compiled(u), layer(u)
    own, others = (torch.autograd.grad(each.square().sum(), parameters) for each in (y, expected))
    assert max(relative(*pair) for pair in ((y, expected), *zip(own, others, strict=True))) < 1e-5


def with_gradients(compute: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """Return the result, and the gradients of all inputs for a weighted sum of the result."""
    y = compute(*given)
    weight = (
        torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(y.dtype)
    )  # exact in all dtypes
    return [y, *torch.autograd.grad(y, given, weight)]


def convolved_by_torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    padded = F.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=len(bias)).transpose(1, 2))


def convolution(channels: int, width: int, dtype: torch.dtype = torch.float64) -> CausalConvolution:
    layer = CausalConvolution(channels, width).to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


SIZES = [(2, 21, 12, 4), (1, 1, 3, 4), (3, 7, 5, 3), (2, 3, 1, 1), (1, 2, 8, 5)]


@pytest.mark.parametrize(("batch", "seq", "channels", "width"), SIZES)
def test_convolution_equals_that_of_torch(batch: int, seq: int, channels: int, width: int) -> None:
    layer = convolution(channels, width)
    x = torch.randn(batch, channels, seq, dtype=torch.float64).transpose(1, 2).requires_grad_()
    own = with_gradients(lambda *_: layer(x), [x, layer.weight, layer.bias])
    for found, expected in zip(own, with_gradients(convolved_by_torch, [x, layer.weight, layer.bias]), strict=True):
        assert relative(found, expected) < 1e-12


def test_convolution_sums_in_fp32_and_keeps_only_its_input() -> None:
    torch.manual_seed(0)
    layer, x = convolution(24, 4, torch.bfloat16), torch.randn(2, 50, 24, dtype=torch.bfloat16, requires_grad=True)
    given = [x, layer.weight, layer.bias]
    exact = with_gradients(convolved_by_torch, [each.detach().double().requires_grad_() for each in given])
    for found, expected in zip(with_gradients(lambda *_: layer(x), given), exact, strict=True):
        assert found.dtype == torch.bfloat16
        assert (found == expected.bfloat16()).double().mean() > 0.95, "rounded once"
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda each: each):
        layer(x)
    assert [each.data_ptr() for each in kept] == [each.data_ptr() for each in given]


class NotTraced:
    """A kernel with a `pre_hook`, as Triton's are: the compiler must not trace its call."""

    pre_hook = print

    def __call__(self) -> None:
        assert not torch.compiler.is_compiling(), "pre_hook and post_hook are not supported"


def installed(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """Pretend that a package with module `name` is installed."""
    for end in [i for i, letter in enumerate(f"{name}.") if letter == "."]:
        monkeypatch.setitem(sys.modules, name[:end], ModuleType(name[:end]))
    for key, value in members.items():
        setattr(sys.modules[name], key, value)


def pulled_back(function: Callable[..., Tensor], inputs: list[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of the inputs. Compute in another thread, because torch switches autograd off within an operator."""

    def compute() -> tuple[Tensor, ...]:
        given = [each.detach().requires_grad_() for each in inputs]
        return torch.autograd.grad(function(*given), given, gradient)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(compute).result()


@pytest.fixture
def mamba_ssm(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Install a stand-in for mamba_ssm, which calls the recurrence. Return the list of its calls."""
    kernel, calls = NotTraced(), list[str]()

    def recurrent(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        kernel()
        assert all(each.is_contiguous() for each in (x, dt, a, b, c, d))
        return recurrence(x * dt.unsqueeze(-1), dt * a, b, c) + x * d.unsqueeze(-1)

    def forward(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor
    ) -> tuple[Tensor, ...]:
        assert chunk_size == 8
        calls.append("forward")
        y = recurrent(x, dt, A, B, C, D)
        return y.transpose(1, 2).contiguous().transpose(1, 2), y, dt, A, B, C

    def backward(
        dout: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, out: Tensor, chunk_size: int, D: Tensor
    ) -> tuple[Tensor | None, ...]:
        assert dout.is_contiguous() and out.is_contiguous() and chunk_size == 8
        calls.append("backward")
        if torch.are_deterministic_algorithms_enabled():
            assert torch.is_deterministic_algorithms_warn_only_enabled(), "torch.cumsum would raise on a GPU"
        of_x, of_dt, of_a, *others = pulled_back(recurrent, [x, dt, A, B, C, D], dout)
        # As in mamba_ssm, the gradient of A is in fp32 at least. Here, that of x is laid out by channels.
        return of_x.transpose(1, 3).contiguous().transpose(1, 3), of_dt, of_a.double(), *others, None, None, None

    name = "mamba_ssm.ops.triton.ssd_combined"
    installed(monkeypatch, name, _mamba_chunk_scan_combined_fwd=forward, _mamba_chunk_scan_combined_bwd=backward)
    return calls


def scanned(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Compute the operator `mamba_scan` in plain torch."""
    return scan(x * dt.unsqueeze(-1), dt * a, b, c, 8) + x * d.unsqueeze(-1)


def by_channel(seq: int, dtype: torch.dtype) -> list[Tensor]:
    """Return inputs of the operator `mamba_scan` that are laid out by channels, so that they are not contiguous."""
    torch.manual_seed(seq)
    shapes = (HEADS, HEAD_DIM), (HEADS,), (GROUPS, STATE), (GROUPS, STATE)
    x, dt, b, c = (torch.randn(2, *shape, seq, dtype=dtype).movedim(-1, 1) for shape in shapes)
    a, d = torch.randn(2, HEADS, 2, dtype=dtype)[:, :, 0]
    return [each.requires_grad_() for each in (x, F.softplus(dt), -a.exp(), b, c, d)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seq", [1, 13, 33])
def test_compiled_mixer_calls_the_fused_kernel(seq: int, backend: str, mamba_ssm: list[str]) -> None:
    """One graph, which does not contain the kernel's own code. Its result and all gradients are those of plain torch."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    given = [each.detach().requires_grad_() for each in by_channel(seq, torch.float32)]
    assert seq == 1 or not given[0].is_contiguous()

    def computed(*inputs: Tensor) -> Tensor:
        return mamba_kernel.scan(*inputs, 8).transpose(1, 2) * 2  # type: ignore[no-any-return]

    compiled = torch.compile(computed, backend=backend, fullgraph=True, dynamic=False)
    found = with_gradients(compiled, given)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1 and mamba_ssm == ["forward", "backward"]
    exact = [each.detach().double().requires_grad_() for each in given]
    expected = with_gradients(lambda *each: scanned(*each).transpose(1, 2) * 2, exact)
    assert max(relative(*pair) for pair in zip([each.double() for each in found], expected, strict=True)) < 1e-5


@pytest.mark.parametrize("deterministic", [False, True])
def test_fused_mixer_equals_that_in_torch(deterministic: bool, mamba_ssm: list[str]) -> None:
    u = torch.randn(2, 21, 12, dtype=torch.float64)
    layers = mamba(kernel="fused"), mamba(kernel="torch")
    torch.use_deterministic_algorithms(deterministic)
    try:
        fused, plain = (with_gradients(lambda *_: layer(u), list(layer.parameters())) for layer in layers)  # noqa: B023
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert mamba_ssm == ["forward", "backward"]
    assert max(relative(*pair) for pair in zip(fused, plain, strict=True)) < 1e-10


@pytest.mark.parametrize("seq", [1, 13])
def test_operators_return_what_their_fakes_promise(seq: int, mamba_ssm: list[str], causal_conv1d: None) -> None:
    given = by_channel(seq, torch.float32)
    torch.library.opcheck(mamba_kernel.scan, (*given, 8))
    gradient, *inputs = (each.detach() for each in (scanned(*given), *given))
    torch.library.opcheck(
        torch.ops.meshrunner.mamba_scan_backward,
        (gradient, *inputs, gradient.transpose(0, 1).contiguous().transpose(0, 1), 8),
    )
    convolved = [torch.randn(2, 8, seq).transpose(1, 2), torch.randn(3, 8).T, torch.randn(16)[::2]]
    torch.library.opcheck(mamba_kernel.convolution, [each.requires_grad_() for each in convolved])
    torch.library.opcheck(
        torch.ops.meshrunner.causal_convolution_backward, [each.detach() for each in (convolved[0], *convolved)]
    )


@pytest.fixture
def causal_conv1d(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a stand-in for causal_conv1d, with the layouts that its kernel requires and returns."""
    kernel = NotTraced()

    def computed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        kernel()
        assert x.stride(1) == 1 and (x.stride(2) % 8 == 0 or x.shape[2] == 1) and bias.is_contiguous()
        return convolved_by_torch(x.transpose(1, 2), weight, bias).transpose(1, 2)

    def forward(x: Tensor, weight: Tensor, bias: Tensor, *others: Any) -> Tensor:
        assert others == (None, None, None, True)
        return computed(x, weight, bias).clone()

    def backward(x: Tensor, weight: Tensor, bias: Tensor, dout: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
        assert others == (None, None, None, None, False, True) and dout.stride(1) == 1
        return *pulled_back(computed, [x, weight, bias], dout), None

    name = "causal_conv1d.cpp_functions"
    installed(monkeypatch, name, causal_conv1d_fwd_function=forward, causal_conv1d_bwd_function=backward)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_convolution_calls_the_fused_kernel(backend: str, causal_conv1d: None) -> None:
    torch._dynamo.reset()
    layer = CausalConvolution(16, 3, fused=True)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    given = [torch.randn(2, 16, 13).transpose(1, 2).requires_grad_(), layer.weight, layer.bias]
    compiled = torch.compile(lambda *_: layer(given[0]).transpose(1, 2), backend=backend, fullgraph=True, dynamic=False)
    expected = with_gradients(lambda *each: convolved_by_torch(*each).transpose(1, 2), given)
    assert max(relative(*pair) for pair in zip(with_gradients(compiled, given), expected, strict=True)) < 1e-5


def test_convolution_is_fused_only_where_the_kernel_works(monkeypatch: pytest.MonkeyPatch, causal_conv1d: None) -> None:
    calls: list[int] = []
    monkeypatch.setattr(mamba_kernel, "convolution", lambda x, *_: calls.append(x.shape[2]) or x)
    for channels, width, deterministic in [
        (8, 4, False),
        (12, 4, False),
        (24, 5, False),
        (32, 1, False),
        (40, 4, True),
    ]:
        torch.use_deterministic_algorithms(deterministic)
        CausalConvolution(channels, width, fused=True)(torch.randn(1, 3, channels))
        torch.use_deterministic_algorithms(False)
    CausalConvolution(8, 4)(torch.randn(1, 3, 8))
    assert calls == [8]


def test_running_sums_need_no_cumsum(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, cumsum raises an error under deterministic algorithms."""
    given = inputs(50, 3.0)
    expected = with_gradients(recurrence, given)

    def raises(*_: Any, **__: Any) -> None:
        raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")

    monkeypatch.setattr(torch, "cumsum", raises)
    monkeypatch.setattr(Tensor, "cumsum", raises)
    torch.use_deterministic_algorithms(True)
    try:
        found = with_gradients(lambda *each: scan(*each, 8), given)
        layer, u = mamba(), torch.randn(2, 21, 12, dtype=torch.float64)
        whole = [with_gradients(lambda *_: layer(u), list(layer.parameters()))]
    finally:
        torch.use_deterministic_algorithms(False)
    whole.append(with_gradients(lambda *_: token_by_token(layer, u), list(layer.parameters())))
    for own, other in zip([*found, *whole[0]], [*expected, *whole[1]], strict=True):
        assert relative(own, other) < 1e-10


class Packages:
    """Packages that importlib finds: mamba_ssm, old or new, and causal_conv1d."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder, self.names = folder, set[str]()
        monkeypatch.setattr(hybrid, "find_spec", self.find)

    def find(self, name: str) -> ModuleSpec | None:
        assert "." not in name, "importlib would import the package"
        if name not in self.names:
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(self.folder)]
        return spec

    def update_mamba_ssm(self) -> None:
        (self.folder / "utils").mkdir()
        (self.folder / "utils" / "determinism.py").touch()


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Packages:
    return Packages(monkeypatch, tmp_path)


def kernel(model: Model, device_type: str, *, deterministic: bool = False) -> str:
    return str(model.on(device_type, deterministic=deterministic).resolved()["mamba.kernel"])


def test_kernel_is_resolved_by_device_and_package(packages: Packages) -> None:
    auto, fused = (experiment("model=hybrid_tiny", f"model.mamba.kernel={key}").model for key in ("auto", "fused"))
    assert kernel(auto, "cpu") == kernel(auto, "cuda") == "torch"
    assert auto.unsupported("cpu") is auto.unsupported("cuda") is None
    assert fused.unsupported("cpu") == "model.mamba.kernel: fused needs a GPU; use model.mamba.kernel=torch"
    assert "fused needs package mamba_ssm" in str(fused.unsupported("cuda"))
    packages.names.add("mamba_ssm")
    assert kernel(auto, "cpu") == "torch" and kernel(auto, "cuda") == kernel(fused, "cuda") == "fused"
    assert fused.unsupported("cuda") is None


def test_falling_back_to_torch_on_a_gpu_is_remarked(packages: Packages) -> None:
    def said(key: str, device_type: str, *overrides: str) -> str:
        return " ".join(
            experiment("model=hybrid_tiny", f"model.mamba.kernel={key}", *overrides).on(device_type).model.remarks()
        )

    assert said("auto", "cpu") == said("torch", "cuda") == ""
    assert "auto chose torch, because fused needs package mamba_ssm (pip install mamba-ssm)" in said("auto", "cuda")
    packages.names.add("mamba_ssm")
    assert said("auto", "cuda") == said("fused", "cuda") == ""
    assert "fused needs a newer mamba_ssm" in said("auto", "cuda", "deterministic=true")
    packages.update_mamba_ssm()
    assert said("auto", "cuda", "deterministic=true") == ""


def test_old_kernels_are_not_deterministic(packages: Packages) -> None:
    def refused(key: str, deterministic: bool) -> list[str]:
        recipe = experiment("model=hybrid_tiny", f"model.mamba.kernel={key}", f"deterministic={deterministic}")
        return problems(recipe, recipe.parallelism.degrees(1, 2))

    auto = experiment("model=hybrid_tiny").model
    assert refused("fused", True) == [], "the package is looked for where the run starts"
    packages.names.add("mamba_ssm")
    assert kernel(auto, "cuda", deterministic=True) == "torch"
    assert "old versions of mamba_ssm" in refused("fused", True)[0]
    assert refused("fused", False) == refused("auto", True) == refused("torch", True) == []
    packages.update_mamba_ssm()
    assert kernel(auto, "cuda", deterministic=True) == "fused" and refused("fused", True) == []


def test_a_package_that_cannot_be_imported_is_named(packages: Packages, mamba_ssm: list[str]) -> None:
    auto = experiment("model=hybrid_tiny").model
    packages.names.add("mamba_ssm")
    auto.on("cuda").import_kernels()  # causal_conv1d is optional
    auto.on("cpu").import_kernels()
    packages.names.add("causal_conv1d")
    said = r"package {} is installed, but cannot be imported; repair .*kernel=torch\. ModuleNotFoundError"
    with pytest.raises(ConfigError, match=said.format("causal_conv1d")):
        auto.on("cuda").import_kernels()
    auto.on("cpu").import_kernels()
    del sys.modules["mamba_ssm.ops.triton.ssd_combined"]
    with pytest.raises(ConfigError, match=said.format("mamba_ssm")):
        auto.on("cuda").import_kernels()

    def convolutions(model: Model) -> set[bool]:
        network = model.on_meta(seq_len=16)
        return {each.fused for each in network.modules() if isinstance(each, CausalConvolution)}

    assert convolutions(auto.on("cuda")) == {True} and convolutions(auto.on("cpu")) == {False}
