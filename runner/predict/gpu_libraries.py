"""Finds out, without a GPU, which attention kernel torch prefers on a GPU and how much memory cuBLAS takes."""

import os
import re
from typing import NamedTuple

import torch

from meshrunner.recipes.determinism import VARIABLES
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.hardware import CPU, GPU


class GPULibraries(NamedTuple):
    """Properties of the libraries that torch calls on a GPU."""

    cudnn_attention: bool = False
    """Whether torch prefers cuDNN's attention to FlashAttention."""
    workspace: int = 0
    """Bytes of a cuBLAS workspace. Each thread that multiplies matrices allocates a workspace and keeps it."""


def gpu_libraries(experiment: Experiment, hardware: GPU | CPU | None) -> GPULibraries:
    """Return the library properties for an experiment's workers, or defaults if the GPU's compute capability is unknown."""
    capability = hardware.compute_capability if isinstance(hardware, GPU) else None
    if capability is None:
        return GPULibraries()
    variables = (VARIABLES if experiment.deterministic else {}) | dict(os.environ) | experiment.launch.env
    # These are the rules of `check_prefer_cudnn_attention` and `check_cudnn_deterministic` in torch's sdp_utils.cpp. If this
    # torch has no cuDNN, assume 9.19, the oldest version in the default CUDA wheels of torch 2.11 and later.
    cudnn = 9 <= capability < 11 and (torch.backends.cudnn.version() or 91900) > 91500  # type: ignore[no-untyped-call]
    cudnn = cudnn and not experiment.deterministic and variables.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    # Rules of `parseChosenWorkspaceSize` in torch's CublasHandlePool.cpp: the setting lists pairs of a size in KiB and a count.
    default = ":4096:8" if capability >= 9 else ":4096:2:16:8"
    pools = re.findall(r":(\d+):(\d+)", variables.get("CUBLAS_WORKSPACE_CONFIG", default))
    return GPULibraries(cudnn, 1024 * sum(int(size) * int(count) for size, count in pools))
