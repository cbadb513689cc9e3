"""Process-wide options of the compiler."""

from __future__ import annotations

import pytest

from meshrunner.recipes.assembly import recompute_and_compile
from tests.composed import experiment


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"])
def test_compiled_code_rounds_as_eager_code_does_with_scales_per_row(scaling: str) -> None:
    import torch._inductor.config as inductor

    recipe = experiment("model.n_layers=1", "compile=per_block", "precision=float8", f"precision.scaling={scaling}")
    with inductor.patch(emulate_precision_casts=scaling == "tensorwise"):
        recompute_and_compile(recipe, recipe.model.on_meta(16), {})
        assert inductor.emulate_precision_casts == (scaling != "tensorwise")
