"""`compile.async_tensor_parallel`, with fallbacks of its operators on CPUs: parity with one process, and the count."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric

from meshrunner.recipes.compile.base import ASYNC_TP_FUSED
from tests.composed import SMALL
from tests.dist.ranks import on_ranks
from tests.dist.test_layouts import difference, observe, reference

ASYNC = "compile=per_block compile.async_tensor_parallel=true"


def observe_fused(overrides: tuple[str, ...], cache: str, nccl: bool) -> tuple[dict[str, Any], int]:
    """Return the record of a run, and the number of fused operators in its compiled code."""
    from torch._dynamo.utils import counters

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter_fallback, "CPU")
    environment = mock.patch.dict("os.environ", {"TORCHINDUCTOR_CACHE_DIR": cache})
    with environment, mock.patch("torch.distributed.is_nccl_available", lambda: nccl):
        return observe(overrides), counters["inductor"][ASYNC_TP_FUSED]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "layout"), [(2, "parallelism=tp micro_batch=6"), (4, "parallelism=fsdp2_tp micro_batch=3")]
)
def test_fused_operators_train_as_one_process_and_are_counted(world: int, layout: str, tmp_path: Path) -> None:
    overrides = (*SMALL, *layout.split(), *ASYNC.split())

    def ranks(*, nccl: bool) -> tuple[list[dict[str, Any]], set[int]]:
        found = on_ranks(world, observe_fused, overrides, str(tmp_path / str(nccl)), nccl)
        return [record for record, _ in found], {fused for _, fused in found}

    records, (fused,) = ranks(nccl=True)
    assert max(difference(records, reference(""))) < 1e-5
    assert fused > 4
    assert ranks(nccl=True)[1] == {fused}, "code from inductor's cache counts, too"
    assert ranks(nccl=False)[1] == {0}
