"""Attention and cuBLAS on a GPU: which kernels torch prefers there, what they keep, and how much memory workspaces take."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from meshrunner.runner import cli
from meshrunner.runner.config.devices import expected_devices
from meshrunner.runner.predict.activations import kept_by_block
from meshrunner.runner.predict.gpu_libraries import GPULibraries, gpu_libraries
from meshrunner.runner.predict.meta.kernels import device_kernels
from meshrunner.runner.predict.meta.replacements import Replacements
from meshrunner.runner.predict.record.operators import cost, traits
from meshrunner.runner.predict.record.trace_events import Operator
from meshrunner.runner.predict.trace.tracer import Trace, trace_recipe
from tests.composed import SMALL, experiment

MIB = 2**20
CUDNN = "launch.env.TORCH_CUDNN_SDPA_DEPRIORITIZED"
WORKSPACE = "launch.env.CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC = "deterministic=true"


@pytest.fixture(autouse=True)
def _without(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_CUDNN_SDPA_DEPRIORITIZED", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def on(*overrides: str) -> GPULibraries:
    chosen = experiment(*overrides)
    return gpu_libraries(chosen, expected_devices(chosen).hardware)


@pytest.mark.parametrize(
    ("overrides", "cudnn", "kib"),
    [
        (("hardware=h100_80gb",), True, 32768),
        (("hardware=h200",), True, 32768),
        (("hardware=b200",), True, 32768),
        (("hardware=b300",), True, 32768),
        (("hardware=a100_80gb",), False, 8320),
        (("hardware=mi300x",), False, 0),
        (("hardware=h100_80gb", "hardware.compute_capability=12.0"), False, 32768),
        (("hardware=h100_80gb", "hardware.compute_capability=null"), False, 0),
        (("hardware=cpu",), False, 0),
        (("hardware=h100_80gb", DETERMINISTIC), False, 32768),
        (("hardware=a100_80gb", DETERMINISTIC), False, 32768),
        (("hardware=h100_80gb", f"{CUDNN}=1"), False, 32768),
        (("hardware=h100_80gb", f"{CUDNN}=0"), True, 32768),
        (("hardware=h100_80gb", f"{WORKSPACE}=':16:8'"), True, 128),
        (("hardware=h100_80gb", f"{WORKSPACE}=':0:0'"), True, 0),
        (("hardware=a100_80gb", f"{WORKSPACE}=':4096:2:16:8'"), False, 8320),
    ],
)
def test_device_and_environment_decide(overrides: tuple[str, ...], cudnn: bool, kib: int) -> None:
    assert on(*overrides) == GPULibraries(cudnn, 1024 * kib)


def test_exported_variables_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert on("hardware=h100_80gb") == on("hardware=h100_80gb", DETERMINISTIC) == GPULibraries(False, 128 * 1024)
    assert on("hardware=h100_80gb", f"{CUDNN}=0", f"{WORKSPACE}=':4096:8'") == GPULibraries(True, 32 * MIB)


@pytest.mark.parametrize(("version", "expected"), [(None, True), (91002, False), (91500, False), (91501, True)])
def test_old_cudnn_is_not_preferred(version: int | None, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    assert on("hardware=h100_80gb").cudnn_attention == expected


class Called(TorchDispatchMode):
    """Mode that records the names of the attention operators, and the arguments and result of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "scaled_dot_product" in func._schema.name:
            self.names.append(func._schema.name.partition("_attention")[0].removeprefix("aten::_scaled_dot_product_"))
            self.last = traits(func), args, kwargs or {}, result
        return result


def attend(
    dtype: torch.dtype, head_dim: int, *, cudnn: bool = True, mask: bool = False, is_causal: bool = True
) -> tuple[Called, list[Tensor]]:
    """Run attention and its backward. Return the operators it called, and queries, keys and values with gradients."""
    qkv = [torch.empty(2, heads, 16, head_dim, dtype=dtype, device="meta", requires_grad=True) for heads in (4, 2, 2)]
    if dtype == torch.float32:
        qkv[1:] = [torch.empty_like(qkv[0]).requires_grad_() for _ in range(2)]
    bias = torch.empty(16, 16, dtype=dtype, device="meta") if mask else None
    with Replacements() as in_torch, Called() as called:
        device_kernels(in_torch, "cuda", compiles=False, cudnn=cudnn)
        out = F.scaled_dot_product_attention(*qkv, bias, is_causal=is_causal, enable_gqa=dtype != torch.float32)
        forward = called.last
        out.sum().backward()
    called.last = forward
    return called, qkv


@pytest.mark.parametrize(
    ("dtype", "head_dim", "mask", "expected"),
    [
        (torch.bfloat16, 64, False, "cudnn"),
        (torch.float16, 128, False, "cudnn"),
        (torch.bfloat16, 64, True, "cudnn"),
        (torch.bfloat16, 136, False, "flash"),
        (torch.bfloat16, 60, False, "flash"),
        (torch.float32, 64, False, "efficient"),
    ],
)
def test_attention_that_cudnn_cannot_compute_goes_elsewhere(
    dtype: torch.dtype, head_dim: int, mask: bool, expected: str
) -> None:
    called, qkv = attend(dtype, head_dim, mask=mask, is_causal=not mask)
    assert called.names == [expected, expected]
    assert all(each.grad is not None and each.grad.shape == each.shape for each in qkv)
    assert "cudnn" not in attend(dtype, head_dim, cudnn=False)[0].names


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_causal_attention_computes_half_of_the_scores(dtype: torch.dtype) -> None:
    """cuDNN's and memory-efficient attention have another boolean argument before `is_causal`."""
    flops = []
    for is_causal in (True, False):
        operator, args, kwargs, result = attend(dtype, 64, is_causal=is_causal)[0].last
        flops.append(cost(operator, args, kwargs, list(args[:3]), result)[0])
    assert flops == [flops[1] // 2, 2 * 2 * 2 * 4 * 16 * 16 * 64]


def traced(libraries: GPULibraries, *overrides: str) -> Trace:
    small = ("global_batch=2", "model.n_layers=2", "precision=bf16", "parallelism=fsdp2", *overrides)
    recipe = experiment(*SMALL, *small).on("cuda")
    return trace_recipe(recipe, nodes=1, workers=2, device_type="cuda", libraries=libraries)


@pytest.mark.slow
def test_cudnn_keeps_as_much_for_backward_as_flash_attention() -> None:
    cudnn, flash = (traced(GPULibraries(cudnn_attention=each)) for each in (True, False))
    names = {each.name for each in cudnn.events if isinstance(each, Operator) and each.kind.startswith("attention")}
    assert names == {f"aten::_scaled_dot_product_cudnn_attention{end}" for end in ("", "_backward")}
    peaks = [each.ledger.peak_of(lambda phase: phase.step == 1) for each in (cudnn, flash)]
    assert peaks[0] == peaks[1]
    kept, expected = (kept_by_block(each)[0] for each in (cudnn, flash))
    assert kept.nbytes == expected.nbytes
    assert kept.operators["_scaled_dot_product_cudnn_attention"] == (4, 4)  # result, log-sum-exp, seed and offset


def test_selective_op_keeps_the_results_of_cudnn() -> None:
    selective = kept_by_block(traced(GPULibraries(cudnn_attention=True), "activation_checkpoint=selective_op"))[0]
    assert selective.operators["_scaled_dot_product_cudnn_attention"] == (4, 4)
    only_flash = "activation_checkpoint.save=[{op:aten._scaled_dot_product_flash_attention}]"
    trace = traced(GPULibraries(cudnn_attention=True), "activation_checkpoint=selective_op", only_flash)
    assert kept_by_block(trace)[0].operators == {}


def test_both_threads_keep_a_workspace_from_their_first_matmul() -> None:
    size = 32 * MIB + 512
    trace = traced(GPULibraries(workspace=size))
    held = [each for each in trace.ledger.allocations if each.nbytes == size]
    assert [each.phase[:2] for each in held] == [(0, "forward"), (0, "backward")]
    assert {each.category for each in held} == {"temporary"} and not any(each.freed_at for each in held)
    without = traced(GPULibraries())
    peaks = [each.ledger.peak_of(lambda phase: phase.step == 1).total for each in (trace, without)]
    assert peaks[0] == peaks[1] + 2 * size


def planned(capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, Any]:
    small = ("data=random", "model=llama3_1b", "model.n_layers=2", "seq_len=4096", "micro_batch=1", "launch.workers=1")
    assert cli._dispatch(["plan", "--json", "--active", "hardware=h100_80gb", *small, *overrides]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_plan_counts_workspaces(capsys: pytest.CaptureFixture[str]) -> None:
    with_them, without = planned(capsys), planned(capsys, f"{WORKSPACE}=':0:0'")
    assert with_them["memory/peak_active_gib"] - without["memory/peak_active_gib"] == pytest.approx(64 / 1024, rel=1e-6)


@pytest.mark.slow
def test_error_includes_attention_whose_speed_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    cudnn, flash, fixed = planned(capsys), planned(capsys, f"{CUDNN}=1"), planned(capsys, DETERMINISTIC)
    assert cudnn["perf/step_time_s"] == pytest.approx(flash["perf/step_time_s"])
    assert flash["perf/error_basis"] == fixed["perf/error_basis"] and "cuDNN" not in flash["perf/error_basis"]
    share = 100 * cudnn["perf/seconds_by_part"]["attention"] / cudnn["perf/step_time_s"]
    assert share > 1
    assert cudnn["perf/error_pct"] == flash["perf/error_pct"] + math.ceil(share)
    assert cudnn["perf/error_basis"].startswith(f"{flash['perf/error_basis']}. hardware.efficiency describes Flash")
    assert "`meshrunner calibrate`" in cudnn["perf/error_basis"]
    calibrated = planned(capsys, "hardware.calibrated={runs:3,error_pct:1.5}")
    assert calibrated["perf/error_pct"] == 1.5 and "cuDNN" not in calibrated["perf/error_basis"]
