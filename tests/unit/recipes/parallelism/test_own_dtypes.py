"""Parameters that stay in fp32 in a bf16 unit. A stand-in replaces the mixed-precision policy of torch 2.15."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.fsdp

from meshrunner.recipes.parallelism.fsdp2 import FSDP2
from tests.composed import experiment


@dataclass(frozen=True)
class LaterPolicy:
    param_dtype: torch.dtype | None = None
    param_dtype_override_fn: Any = None


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        ("llama_tiny", set()),
        ("moe_tiny", {"router.weight"}),
        ("hybrid_tiny", {"scan.a_log", "scan.dt_bias", "scan.d", "router.weight"}),
    ],
)
def test_listed_parameters_stay_in_fp32(model: str, kept: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = experiment(f"model={model}", "parallelism=fsdp2")
    network = recipe.model.on_meta(seq_len=8)
    assert isinstance(recipe.parallelism, FSDP2)
    if "param_dtype_override_fn" not in torch.distributed.fsdp.MixedPrecisionPolicy.__dataclass_fields__:
        assert recipe.parallelism._own_dtypes(network) == {} and not recipe.parallelism.mixes_dtypes()
    monkeypatch.setattr(torch.distributed.fsdp, "MixedPrecisionPolicy", LaterPolicy)
    assert recipe.parallelism.mixes_dtypes()
    policy = LaterPolicy(torch.bfloat16, **recipe.parallelism._own_dtypes(network))
    if not kept:
        assert policy.param_dtype_override_fn is None
        return
    dtypes = {name: policy.param_dtype_override_fn(parameter) for name, parameter in network.named_parameters()}
    assert {".".join(name.split(".")[-2:]) for name, dtype in dtypes.items() if dtype is torch.float32} == kept
    assert set(dtypes.values()) == {torch.float32, None}
