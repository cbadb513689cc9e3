"""`compile.cuda_graph`: a step can be captured, and replays of the captured step train exactly as eager steps do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshrunner.recipes import pretrain
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.pretrain import prepare, train, update
from tests.composed import SMALL, experiment
from tests.dist.cuda_graph import Capture, graphs_on_cpu
from tests.dist.ranks import on_ranks
from tests.dist.test_layouts import CPU, Recorder, whole_values

MOE = "model=moe_tiny model.dim=48 model.n_heads=6 model.n_kv_heads=2 model.n_layers=2"
HYBRID = "model=hybrid_tiny model.mtp.depth=1"
CASES = {
    1: [
        "parallelism=single global_batch=null",
        "parallelism=single activation_checkpoint=full loss=chunked loss.tokens=13",
        "parallelism=single precision=bf16 compile=per_block compile.backend=aot_eager",
        f"parallelism=single precision=bf16 {MOE}",
        f"parallelism=single precision=bf16 {HYBRID}",
    ],
    2: [
        "parallelism=fsdp2",
        "parallelism=fsdp2 parallelism.reshard_after_forward=never global_batch=null",
        "parallelism=fsdp2 parallelism.accumulate=hold parallelism.prefetch=2 precision=bf16",
        "parallelism=fsdp2 activation_checkpoint=selective_op loss=chunked loss.tokens=13 model.tie_embeddings=true",
        "parallelism=fsdp2 compile=per_block compile.backend=aot_eager activation_checkpoint=full",
        "parallelism=hsdp2",
        "parallelism=tp",
        f"parallelism=fsdp2 precision=bf16 {MOE}",
        f"parallelism=fsdp2 precision=bf16 {HYBRID}",
    ],
}


def overrides(case: str) -> list[str]:
    small = [each for each in SMALL if not ("hybrid" in case and each.startswith("model."))]
    # Learning rates that fp32 represents exactly: a captured step reads them from a tensor, an eager one from a number of Python.
    schedule = (
        "lr_schedule=warmup_linear",
        "lr_schedule.warmup_steps=2",
        "lr_schedule.final=0.5",
        f"optimizer.lr={2**-10}",
    )
    return [*small, "global_batch=4", "steps=6", *schedule, *case.split()]


@pytest.mark.slow
@pytest.mark.parametrize("world", CASES)
def test_replays_train_as_eager_steps_do(world: int) -> None:
    for found in on_ranks(world, both_ways, CASES[world]):
        for case, (losses, weights) in zip(CASES[world], found, strict=True):
            assert losses == weights == 0, (case, losses, weights)


def both_ways(cases: list[str]) -> list[tuple[float, float]]:
    """Return the largest relative differences of losses and of final weights, for each case."""
    found = []
    for case in cases:
        eager, own = trained(case)
        captured, weights = trained(f"{case} compile.cuda_graph=true")
        found.append((float(apart(captured, eager)), max(float(apart(weights[name], own[name])) for name in own)))
    return found


def apart(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).abs().max() / other.abs().max()


class Late(Recorder):
    """A meter that reads the metrics of all steps after the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[Tensor] = []

    def step_done(self, step: int, *, loss: Tensor, grad_norm: Tensor, **_: Any) -> None:
        self.metrics += [loss, grad_norm]


def trained(case: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Train. Return this rank's losses and the gradient norms of all steps, and the final weights."""
    recorder = Late()
    with graphs_on_cpu():
        recipe = experiment(*overrides(case))
        model, _ = train(recipe, recorder, device=CPU, nodes=1, workers=dist.get_world_size())
    return torch.stack(recorder.metrics), whole_values(model, gradients=False)


@pytest.mark.slow
@pytest.mark.parametrize("world", CASES)
def test_two_steps_issue_the_same_kernels(world: int) -> None:
    for found in on_ranks(world, kernels_of, CASES[world]):
        for case, (first, second) in zip(CASES[world], found, strict=True):
            assert first == second and len(first) > 100, case


def kernels_of(cases: list[str]) -> list[list[list[str]]]:
    """Return the operators, with their arguments, of the third and the fourth step of each case."""
    return [[[*map(str, calls)] for calls in captured(case)] for case in cases]


def captured(case: str, changing: bool = False) -> list[list[Any]]:
    """Return the operators of the third and the fourth step. changing: whether the learning rate is a number, not a tensor."""
    recipe = experiment(*overrides(case))
    run = prepare(recipe, Recorder(), CPU, 1, dist.get_world_size(), None)
    lr, batches, found = torch.zeros(()), run.loader.next(), []
    for step in range(1, 5):
        lr.fill_(1e-3 / step)
        for own, given in zip(batches, run.loader.next(), strict=True):
            torch._foreach_copy_(own, given)
        arguments = run.recipe, run.model, run.trained, run.optimizer, batches, 1e-3 / step if changing else lr
        if step < 3:
            update(*arguments)
            continue
        capture = Capture()
        with capture:
            update(*arguments)
        found.append(capture.calls)
    run.loader.close()
    return found


def test_a_number_that_changes_shows() -> None:
    [(first, second)] = on_ranks(1, changing, "parallelism=single")
    assert first != second


def changing(case: str) -> list[list[str]]:
    return [[*map(str, calls)] for calls in captured(case, changing=True)]


@pytest.mark.parametrize("fault", ["item", "branch"])
def test_work_of_the_host_is_refused(fault: str) -> None:
    [message] = on_ranks(1, refused, fault)
    assert message.startswith("compile.cuda_graph: cannot capture the step; use compile.cuda_graph=false. aten::")


def refused(fault: str) -> str:
    """Train with a fault in clipping, and return the error."""
    clip = pretrain.clip_by_norm

    def faulty(trained: Any, norm: Tensor, max_norm: float) -> None:
        if fault == "item":
            clip(trained, torch.full((), norm.item()), max_norm)
        elif norm > max_norm:
            clip(trained, norm, max_norm)

    pretrain.clip_by_norm = faulty
    try:
        trained("parallelism=single compile.cuda_graph=true")
    except ConfigError as error:
        return str(error)
    return ""


def test_a_change_of_the_optimizer_ends_the_replays() -> None:
    [(messages, changed)] = on_ranks(1, with_other_decay, "parallelism=single compile.cuda_graph=true")
    assert len(messages) == 1 and "later steps run without the graph" in messages[0]
    assert changed


def with_other_decay(case: str) -> tuple[list[str], bool]:
    """Change the weight decay before step 5. Return the warnings, and whether the weights show the change."""

    class Changing(Recorder):
        def step_done(self, step: int, **figures: Any) -> None:
            super().step_done(step, **figures)
            if step == 4:
                optimizers[-1].param_groups[0]["weight_decay"] = 100.0

    optimizers: list[torch.optim.Optimizer] = []
    before = torch.optim.AdamW.__init__

    def init(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        optimizers.append(self)

    torch.optim.AdamW.__init__ = init  # type: ignore[method-assign, assignment]
    _, expected = trained(case)
    with graphs_on_cpu(), warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        model, _ = train(experiment(*overrides(case)), Changing(), device=CPU, nodes=1, workers=1)
    weights = whole_values(model, gradients=False)
    messages = [str(each.message) for each in given if "cuda_graph" in str(each.message)]
    return messages, any(float(apart(weights[name], expected[name])) > 1e-3 for name in weights)
