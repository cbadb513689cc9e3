"""`deterministic`: the same losses to the last bit whenever a run is repeated, or resumed, with the same layout and devices."""

from __future__ import annotations

CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""The variable, set before CUDA starts, by which cuBLAS gives every stream a workspace of its own; torch asks for it."""


def compute_deterministically(*, compiles: bool) -> None:
    """
    Have torch choose algorithms whose results do not depend on which thread is first; where it has none it raises.

    In attention's backward flash and memory-efficient kernels then add up without atomics, and cuDNN's are not chosen. Compiled
    scatters become calls of such algorithms; what inductor would find out by timing it decides by rules, in a torch that can.
    """
    import torch

    torch.use_deterministic_algorithms(True)
    # Else every torch.empty is filled, those of collectives included; nothing here reads what was not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if compiles:
        from torch._inductor import config

        if hasattr(config, "deterministic"):
            config.deterministic = True
