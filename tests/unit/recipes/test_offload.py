"""Placement of offloaded parameters in host memory and of everything else on the device, with fake CUDA tensors."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from meshrunner.recipes.model import init_weights
from meshrunner.recipes.model.init_weights import Initialiser
from meshrunner.recipes.model.network import Initial
from meshrunner.recipes.optim.grad_norm import Trainable, clip_by_norm, local_gradients, squared_norm
from meshrunner.recipes.optim.optimizer import step_if_finite
from tests.composed import SMALL, experiment

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_offloaded_values_are_drawn_on_the_device_and_kept_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: set[torch.device] = set()

    def initial_value(name: str, shape: torch.Size, initial: Initial, seed: int, device: torch.device) -> Tensor:
        drawn.add(device)  # not drawn: the generator of a GPU needs one
        return torch.zeros(shape, device=device)

    monkeypatch.setattr(init_weights, "initial_value", initial_value)
    recipe = experiment("model=moe_tiny", *SMALL)
    network = recipe.model.on_meta(recipe.seq_len)
    monkeypatch.setattr(network, "reset_buffers", lambda: None)  # it computes on the device
    with FakeTensorMode(allow_non_fake_inputs=True):
        Initialiser(network, 0, GPU).materialise(network, offload=True)
    assert drawn == {GPU}
    assert {parameter.device for parameter in network.parameters()} == {CPU}
    assert {buffer.device for buffer in network.buffers()} == {GPU}, "blocks read them where they compute"


@pytest.mark.parametrize("offload", [True, False])
def test_fsdp2_initialises_where_torch_expects_parameters(offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch rejects parameters on the device in the first forward, in FSDPParamGroup._validate_cpu_offload_params."""
    policies: list[Any] = []
    monkeypatch.setattr(torch.distributed.fsdp, "fully_shard", lambda _, **how: policies.append(how["offload_policy"]))
    recipe = experiment(*SMALL, "wrap=root_only", f"parallelism.cpu_offload={offload}".lower())
    network, initialiser = recipe.model.on_meta(recipe.seq_len), MagicMock(device=GPU)
    mesh, plan = MagicMock(mesh_dim_names=("shard",)), recipe.wrap.plan(network, "always")
    recipe.parallelism.apply(network, mesh, plan, recipe.precision, initialiser)
    initialiser.materialise.assert_called_once_with(network, offload=offload)
    offloaded = torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=True)
    assert policies == [offloaded if offload else torch.distributed.fsdp.OffloadPolicy()]


def test_norm_is_on_the_device_and_applied_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    factors: list[Tensor] = []
    monkeypatch.setattr(torch, "_foreach_mul_", lambda _, factor: factors.append(factor))
    with FakeTensorMode():
        parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        trained = [Trainable(f"{number}", parameter, ()) for number, parameter in enumerate(parameters)]
        norm = squared_norm(trained, GPU).sqrt()
        assert norm.device == torch.stack([torch.zeros((), device=GPU), norm]).device == GPU
        clip_by_norm(trained, norm, 1.0)
        optimizer = MagicMock(param_groups=[{"params": parameters, "fused": True}])
        step_if_finite(optimizer, norm)
        used = [*local_gradients(trained), *factors, optimizer.found_inf]
        assert [tensor.device for tensor in used] == [CPU] * 4
        assert squared_norm(trained).device == CPU
