"""Megatron-FSDP without the package: settings refused before a run starts, and the output of `show`."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from meshrunner.recipes.errors import ConfigError, Incompatible
from meshrunner.recipes.parallelism import megatron_fsdp
from meshrunner.recipes.parallelism.megatron_fsdp import without_update
from meshrunner.runner import cli
from meshrunner.runner.config import devices
from meshrunner.runner.config.consistency import fit
from meshrunner.runner.launch import environment
from tests.composed import SMALL, experiment

MEGATRON = (*SMALL, "parallelism=megatron_fsdp", "micro_batch=3")


def test_a_cpu_is_refused_in_one_line() -> None:
    with pytest.raises(Incompatible) as caught:
        devices.node_devices(experiment(*MEGATRON, "hardware=cpu"))
    assert str(caught.value) == "parallelism: megatron_fsdp needs a GPU; use parallelism=fsdp2"


def test_a_run_on_a_cpu_ends_before_it_starts(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli._dispatch(["run", *MEGATRON, "hardware=cpu", "tracker=none"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("parallelism: megatron_fsdp needs a GPU; use parallelism=fsdp2")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        (None, "needs megatron-fsdp 0.6.1 or later, but it is not installed; pip install 'meshrunner[megatron]'"),
        ("0.5.9", "needs megatron-fsdp 0.6.1 or later, but 0.5.9 is installed; pip install 'meshrunner[megatron]'"),
        ("0.6.1", None),
        ("0.10.0", None),
    ],
)
def test_a_missing_or_old_release_is_refused(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, expected: str | None
) -> None:
    def version(_: str) -> str:
        if installed is None:
            raise PackageNotFoundError
        return installed

    monkeypatch.setattr("importlib.metadata.version", version)
    reason = experiment(*MEGATRON).parallelism.unsupported("cuda")
    assert expected in reason if expected and reason else reason is expected


def test_nccl_registration_needs_megatron_core_or_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = experiment(
        *MEGATRON, "parallelism.nccl_registration=true", "parallelism.double_buffer=max_pool"
    ).parallelism
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.6.1")
    monkeypatch.setattr(megatron_fsdp, "find_spec", lambda name: None)
    assert "neither is installed; use parallelism.nccl_registration=false" in str(layout.unsupported("cuda"))
    monkeypatch.setattr(megatron_fsdp, "find_spec", lambda name: name == "apex" or None)
    assert layout.unsupported("cuda") is None


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("precision=float8", "precision: megatron_fsdp supports float8 only through Transformer Engine"),
        ("parallelism.tensor=2", "parallelism.tensor: megatron_fsdp treats local gradients as complete"),
        ("parallelism.expert=2 model=moe_tiny", "parallelism.expert: only FSDP2"),
        (
            "parallelism.reshard_after_forward=never",
            "parallelism.reshard_after_forward: megatron_fsdp reshards every unit",
        ),
        ("parallelism.reshard_after_forward=except_last", "parallelism.reshard_after_forward: megatron_fsdp"),
        ("parallelism.reshard_after_forward=always parallelism.zero=2", "parallelism.reshard_after_forward: megatron"),
        (
            "parallelism.accumulate=hold",
            "parallelism.accumulate: with zero=2 and 3, megatron_fsdp shards gradients and therefore reduces them in every",
        ),
        (
            "parallelism.zero=1 parallelism.double_buffer=fixed",
            "parallelism.double_buffer: double buffers hold gathered",
        ),
        (
            "parallelism.nccl_registration=true",
            "parallelism.nccl_registration: NCCL can register only permanent memory",
        ),
        ("checkpoint=dcp", "checkpoint: megatron_fsdp shards buckets"),
        ("checkpoint=dcp_async", "checkpoint: megatron_fsdp shards buckets"),
        ("checkpoint.load=somewhere", "checkpoint: megatron_fsdp shards buckets"),
        ("compile=per_block compile.mode=reduce-overhead", "compile.mode: reduce-overhead and max-autotune replay"),
        ("parallelism.zero=0 parallelism.shard=2", "parallelism.shard: zero=0 does not shard, but shard is 2"),
        ("wrap=root_only", "megatron_fsdp with zero=3 and double_buffer=none needs a resharded unit besides the root"),
        (
            "wrap=root_only parallelism.zero=2 parallelism.double_buffer=fixed",
            "megatron_fsdp with zero=2 and double_buffer=fixed needs a unit besides the root, but",
        ),
    ],
)
def test_unsupported_settings_are_refused(overrides: str, expected: str) -> None:
    with pytest.raises(Incompatible) as caught:
        fit(experiment(*MEGATRON, *overrides.split()), 2)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "parallelism.replicate=2",
        "parallelism.zero=1 parallelism.accumulate=hold",
        "parallelism.zero=2 parallelism.reshard_after_forward=never parallelism.double_buffer=max_pool",
        "parallelism.reshard_after_forward=always",
        "parallelism.zero=0 wrap=root_only",
        "parallelism.double_buffer=max_pool parallelism.nccl_registration=true",
        "model.tie_embeddings=true",
        "model=moe_tiny",
        "wrap=rules wrap.rules=[{match:Block},{match:output,reshard_after_forward:never}]",
    ],
)
def test_supported_settings_are_accepted(overrides: str) -> None:
    fit(experiment(*MEGATRON, "micro_batch=1", *overrides.split()), 4)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (
            "[{match:layers.0}]",
            "'layers.0' and 'layers.1' are both Block, but wrap makes only 'layers.0' a resharded unit",
        ),
        (
            "[{match:layers.1,wrap:false},{match:Block}]",
            "' and 'layers.1' are both Block, but wrap makes only UNIT a resharded unit",
        ),
        (
            "[{match:layers.2,reshard_after_forward:never},{match:Block}]",
            "' and 'layers.2' are both Block, but wrap makes only UNIT a resharded unit",
        ),
        ("[{match:layers.*.attention.wo}]", "are both Linear, but wrap makes only UNIT a resharded unit"),
        ("[{match:Block},{match:layers.*.feed_forward}]", "'layers.0.feed_forward' cannot be a unit inside 'layers.0'"),
        (
            "[{match:Block,reshard_after_forward:2}]",
            "with zero=3 reshards a unit either fully or not at all; set reshard_after_forward of 'layers.0' to null",
        ),
    ],
)
def test_units_must_be_whole_classes(rules: str, expected: str) -> None:
    with pytest.raises(Incompatible) as caught:
        fit(experiment(*MEGATRON, "wrap=rules", f"wrap.rules={rules}"), 2)
    any_unit = r"'layers\.[\w.]+'"  # any of several units may be named
    assert re.search(re.escape(expected).replace("UNIT", any_unit), str(caught.value))


def test_a_rule_cannot_reshard_with_zero_2() -> None:
    wrap = ("wrap=rules", "wrap.rules=[{match:Block,reshard_after_forward:always}]")
    with pytest.raises(Incompatible, match="megatron_fsdp with zero=2 never shards parameters"):
        fit(experiment(*MEGATRON, *wrap, "parallelism.zero=2"), 2)
    fit(experiment(*MEGATRON, *wrap), 2)


def test_double_buffers_refuse_a_unit_that_is_called_again() -> None:
    """The output projection is called once for every further token, while prefetched units occupy both buffers."""
    hybrid = ("model=hybrid_tiny", "model.mtp.depth=2", "data=random", "parallelism=megatron_fsdp")
    fit(experiment(*hybrid), 2)
    for zero in (3, 2):
        pool = (*hybrid, f"parallelism.zero={zero}", "parallelism.double_buffer=max_pool")
        with pytest.raises(Incompatible, match="'output' is called 3 times per forward pass"):
            fit(experiment(*pool), 2)
        fit(experiment(*pool, "wrap=rules", "wrap.rules=[{match:layers.*},{match:mtp.*}]"), 2)
        fit(experiment(*pool, "model.mtp.depth=0"), 2)


def test_a_derived_class_counts_as_the_unit_class() -> None:
    recipe = experiment(*MEGATRON)
    network = recipe.model.on_meta(recipe.seq_len)
    plan = recipe.wrap.plan(network, "always")
    recipe.parallelism.check_units(network, plan)
    network.add_module("another", type("Table", (torch.nn.Embedding,), {})(2, 2))
    with pytest.raises(
        ConfigError,
        match="'tok_embeddings' and 'another' are both Table, but wrap makes only 'tok_embeddings' a resharded unit",
    ):
        recipe.parallelism.check_units(network, plan)


def test_zero_0_makes_all_devices_replicas() -> None:
    layout = experiment(*MEGATRON, "parallelism.zero=0", "parallelism.replicate=2").parallelism
    assert layout.degrees(1, 4) == (4, 1, 1, 1, 1)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for_loop"])
def test_creating_optimizer_state_changes_nothing(implementation: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = experiment(*MEGATRON, f"optimizer.implementation={implementation}").optimizer.build([weight])
    hyperparameters = dict(optimizer.param_groups[0])
    with without_update(optimizer):
        weight.grad = torch.zeros(3)
        optimizer.step()
    assert torch.equal(weight, torch.ones(3))
    assert optimizer.state[weight]["step"] == 0
    assert dict(optimizer.param_groups[0]) == hyperparameters


def test_the_optimizer_is_built_without_update(monkeypatch: pytest.MonkeyPatch) -> None:
    rate: list[float] = []

    class Package:
        @staticmethod
        def fully_shard_optimizer(optimizer: torch.optim.Optimizer, **_: bool) -> torch.optim.Optimizer:
            rate.append(optimizer.param_groups[0]["lr"])
            return optimizer

    monkeypatch.setitem(sys.modules, "megatron_fsdp", Package)
    layout, optimizer = experiment(*MEGATRON).parallelism, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    assert layout.optimizer(torch.nn.Identity(), optimizer) is optimizer
    assert rate == [0.0]
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_the_installed_package_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "version", lambda name: f"{name} 1")
    recorded = environment.environment(devices.NodeDevices("cuda", 8, 1), {}, {})
    assert recorded.packages["megatron-fsdp"] == "megatron-fsdp 1"


def test_show_needs_neither_a_gpu_nor_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """
    8,030,261,248 parameters over 8 devices. In bf16 each has 2 bytes a parameter to compute with, 4 of master weights, 4 of
    gradients and 8 of moments: with zero 3 an eighth of all.
    """
    given = ("model=llama3_8b", "hardware=h100_80gb", "precision=bf16", "parallelism=megatron_fsdp")
    parameters = 8_030_261_248
    for zero, weights, gradients in ((3, 6 / 8, 4 / 8), (2, 2 + 4 / 8, 4 / 8), (1, 2 + 4 / 8, 4)):
        assert cli._dispatch(["show", *given, f"parallelism.zero={zero}"]) == 0, capsys.readouterr().err
        text = capsys.readouterr().out
        for bytes_each in (weights, gradients):
            assert f"{int(parameters * bytes_each):,} bytes" in text, (zero, text)
