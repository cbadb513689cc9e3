"""The option `hybrid`: its checks, parameter and FLOP counts, and the targets of multi-token prediction."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.loss.base import cross_entropy
from meshrunner.recipes.loss.z_loss import IGNORED
from meshrunner.recipes.model.hybrid.hybrid import Hybrid
from meshrunner.recipes.model.hybrid.hybrid_transformer import further
from tests.composed import experiment

TINY = ("model=hybrid_tiny", "data=random", "seq_len=16")


def hybrid(*overrides: str) -> Hybrid:
    model = experiment(*TINY, *overrides).model
    assert isinstance(model, Hybrid)
    return model


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("model.pattern=M*-X",),
            r"model.pattern: no such letter: 'X'; the letters are M \(Mamba-2\), \* \(attention\)",
        ),
        (("model.mamba=null",), r"'M' in pattern 'M\*-ME' needs the section mamba"),
        (("model.experts=null",), r"'E' in pattern 'M\*-ME' needs the section experts"),
        (("model.pattern=*-E",), r"the section mamba has no effect without 'M' in pattern '\*-E'; use mamba=null"),
        (("model.pattern=M*-",), r"the section experts has no effect without 'E' in pattern 'M\*-'; use experts=null"),
        (("model.pattern=''",), "model.pattern"),
        (("model.mamba.groups=3",), r"heads\(8\) is not a multiple of groups\(3\)"),
        (("model.n_kv_heads=3",), r"n_heads\(8\) is not a multiple of n_kv_heads\(3\)"),
        (("model.head_dim=31", "model.rope_theta=1e4"), r"head_dim\(31\) is odd, but rotary embeddings rotate pairs"),
        (("model.rope_scaling={factor:8.0}",), "rope_scaling has no effect without rope_theta"),
        (("model.mtp.depth=-1",), "model.mtp.depth"),
    ],
)
def test_invalid_keys_are_rejected(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        hybrid(*overrides)


def test_indivisible_widths_are_reported() -> None:
    assert hybrid("model.mtp.depth=1").tensor_problems(2) == []
    assert hybrid().tensor_problems(4) == [
        "parallelism.tensor(4) does not divide model.n_kv_heads(2)",
        "parallelism.tensor(4) does not divide model.mamba.groups(2)",
    ]
    mamba_alone = hybrid("model.pattern=MM", "model.experts=null", "model.mamba.groups=8")
    assert mamba_alone.tensor_problems(8) == [], "it has no attention and no feed-forward network"
    assert hybrid(
        "model.dim=254", "model.n_heads=4", "model.n_kv_heads=4", "model.mamba.groups=4", "model.mtp.depth=1"
    ).tensor_problems(4) == ["parallelism.tensor(4) does not divide model.dim(254)"]


def test_nemotron_h_8b_has_the_published_shape() -> None:
    """NVIDIA 2025, table 1: 24 Mamba-2, 24 feed-forward and 4 attention blocks. The parameter count is the checkpoint's."""
    model = experiment("model=nemotron_h_8b").model
    assert isinstance(model, Hybrid)
    assert Counter(model.pattern) == {"M": 24, "-": 24, "*": 4}
    network = model.on_meta(seq_len=64)
    assert sum(p.numel() for p in network.parameters()) == 8_100_852_736
    classes = Counter(type(network.get_submodule(name)).__name__ for name in network.block_names())
    assert classes == {"MambaBlock": 24, "FeedForwardBlock": 24, "AttentionBlock": 4}


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.mtp.depth=2",),
        ("model.mtp.depth=1", "model.ffn=relu2", "model.tie_embeddings=true"),
        ("model.pattern=M*-M", "model.experts=null"),
        ("model.pattern=*-", "model.mamba=null", "model.experts=null"),
    ],
)
def test_weights_cover_every_parameter(overrides: tuple[str, ...]) -> None:
    model = hybrid(*overrides)
    sizes = {name: p.numel() for name, p in model.on_meta(seq_len=16).named_parameters()}
    active = dict(model.multiplied_weights())
    looked_up = 0 if model.tie_embeddings else model.vocab_size * model.dim
    assert sum(sizes.values()) == sum(active.values()) + looked_up + model.inactive_parameters()
    for name, size in sizes.items():
        if name in active:
            experts, per_token = (8, 2) if ".experts.w" in name else (1, 1)
            assert active[name] * experts == size * per_token, name
    assert sizes.keys() - active.keys() == (set() if model.tie_embeddings else {"tok_embeddings.weight"})


def test_flops_count_every_letter() -> None:
    """6 x active weights, attention per *, 21 x heads x head_dim x state per M, and one more output projection per depth."""
    seq_len = 16
    plain, attention = hybrid().flops_per_token(seq_len)
    weights = sum(dict(hybrid().multiplied_weights()).values())
    scores, scan, output = 12 * 8 * 32 * seq_len, 21 * 8 * 32 * 32, 4096 * 256
    assert attention == scores
    assert plain == 6 * weights + scores + 2 * scan
    deeper = hybrid("model.mtp.depth=2")
    own = sum(size for name, size in dict(deeper.multiplied_weights()).items() if name.startswith("mtp."))
    assert own == 2 * (2 * 256**2 + 3 * 256 + 2 * 256 + 2 * 256**2 + 2 * 64 * 256 + 3 * 256 * 768)
    assert deeper.flops_per_token(seq_len).total == plain + 6 * own + 2 * scores + 2 * 6 * output


def test_frozen_blocks_take_fewer_flops() -> None:
    """Backward stops at the first trained weight. Below it, a scan has no backward either."""
    whole = hybrid().flops_per_token(16).total
    below = [size for name, size in hybrid().multiplied_weights() if name.startswith("layers.0.")]
    frozen = hybrid("model.freeze=[tok_embeddings.*,layers.0.*]").flops_per_token(16).total
    first_trained = 256  # a norm, whose input needs no gradient
    assert whole - frozen == 4 * sum(below) + 2 * first_trained + 14 * 8 * 32 * 32


def test_further_targets_are_shifted_and_ignored_at_the_end() -> None:
    targets = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    assert further(targets, 2).tolist() == [[3, 4, 5, IGNORED, IGNORED], [8, 9, 10, IGNORED, IGNORED]]
    assert targets[0, 0] == 1, "the targets of the batch are not modified"
    logits = torch.randn(2, 5, 12)
    cut = cross_entropy(logits[:, :3], targets[:, 2:])
    torch.testing.assert_close(cross_entropy(logits, further(targets, 2)), cut)


def test_prediction_module_predicts_the_token_after_the_next() -> None:
    """The first module's loss, computed by hand from the stream, the next token's embedding and the token after that."""
    model = hybrid("model.mtp.depth=1", "model.vocab_size=64", "model.dim=32", "model.experts.ffn_dim=16")
    network = model.build(seq_len=16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    network.reset_buffers()
    network.loss = lambda output, hidden, targets: cross_entropy(output(hidden), targets) / targets.numel()
    tokens = torch.randint(64, (3, 17), generator=generator)
    streams = []
    handle = network.norm.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0]))
    loss = network(tokens[:, :-1], tokens[:, 1:])
    handle.remove()
    _, hidden = network.mtp[0](streams[0], network.tok_embeddings(tokens[:, 1:]), None)
    further_on = torch.nn.functional.cross_entropy(
        network.output(hidden)[:, :-1].flatten(0, 1), tokens[:, 2:].flatten()
    )
    torch.testing.assert_close(network.observed["train/mtp_loss"], further_on)
    logits = network(tokens[:, :-1])
    next_token = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(loss, next_token)
    trained = [p for p in network.parameters() if p.requires_grad]
    own = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
    expected = torch.autograd.grad(next_token + 0.3 * further_on, trained, allow_unused=True)
    for gradient, other in zip(own, expected, strict=True):
        assert gradient is not None and other is not None
        torch.testing.assert_close(gradient, other)
