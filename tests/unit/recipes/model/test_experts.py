"""Experts on one rank: grouped matmuls, routing, load balance, counts, initial values, and configuration errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.decoder import Experts
from meshrunner.recipes.model.experts import grouped_rows
from meshrunner.recipes.model.experts.feed_forward import ExpertFeedForward, GroupedExperts, balance_loss
from meshrunner.recipes.model.experts.grouped_rows import (
    FP32Linear,
    WeightedSum,
    grouped_mm,
    inverse_of,
    permute,
)
from meshrunner.recipes.model.init_weights import Initialiser, initial_value
from meshrunner.recipes.model.llama import MoE
from meshrunner.recipes.model.network import Loads
from meshrunner.runner.config.consistency import fit, remarks
from tests.composed import config, experiment

LOADS = {
    "even": [4, 4, 4, 4],
    "empty experts": [0, 7, 0, 5],
    "no rows": [0, 0, 0, 0],
    "all rows to one": [0, 0, 11, 0],
    "odd numbers of rows": [3, 1, 5, 2],
    "one row": [0, 0, 0, 1],
}


def product_by_product(x: Tensor, weights: Tensor, load: list[int]) -> Tensor:
    return torch.cat([rows @ weight for rows, weight in zip(x.split(load), weights, strict=True)])


def ends_of(load: list[int]) -> Tensor:
    return torch.tensor(load).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_grouped_mm_equals_one_matmul_per_group(load: list[int], dtype: torch.dtype, limit: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(sum(load), 24, dtype=dtype, requires_grad=True)
    weights = torch.randn(4, 24, 40, dtype=dtype, requires_grad=True)
    found, expected = grouped_mm(x, weights, ends_of(load)), product_by_product(x, weights, load)
    assert found.dtype == dtype and found.shape == expected.shape
    into = torch.randn_like(expected)
    gradients = [torch.autograd.grad(each, (x, weights), into) for each in (found, expected)]
    for a, b in ((found, expected), *zip(*gradients, strict=True)):
        assert torch.isfinite(a).all()
        assert (a - b).norm() <= limit * b.norm(), (a - b).norm() / b.norm()


def test_grouped_mm_accepts_an_expanded_gradient() -> None:
    x, weights = torch.randn(5, 8, requires_grad=True), torch.randn(2, 8, 8, requires_grad=True)
    grouped_mm(x, weights, ends_of([2, 3])).sum().backward()
    assert x.grad is not None and weights.grad is not None and weights.grad.norm() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_mm_runs_on_fake_tensors(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        x, weights = torch.empty(6, 8, dtype=dtype, requires_grad=True), torch.empty(2, 8, 16, dtype=dtype)
        out = grouped_mm(x, weights, torch.empty(2, dtype=torch.int32))
        assert out.shape == (6, 16) and out.dtype == dtype
        out.backward(torch.empty_like(out))
        assert x.grad is not None and x.grad.shape == x.shape


def test_unwritten_gradients_of_empty_groups_are_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = GroupedExperts(3, 8, 8)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)

    def unwritten(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        weights.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([1]), float("nan")))
        return grouped_mm(x, weights, ends)

    monkeypatch.setattr(grouped_rows, "leaves_empty_groups", lambda _: True)
    monkeypatch.setattr(grouped_rows, "grouped_mm", unwritten)
    layer(torch.randn(5, 8), torch.tensor([2, 0, 3])).square().sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert not parameter.grad[1].any() and parameter.grad[[0, 2]].isfinite().all()


def test_backward_of_permute_applies_the_inverse() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    order = torch.randperm(8)
    into = torch.randn(8, 3, dtype=torch.float64)
    found = permute(x, order, inverse_of(order), 2)
    expected = x.repeat_interleave(2, 0)[order]
    assert torch.equal(found, expected)
    a, b = (torch.autograd.grad(each, x, into)[0] for each in (found, expected))
    assert torch.allclose(a, b)


def section(**keys: Any) -> Experts:
    return Experts.model_validate({"number": 6, "per_token": 2, "ffn_dim": 12} | keys)


def by_token(layer: ExpertFeedForward, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the output and the loads of a layer in a loop over tokens."""
    settings, rows, load = layer.router.config, [], torch.zeros(layer.number, dtype=torch.int64)
    for number, token in enumerate(x.flatten(0, 1)):
        logits = layer.router.weight @ token
        scores = logits.sigmoid() if settings.score == "sigmoid" else logits.softmax(0)
        chosen = (scores + bias).topk(settings.per_token).indices
        if settings.routing == "balanced":
            chosen = torch.arange(number * settings.per_token, (number + 1) * settings.per_token) % settings.number
        weights = scores[chosen] / scores[chosen].sum() if settings.normalize else scores[chosen]
        out = torch.zeros_like(token) if layer.shared is None else layer.shared(token)
        for expert, weight in zip(chosen.tolist(), weights * settings.route_scale, strict=True):
            w1, w3, w2 = (stack[expert] for stack in (layer.experts.w1, layer.experts.w3, layer.experts.w2))
            out = out + weight * ((F.silu(token @ w1) * (token @ w3)) @ w2)
            load[expert] += 1
        rows.append(out)
    return torch.stack(rows).view_as(x), load


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"shared_ffn_dim": 12},
        {"score": "softmax", "route_scale": 2.5},
        {"routing": "balanced", "per_token": 4},
        {"normalize": False, "per_token": 1},
        {"per_token": 6},
        {"number": 1, "per_token": 1, "normalize": False},
    ],
    ids=str,
)
def test_layer_equals_a_loop_over_tokens(keys: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = ExpertFeedForward(8, section(**keys))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x, bias = torch.randn(2, 7, 8, requires_grad=True), torch.randn(layer.number) / 10
    out, load, _ = layer(x, bias)
    expected, expected_load = by_token(layer, x, bias)
    assert torch.equal(load, expected_load) and load.dtype == torch.int64
    into = torch.randn_like(out)
    inputs = (x, *layer.parameters())
    for a, b in zip(
        (out, *torch.autograd.grad(out, inputs, into)),
        (expected, *torch.autograd.grad(expected, inputs, into)),
        strict=True,
    ):
        assert (a - b).norm() <= 2e-6 * b.norm() and b.norm() > 0


def test_bias_chooses_experts_but_does_not_weigh_them() -> None:
    torch.manual_seed(0)
    layer = ExpertFeedForward(8, section(normalize=False))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(1, 5, 8)
    plain, *_ = layer.router(x, torch.zeros(6))
    same, *_ = layer.router(x, torch.full((6,), 100.0))
    assert torch.equal(plain.sort().values, same.sort().values)
    weights, experts, _ = layer.router(x, torch.tensor([0, 0, 9.0, 0, 9.0, 0]))
    assert torch.equal(experts.sort().values, torch.tensor([[2, 4]] * 5))
    assert (weights < 1).all()


def test_scores_are_fp32_in_bf16() -> None:
    layer = ExpertFeedForward(8, section(ffn_dim=16)).to(torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(1, 5, 8, dtype=torch.bfloat16)
    weights, experts, _ = layer.router(x, torch.zeros(6))
    scores = (x.float().flatten(0, 1) @ layer.router.weight.float().T).sigmoid()
    expected = scores.gather(-1, experts)
    assert weights.dtype == torch.float32
    assert torch.equal(weights, expected / (expected.sum(-1, keepdim=True) + 1e-20))
    assert layer(x, torch.zeros(6))[0].dtype == torch.bfloat16


def test_autocast_lowers_only_the_matmuls() -> None:
    torch.manual_seed(0)
    layer = ExpertFeedForward(8, section(ffn_dim=16))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(1, 5, 8)
    plain = layer(x, torch.zeros(6))
    with torch.autocast("cpu", torch.bfloat16):
        weights = layer.router(x, torch.zeros(6))[0]
        lowered = layer(x, torch.zeros(6))
    assert torch.equal(weights, layer.router(x, torch.zeros(6))[0])
    assert torch.equal(lowered[1], plain[1])
    difference = (lowered[0] - plain[0]).norm() / plain[0].norm()
    assert 1e-4 < difference < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_own_backwards_equal_autograd(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 8).to(dtype).requires_grad_(), torch.randn(6, 8, requires_grad=True)
    results, weights = torch.randn(7, 3, 8).to(dtype).requires_grad_(), torch.rand(7, 3, requires_grad=True)
    for found, expected, inputs in (
        (FP32Linear.apply(x, weight), F.linear(x.float(), weight), (x, weight)),
        (
            WeightedSum.apply(results, weights),
            (results.float() * weights.unsqueeze(-1)).sum(1).to(dtype),
            (results, weights),
        ),
    ):
        assert torch.equal(found, expected)
        into = torch.randn_like(expected)
        for a, b in zip(*(torch.autograd.grad(each, inputs, into) for each in (found, expected)), strict=True):
            assert a.dtype == b.dtype and (a - b).float().norm() <= 1e-6 * b.float().norm() and b.norm() > 0


def test_nothing_large_is_kept_in_fp32() -> None:
    layer = ExpertFeedForward(8, section(ffn_dim=16, shared_ffn_dim=16)).to(torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(2, 7, 8, dtype=torch.bfloat16, requires_grad=True), torch.zeros(6))
    tokens, width = 2 * 7, 8
    large = [tuple(each.shape) for each in kept if each.dtype == torch.float32 and each.numel() >= tokens * width]
    assert kept and not large, large


def test_balance_loss_equals_its_formula() -> None:
    torch.manual_seed(0)
    scores = torch.rand(3, 5, 4, dtype=torch.float64, requires_grad=True)
    experts = scores.detach().topk(2).indices
    expected = torch.zeros((), dtype=torch.float64)
    for sequence, chosen in zip(scores, experts, strict=True):
        for expert in range(4):
            f = 4 / (2 * 5) * sum(int(expert in token.tolist()) for token in chosen)
            p = sum(token[expert] / token.sum() for token in sequence) / 5
            expected = expected + f * p / 3
    found = balance_loss(scores, experts)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    a, b = (torch.autograd.grad(each, scores)[0] for each in (found, expected))
    assert torch.allclose(a, b, rtol=1e-10) and b.norm() > 0


def test_balance_loss_is_one_for_equal_loads() -> None:
    scores = torch.full((1, 4, 4), 0.5)
    experts = torch.tensor([[[0], [1], [2], [3]]])
    assert balance_loss(scores, experts).item() == 1
    assert balance_loss(scores, torch.zeros_like(experts)).item() == 1  # equal scores cannot tell
    skewed = torch.tensor([[[0.9, 0.1, 0.1, 0.1]] * 4])
    assert balance_loss(skewed, torch.zeros_like(experts)).item() == pytest.approx(4 * 0.75)


def loads_of_a_step(rate: float = 0.25) -> Loads:
    loads = Loads(torch.zeros(2, 4), rate)
    for _ in range(2):
        loads.tokens += torch.tensor([[3, 1, 2, 2], [8, 0, 0, 0]])
    return loads


def test_biases_move_by_the_sign_of_the_difference_from_the_mean() -> None:
    loads = loads_of_a_step()
    found = loads.balance(torch.tensor(True))
    assert loads.bias.tolist() == [[-0.25, 0.25, 0, 0], [-0.25, 0.25, 0.25, 0.25]]
    expected = {"max_violation": 3.0, "mean_violation": 1.75, "unused": 3.0}
    assert {key.removeprefix("experts/"): value.item() for key, value in found.items()} == expected
    assert not loads.tokens.any(), "the next step starts at 0"


def test_nonfinite_gradient_leaves_biases_unchanged() -> None:
    loads = loads_of_a_step()
    loads.bias += 0.3
    before = loads.bias.clone()
    loads.balance(torch.tensor(False))
    assert torch.equal(loads.bias, before) and not loads.tokens.any()


def test_violation_is_reported_per_expert_rank() -> None:
    loads = loads_of_a_step()
    loads.expert_ranks = 2
    assert loads.balance(torch.tensor(True))["experts/rank_violation"].item() == 1.0


def test_biases_stay_without_a_rate() -> None:
    loads = loads_of_a_step(rate=0.0)
    loads.balance(torch.tensor(True))
    assert not loads.bias.any()


def test_each_expert_is_initialised_by_itself() -> None:
    model = experiment("model=moe_tiny").model
    assert isinstance(model, MoE)
    network = model.on_meta(8)
    Initialiser(network, 7, torch.device("cpu")).materialise(network)
    name = "layers.2.feed_forward.experts.w2"
    stack = network.get_parameter(name)
    for number in (0, 5):
        expected = initial_value(f"{name}.{number}", stack.shape[1:], network.initial(name), 7, torch.device("cpu"))
        assert torch.equal(stack[number], expected)
    assert not torch.equal(stack[0], stack[1])
    assert not network.get_buffer("expert_bias").any()


PUBLISHED = {"mixtral_8x7b": (46_702_792_704, 12_879_925_248), "llama4_17b_16e": (107_769_861_120, 17_172_894_720)}


@pytest.mark.parametrize("name", [*PUBLISHED, "moe_tiny", "llama4_tiny"])
def test_parameters_and_flops_are_the_published_ones(name: str) -> None:
    model = experiment(f"model={name}").model
    assert isinstance(model, MoE)
    network = model.on_meta(16)
    total = sum(parameter.numel() for parameter in network.parameters())
    assert (
        total
        == sum(dict(model.multiplied_weights()).values()) + model.vocab_size * model.dim + model.inactive_parameters()
    )
    if name in PUBLISHED:
        assert (total, total - model.inactive_parameters()) == PUBLISHED[name]
    active = total - model.inactive_parameters()
    attention = 12 * model.n_layers * model.n_heads * model.head_width * 16
    assert model.flops_per_token(16) == (6 * (active - model.vocab_size * model.dim) + attention, attention)


def test_frozen_stack_of_experts_takes_fewer_flops() -> None:
    free = experiment("model=moe_tiny").model
    frozen = experiment("model=moe_tiny", "model.freeze=[layers.5.feed_forward.experts.w1]").model
    assert free.flops_per_token(8).total - frozen.flops_per_token(8).total == 2 * 2 * 256 * 256


WRONG = {
    "model.experts.per_token=9": "per_token(9) is more than number(8)",
    "model.experts.per_token=1": "normalize=true divides the only weight by itself",
    "model.dense_layers=6": "dense_layers(6) must be below n_layers(6), otherwise no layer has experts",
    "model.experts.number=0": "model.experts.number",
    "model.experts.score=relu": "model.experts.score",
    "model.experts.balance_rate=0": "model.experts.balance_rate",
}


@pytest.mark.parametrize("override", WRONG)
def test_invalid_keys_are_rejected(override: str) -> None:
    with pytest.raises((ConfigError, ValidationError)) as caught:
        experiment("model=moe_tiny", override)
    assert WRONG[override] in str(caught.value)


TOGETHER = {
    "model=llama_tiny parallelism.expert=2": (2, "this model has no experts"),
    "parallelism.expert=3": (3, "parallelism.expert(3) does not divide model.experts.number(8)"),
    "parallelism.expert=2": (3, "expert(2) does not divide shard(3)"),
    "parallelism=fsdp1 parallelism.expert=2": (2, "only FSDP2"),
    "parallelism=ddp parallelism.expert=2": (2, "only FSDP2"),
    "parallelism=fsdp2_tp parallelism.expert=2": (4, "tokens are sent to the single device that holds an expert"),
    "parallelism.expert=2 parallelism.reshard_after_forward=2": (4, "so no single number of devices fits both"),
    "parallelism.expert=2 compile=per_block activation_checkpoint=memory_budget": (
        2,
        "cannot handle blocks with process groups",
    ),
    "parallelism.expert=2 compile=per_block activation_checkpoint=selective_op activation_checkpoint.save=[{op:aten.mm}]": (
        2,
        "recomputing the token exchange of experts in a compiled block needs the token counts, which torch cannot save",
    ),
    "model.experts.ffn_dim=250": (2, "model.experts.ffn_dim(250) x 4 bytes = 1000 is not a multiple of 16"),
    "model.experts.ffn_dim=252 precision=bf16": (
        2,
        "model.experts.ffn_dim(252) x 2 bytes = 504 is not a multiple of 16",
    ),
    "model.experts.ffn_dim=252 parallelism=tp": (
        2,
        "model.experts.ffn_dim(252) / parallelism.tensor(2) x 4 bytes = 504 is not a multiple of 16",
    ),
    "parallelism=tp model.experts.shared_ffn_dim=255": (2, "does not divide model.experts.shared_ffn_dim(255)"),
}


@pytest.mark.parametrize("overrides", TOGETHER)
def test_invalid_combinations_are_rejected(overrides: str) -> None:
    workers, text = TOGETHER[overrides]
    with pytest.raises(ConfigError) as caught:
        fit(experiment("model=moe_tiny", *overrides.split()), workers)
    assert text in str(caught.value)


def test_ffn_dim_is_not_checked_without_dense_blocks() -> None:
    fit(experiment("model=llama4_tiny", "model.ffn_dim=1", "parallelism=tp"), 2)


UNITS = (
    "wrap=rules",
    "wrap.rules=[{match:layers.*},{match:layers.*.attention},{match:tok_embeddings},{match:output},{match:norm}]",
)


@pytest.mark.parametrize("words", ["model=moe_tiny parallelism.expert=2", "model=llama_tiny parallelism.prefetch=1"])
def test_units_inside_selectively_recomputed_blocks_are_rejected(words: str) -> None:
    given = (*words.split(), *UNITS)
    with pytest.raises(
        ConfigError, match=r"'layers\.0\.attention' cannot be a unit inside a block that selective_op recomputes"
    ):
        fit(experiment(*given, "activation_checkpoint=selective_op"), 2)
    fit(experiment(*given, "activation_checkpoint=full"), 2)


def test_remarks_say_what_precision_does_not_cover() -> None:
    float8 = remarks(experiment("model=moe_tiny", "precision=float8", "precision.emulate=true"))
    assert any("leaves the matmuls of routed experts in bf16" in remark for remark in float8)
    tf32 = remarks(experiment("model=moe_tiny", "precision=fp32", "precision.matmul=high"))
    assert any("router scores in TF32" in remark for remark in tf32)
    assert not remarks(experiment("model=llama_tiny", "precision=fp32", "precision.matmul=high"))


def test_float8_skips_experts_and_router() -> None:
    chosen = experiment("model=moe_tiny", "precision=float8", "precision.emulate=true")
    network = chosen.model.on_meta(8)
    before = {name: type(module).__name__ for name, module in network.named_modules()}
    chosen.precision.convert(network, 1)
    changed = {name for name, module in network.named_modules() if type(module).__name__ != before[name]}
    assert "layers.1.feed_forward.shared.w1" in changed and "layers.1.attention.wq" in changed
    assert not any("router" in name or "experts" in name for name in changed)


def test_older_torch_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.distributed.fsdp._fully_shard._fsdp_common.ShardPlacementResult", raising=False)
    with pytest.raises(ConfigError, match=r"use torch 2\.12 or later"):
        fit(experiment("model=moe_tiny", "parallelism.expert=2"), 2)
    fit(experiment("model=moe_tiny"), 2)


def test_unknown_key_of_the_section_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="per_token"):
        experiment("model=moe_tiny", "+model.experts.per_tokn=1")
    assert config("model=moe_tiny", "model.experts.balance=none")["model"]["experts"]["balance"] == "none"
