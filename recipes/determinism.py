"""The key `deterministic: true`. A repeated or resumed run has bit-identical losses if its layout and devices are the same."""

from __future__ import annotations

CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""Name and value of an environment variable. torch's deterministic mode requires such a value before CUDA starts."""


def compute_deterministically(*, compiles: bool) -> None:
    """Use only deterministic algorithms. An operator that has none raises an error. compiles: whether torch.compile is used."""
    import torch

    torch.use_deterministic_algorithms(True)
    # Do not fill torch.empty tensors, such as those of collectives, because nothing here reads uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if compiles:
        from torch._inductor import config

        config.deterministic = True  # decide by rules instead of by timing
