"""A checkpoint written under any layout loads under any other, bit for bit, and continuing from it changes no figure."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from meshrunner.recipes.assembly import assemble
from meshrunner.recipes.checkpoint import save as save_module
from meshrunner.recipes.checkpoint.on_disk import (
    Consumed,
    Training,
    checkpoint_folders,
    choose_checkpoint,
    remove_checkpoint,
)
from meshrunner.recipes.checkpoint.save import ChecksummedWriter, DCPSaver
from meshrunner.recipes.checkpoint.state_dict import get_state, patch_if_needed, restore
from meshrunner.recipes.data.base import DataSpec
from meshrunner.recipes.data.loader import Loader
from meshrunner.recipes.errors import NotSaved
from meshrunner.recipes.model.network import network_of
from meshrunner.recipes.parallelism.mesh import build_mesh, place
from meshrunner.recipes.pretrain import train, update
from tests.composed import SMALL, experiment
from tests.dist.ranks import on_ranks
from tests.dist.test_layouts import CPU, Recorder, relative, union, whole, whole_values

KINDS = {
    "single": (1, "parallelism=single micro_batch=12"),
    "ddp-2": (2, "parallelism=ddp"),
    "fsdp1-2": (2, "parallelism=fsdp1"),
    "fsdp1-3": (3, "parallelism=fsdp1"),
    "fsdp2-2": (2, "parallelism=fsdp2"),
    "fsdp2-3": (3, "parallelism=fsdp2"),
    "hsdp1-4": (4, "parallelism=hsdp1"),
    "hsdp2-4": (4, "parallelism=hsdp2"),
    "tp-2": (2, "parallelism=tp micro_batch=12"),
    "tp-2-whole-sequence": (2, "parallelism=tp parallelism.sequence_parallel=false micro_batch=12"),
    "fsdp2_tp-4": (4, "parallelism=fsdp2_tp micro_batch=6"),
    "fsdp1_tp-4": (4, "parallelism=fsdp1_tp micro_batch=6"),
    "pipeline-3": (3, "parallelism=single parallelism.pipeline=3 micro_batch=4"),
    "pipeline-2 x fsdp2-2": (4, "parallelism=fsdp2_pp micro_batch=3"),
    "pipeline-4": (4, "parallelism=single parallelism.pipeline=4 micro_batch=3"),
    "pipeline-2-interleaved": (
        2,
        "parallelism=single parallelism.pipeline=2 parallelism.pipeline_schedule=interleaved_1f1b micro_batch=3",
    ),
    "fsdp2-2 x context-2": (4, "parallelism=fsdp2_cp parallelism.context_method=ulysses micro_batch=3"),
}
BLOCKS = 4
LAYOUTS = {name: (world, f"{layout} model.n_layers={BLOCKS}") for name, (world, layout) in KINDS.items()}
TENSORS = 3 + 9 * BLOCKS
SOME = ("single", "fsdp2-3", "tp-2")
TIED = ("ddp-2", "fsdp1-2", "fsdp2-3", "fsdp2_tp-4")
IN_BACKGROUND = ("ddp-2", "fsdp1-2", "fsdp2-2", "hsdp1-4", "fsdp1_tp-4")
STEPS = 3


class Assembled(NamedTuple):
    recipe: Any
    training: Training
    trained: list[Any]
    loader: Loader

    def step(self) -> None:
        """Take one step of `train`."""
        model, optimizer = self.training.model, self.training.optimizer
        update(self.recipe, model, self.trained, optimizer, self.loader.next(), self.recipe.optimizer.lr)


def assembled(*overrides: str) -> Assembled:
    """Set up what `train` sets up, without a checkpoint. The words may replace the small model."""
    names_model = any(word.startswith("model=") for word in overrides)
    recipe = experiment(*(() if names_model else SMALL), *overrides)
    degrees = recipe.parallelism.degrees(1, dist.get_world_size())
    mesh = build_mesh("cpu", degrees)
    model, trained, parameters = assemble(recipe, mesh, CPU)
    optimizer = recipe.optimizer.build_for(trained)
    global_batch, _ = recipe.accumulation(degrees.data)
    loader = Loader(
        recipe.data.open(DataSpec(recipe.model.vocab_size, recipe.seq_len, recipe.seed)),
        global_batch=global_batch,
        micro_batch=recipe.micro_batch,
        rank=place(mesh, degrees)[0],
        ranks=degrees.data,
        device=CPU,
        own=network_of(model).own,
    )
    config = recipe.model_dump(mode="json")
    training = Training(config, recipe.steps, recipe.seed, model, optimizer, parameters, global_batch)
    return Assembled(recipe, training, trained, loader)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return whole parameters, expert biases and whole AdamW state by name. The model cannot be used afterwards."""
    if patch_if_needed(model):
        state = get_state(model, optimizer)["optimizer"]
    else:
        whole_state = StateDictOptions(full_state_dict=True)
        state = dict(get_optimizer_state_dict(model, optimizer, options=whole_state)["state"])
    of_optimizer = {f"{name}.{key}": whole(value) for name, values in state.items() for key, value in values.items()}
    everyone: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, {name: value for name, value in of_optimizer.items() if not value.dim()})
    for scalars in everyone:  # FSDP1: a rank that holds nothing of a parameter counts no steps of it
        of_optimizer |= scalars
    loads = network_of(model).loads
    biases = {"expert_bias": loads.bias.clone()} if loads is not None else {}
    return union(whole_values(model, gradients=False) | biases | of_optimizer)


def save(folder: Path, overrides: tuple[str, ...]) -> int:
    """Train, save into the directory together with the expected values, and return the number of tensors."""
    made = assembled(*overrides)
    for _ in range(STEPS):
        made.step()
    folder.mkdir(exist_ok=True)
    DCPSaver(folder, made.training, every=1, keep=None).save(STEPS, Consumed(36, 36 * 34))
    values = everything(made.training.model, made.training.optimizer)
    if dist.get_rank() == 0:
        torch.save(values, folder / "values.pt")
    return len(values)


def load(folders: list[Path], overrides: tuple[str, ...]) -> dict[str, list[str]]:
    """Return directory -> tensors that are not bit for bit as saved after loading over other weights."""
    wrong = {}
    for folder in folders:
        made = assembled(*overrides, "seed=99")
        stored = choose_checkpoint(None, folder)
        assert stored is not None and stored.record.step == STEPS
        restore(stored, made.training.model, made.training.optimizer)
        found, expected = everything(made.training.model, made.training.optimizer), torch.load(folder / "values.pt")
        different = [name for name in expected if name in found and not torch.equal(found[name], expected[name])]
        wrong[folder.name] = different + sorted(found.keys() ^ expected.keys())
    return wrong


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return layout -> directory with its checkpoint, saved on first use."""
    root = tmp_path_factory.mktemp("saved")

    @cache
    def folder(name: str) -> Path:
        world, layout = LAYOUTS[name]
        tensors = on_ranks(world, save, root / name, tuple(layout.split()))[0]
        assert tensors == 4 * TENSORS, "parameters, two moments and the step of each"
        alone = root / name if name == "single" else folder("single")
        expected, found = (torch.load(which / "values.pt") for which in (alone, root / name))
        for key, value in expected.items():
            assert relative(found[key], value) < 1e-3, f"{key} under {name} is not that of one process"
        return root / name

    return folder


@pytest.mark.slow
@pytest.mark.parametrize("target", LAYOUTS)
def test_every_layout_loads_what_every_other_saved(target: str, saved: Callable[[str], Path]) -> None:
    assert_loads(target, LAYOUTS, saved)


@pytest.mark.slow_but("fsdp2-3")
@pytest.mark.parametrize("target", SOME)
def test_some_layouts_load_what_the_others_saved(target: str, saved: Callable[[str], Path]) -> None:
    assert_loads(target, SOME, saved)


def assert_loads(target: str, names: Iterable[str], saved: Callable[[str], Path]) -> None:
    world, layout = LAYOUTS[target]
    folders = {name: saved(name) for name in names}
    for rank in on_ranks(world, load, list(folders.values()), tuple(layout.split())):
        assert rank == {name: [] for name in folders}


@pytest.mark.slow
def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    tied = "model.tie_embeddings=true"
    for name in TIED:
        world, layout = LAYOUTS[name]
        assert on_ranks(world, save, tmp_path / name, (*layout.split(), tied))[0] == 4 * (TENSORS - 1)
    for name in TIED:
        world, layout = LAYOUTS[name]
        found = on_ranks(world, load, [tmp_path / name for name in TIED], (*layout.split(), tied))[0]
        assert found == {name: [] for name in TIED}


def interrupted(folder: Path, kind: str, overrides: tuple[str, ...]) -> tuple[list[Any], list[Any]]:
    """Return (loss, norm) of 6 steps without a checkpoint, and of 4 steps that lose the last two, then the rest."""
    world = dist.get_world_size()

    def run(number: int, checkpoints: Path | None) -> list[Any]:
        recorder = Recorder()
        recipe = experiment(
            *SMALL, *overrides, f"steps={number}", f"checkpoint={kind}", "checkpoint.every=1", "checkpoint.keep=null"
        )
        KEPT.append(train(recipe, recorder, device=CPU, nodes=1, workers=world, checkpoints=checkpoints)[0])
        resumes = checkpoints is not None and number == 6
        assert recorder.phases == [
            "building the model",
            *["loading the checkpoint"] * resumes,
            "opening the data",
            *["saving a checkpoint"] * (checkpoints is not None),  # what was left to the background
        ]
        return list(zip(recorder.losses, recorder.norms, strict=True))

    class Slow(ChecksummedWriter):
        """A writer that waits until the next step has been trained, so the state must have been copied before."""

        def write_data(self, *arguments: Any) -> Any:
            time.sleep(0.3)
            return super().write_data(*arguments)

    if kind == "dcp_async":
        save_module.ChecksummedWriter = Slow  # type: ignore[misc]
    straight = run(6, None)
    first = run(4, folder)
    if dist.get_rank() == 0:
        assert list(checkpoint_folders(folder)) == [4, 3, 2, 1]
        remove_checkpoint(folder / "step-00000004")
        remove_checkpoint(folder / "step-00000003")
    dist.barrier()
    return straight, first[:2] + run(6, folder)


KEPT: list[nn.Module] = []
"""Models of this process: DDP must not be destroyed before its process group."""


@pytest.mark.slow_cases(
    "ddp-2-dcp",
    "ddp-2-dcp_async",
    "fsdp1-2-dcp",
    "fsdp1-2-dcp_async*",
    "fsdp1-3-dcp",
    "fsdp2-2-dcp*",
    "fsdp2-3-dcp",
    "pipeline-2-interleaved-dcp",
    "pipeline-3-dcp",
    "tp-2-whole-sequence-dcp",
    "tp-2-dcp",
)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[pytest.mark.slow] * name.endswith("-4"))
        for kind, names in (("dcp", LAYOUTS), ("dcp_async", IN_BACKGROUND))
        for name in names
    ],
)
def test_an_interrupted_run_is_the_uninterrupted_one(name: str, kind: str, tmp_path: Path) -> None:
    world, layout = LAYOUTS[name]
    for straight, resumed in on_ranks(world, interrupted, tmp_path, kind, tuple(layout.split())):
        assert len(straight) == 6
        assert resumed == straight


def staged(folder: Path, overrides: tuple[str, ...]) -> list[dict[str, int]]:
    """Return tensor -> address of its copy in host memory in each of two saves."""
    made, addresses = assembled(*overrides), []
    saver = DCPSaver(folder, made.training, every=1, keep=None, in_background=True)
    assert saver.stager is not None
    stage = saver.stager.stage

    def noting(state: dict[str, Any]) -> Any:
        copied = stage(state)
        assert isinstance(copied, dict)
        flat = copied["model"] | {
            f"{name}.{key}": v for name, of in copied["optimizer"].items() for key, v in of.items()
        }
        addresses.append({name: getattr(value, "_local_tensor", value).data_ptr() for name, value in flat.items()})
        return copied

    saver.stager.stage = noting  # type: ignore[method-assign, assignment]
    for step in (1, 2):
        made.step()
        saver.save(step, Consumed(12 * step, 12 * 34 * step))
    saver.close()
    return addresses


@pytest.mark.slow_but("fsdp2-2")
@pytest.mark.parametrize("name", ["ddp-2", "fsdp2-2"])
def test_saves_in_the_background_share_host_memory(name: str, tmp_path: Path) -> None:
    world, layout = LAYOUTS[name]
    for first, second in on_ranks(world, staged, tmp_path, tuple(layout.split())):
        assert len(first) == 4 * TENSORS and second == first
    assert list(checkpoint_folders(tmp_path)) == [2, 1]


def resumed_elsewhere(folder: Path, overrides: tuple[str, ...]) -> list[Any]:
    """Return (loss, norm) of the remaining steps up to 6, saved every 3, from the directory's checkpoint on."""
    recorder = Recorder()
    recipe = experiment(*SMALL, *overrides, "checkpoint=dcp", "checkpoint.every=3")
    KEPT.append(train(recipe, recorder, device=CPU, nodes=1, workers=dist.get_world_size(), checkpoints=folder)[0])
    return [*recorder.losses, *recorder.norms]


def test_another_number_of_ranks_keeps_the_global_batch(tmp_path: Path) -> None:
    """global_batch is null: 3 ranks x 2. Two ranks continue with the same six sequences per step."""
    auto = ("global_batch=null",)
    three = on_ranks(3, resumed_elsewhere, tmp_path / "straight", (*auto, "micro_batch=2", "steps=6"))[0]
    on_ranks(3, resumed_elsewhere, tmp_path / "moved", (*auto, "micro_batch=2", "steps=3"))
    two = on_ranks(2, resumed_elsewhere, tmp_path / "moved", (*auto, "micro_batch=1", "steps=6", "parallelism=fsdp1"))[
        0
    ]
    assert two == pytest.approx(three[3:6] + three[9:], rel=1e-5)


@pytest.mark.slow
def test_another_batch_goes_on_where_the_data_was(tmp_path: Path) -> None:
    """Steps 4 and 5 of 18 sequences are 36 to 71, and so are steps 4, 5 and 6 of 12."""
    seen: list[Any] = []
    for batch, number in ((12, 6), (18, 5)):
        folder = tmp_path / str(batch)
        on_ranks(1, resumed_elsewhere, folder, ("parallelism=single", "micro_batch=6", "steps=3"))
        rest = ("parallelism=single", "micro_batch=6", f"steps={number}", f"global_batch={batch}", "optimizer.lr=1e-30")
        found = on_ranks(1, resumed_elsewhere, folder, (*rest, "optimizer.weight_decay=0"))[0]
        seen.append(sum(found[: number - 3]) / (number - 3))
    assert seen[1] == pytest.approx(seen[0], rel=1e-6)


def failing(folder: Path, kind: str) -> str:
    """Return a rank's error when the disk of rank 1 is full in step 2."""
    write = FileSystemWriter.write_data

    def fails(self: FileSystemWriter, *arguments: Any) -> Any:
        if dist.get_rank() == 1 and "step-00000002" in str(self.path):
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
        return write(self, *arguments)

    recipe = experiment(*SMALL, "steps=4", f"checkpoint={kind}", "checkpoint.every=1")
    full = patch("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    try:
        with patch.object(FileSystemWriter, "write_data", fails), full:
            train(recipe, Recorder(), device=CPU, nodes=1, workers=2, checkpoints=folder)
    except NotSaved as error:
        return str(error)
    return "nothing"


@pytest.mark.slow_but("dcp_async")
@pytest.mark.parametrize("kind", ["dcp", "dcp_async"])
def test_a_failed_save_is_said_on_every_rank_and_leaves_nothing(kind: str, tmp_path: Path) -> None:
    for said in on_ranks(2, failing, tmp_path, kind):
        assert "the checkpoint of step 2 could not be written" in said
        assert re.search(
            r"rank 1: the disk is full: [\d,]{5,} more bytes are needed, 100 are free \(.*unexpected pos", said
        )
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
