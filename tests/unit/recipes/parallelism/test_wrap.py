"""Wrap policies and their plans on meta. Nothing is wrapped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.network import Network
from meshrunner.recipes.parallelism.unit_sizes import local_parameters
from meshrunner.recipes.parallelism.wrap_policy import Unit, unit_parameters
from meshrunner.runner.config.consistency import remarks
from tests.composed import SMALL, experiment

BLOCKS = ["layers.0", "layers.1", "layers.2"]


def planned(*overrides: str) -> tuple[Network, dict[str, bool | int]]:
    """Return the network and its plan as name -> reshard_after_forward."""
    recipe = experiment(*SMALL, *overrides)
    with torch.device("meta"):
        network = recipe.model.build(recipe.seq_len)
    plan = recipe.wrap.plan(network, recipe.parallelism.reshard(2))
    return network, {name: unit.reshard_after_forward for name, unit in plan.items()}


@pytest.mark.parametrize(
    ("reshard", "expected"),
    [
        ("auto", [True, True, True, True]),
        ("always", [True, True, True, True]),
        ("never", [False, False, False, False]),
        ("except_last", [True, True, False, True]),
        ("2", [2, 2, 2, 2]),
    ],
)
def test_blocks(reshard: str, expected: list[bool | int]) -> None:
    """The output projection is not resharded, because backward begins with it; nor is the root with the final norm."""
    network, plan = planned(f"parallelism.reshard_after_forward={reshard}")
    assert list(plan) == [*BLOCKS, "tok_embeddings", "output", ""]
    assert list(plan.values()) == [*expected, False, False]
    units = unit_parameters(network, {name: Unit(each) for name, each in plan.items()})
    assert set(units[""]) == {"norm.weight"}


def test_auto_does_not_reshard_a_single_shard() -> None:
    assert experiment("parallelism=hsdp2", "parallelism.shard=1").parallelism.reshard(1) == "never"
    assert experiment("parallelism.reshard_after_forward=always").parallelism.reshard(1) == "always"


class Headed(nn.Module):
    """A network with more than blocks: a container with a forward, a two-layer head, a table that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
        self.heads = nn.ModuleList([nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8)), nn.LayerNorm(4)])

    def block_names(self) -> list[str]:
        return ["body.1"]


def test_units_of_a_custom_network() -> None:
    """Units are the outermost modules with a matrix, but not containers that are never called or that contain blocks."""
    network: Any = Headed()
    blocks = experiment("wrap=blocks").wrap
    assert blocks.units(network) == {"table": None, "body.0": None, "body.1": None, "heads.0": "never"}
    network.heads[0][1].weight = network.table.weight
    assert blocks.units(network) == {"body.0": None, "body.1": None}


def test_root_only() -> None:
    assert planned("wrap=root_only")[1] == {"": False}


def test_size_takes_the_smallest_modules_that_are_large_enough() -> None:
    """A block has 22,952 parameters here: the feed-forward 14,400, the attention 6,144."""
    assert list(planned("wrap=size", "wrap.min_parameters=20000")[1]) == [*BLOCKS, "tok_embeddings", "output", ""]
    _, plan = planned("wrap=size", "wrap.min_parameters=10000")
    assert [name for name in plan if name.count(".") == 2] == [f"{block}.feed_forward" for block in BLOCKS]
    assert list(plan)[-1] == ""


def test_size_finds_nothing() -> None:
    with pytest.raises(ConfigError, match=r"min_parameters\(1,000,000,000\): no module"):
        planned("wrap=size", "wrap.min_parameters=1000000000")


def test_rules_first_match_decides_and_children_come_first() -> None:
    _, plan = planned(
        "wrap=rules",
        "wrap.rules=[{match: layers.1, wrap: false}, {match: layers.2, reshard_after_forward: never}, "
        "{match: Block}, {match: layers.*.feed_forward, reshard_after_forward: 2}]",
    )
    assert plan == {
        **{f"{block}.feed_forward": 2 for block in BLOCKS},
        "layers.0": True,
        "layers.2": False,
        "": False,
    }


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ("[{match: experts.*}]", r"wrap.rules\[0\]: 'experts.\*' matches no module"),
        (
            "[{match: layers.*}, {match: layers.1}]",
            r"wrap.rules\[1\]: 'layers.1' matches no module, or only modules that earlier rules match",
        ),
        ("[{match: layers}]", "'layers' cannot be a unit: it is a container that is never called"),
    ],
)
def test_rules_without_effect_are_refused(rules: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        planned("wrap=rules", f"wrap.rules={rules}")


def test_a_shared_parameter_belongs_to_the_unit_around_all_its_users() -> None:
    tied = "model.tie_embeddings=true"
    _, plan = planned(tied)
    assert list(plan) == [*BLOCKS, ""]
    with pytest.raises(ConfigError, match=r"'output' cannot be a unit: output\.weight is shared"):
        planned(tied, "wrap=rules", "wrap.rules=[{match: output}]")
    _, by_size = planned(tied, "wrap=size", "wrap.min_parameters=20000")
    assert "output" not in by_size and "tok_embeddings" not in by_size


def test_every_parameter_is_in_one_unit() -> None:
    recipe = experiment(*SMALL, "wrap=rules", "wrap.rules=[{match: Block}, {match: layers.*.feed_forward}]")
    network = recipe.model.build(8)
    plan = recipe.wrap.plan(network, "always")
    units = unit_parameters(network, plan)
    names = [name for unit in units.values() for name in unit]
    assert sorted(names) == sorted(name for name, _ in network.named_parameters())
    assert set(units["layers.0.feed_forward"]) == {f"layers.0.feed_forward.w{i}.weight" for i in (1, 2, 3)}


def test_mixed_units_waste_gradients_of_frozen_parameters() -> None:
    recipe = experiment(*SMALL, "model.freeze=[layers.0.*,layers.1.attention.*]")
    network = recipe.model.build(8)
    plan = recipe.wrap.plan(network, "always")
    attention = sum(p.numel() for p in network.get_submodule("layers.1.attention").parameters())
    (remark,) = recipe.wrap.remarks(network, plan, "fsdp1")
    assert "'layers.1' mixes" in remark and f"allocates {4 * attention / 2**20:,.2f} MiB" in remark


def test_questionable_plans_are_remarked_on() -> None:
    assert remarks(experiment(*SMALL)) == remarks(experiment(*SMALL, "wrap=rules")) == []
    frozen = (*SMALL, "model.freeze=[layers.1.attention.*]")
    assert remarks(experiment(*frozen)) == []
    (remark,) = remarks(experiment(*frozen, "parallelism=fsdp1"))
    assert "'layers.1' mixes frozen and trained" in remark
    (remark,) = remarks(experiment(*SMALL, "wrap=rules", "wrap.rules=[{match: layers.0}, {match: layers.1.ffn_norm}]"))
    attention = ", ".join(f"layers.1.attention.w{each}" for each in "qkvo")
    assert f"no rule matches tok_embeddings, layers.1.attention_norm, {attention}, layers.1.feed_forward.w1" in remark


@pytest.mark.parametrize(
    ("layout", "workers", "gathered", "reduced"),
    [
        ("parallelism=fsdp2", 4, 2, 1),
        ("parallelism=fsdp1 parallelism.reshard_after_forward=never", 4, 1, 1),
        ("parallelism=fsdp2 global_batch=24", 4, 12, 6),
        ("parallelism=fsdp2 global_batch=24 parallelism.accumulate=hold", 4, 12, 1),
        ("parallelism=hsdp2 parallelism.shard=1 global_batch=24", 2, 0, 1),
        ("parallelism=ddp global_batch=24", 4, 0, 1),
        ("parallelism=hsdp2 parallelism.shard=1", 2, 0, 1),
        ("parallelism=fsdp2", 1, 0, 0),
        ("parallelism=ddp", 4, 0, 1),
        ("parallelism=single", 1, 0, 0),
        ("parallelism=fsdp2_tp", 4, 1, 0.5),
    ],
)
def test_traffic_of_a_block(layout: str, workers: int, gathered: float, reduced: float) -> None:
    """Compare in units of the block's fp32 bytes. Norms, which tensor parallelism does not split, are a few per thousand."""
    recipe = experiment(*SMALL, "global_batch=null", *layout.split())
    degrees = recipe.parallelism.degrees(1, workers)
    network = recipe.model.build(recipe.seq_len)
    parameters = dict(network.get_submodule("layers.0").named_parameters("layers.0"))
    plan = recipe.wrap.plan(network, recipe.parallelism.reshard(degrees.shard))
    unit = local_parameters(network, plan, degrees.tensor)["layers.0"]
    traffic = recipe.parallelism.traffic(unit, recipe.precision, degrees, recipe.accumulation(degrees.data)[1])
    whole = 4 * sum(p.numel() for p in parameters.values())
    assert traffic.gathered / whole == pytest.approx(gathered, rel=5e-3)
    assert traffic.reduced / whole == pytest.approx(reduced, rel=5e-3)
