"""`deterministic=true`: nothing that is offered refuses it, it changes no figure on a CPU, and a resumed run is bit-equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshrunner.recipes.assembly import assemble
from meshrunner.recipes.determinism import compute_deterministically
from meshrunner.recipes.parallelism.mesh import build_mesh
from meshrunner.recipes.pretrain import backward, train
from tests.composed import SMALL, experiment
from tests.dist.ranks import on_ranks
from tests.dist.test_checkpoint import KEPT, interrupted
from tests.dist.test_layouts import CPU, Recorder

OPTIONS = [
    "parallelism=single micro_batch=12",
    "parallelism=ddp",
    "parallelism=fsdp1 loss=chunked loss.tokens=16",
    "parallelism=fsdp2 precision=bf16 activation_checkpoint=selective_op optimizer.implementation=foreach",
    "parallelism=fsdp2 activation_checkpoint=full compile=per_block compile.backend=aot_eager",
    "parallelism=tp micro_batch=12 loss=chunked loss.tokens=16 parallelism.loss_parallel=true model.vocab_size=510",
    "parallelism=tp micro_batch=12 parallelism.sequence_parallel=false",
]


def curve(overrides: tuple[str, ...]) -> list[float]:
    """Losses and norms of five steps."""
    recorder = Recorder()
    train(experiment(*SMALL, *overrides), recorder, device=CPU, nodes=1, workers=dist.get_world_size())
    return recorder.losses + recorder.norms


def both(overrides: tuple[str, ...]) -> tuple[list[float], list[float], bool]:
    """The curve without and with the key, and whether torch was told."""
    free, asked = curve(overrides), curve((*overrides, "deterministic=true"))
    return free, asked, torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_no_option_refuses_it_and_on_a_cpu_no_figure_changes(options: str) -> None:
    overrides = tuple(options.split())
    for free, asked, told in on_ranks(1 if "single" in options else 2, both, overrides):
        assert told and asked == free


@pytest.mark.slow_cases("parallelism=fsdp1*", "parallelism=fsdp2")
@pytest.mark.parametrize("layout", ["parallelism=fsdp1", "parallelism=fsdp2"])
def test_a_resumed_run_is_bit_equal(layout: str, tmp_path: Path) -> None:
    for straight, resumed in on_ranks(3, interrupted, tmp_path, "dcp", (layout, "deterministic=true")):
        assert len(straight) == 6 and resumed == straight


def gradients_of_one_batch(deterministic: bool) -> list[bool]:
    """Whether DDP's gradients of the second and third backward are those of the first, to the last bit."""
    if deterministic:
        compute_deterministically(compiles=False)
    recipe = experiment(*SMALL, "parallelism=ddp", "model.dim=96", "model.ffn_dim=192")
    model, trained, _ = assemble(recipe, build_mesh("cpu", recipe.parallelism.degrees(1, 3)), CPU)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(recipe.model.vocab_size, (2, 1, recipe.seq_len), generator=generator)
    found = []
    for _ in range(3):
        backward(recipe, model, [(tokens[0], tokens[1])])
        found.append([each.parameter.grad.clone() for each in trained if each.parameter.grad is not None])
        model.zero_grad()
    KEPT.append(model)
    return [all(map(torch.equal, found[0], other)) for other in found[1:]]


def test_ddp_of_three_keeps_the_order_in_which_gradients_are_added() -> None:
    """Else the steps after a resume would not be those of a run that went on."""
    assert on_ranks(3, gradients_of_one_batch, True) == [[True, True]] * 3
    assert on_ranks(3, gradients_of_one_batch, False) == [[False, False]] * 3, "the test would show nothing"
