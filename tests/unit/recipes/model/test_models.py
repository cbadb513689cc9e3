"""The shipped models, compared with published parameter counts, formulas and reference implementations."""

from __future__ import annotations

import hashlib
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshrunner.recipes.model import transformer
from meshrunner.recipes.model.base import Model
from meshrunner.recipes.model.decoder import RopeScaling
from meshrunner.recipes.model.documents import Documents
from meshrunner.recipes.model.init_weights import Initialiser, initial_value
from meshrunner.recipes.model.llama import Llama
from meshrunner.recipes.model.network import CUTOFF, ONES, InverseSoftplus, LogOfUniform, TruncatedNormal
from meshrunner.recipes.model.transformer import Attention, rope_frequencies, rope_table, rotate
from tests.composed import SMALL, experiment

PUBLISHED = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
}
"""Parameter counts of the published checkpoints."""


def parameters(model: Model) -> int:
    """Count the parameters of a model; a tied table counts once."""
    return sum(p.numel() for p in model.on_meta(seq_len=8).parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    llama = experiment(f"model={name}").model
    assert isinstance(llama, Llama)
    with torch.device("meta"):
        network = llama.build(seq_len=128)
    assert sum(p.numel() for p in network.parameters()) == PUBLISHED[name]
    assert all(p.is_meta for p in network.parameters())


def test_flops_of_llama2_7b_give_the_published_mfu() -> None:
    """9,300 tokens per second on a 989 TFLOP/s device at sequence length 2048 are an MFU of 40.3%."""
    flops = experiment("model=llama2_7b").model.flops_per_token(2048)
    assert flops.attention == 12 * 32 * 32 * 128 * 2048
    assert 100 * 9300 * flops.total / 989e12 == pytest.approx(40.3, abs=0.1)


def test_tied_table_counts_once_and_as_output() -> None:
    free, tied = (experiment("model=llama_tiny", f"model.tie_embeddings={tie}").model for tie in ("false", "true"))
    assert isinstance(free, Llama) and isinstance(tied, Llama)
    assert parameters(free) - parameters(tied) == 4096 * 256
    assert free.flops_per_token(256) == tied.flops_per_token(256)


@pytest.mark.parametrize(("key", "value"), [("n_heads", 7), ("n_kv_heads", 3), ("n_heads", 256)])
def test_heads_that_do_not_divide_are_rejected(key: str, value: int) -> None:
    good = experiment("model=llama_tiny").model.model_dump()
    with pytest.raises(ValidationError, match=r"not a multiple|odd"):
        Llama.model_validate(good | {key: value})


LLAMA31 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=8192)


def test_rotation_keeps_lengths_and_depends_only_on_distance() -> None:
    rope = rope_table(head_dim=8, seq_len=64, theta=1e4, scaling=None, device=torch.device("cpu"))
    q, k = torch.randn(2, 8).unbind(0)
    queries, keys = (rotate(x.expand(1, 64, 1, 8), rope)[0, :, 0] for x in (q, k))
    assert torch.allclose(queries.norm(dim=-1), q.norm().expand(64), atol=1e-5)
    scores = queries @ keys.T
    for distance in (0, 3, 17):
        along = scores.diagonal(-distance)
        assert torch.allclose(along, along[0].expand_as(along), atol=1e-4)


def as_transformers(x: Tensor, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Apply rotary embeddings as transformers does. x: [batch, seq, heads, head_dim]."""
    dim = x.shape[-1]
    inv_freq = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if scaling is not None:
        low_freq_wavelen = scaling.original_seq_len / scaling.low_freq_factor
        high_freq_wavelen = scaling.original_seq_len / scaling.high_freq_factor
        wavelen = 2 * math.pi / inv_freq
        inv_freq_llama = torch.where(wavelen > low_freq_wavelen, inv_freq / scaling.factor, inv_freq)
        smooth = (scaling.original_seq_len / wavelen - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        smoothed = (1 - smooth) * inv_freq_llama / scaling.factor + smooth * inv_freq_llama
        is_medium = ~(wavelen < high_freq_wavelen) * ~(wavelen > low_freq_wavelen)
        inv_freq = torch.where(is_medium, smoothed, inv_freq_llama)
    positions = torch.arange(x.shape[1]).float()
    angles = (inv_freq[:, None] @ positions[None, :]).T
    emb = torch.cat((angles, angles), dim=-1)
    cos, sin = emb.cos()[:, None], emb.sin()[:, None]
    rotate_half = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), dim=-1)
    return x * cos + rotate_half * sin


@pytest.mark.parametrize("scaling", [None, LLAMA31], ids=["plain", "llama3"])
def test_rotation_equals_that_of_transformers(scaling: RopeScaling | None) -> None:
    x = torch.randn(2, 9000, 3, 128)
    rope = rope_table(128, 9000, 5e5, scaling, torch.device("cpu"))
    torch.testing.assert_close(rotate(x, rope), as_transformers(x, 5e5, scaling), rtol=0, atol=2e-6)
    # The table itself to the last bit: its angles reach thousands of radians.
    ones = as_transformers(torch.ones(1, 9000, 1, 128), 5e5, scaling)[0, :, 0]
    assert torch.equal(rope[:, 0] + rope[:, 1], ones)


def neighbours(x: Tensor, theta: float) -> Tensor:
    """Apply rotary embeddings to neighbouring pairs, like Llama's original code and checkpoints of format 1."""
    angles = torch.outer(torch.arange(x.shape[1]).float(), theta ** -(torch.arange(0, x.shape[-1], 2) / x.shape[-1]))
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def test_rotated_halves_equal_rotated_neighbours_with_reordered_weights() -> None:
    """Element 2i of a head becomes i and element 2i + 1 becomes i + head_dim / 2. Outputs and gradients stay the same."""
    llama = experiment(*SMALL).model
    assert isinstance(llama, Llama)
    attention, dim = Attention(llama), llama.head_width
    rope = rope_table(dim, 34, 1e4, None, torch.device("cpu"))
    rows = torch.arange(dim).unflatten(0, (-1, 2)).T.flatten()
    x = torch.randn(2, 34, llama.dim)
    old = {name: torch.randn_like(p).div_(7).requires_grad_() for name, p in attention.named_parameters()}
    q, k, v = ((x @ old[f"w{name}.weight"].T).unflatten(-1, (-1, dim)) for name in "qkv")
    q, k = neighbours(q, 1e4), neighbours(k, 1e4)
    k, v = (t.repeat_interleave(3, dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / dim**0.5
    scores = scores.masked_fill(torch.ones(34, 34).triu(1).bool(), float("-inf"))
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2) @ old["wo.weight"].T

    def reordered(name: str, weight: Tensor) -> Tensor:
        turns = name.startswith(("wq", "wk"))
        return weight.unflatten(0, (-1, dim))[:, rows].flatten(0, 1) if turns else weight

    attention.load_state_dict({name: reordered(name, weight.detach()) for name, weight in old.items()})
    found = attention(x, rope)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    along = torch.randn_like(found)
    (found * along).sum().backward()
    (expected * along).sum().backward()
    for name, parameter in attention.named_parameters():
        gradient = old[name].grad
        assert gradient is not None and parameter.grad is not None
        difference = parameter.grad - reordered(name, gradient)
        assert difference.norm() < 1e-5 * gradient.norm(), name


class Kernels(TorchDispatchMode):
    """Records the operators that compute, each of which is a kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten._unsafe_view.default:
            self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, 8), (torch.bfloat16, 10)])
def test_eager_rotation_launches_few_kernels(dtype: torch.dtype, expected: int) -> None:
    """The count is for queries and keys together. Rotating neighbouring pairs took 14 and 18 kernels. Two
    fewer, with addcmul, would round otherwise than transformers."""
    rope = rope_table(8, 16, 1e4, None, torch.device("cpu"))
    q, k = torch.randn(1, 16, 4, 8, dtype=dtype), torch.randn(1, 16, 2, 8, dtype=dtype)
    with Kernels() as kernels:
        assert rotate(q, rope).dtype == rotate(k, rope).dtype == dtype
    assert len(kernels.names) == expected, kernels.names


def test_bf16_is_rotated_in_fp32() -> None:
    rope = rope_table(64, 512, 1e4, None, torch.device("cpu"))
    x = torch.randn(1, 512, 2, 64).bfloat16()
    assert torch.equal(rotate(x, rope), rotate(x.float(), rope).bfloat16())


@pytest.mark.parametrize(
    ("device", "dtype", "kv_heads", "masked"),
    [
        ("cpu", torch.float32, 2, True),
        ("cuda", torch.bfloat16, 2, False),
        ("cuda", torch.bfloat16, 6, True),
        ("cuda", torch.float32, 6, False),
    ],
)
def test_key_heads_are_repeated_where_no_fused_kernel_groups_them(
    device: str, dtype: torch.dtype, kv_heads: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 2 key heads of 6 query heads are repeated in the order of their groups, in fp32 or with a mask on CUDA."""
    llama = experiment(*SMALL).model
    assert isinstance(llama, Llama)
    seen: list[tuple[int, bool]] = []

    def recorded(
        q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool
    ) -> Tensor:
        assert k.shape == v.shape and is_causal == (attn_mask is None) == (not masked)
        seen.append((k.shape[1], enable_gqa))
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    with torch.device("meta"):
        attention = Attention(llama)
    with FakeTensorMode(), torch.device(device), torch.no_grad():
        for module in attention.children():
            module.weight = nn.Parameter(torch.empty(module.weight.shape, dtype=dtype))
        rope = torch.empty(34, 2, llama.head_width)
        documents = Documents(rope, torch.empty(1, 1, 34, 34, dtype=dtype))
        attention(torch.empty(1, 34, llama.dim, dtype=dtype), documents if masked else rope)
    assert seen == [(kv_heads, kv_heads == 2)]


def test_repeated_heads_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = experiment(*SMALL).model
    assert isinstance(llama, Llama)
    attention, x = Attention(llama), torch.randn(2, 34, llama.dim)
    rope = rope_table(llama.head_width, 34, 1e4, None, torch.device("cpu"))
    grouped = attention(x, rope)
    monkeypatch.setattr(transformer, "lacks_grouped_kernel", lambda *_: True)
    torch.testing.assert_close(attention(x, rope), grouped)


def test_rope_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    """Llama 3.1: head_dim 128, theta 500000, factor 8 over 8192."""
    plain, scaled = (rope_frequencies(128, 5e5, s) for s in (None, LLAMA31))
    ratio = scaled / plain
    wavelength = 2 * torch.pi / plain
    assert torch.allclose(ratio[wavelength < 8192 / 4], torch.ones(1), atol=1e-5)
    assert torch.allclose(ratio[wavelength > 8192], torch.full((1,), 1 / 8), atol=1e-5)
    between = (wavelength >= 8192 / 4) & (wavelength <= 8192)
    smooth = (8192 / wavelength - 1) / (4 - 1)
    assert between.sum() > 2
    assert torch.allclose(ratio[between], ((1 - smooth) / 8 + smooth)[between], atol=1e-5)


def test_initial_values_are_a_truncated_normal_per_name_and_seed() -> None:
    cpu, shape = torch.device("cpu"), torch.Size((512, 512))
    normal = TruncatedNormal(0.5)
    value = initial_value("a", shape, normal, seed=1, device=cpu)
    assert torch.equal(value, initial_value("a", shape, normal, seed=1, device=cpu))
    assert not torch.equal(value, initial_value("b", shape, normal, seed=1, device=cpu))
    assert not torch.equal(value, initial_value("a", shape, normal, seed=2, device=cpu))
    assert value.abs().max() <= 0.5 * CUTOFF
    # Standard deviation of a normal truncated at 3: 0.98658 of the untruncated one.
    assert value.std().item() == pytest.approx(0.5 * 0.98658, rel=5e-3)
    assert abs(value.mean().item()) < 5e-3


@pytest.mark.parametrize(("model", "checksum"), [("llama_tiny", "ea9ded6f18e9a647"), ("moe_tiny", "81b66a9d60e577e8")])
def test_initial_values_are_those_of_earlier_versions(model: str, checksum: str) -> None:
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("torch computes a normal's last bits in another way on CPUs without AVX2")
    network = experiment(f"model={model}", *SMALL).model.on_meta(seq_len=8)
    Initialiser(network, 7, torch.device("cpu")).materialise(network)
    found = hashlib.blake2b(digest_size=8)
    for name, parameter in sorted(network.named_parameters()):
        found.update(name.encode() + parameter.detach().numpy().tobytes())
    assert found.hexdigest() == checksum


def test_distributions_of_mamba_parameters() -> None:
    """exp(a_log) is uniform, and softplus(dt_bias) is log-uniform."""
    draw = partial(initial_value, "a", torch.Size((1000,)), seed=1, device=torch.device("cpu"))
    rates = draw(LogOfUniform(1, 16)).exp()
    assert 1 <= rates.min() < 1.1 and 15.9 < rates.max() <= 16 and abs(rates.mean() - 8.5) < 0.5
    steps = F.softplus(draw(InverseSoftplus(0.001, 0.1)))
    assert 0.001 <= steps.min() < 0.00102 and 0.099 < steps.max() < 0.1001
    assert abs(steps.log().mean() - math.log(0.01)) < 0.1


def test_each_parameter_has_a_distribution_and_depth_scales_projections() -> None:
    llama = experiment("model=llama_tiny").model
    network = llama.build(seq_len=8)
    values = {name: network.initial(name) for name, _ in network.named_parameters()}
    assert values["layers.0.attention_norm.weight"] == values["norm.weight"] == ONES
    into_stream = TruncatedNormal(0.02 / 12**0.5)
    assert values["layers.3.attention.wo.weight"] == values["layers.3.feed_forward.w2.weight"] == into_stream
    assert values["layers.3.attention.wq.weight"] == TruncatedNormal(0.02)
    assert values["tok_embeddings.weight"] == TruncatedNormal(256**-0.5)


@pytest.mark.parametrize(
    ("freeze", "of_six"),
    [
        ("[]", [6] * 5),
        ("[layers.1.*]", [6, 4, 6, 6, 6]),
        ("[tok_embeddings.weight,layers.0.*,layers.1.*]", [2, 2, 6, 6, 6]),
        ("['tok*','layers.*','norm*']", [2, 2, 2, 2, 4]),
    ],
)
def test_frozen_weights_take_fewer_flops(freeze: str, of_six: list[int]) -> None:
    """A weight takes 2 FLOPs in forward, 2 for the gradient of its input, 2 for its own. of_six: blocks 0-3 and output."""
    given = ("model=llama_tiny", "model.n_layers=4", f"model.freeze={freeze}")
    model = experiment(*given).model
    assert isinstance(model, Llama)
    sizes = dict(model.multiplied_weights())
    with torch.device("meta"):
        named = dict(model.build(seq_len=64).named_parameters())
    assert {**sizes, "tok_embeddings.weight": 4096 * 256} == {name: p.numel() for name, p in named.items()}
    flops = model.flops_per_token(64)
    attention = 4 * 256 * 64 * sum(3 if factor > 2 else 1 for factor in of_six[:4])
    assert flops.attention == attention
    expected = attention
    for number, factor in enumerate(of_six):
        block = f"layers.{number}." if number < 4 else "output."
        expected += factor * sum(size for name, size in sizes.items() if name.startswith(block))
    # The norms are too small to matter, and those around a border have a factor of their own.
    assert flops.total == pytest.approx(expected, rel=2e-3)


def test_flops_without_freezing_equal_the_published_formula() -> None:
    for tie in ("false", "true"):
        model = experiment("model=llama_tiny", f"model.tie_embeddings={tie}").model
        assert isinstance(model, Llama)
        looked_up = 0 if model.tie_embeddings else 4096 * 256
        attention = 12 * model.n_layers * 256 * 128
        assert model.flops_per_token(128) == (6 * (parameters(model) - looked_up) + attention, attention)
