"""Checkpoints of several layouts, exported by one process, are the same models in transformers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from meshrunner.recipes.checkpoint.on_disk import Consumed
from meshrunner.recipes.checkpoint.save import DCPSaver
from meshrunner.runner.verbs.records import export as verb
from tests.composed import SMALL, experiment
from tests.dist.ranks import on_ranks
from tests.dist.test_checkpoint import assembled, save
from tests.hugging_face import tensors

ROPE3 = "model.rope_scaling={factor:8.0,low_freq_factor:1.0,high_freq_factor:4.0,original_seq_len:16}"
SPARSE = "model.experts.number=6 model.experts.score=softmax model.experts.shared_ffn_dim=0 model.vocab_size=509"
SPARSE += " model.dense_layers=0"
SPARSE += " model.dim=48 model.n_layers=2 model.n_heads=6 model.n_kv_heads=2 model.experts.ffn_dim=24 seq_len=34"
SPARSE += " data=random steps=5 global_batch=12"


class Case(NamedTuple):
    world: int
    layout: str
    family: str

    @property
    def overrides(self) -> tuple[str, ...]:
        return tuple(self.layout.split())


CASES = {
    "fsdp1-tied": Case(2, f"parallelism=fsdp1 model.tie_embeddings=true {ROPE3}", "llama"),
    "fsdp2-3": Case(3, "parallelism=fsdp2 model.head_dim=10 model.qk_norm=true", "qwen3"),
    "fsdp2_tp": Case(4, "parallelism=fsdp2_tp micro_batch=6 model.qkv_bias=true", "qwen2"),
    "fsdp2_pp": Case(4, "parallelism=fsdp2_pp model.n_layers=4 micro_batch=3", "llama"),
    "expert": Case(
        2,
        f"model=moe_tiny {SPARSE} model.experts.balance=none parallelism=fsdp2 parallelism.expert=2 micro_batch=1",
        "mixtral",
    ),
    "expert-tp": Case(
        4,
        f"model=moe_tiny {SPARSE} model.qk_norm=true model.experts.balance=sequence_loss model.experts.normalize=false "
        "parallelism=fsdp2_tp micro_batch=3",
        "qwen3_moe",
    ),
}


def save_all(folder: Path, cases: dict[str, Case]) -> None:
    for name, case in cases.items():
        save(folder / name / "checkpoints", case.overrides)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run directory of each case."""
    folder = tmp_path_factory.mktemp("runs")
    for world in sorted({case.world for case in CASES.values()}):
        some = {name: case for name, case in CASES.items() if case.world == world}
        for name in some:
            (folder / name).mkdir()
        on_ranks(world, save_all, folder, some)
    return folder


def network(case: Case, values: dict[str, Tensor]) -> Any:
    """Return our network of a case with the values of its parameters."""
    names_model = any(word.startswith("model=") for word in case.overrides)
    recipe = experiment(*(() if names_model else SMALL), *case.overrides)
    model = recipe.model.build(recipe.seq_len)
    model.reset_buffers()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    return model.eval()


def loaded(folder: Path) -> Any:
    """Return transformers' model of a folder, in which nothing is missing or unexpected."""
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings(action="ignore"):
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(info.values()), info
    return model.eval()


def difference(ours: Any, theirs: Any) -> float:
    """Return the largest difference between the logits of two models, relative to the largest logit."""
    ids = torch.randint(509, (2, 34), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = ours(ids), theirs(ids).logits
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_transformers_computes_the_same_logits(name: str, runs: Path, tmp_path: Path) -> None:
    case = CASES[name]
    ours = network(case, torch.load(runs / name / "checkpoints" / "values.pt"))
    assert verb.export([str(runs / name), str(tmp_path / "fp32")]) == 0
    config = json.loads((tmp_path / "fp32" / "config.json").read_text())
    assert config["model_type"] == case.family
    theirs = loaded(tmp_path / "fp32")
    assert difference(ours, theirs) < 1e-6

    assert (
        verb.export([str(runs / name / "checkpoints" / "step-00000003"), str(tmp_path / "bf16"), "--dtype=bf16"]) == 0
    )
    exact, rounded = tensors(tmp_path / "fp32"), tensors(tmp_path / "bf16")
    assert {name: tensor.bfloat16().tolist() for name, tensor in exact.items()} == {
        name: tensor.tolist() for name, tensor in rounded.items()
    }
    assert all(tensor.dtype == torch.bfloat16 for tensor in rounded.values())


def start(folder: Path, overrides: tuple[str, ...]) -> None:
    """Save a checkpoint before the first step."""
    DCPSaver(folder, assembled(*overrides).training, every=1, keep=None).save(1, Consumed(0, 0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp1-tied", "expert"])
def test_run_from_exported_weights_exports_the_same_bytes(name: str, runs: Path, tmp_path: Path) -> None:
    assert verb.export([str(runs / name), str(tmp_path / "first")]) == 0
    (tmp_path / "checkpoints").mkdir()
    weights = f"model.weights={tmp_path / 'first'}"
    on_ranks(2, start, tmp_path / "checkpoints", (*CASES[name].overrides, weights))
    assert verb.export([str(tmp_path), str(tmp_path / "second")]) == 0
    first, second = (
        {file.name: file.read_bytes() for file in (tmp_path / part).iterdir()} for part in ("first", "second")
    )
    assert first == second and "model.safetensors" in first
