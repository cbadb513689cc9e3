"""Which GPUs and which layers multiply in float8."""

from __future__ import annotations

import pytest
import torch

from tests.composed import experiment


@pytest.mark.parametrize(
    ("override", "capability", "needed"),
    [
        ("precision=float8", (8, 9), None),
        ("precision=float8", (8, 0), "8.9"),
        ("precision.scaling=rowwise", (8, 9), "9.0"),
        ("precision=mxfp8", (10, 0), None),
        ("precision=mxfp8", (9, 0), "10.0"),
    ],
)
def test_float8_names_the_needed_gpu(
    override: str, capability: tuple[int, int], needed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchao")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    recipe = experiment(*(["precision=float8"] if "scaling" in override else []), override)
    said = recipe.precision.unsupported("cuda")
    if needed is None:
        assert said is None
    else:
        assert said is not None
        assert f"needs compute capability {needed}, but this GPU has {'.'.join(map(str, capability))}" in said


@pytest.mark.parametrize(
    ("override", "tensor", "converted"),
    [("precision=float8", 1, 3), ("precision=float8", 2, 0), ("precision=mxfp8", 1, 0)],
)
def test_both_dimensions_of_a_float8_weight_fit_its_kernels(override: str, tensor: int, converted: int) -> None:
    """112 is 7 x 16. Tensor parallelism over 2 ranks leaves 56, which the kernels of float8 reject."""
    pytest.importorskip("torchao")
    recipe = experiment(override, "model=llama_tiny", "model.n_layers=1", "model.dim=256", "model.ffn_dim=112")
    network = recipe.model.on_meta(recipe.seq_len)
    recipe.precision.convert(network, tensor)
    wide = [module for module in network.modules() if 112 in getattr(getattr(module, "weight", None), "shape", ())]
    assert len(wide) == 3
    assert sum(type(module) is not torch.nn.Linear for module in wide) == converted
