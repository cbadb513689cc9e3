"""The GPUs of a node, counted with a fake NVML and compared with torch."""

from __future__ import annotations

import ctypes
import random
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrunner.runner.config import devices
from meshrunner.runner.config.devices import gpu_count

VISIBLE = "CUDA_VISIBLE_DEVICES"
UNKNOWN_TO_NVML = 77
"""Number of GPUs that torch reports here, so that a count shows who has counted."""


class Library:
    """A fake NVML of a node with 4 GPUs. Its functions return 0, or `status` if they fail."""

    status = {"nvmlInit_v2": 0, "nvmlDeviceGetCount_v2": 0}

    def __init__(self, name: str) -> None:
        assert name == "libnvidia-ml.so.1"

    def nvmlInit_v2(self) -> int:
        return self.status["nvmlInit_v2"]

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 4
        return self.status["nvmlDeviceGetCount_v2"]


@pytest.fixture(autouse=True)
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node with a driver, and with a torch that is built for CUDA. Return the library of torch."""
    library = tmp_path / "lib" / "libtorch_cuda.so"
    library.parent.mkdir()
    library.touch()
    spec = ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(devices, "find_spec", lambda _: spec)
    monkeypatch.setattr(devices, "DRIVERS", (library,))
    monkeypatch.setattr(ctypes, "CDLL", Library)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: UNKNOWN_TO_NVML)
    monkeypatch.delenv(VISIBLE, raising=False)
    return library


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, 4),
        ("", 0),
        ("0,1", 2),
        (" 3 , 1 ", 2),
        *((visible, UNKNOWN_TO_NVML) for visible in ("2,-1,3", "-1", "1,4,2", "0,0", "0,9,0", "1gpu,2")),
        *((visible, UNKNOWN_TO_NVML) for visible in ("NoDevFiles", "GPU-8932f937", "MIG-8932f937")),
    ],
)
def test_gpus_are_counted_without_torch(visible: str | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    if expected != UNKNOWN_TO_NVML:
        monkeypatch.setitem(sys.modules, "torch", None)  # an import raises ImportError
    assert gpu_count() == expected


def test_any_list_is_read_as_torch_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 4)
    draw = random.Random(0)
    for _ in range(3000):
        words = draw.choices(
            ["0", "1", "2", "3", "4", "9", "-1", "+2", "1x", " 3", "x", "", "GPU-1"], k=draw.randint(1, 5)
        )
        monkeypatch.setenv(VISIBLE, ",".join(words))
        indices = [word.strip() for word in words]
        plain = words == [""] or (len(set(indices)) == len(words) and {*indices} <= {"0", "1", "2", "3"})
        assert gpu_count() == (torch.cuda._device_count_nvml() if plain else UNKNOWN_TO_NVML), words


@pytest.mark.parametrize(
    "broken", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "library", "function", "torch without CUDA"]
)
def test_torch_counts_if_nvml_cannot(broken: str, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    if broken in Library.status:
        monkeypatch.setitem(Library.status, broken, 999)
    elif broken == "library":
        monkeypatch.setattr(ctypes, "CDLL", missing)
    elif broken == "function":
        monkeypatch.delattr(Library, "nvmlInit_v2")
    else:
        monkeypatch.setattr(devices, "DRIVERS", (node.parent,))
        node.unlink()
    assert gpu_count() == UNKNOWN_TO_NVML
