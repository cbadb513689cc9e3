"""Which GPUs multiply in float8."""

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
