"""The shipped models against what was published about them."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from meshrunner.recipes.init_weights import CUTOFF, initial_value, parameter_seed
from meshrunner.recipes.model.llama import Llama
from meshrunner.recipes.model.shape import RopeScaling
from meshrunner.recipes.model.transformer import rope_table, rotate
from tests.composed import experiment

PUBLISHED = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
}
"""Parameter counts as the model cards' checkpoints have them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_number(name: str) -> None:
    llama = experiment(f"model={name}").model
    assert isinstance(llama, Llama)
    with torch.device("meta"):
        network = llama.build(seq_len=128)
    assert sum(p.numel() for p in network.parameters()) == PUBLISHED[name] == llama.parameter_count()
    assert all(p.is_meta for p in network.parameters())


def test_flops_of_llama2_7b_give_the_published_mfu() -> None:
    """9,300 tokens per second on a device of 989 TFLOP/s at sequence length 2048 are 40.3%."""
    flops = experiment("model=llama2_7b").model.flops_per_token(2048)
    assert flops.attention == 12 * 32 * 32 * 128 * 2048
    assert 100 * 9300 * flops.total / 989e12 == pytest.approx(40.3, abs=0.1)


def test_a_tied_table_counts_once_and_as_output() -> None:
    free, tied = (experiment("model=llama_tiny", f"model.tie_embeddings={tie}").model for tie in ("false", "true"))
    assert isinstance(free, Llama) and isinstance(tied, Llama)
    assert free.parameter_count() - tied.parameter_count() == 4096 * 256
    assert free.flops_per_token(256) == tied.flops_per_token(256)


@pytest.mark.parametrize(("key", "value"), [("n_heads", 7), ("n_kv_heads", 3), ("n_heads", 256)])
def test_heads_that_do_not_divide_are_refused(key: str, value: int) -> None:
    good = experiment("model=llama_tiny").model.model_dump()
    with pytest.raises(ValidationError, match=r"not a multiple|odd"):
        Llama.model_validate(good | {key: value})


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    rope = rope_table(head_dim=8, seq_len=64, theta=1e4, scaling=None, device=torch.device("cpu"))
    q, k = torch.randn(2, 8).unbind(0)
    queries, keys = (rotate(x.expand(1, 64, 1, 8), rope)[0, :, 0] for x in (q, k))
    assert torch.allclose(queries.norm(dim=-1), q.norm().expand(64), atol=1e-5)
    scores = queries @ keys.T
    for distance in (0, 3, 17):
        along = scores.diagonal(-distance)
        assert torch.allclose(along, along[0].expand_as(along), atol=1e-4)


def test_rope_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    """Figures of Llama 3.1's own formula: head_dim 128, theta 500000, factor 8 over 8192."""
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=8192)
    cpu = torch.device("cpu")
    plain, scaled = (rope_table(128, 2, 5e5, s, cpu)[1] for s in (None, scaling))
    angle = lambda table: torch.atan2(table[:, 1], table[:, 0])  # noqa: E731
    ratio = angle(scaled) / angle(plain)
    wavelength = 2 * torch.pi / angle(plain)
    assert torch.allclose(ratio[wavelength < 8192 / 4], torch.ones(1), atol=1e-5)
    assert torch.allclose(ratio[wavelength > 8192], torch.full((1,), 1 / 8), atol=1e-5)
    between = (wavelength >= 8192 / 4) & (wavelength <= 8192)
    smooth = (8192 / wavelength - 1) / (4 - 1)
    assert between.sum() > 2
    assert torch.allclose(ratio[between], ((1 - smooth) / 8 + smooth)[between], atol=1e-5)


def test_initial_values_are_a_truncated_normal_of_their_own() -> None:
    cpu, shape = torch.device("cpu"), torch.Size((512, 512))
    value = initial_value("a", shape, 0.5, seed=1, device=cpu)
    assert torch.equal(value, initial_value("a", shape, 0.5, seed=1, device=cpu))
    assert not torch.equal(value, initial_value("b", shape, 0.5, seed=1, device=cpu))
    assert not torch.equal(value, initial_value("a", shape, 0.5, seed=2, device=cpu))
    assert value.abs().max() <= 0.5 * CUTOFF
    # Standard deviation of a normal truncated at 3: 0.98658 of the untruncated one.
    assert value.std().item() == pytest.approx(0.5 * 0.98658, rel=5e-3)
    assert abs(value.mean().item()) < 5e-3
    assert parameter_seed(0, "x") != parameter_seed(1, "x")


def test_every_parameter_has_a_rule_and_depth_scales_the_projections() -> None:
    llama = experiment("model=llama_tiny").model
    network = llama.build(seq_len=8)
    stds = {name: network.initial_std(name) for name, _ in network.named_parameters()}
    assert stds["layers.0.attention_norm.weight"] is None and stds["norm.weight"] is None
    assert (
        stds["layers.3.attention.wo.weight"] == stds["layers.3.feed_forward.w2.weight"] == pytest.approx(0.02 / 12**0.5)
    )
    assert stds["layers.3.attention.wq.weight"] == 0.02
    assert stds["tok_embeddings.weight"] == 256**-0.5


@pytest.mark.parametrize(
    ("freeze", "of_six"),
    [
        ("[]", [6] * 5),
        ("[layers.1.*]", [6, 4, 6, 6, 6]),
        ("[tok_embeddings.weight,layers.0.*,layers.1.*]", [2, 2, 6, 6, 6]),
        ("['tok*','layers.*','norm*']", [2, 2, 2, 2, 4]),
    ],
)
def test_a_frozen_weight_takes_less(freeze: str, of_six: list[int]) -> None:
    """Blocks 0-3 and the output: 2 FLOPs forward, 2 for the gradient of the input, 2 for the weight's own."""
    given = ("model=llama_tiny", "model.n_layers=4", f"model.freeze={freeze}")
    model = experiment(*given).model
    assert isinstance(model, Llama)
    sizes = dict(model.weights())
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


def test_nothing_frozen_is_the_published_formula() -> None:
    for tie in ("false", "true"):
        model = experiment("model=llama_tiny", f"model.tie_embeddings={tie}").model
        assert isinstance(model, Llama)
        looked_up = 0 if model.tie_embeddings else 4096 * 256
        attention = 12 * model.n_layers * 256 * 128
        assert model.flops_per_token(128) == (6 * (model.parameter_count() - looked_up) + attention, attention)
