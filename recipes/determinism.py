"""The key `deterministic`: with the same layout and devices, losses are equal bit for bit when a run is repeated or resumed."""

from __future__ import annotations

CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""Environment variable and its value, set before CUDA starts. torch requires such a value for deterministic cuBLAS calls."""


def compute_deterministically(*, compiles: bool) -> None:
    """Make torch use algorithms that do not depend on thread order. An operator without such an algorithm raises an error."""
    import torch

    torch.use_deterministic_algorithms(True)
    # Do not fill torch.empty tensors, such as those of collectives, because nothing here reads uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if compiles:
        from torch._inductor import config

        config.deterministic = True  # decide by rules instead of by timing
