"""Keys of the optimizer and the loss give the same result in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrunner.recipes.checkpoint.on_disk import Consumed, choose_checkpoint
from meshrunner.recipes.checkpoint.save import DCPSaver
from meshrunner.recipes.checkpoint.state_dict import restore
from meshrunner.recipes.model.network import network_of
from meshrunner.recipes.optim.outliers import ENOUGH
from meshrunner.recipes.pretrain import update
from tests.dist.ranks import on_ranks
from tests.dist.test_checkpoint import LAYOUTS, Assembled, assembled, interrupted, load, save
from tests.dist.test_layouts import (
    CONTEXT,
    INTERLEAVED,
    PIPELINE,
    ULYSSES,
    compare,
    reference,
    relative,
    union,
    whole_values,
)

MOE = (
    "model=moe_tiny model.vocab_size=509 model.dim=48 model.n_layers=3 model.n_heads=6 model.n_kv_heads=2"
    " model.ffn_dim=100 model.experts.number=6 model.experts.ffn_dim=24 data=random seq_len=34 global_batch=12"
    " micro_batch=1 optimizer.eps=1e-2 optimizer.lr=1e-3"
)
KEYS = "loss.z=0.1 optimizer.no_decay=[*norm.weight,tok_embeddings.*] optimizer.weight_decay=9"
WITH_KEYS = [
    (3, "parallelism=fsdp1"),
    (3, "parallelism=fsdp2 loss=chunked loss.tokens=13"),
    (2, "parallelism=ddp compile=per_block compile.backend=aot_eager"),
    (2, "parallelism=tp loss=chunked loss.tokens=5 micro_batch=6"),
    (4, "parallelism=fsdp2_tp micro_batch=3"),
    (4, "parallelism=fsdp1_tp micro_batch=6"),
    (4, f"parallelism=fsdp2 {PIPELINE} {INTERLEAVED} loss=chunked loss.tokens=13"),
    (4, f"parallelism=tp {PIPELINE} micro_batch=3"),
    (2, f"parallelism=fsdp2 {CONTEXT} {ULYSSES} micro_batch=3"),
]
KEPT: list[Assembled] = []
"""Models of this process: DDP must not be destroyed before its process group."""


@pytest.mark.slow_but("3x parallelism=fsdp1")
@pytest.mark.parametrize(("world", "layout"), WITH_KEYS, ids=[f"{world}x {layout}" for world, layout in WITH_KEYS])
def test_layout_with_z_loss_and_no_decay_equals_one_process(world: int, layout: str) -> None:
    found = compare(world, f"{layout} {KEYS}")
    assert max(found) < 1e-5, found


@pytest.mark.slow
def test_z_loss_and_no_decay_change_the_course() -> None:
    """Without this, a layout could ignore the keys as the reference does. The z-loss is not part of the first loss."""
    plain, keys = reference("optimizer.weight_decay=9"), reference(KEYS)
    assert keys["losses"][0] == plain["losses"][0] and keys["norm"] > 1.01 * plain["norm"]
    assert relative(keys["gradients"]["output.weight"], plain["gradients"]["output.weight"]) > 0.1
    decaying = reference("loss.z=0.1 optimizer.weight_decay=9")
    assert abs(keys["losses"][-1] - decaying["losses"][-1]) > 1e-4


class Course(NamedTuple):
    updates: dict[str, Tensor]
    """Sum of the updates of each whole parameter."""
    losses: list[float]
    """Mean over ranks of the loss of each step."""


def step(made: Assembled) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model, optimizer = made.training.model, made.training.optimizer
    return update(made.recipe, model, made.trained, optimizer, made.loader.next(), made.recipe.optimizer.lr)


def courses(layouts: list[str], steps: int = 10) -> list[Course]:
    found = []
    for layout in layouts:
        made, losses = assembled(*layout.split()), []
        KEPT.append(made)
        before = union(whole_values(made.training.model, gradients=False))
        for _ in range(steps):
            loss, *_ = step(made)
            dist.all_reduce(loss)
            losses.append(loss.item() / dist.get_world_size())
        after = union(whole_values(made.training.model, gradients=False))
        found.append(Course({name: after[name] - before[name] for name in before}, losses))
        made.loader.close()
    return found


MUON = "optimizer=muon optimizer.iteration_dtype=fp32"
OF_MUON = {
    (2, MUON): [
        "parallelism=ddp",
        "parallelism=fsdp2",
        "parallelism=tp micro_batch=6",
        "parallelism=single parallelism.pipeline=2 micro_batch=3",
    ],
    (3, MUON): ["parallelism=fsdp2"],
    (4, MUON): ["parallelism=hsdp2", "parallelism=fsdp2_tp micro_batch=3"],
    (2, f"{MUON} {MOE}"): ["parallelism=fsdp2 parallelism.expert=2", "parallelism=tp"],
    (4, f"{MUON} {MOE}"): [
        "parallelism=fsdp2",
        "parallelism=fsdp2 parallelism.expert=2",
        "parallelism=fsdp2_tp model.experts.number=3",
    ],
}


@pytest.mark.slow_but("3-optimizer.iteration_dtype=fp32")
@pytest.mark.parametrize(("world", "model"), OF_MUON, ids=[f"{world}-{model.split()[-1]}" for world, model in OF_MUON])
def test_muon_of_a_layout_equals_one_process(world: int, model: str) -> None:
    """The tolerance is that of the docstring of `muon.py`."""
    layouts = OF_MUON[world, model]
    alone = "parallelism=single parallelism.shard=1 parallelism.tensor=1 parallelism.expert=1 parallelism.pipeline=1"
    models = [" ".join(word for word in layout.split() if word.startswith("model")) for layout in layouts]
    expected = on_ranks(1, courses, [f"{model} {alone} micro_batch=12 {each}" for each in models])[0]
    for layout, found, whole in zip(
        layouts, on_ranks(world, courses, [f"{model} {each}" for each in layouts])[0], expected, strict=True
    ):
        assert found.losses == pytest.approx(whole.losses, rel=1e-6), layout
        assert found.updates.keys() == whole.updates.keys()
        updates = {name: relative(found.updates[name], update) for name, update in whole.updates.items()}
        assert max(updates.values()) < 1e-4, (layout, updates)


SKIPPING = {
    2: [
        "parallelism=ddp",
        "parallelism=fsdp1 optimizer.implementation=foreach",
        f"parallelism=fsdp2 {MUON}",
        "parallelism=tp micro_batch=4",
        f"parallelism=fsdp2 {MOE}",
        "parallelism=single parallelism.pipeline=2 micro_batch=2",
    ],
    4: ["parallelism=hsdp2", "parallelism=fsdp2_tp micro_batch=2", f"parallelism=fsdp2 parallelism.expert=2 {MOE}"],
}


def state(made: Assembled) -> list[Tensor]:
    """Return copies of this rank's parameters, optimizer state, expert biases and history."""
    network = network_of(made.training.model)
    assert network.outliers is not None
    states = [value for each in made.training.optimizer.state.values() for value in each.values()]
    biases = [] if network.loads is None else [network.loads.bias]
    tensors = [*(each.parameter for each in made.trained), *states, *biases, *network.outliers.state.values()]
    return [getattr(each, "_local_tensor", each).detach().clone() for each in tensors]


def spiked(layouts: list[str]) -> list[list[float]]:
    """Return `train/skipped` of each step. In the last step but one, the loss of one rank, but no gradient, is far too high."""
    found = []
    for layout in layouts:
        made = assembled(*layout.split(), "optimizer.skip_above=5", "global_batch=4", "model.n_layers=2")
        KEPT.append(made)
        network = network_of(made.training.model)
        skipped = [step(made)[2]["train/skipped"].item() for _ in range(ENOUGH)]
        before, loss = state(made), network.loss
        if dist.get_rank() == dist.get_world_size() - 1:  # the last pipeline stage
            network.loss = lambda *given, loss=loss: loss(*given) + 100
        skipped.append(step(made)[2]["train/skipped"].item())
        assert all(torch.equal(a, b) for a, b in zip(before, state(made), strict=True)), f"{layout}: the state changed"
        network.loss = loss
        skipped.append(step(made)[2]["train/skipped"].item())
        assert not any(torch.equal(a, b) for a, b in zip(before, state(made), strict=True) if a.numel()), layout
        made.loader.close()
        found.append(skipped)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", SKIPPING)
def test_all_ranks_skip_an_update_whose_loss_is_an_outlier(world: int) -> None:
    expected = [0.0] * ENOUGH + [1.0, 0.0]
    assert on_ranks(world, spiked, SKIPPING[world]) == [[expected] * len(SKIPPING[world])] * world


def remembered(folder: Path, writes: str, reads: list[str]) -> list[list[float]]:
    """Return the histories after loading a checkpoint of three steps, then the history that was saved."""
    made = assembled(*writes.split())
    for _ in range(3):
        step(made)
    folder.mkdir(exist_ok=True)
    DCPSaver(folder, made.training, every=1, keep=None).save(3, Consumed(36, 36 * 34))
    histories = []
    for layout in reads:
        again = assembled(*layout.split(), "seed=99")
        stored = choose_checkpoint(None, folder)
        assert stored is not None
        restore(stored, again.training.model, again.training.optimizer)
        histories.append(history_of(again.training.model))
        KEPT.append(again)
    KEPT.append(made)
    return [*histories, history_of(made.training.model)]


def history_of(model: nn.Module) -> list[float]:
    outliers = network_of(model).outliers
    return [] if outliers is None else [outliers.count.item(), *outliers.history[:4].flatten().tolist()]


@pytest.mark.slow
def test_checkpoints_contain_the_history(tmp_path: Path) -> None:
    skips = "optimizer.skip_above=5"
    layouts = [f"parallelism={layout} {skips}" for layout in ("fsdp2", "fsdp1", "tp micro_batch=6", "ddp")]
    *found, saved = on_ranks(2, remembered, tmp_path / "with", layouts[0], [*layouts, "parallelism=fsdp2"])[0]
    assert saved[0] == 3 and all(saved[1:7]) and saved[7:] == [0, 0]
    assert found == [saved] * len(layouts) + [[]]
    older = on_ranks(2, remembered, tmp_path / "without", "parallelism=fsdp2", layouts)[0]
    assert older == [[0] + [0.0] * 8] * len(layouts) + [[]]


GROUPS = "optimizer.no_decay=[*norm.weight,tok_embeddings.*]"
OF_CHECKPOINTS: dict[str, tuple[str, ...]] = {
    f"{MUON} {GROUPS}": ("fsdp2-3", "tp-2", "single", "fsdp2_tp-4", "pipeline-2-interleaved"),
    GROUPS: ("fsdp1-3", "fsdp1_tp-4", "fsdp2-2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("keys", OF_CHECKPOINTS)
def test_parameter_groups_load_in_every_layout(keys: str, tmp_path: Path) -> None:
    names = OF_CHECKPOINTS[keys]
    for name in names:
        world, layout = LAYOUTS[name]
        assert on_ranks(world, save, tmp_path / name, (*layout.split(), *keys.split()))[0] > 80
    for name in names:
        world, layout = LAYOUTS[name]
        found = on_ranks(world, load, [tmp_path / each for each in names], (*layout.split(), *keys.split()))
        assert found == [{each: [] for each in names}] * world


@pytest.mark.slow
def test_a_checkpoint_from_before_no_decay_loads(tmp_path: Path) -> None:
    world, layout = LAYOUTS["fsdp1-2"]
    on_ranks(world, save, tmp_path / "old", tuple(layout.split()))
    assert on_ranks(world, load, [tmp_path / "old"], (*layout.split(), GROUPS)) == [{"old": []}] * world


@pytest.mark.slow_but(f"fsdp2-2-{MUON} {GROUPS} optimizer.skip_above=5")
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("fsdp2-2", f"{MUON} {GROUPS} optimizer.skip_above=5"),
        ("fsdp1-2", GROUPS),
        ("tp-2", f"{MUON} {GROUPS}"),
        ("pipeline-2-interleaved", f"{MUON} {GROUPS} optimizer.skip_above=5"),
    ],
)
def test_an_interrupted_run_is_the_uninterrupted_one(name: str, keys: str, tmp_path: Path) -> None:
    world, layout = LAYOUTS[name]
    for straight, resumed in on_ranks(world, interrupted, tmp_path, "dcp", (*layout.split(), *keys.split())):
        assert len(straight) == 6 and resumed == straight
