"""What a worker with a GPU does before it joins the process group. The calls to CUDA are replaced."""

import pickle
from pathlib import Path

import pytest
import torch

from meshrunner.recipes.model.llama import Llama
from meshrunner.runner.launch import worker
from meshrunner.runner.process.worker_context import Node, SharedIntegers, WorkerContext
from tests.composed import experiment


class Joined(BaseException):
    """Raised where the worker would join the process group, which ends the test."""


@pytest.mark.parametrize(
    ("emulate", "local_rank", "processes", "expected"),
    [(None, 3, 8, ["bind GPU 3 of 8", "cuda:3"]), (5, 0, 1, ["bind GPU 0 of 1", "cuda:0"])],
)
def test_the_gpu_is_one_of_this_nodes_processes(
    emulate: int | None,
    local_rank: int,
    processes: int,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def join(*_: object) -> None:
        raise Joined

    monkeypatch.setattr(worker, "bind_to_gpu", lambda gpu, of: calls.append(f"bind GPU {gpu} of {of}"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(str(device)))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(worker, "apply_allocator_settings", lambda: None)
    monkeypatch.setattr(worker, "fall_back_to_fixed_segments", lambda _: None)
    monkeypatch.setattr(Llama, "import_kernels", lambda _: calls.append("import kernels"))
    monkeypatch.setattr(worker, "_init_process_group", join)
    monkeypatch.setattr(worker, "join_fake_process_group", join)
    monkeypatch.setattr(worker, "_write_error", lambda *_: None)
    configured = experiment("launch.workers=8", *([] if emulate is None else [f"launch.emulate={emulate}"]))
    context = WorkerContext(
        rank=local_rank if emulate is None else emulate,
        local_rank=local_rank,
        workers=8,
        node=Node(0, 1, "", 0, ""),
        device_type="cuda",
        threads=1,
        attempt=1,
        port=SharedIntegers(1),
        steps=SharedIntegers(processes),
        phase=SharedIntegers(1),
        stop_requested=None,
        emulated=emulate is not None,
    )
    worker.main(tmp_path, pickle.dumps(configured), context)
    assert calls == [*expected, "import kernels"]
