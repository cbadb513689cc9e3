"""Weights of Hugging Face folders and of other runs, read by every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshrunner.recipes.assembly import assemble
from meshrunner.recipes.checkpoint.on_disk import FOLDER
from meshrunner.recipes.data.base import DataSpec
from meshrunner.recipes.model.init_weights import Initialiser
from meshrunner.recipes.parallelism.mesh import build_mesh
from meshrunner.recipes.pretrain import prepare, train
from meshrunner.recipes.weights.hugging_face import counterparts
from meshrunner.recipes.weights.initial import reader
from tests.composed import SMALL, experiment
from tests.dist.ranks import on_ranks
from tests.dist.test_layouts import CPU, Recorder, union, whole_values
from tests.hugging_face import DENSE, EXPERTS, MODELS, loaded, save, saved, tensors

RUN = ("data=random", "seq_len=48", "micro_batch=1", "global_batch=12")
CASES: dict[int, list[tuple[str, str]]] = {
    1: [(name, "single") for name in MODELS],
    2: [
        ("llama3", "ddp"),
        ("qwen3", "fsdp1"),
        ("llama3", "fsdp1"),
        ("qwen3_moe", "fsdp1"),
        ("qwen2", "tp"),
        ("qwen3_moe", "tp"),
        ("mixtral", "ep"),
        ("qwen3", "fsdp2 parallelism.cpu_offload=true"),
        ("mistral", "fsdp2_cp parallelism.context_method=allgather"),
        ("llama", "single parallelism.pipeline=2"),
    ],
    3: [(name, "fsdp2") for name in ("mistral", "llama3", "qwen3", "qwen3_moe")],
    4: [
        ("qwen2", "fsdp2_tp"),
        ("qwen3", "fsdp1_tp"),
        ("qwen3_moe", "fsdp2_tp"),
        ("mixtral", "ep parallelism.expert=2"),
        ("llama", "hsdp2"),
        ("qwen3", "fsdp2_pp"),
    ],
}
"""(model, layout) by number of ranks."""


def expected(folder: Path, recipe: Any) -> dict[str, Tensor]:
    """Return the values of all parameters, from the files."""
    stored, found = tensors(folder), {}
    for name, counterpart in counterparts(recipe.model).items():
        values = [stored[each].float() for each in counterpart.tensors]
        found[name] = torch.stack([each.T for each in values]) if counterpart.stack else values[0]
    return found


def read_all(cases: list[tuple[str, tuple[str, ...]]]) -> list[list[str]]:
    """Return the names of the parameters that are not equal to the files, for each (folder, overrides)."""
    found = []
    for folder, overrides in cases:
        recipe = experiment("model=hf", f"model.path={folder}", *RUN, *overrides)
        mesh = build_mesh("cpu", recipe.parallelism.degrees(1, dist.get_world_size()))
        model, *_ = assemble(recipe, mesh, CPU)
        values, want = union(whole_values(model, gradients=False)), expected(Path(folder), recipe)
        assert values.keys() == want.keys()
        found.append([name for name, value in want.items() if not torch.equal(values[name], value)])
    return found


@pytest.mark.slow_but("2")
@pytest.mark.parametrize("world", CASES)
def test_every_layout_reads_the_values_in_the_files(world: int) -> None:
    cases = [(str(saved(name)), tuple(f"parallelism={layout}".split())) for name, layout in CASES[world]]
    for case, wrong in zip(CASES[world], on_ranks(world, read_all, cases)[0], strict=True):
        assert not wrong, (case, wrong)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str) -> None:
    """Bit for bit, except that experts add up in another order."""
    recipe = experiment("model=hf", f"model.path={saved(name)}", "data=random", "seq_len=100")
    network = recipe.model.on_meta(100)
    Initialiser(network, 0, CPU, reader(recipe.model)).materialise(network)
    tokens = torch.randint(509, (2, 100))
    with torch.no_grad():
        theirs, ours = loaded(saved(name)).requires_grad_(False)(tokens).logits, network(tokens)
    assert torch.equal(ours, theirs) or name in EXPERTS
    assert (ours - theirs).abs().max() < 1e-6 * theirs.abs().max()
    assert sorted(MODELS) == sorted((*DENSE, *EXPERTS))


def first_loss(overrides: tuple[str, ...]) -> tuple[float, list[list[int]]]:
    """Return the loss of the first step, and the tokens of its sequences."""
    recipe, recorder = experiment(*overrides), Recorder()
    train(recipe, recorder, device=CPU, nodes=1, workers=dist.get_world_size())
    rows = recipe.data.open(DataSpec(recipe.model.vocab_size, recipe.seq_len, recipe.seed)).rows(0, 12)
    return recorder.losses[0], rows.tolist()


@pytest.mark.parametrize(("name", "layout"), [("qwen2", "fsdp2"), ("mixtral", "ep")])
def test_first_loss_equals_that_of_transformers(name: str, layout: str) -> None:
    overrides = ("model=hf", f"model.path={saved(name)}", *RUN, "steps=1", f"parallelism={layout}")
    loss, rows = on_ranks(2, first_loss, overrides)[0]
    tokens = torch.tensor(rows)
    with torch.no_grad():
        logits = loaded(saved(name))(tokens[:, :-1]).logits
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert abs(loss - theirs) < 1e-6 * theirs


def trained(overrides: tuple[str, ...], folder: str) -> dict[str, Tensor]:
    """Train and save checkpoints. Return the final parameters and buffers."""
    (Path(folder) / FOLDER).mkdir(exist_ok=True)
    model, _ = train(
        experiment(*overrides),
        Recorder(),
        device=CPU,
        nodes=1,
        workers=dist.get_world_size(),
        checkpoints=Path(folder) / FOLDER,
    )
    return whole_values(model, gradients=False) | {
        name: value for name, value in model.named_buffers() if "bias" in name
    }


def prepared(overrides: tuple[str, ...]) -> tuple[dict[str, Tensor], int, int]:
    """Return initial parameters and buffers, the number of completed steps and the number of optimizer states."""
    recipe = experiment(*overrides)
    run = prepare(recipe, Recorder(), CPU, 1, dist.get_world_size(), None)
    run.loader.close()
    buffers = {name: value for name, value in run.model.named_buffers() if "bias" in name}
    return union(whole_values(run.model, gradients=False) | buffers), run.done, len(run.optimizer.state)


@pytest.mark.parametrize(
    "layout",
    [
        "fsdp2",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("fsdp1_tp micro_batch=3", "fsdp2_pp micro_batch=3")),
    ],
)
def test_weights_of_a_run_start_another_at_step_0(layout: str, tmp_path: Path) -> None:
    moe = ("model=moe_tiny", *SMALL[1:], "model.experts.ffn_dim=20", "data=random", "max_grad_norm=1.0")
    want = on_ranks(2, trained, (*moe, "parallelism=fsdp2", "checkpoint=dcp", "checkpoint.every=3"), str(tmp_path))[0]
    start = (*moe, f"model.weights={tmp_path}", *f"parallelism={layout}".split())
    found, done, states = on_ranks(2 if layout == "fsdp2" else 4, prepared, start)[0]
    assert done == 0 and states == 0
    assert {name.rpartition("module.")[2] for name in found} == want.keys()
    assert all(torch.equal(value, want[name.rpartition("module.")[2]]) for name, value in found.items())
    assert want["expert_bias"].abs().max() > 0


def memory(field: str) -> int:
    """Return this process's memory in bytes. VmHWM is the largest VmRSS so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def most_memory(overrides: tuple[str, ...]) -> tuple[int, int]:
    """Return by how many bytes assembling the model raises this rank's memory, and the bytes of the rank's parameters."""
    recipe = experiment(*overrides)
    mesh = build_mesh("cpu", recipe.parallelism.degrees(1, dist.get_world_size()))
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    model, *_ = assemble(recipe, mesh, CPU)
    local = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
    return memory("VmHWM") - before, sum(each.nbytes for each in local)


@pytest.mark.parametrize("layout", ["fsdp2", "tp", "fsdp2_pp"])
def test_reading_takes_the_memory_of_the_shards_and_one_tensor(layout: str) -> None:
    shapes = {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    folder = save("llama", "1GB", **shapes)
    overrides = ("model=hf", f"model.path={folder}", *RUN, "global_batch=null", f"parallelism={layout}")
    for most, own in on_ranks(4, most_memory, overrides):
        assert own < most < own + 8000 * 512 * 4 + 2**23, (most, own)  # 8 MiB: the heap grows in steps
