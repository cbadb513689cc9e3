"""The key `deterministic`. It makes losses bit-identical if a run is repeated or resumed with the same layout and devices."""

VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "MAMBA_DETERMINISTIC": "1"}
"""Environment variables of deterministic GPU workers. cuBLAS reads its variable when CUDA starts. mamba_ssm reads its variable
when it is imported."""


def compute_deterministically(*, compiles: bool) -> None:
    """Make torch's operators use deterministic algorithms or raise errors. compiles: whether torch.compile is used."""
    import torch

    torch.use_deterministic_algorithms(True)
    # Do not fill torch.empty tensors, such as buffers of collectives, because nothing here reads uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if compiles:
        from torch._inductor import config

        config.deterministic = True  # choose kernels by rules instead of by timing
