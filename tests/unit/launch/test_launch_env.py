"""The environment of the workers: what wins, what is recorded, and what is refused because it would have no effect."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshrunner.recipes.compatibility import problems
from meshrunner.recipes.errors import ConfigError
from meshrunner.runner import cli
from meshrunner.runner.config import devices
from meshrunner.runner.config.devices import NodeDevices, node_devices
from meshrunner.runner.config.launch_env import ALLOCATOR
from meshrunner.runner.launch import worker
from meshrunner.runner.launch.environment import (
    apply_allocator_settings,
    environment,
    fall_back_to_fixed_segments,
    sdpa_backend,
    worker_environment,
)
from meshrunner.runner.launch.outcome import Outcome
from meshrunner.runner.launch.report import report
from meshrunner.runner.process.worker_context import WorkerContext
from meshrunner.runner.rundir import Environment, Summary
from meshrunner.runner.rundir.files import ENVIRONMENT
from tests.composed import experiment

EXPANDABLE, FIXED = "expandable_segments:True", "expandable_segments:False"


@pytest.fixture(autouse=True)
def _without(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ALLOCATOR, "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "name",
    ["RANK", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "MKL_NUM_THREADS", "MESHRUNNER_CACHE", "WANDB_PROJECT", "HF_HOME"],
)
def test_what_would_have_no_effect_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"launch.env: these variables would have no effect here: {name} \("):
        experiment(f"++launch.env.{name}=1")


def test_all_that_would_have_no_effect_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r": LOCAL_RANK \(.*\), PYTHONPATH \(.* export it before .*\)$"):
        experiment("++launch.env.PYTHONPATH=x", "++launch.env.LOCAL_RANK=0", "++launch.env.NCCL_DEBUG=INFO")


def test_the_number_of_threads_may_come_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cores", lambda: 16)
    cpu = ("hardware=cpu", "launch.workers=2")
    assert node_devices(experiment(*cpu)).threads == 8
    assert node_devices(experiment(*cpu, "++launch.env.OMP_NUM_THREADS=3")).threads == 3
    assert node_devices(experiment(*cpu, "++launch.env.OMP_NUM_THREADS=3", "launch.threads=3")).threads == 3
    with pytest.raises(
        ConfigError, match=r"launch: threads\(4\) and env.OMP_NUM_THREADS\(3\) differ; set only one of them"
    ):
        experiment("++launch.env.OMP_NUM_THREADS=3", "launch.threads=4")
    with pytest.raises(ConfigError, match="expected a whole number of at least 1 for OMP_NUM_THREADS, got '4,2'"):
        experiment("++launch.env={OMP_NUM_THREADS:'4,2'}")


def test_a_mapping_is_set_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._dispatch(["show", "launch.env={NCCL_DEBUG: INFO}"]) == 2
    assert capsys.readouterr().err == "launch.env: cannot be set as a whole; use launch.env.NCCL_DEBUG=VALUE\n"


def test_launch_env_wins_over_what_was_exported_and_that_over_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCHINDUCTOR_CACHE_DIR"
    assert worker_environment(experiment(), "cpu")[name].endswith("/inductor")
    monkeypatch.setenv(name, "/exported")
    assert worker_environment(experiment(), "cpu")[name] == "/exported"
    assert worker_environment(experiment(f"++launch.env.{name}=/own"), "cpu")[name] == "/own"


def allocator(device_type: str, *overrides: str) -> dict[str, str]:
    """The variables of the allocator that workers have."""
    return {k: v for k, v in worker_environment(experiment(*overrides), device_type).items() if k in ALLOCATOR}


def test_segments_are_expandable_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert allocator("cuda") == {"PYTORCH_ALLOC_CONF": EXPANDABLE} and allocator("cpu") == {}
    own = "++launch.env.PYTORCH_CUDA_ALLOC_CONF='max_split_size_mb:512'"
    assert allocator("cuda", own) == {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert allocator("cuda") == {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    assert allocator("cuda", own) == {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, (
        "torch prefers the other name"
    )


def test_cublas_is_told_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.delenv(name, raising=False)
    asked = experiment("deterministic=true")
    assert worker_environment(asked, "cuda")[name] == ":4096:8"
    assert name not in worker_environment(asked, "cpu") and name not in worker_environment(experiment(), "cuda")
    monkeypatch.setenv(name, ":16:8")
    assert worker_environment(asked, "cuda")[name] == ":16:8"


def test_autotuning_is_not_deterministic() -> None:
    for mode, refused in (("max-autotune", True), ("max-autotune-no-cudagraphs", True), ("default", False)):
        recipe = experiment("deterministic=true", "compile=per_block", f"compile.mode={mode}")
        assert any("autotuning" in each for each in problems(recipe, recipe.parallelism.degrees(1, 2))) == refused


def test_what_the_workers_have_is_recorded() -> None:
    found = experiment("++launch.env.MKL_CBWR=AVX2", "++launch.env.OTHER=x")
    recorded = environment(NodeDevices("cuda", 1, 1), found.launch.env, worker_environment(found, "cuda"))
    assert recorded.launch_env == {"MKL_CBWR": "AVX2", "OTHER": "x"}
    assert recorded.environment["PYTORCH_ALLOC_CONF"] == EXPANDABLE
    assert recorded.environment["MKL_CBWR"] == "AVX2" and "OTHER" not in recorded.environment


def test_torch_is_handed_the_settings_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", handed.append)
    apply_allocator_settings()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "a")
    apply_allocator_settings()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "b")
    apply_allocator_settings()
    assert handed == ["a", "b"]


def test_settings_that_torch_refuses_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", EXPANDABLE)
    apply_allocator_settings()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:yes")
    with pytest.raises(ConfigError, match=r"^PYTORCH_ALLOC_CONF=expandable_segments:yes: Expected 'True' or 'False'"):
        apply_allocator_settings()


class Device:
    """A GPU of which the first `failing` allocations fail. `settings` are those that torch gets."""

    def __init__(self, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocations, self.settings = 0, list[str]()

        def allocate(*_: object, device: object) -> None:
            assert device is self
            self.allocations += 1
            if self.allocations <= failing:
                raise RuntimeError("CUDA driver error: operation not supported\nin cuMemCreate")

        monkeypatch.setattr(torch, "empty", allocate)
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", self.settings.append)

    def fall_back(self) -> str | None:
        return fall_back_to_fixed_segments(cast(torch.device, self))


@pytest.mark.parametrize("name", ALLOCATOR)
def test_gpus_that_cannot_expand_segments_get_fixed_segments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, f"max_split_size_mb:64,{EXPANDABLE}")
    device = Device(1, monkeypatch)
    warning = device.fall_back()
    fixed = f"max_split_size_mb:64,{FIXED}"
    assert device.settings == [fixed] and os.environ[name] == fixed and device.allocations == 2
    assert warning and f"this run used {fixed}" in warning and "(CUDA driver error: operation not supported)" in warning
    assert f"Set launch.env.{name}={fixed}, so that" in warning and "cuMemCreate" not in warning


def test_segments_stay_expandable_if_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", EXPANDABLE)
    device = Device(0, monkeypatch)
    assert device.fall_back() is None and device.settings == []
    assert os.environ["PYTORCH_ALLOC_CONF"] == EXPANDABLE


def test_gpus_that_cannot_allocate_at_all_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", EXPANDABLE)
    with pytest.raises(RuntimeError, match="operation not supported"):
        Device(2, monkeypatch).fall_back()
    assert os.environ["PYTORCH_ALLOC_CONF"] == EXPANDABLE
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", FIXED)
    device = Device(1, monkeypatch)
    with pytest.raises(RuntimeError, match="operation not supported"):
        device.fall_back()
    assert device.settings == []


def test_the_settings_in_use_are_recorded_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ENVIRONMENT
    before = Environment(environment={"PYTORCH_ALLOC_CONF": EXPANDABLE, "NCCL_DEBUG": "INFO"})
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", FIXED)

    def gathered(everyone: list[object], own: object) -> None:
        everyone[:] = [own, ("2-3", others)]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gathered)
    context = SimpleNamespace(rank=0, world_size=2, device_type="cpu", emulated=False, records=True)
    for own, others, expected in ((None, None, EXPANDABLE), ("mine", None, FIXED), (None, "theirs", FIXED)):
        before.write(path)
        worker._record_environment(tmp_path, cast(WorkerContext, context), experiment(), own)
        found = Environment.read(path)
        assert found.environment == {"PYTORCH_ALLOC_CONF": expected, "NCCL_DEBUG": "INFO"}
        assert len(found.cpus) == 2 and found.remarks == [own or others] * bool(own or others)
        report(tmp_path, Outcome("completed", ""), Summary(state="completed"), row=False)
        assert capsys.readouterr().err == (f"meshrunner: {own or others}\n" if own or others else "")


def test_attention_is_that_which_torch_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def choose(query: torch.Tensor, *_: torch.Tensor, is_causal: bool) -> int:
        asked.append((query.dtype, query.shape[-1], query.requires_grad, torch.are_deterministic_algorithms_enabled()))
        return 3 if is_causal else 0

    run = experiment("precision=bf16", "model.n_heads=4", "model.n_kv_heads=4", "deterministic=true")
    with sdpa_kernel(SDPBackend.MATH):
        assert sdpa_backend(experiment(), "cpu") == "math"
    assert sdpa_backend(experiment(), "cpu") == "flash_attention"
    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    try:
        assert sdpa_backend(run, "cpu") == sdpa_backend(experiment(), "cpu") == "cudnn_attention"
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [(torch.bfloat16, 64, True, True), (torch.float32, 32, True, False)]


def test_the_choice_of_attention_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Environment().write(tmp_path / ENVIRONMENT)
    monkeypatch.setattr(worker, "sdpa_backend", lambda _, device: f"{device}_attention")
    context = SimpleNamespace(rank=0, world_size=2, device_type="cuda", emulated=True, records=True)
    worker._record_environment(tmp_path, cast(WorkerContext, context), experiment(), None)
    assert Environment.read(tmp_path / ENVIRONMENT).attention_backend == "cuda_attention"
