"""What `python -m bench gpu` would run: rows that exist, a loop that does the same work, a document of what was found."""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bench.gpu import emulate, figures, grid
from bench.gpu.document import Document
from bench.gpu.loops import plain_loop
from bench.gpu.loops.plain_llama import PlainLlama
from bench.gpu.loops.shape import Shape
from bench.gpu.machine import Machine
from bench.gpu.results import Call, Result, Results
from bench.gpu.rows import Small
from bench.published_rows import Row
from meshrunner.recipes.errors import Incompatible
from meshrunner.recipes.loss.base import cross_entropy
from meshrunner.recipes.model.transformer import Transformer
from meshrunner.runner import shipped
from meshrunner.runner.config.consistency import fit
from meshrunner.runner.config.experiment import Experiment
from tests.composed import experiment

MACHINES = {
    "cpu": Machine("a processor", 0, None, 2, ()),
    "one": Machine("NVIDIA H200", 1, 139.8, 16, ()),
    "old": Machine("NVIDIA A100-SXM4-80GB", 1, 79.2, 16, ()),
    "node": Machine("NVIDIA H100 80GB HBM3", 8, 79.1, 64, ()),
}
ROWS = (
    dict.fromkeys((grid.REFERENCE, *grid.REFERENCES.values(), *grid.FIRST, *grid.REST, *grid.HYBRIDS, *grid.EXPERTS))
    | dict.fromkeys(grid.REFUSED)
    | grid.SEVERAL
)
ON_ITS_OWN = Shape(304, 32, 2, 4, 2, 64, rope_theta=10000.0)
SEQ_LEN = 12


def options(row: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in row.split())


def test_every_pair_of_options_is_in_a_row() -> None:
    together = {pair for row in ROWS for pair in combinations(sorted(options(row).items()), 2)}
    axes = [[(group, option) for option in names] for group, names in sorted(grid.AXES.items())]
    missing = {pair for one, other in combinations(axes, 2) for pair in product(one, other)} - together
    never = {
        (("activation_checkpoint", "memory_budget"), ("compile", "eager")),
        (("parallelism", "single"), ("precision", "float8")),
    }
    assert missing <= never, missing


def test_a_row_is_no_other_row() -> None:
    every = [*ROWS, *grid.all_combinations()]
    assert len({tuple(sorted(options(row).items())) for row in every}) == len(every)
    assert len(list(grid.all_combinations())) > 300


def test_the_axes_are_shipped_options() -> None:
    for group, names in grid.AXES.items():
        assert {*names} <= {*shipped.options(group)}


@pytest.mark.slow_cases("node")
@pytest.mark.parametrize("machine", ["cpu", "node"])
def test_a_row_is_a_configuration(machine: str) -> None:
    """A row whose options do not go together is refused for that; none has a key or value that does not exist."""
    small = Small.on(MACHINES[machine])
    singular = [row for row in ROWS if {*options(row)} - {*grid.AXES}]
    for row in (grid.REFERENCE, grid.FIRST[1], *(singular if machine == "node" else []), *grid.REFUSED):
        words = small.overrides(row, ROWS[row])
        checked = experiment(*words)
        if row in grid.REFUSED:
            with pytest.raises(Incompatible):
                fit(checked, small.machine.pair)
            continue
        assert checked.steps == 8 and checked.precision.kind == options(row)["precision"]
        fit(checked, int(options(" ".join(words))["launch.workers"]))


@pytest.mark.parametrize("machine", ["cpu", "one", "old"])
def test_the_loop_has_the_shape_that_meshrunner_trains(machine: str) -> None:
    for name, subject in figures.subjects(MACHINES[machine]).items():
        if subject.shape is None:
            continue
        case = figures.Case(name, "selective_op", "per_block")
        checked = experiment(*figures.overrides(case, subject, MACHINES[machine]))
        shape, model = subject.shape, checked.model
        assert {key: getattr(model, key) for key in shape._fields} == shape._asdict()
        with torch.device("meta"):
            plain = PlainLlama(shape, subject.seq_len)
        count = sum(weight.numel() for weight in plain.parameters())
        assert count == sum(weight.numel() for weight in model.on_meta(subject.seq_len).parameters())
        assert shape.flops_per_token(count, subject.seq_len) == model.flops_per_token(subject.seq_len).total
        assert checked.measure_after == checked.log_every == figures.READ_EVERY < checked.steps == figures.STEPS


@pytest.mark.parametrize("case", [*figures.BATCHES[:1], *figures.SETTINGS, *figures.MODELS[:1], *figures.MODELS[-1:]])
def test_a_measured_case_is_a_configuration(case: figures.Case) -> None:
    checked = experiment(*figures.overrides(case, figures.subjects(MACHINES["old"])[case.subject], MACHINES["old"]))
    assert checked.compile.kind == case.compile and checked.steps == figures.STEPS
    fit(checked, 1)


@pytest.mark.parametrize("row", emulate.ROWS, ids=emulate.what)
def test_an_emulated_row_is_a_configuration(row: Row) -> None:
    """The published row's batch per rank, devices and precision, on one GPU."""
    checked = experiment(*emulate.overrides(row, MACHINES["one"])).on("cuda")
    fit(checked, 8)
    assert checked.launch.emulate == 0 and checked.launch.nodes * 8 == emulate.devices(row)
    assert checked.launch.nodes_used == 1 and checked.steps > emulate.UNMEASURED
    assert not any(word in emulate.TOY for word in emulate.overrides(row, MACHINES["one"]))


def test_a_large_gpu_trains_a_larger_micro_batch() -> None:
    sizes = {name: figures.subjects(machine)["1B"].micro_batch for name, machine in MACHINES.items() if machine.gpus}
    assert sizes == {"one": 4, "old": 4, "node": 4}
    assert figures.subjects(MACHINES["old"]._replace(memory_gib=44.0))["1B"].micro_batch == 2


def test_a_row_that_a_machine_cannot_run_has_a_reason() -> None:
    machine = MACHINES["one"]._replace(versions=("torch 2.11.0+cu130",))
    pool, fused = (
        "precision=bf16 parallelism.buffers=max_pool",
        "model=hybrid_tiny model.mamba.kernel=fused precision=bf16",
    )
    assert grid.missing(pool, machine, 1) == "this row needs 2 GPUs: with one shard, FSDP2 gathers nothing into a pool"
    assert grid.missing(pool, machine, 2) == "this row needs 2 GPUs"
    assert grid.missing(fused, machine, 1) == "the package mamba-ssm is not installed"
    assert grid.missing(fused, machine._replace(versions=("torch 2.11.0", "mamba-ssm 2.2.6")), 1) == ""
    assert grid.missing(fused, MACHINES["cpu"], 1) == "model.mamba.kernel=fused needs a GPU"
    assert grid.missing("precision=float8", machine, 1) == "the package torchao is not installed"
    for row in ("model=moe_tiny parallelism=ep precision=fp32", "precision=bf16 parallelism.buffers=symmetric"):
        node = machine._replace(gpus=8)
        assert grid.missing(row, node, 2) == "this row needs torch 2.12 or later"
        assert grid.missing(row, node._replace(versions=("torch 2.12.1",)), 2) == ""


def test_compiling_a_whole_model_may_take_longer() -> None:
    small = Small.on(MACHINES["one"])
    assert "launch.start_timeout_minutes=4" in small.overrides("precision=bf16 compile=whole_model")
    assert "launch.start_timeout_minutes=2" in small.overrides("precision=bf16 compile=per_block")


def test_the_loop_has_the_settings_of_meshrunner() -> None:
    case = figures.FIRST[0]
    checked = experiment(*figures.overrides(case, figures.subjects(MACHINES["one"])[case.subject], MACHINES["one"]))
    optimizer = checked.optimizer.model_dump()
    for key, value in plain_loop.ADAMW.items():
        assert optimizer["implementation"] == key if key == "fused" else optimizer[key] == value
    assert checked.max_grad_norm == plain_loop.CLIP
    factors = [checked.lr_schedule.factor(step) for step in range(1, 21)]
    assert factors == [min(1.0, step / plain_loop.WARM_UP) for step in range(1, 21)]


def built(*overrides: str) -> tuple[Experiment, Transformer]:
    """Meshrunner's network of the shape above, with its loss and recomputation, as one process trains it."""
    from meshrunner.recipes.assembly import recompute_and_compile

    words = [f"model.{key}={value}" for key, value in ON_ITS_OWN._asdict().items()]
    checked = experiment("parallelism=single", f"seq_len={SEQ_LEN}", *words, *overrides)
    generator = torch.Generator().manual_seed(0)
    network = checked.model.build(SEQ_LEN)
    network.reset_buffers()
    with torch.no_grad():
        for name, weight in network.named_parameters():
            weight.copy_(network.initial(name).draw(weight.shape, generator, weight.device))
    network.loss = checked.loss.function(cross_entropy)
    recompute_and_compile(checked, network, {})
    assert isinstance(network, Transformer)
    return checked, network


def alike(network: Transformer) -> PlainLlama:
    """The hand-written network with the same weights."""
    plain = PlainLlama(ON_ITS_OWN, SEQ_LEN)
    weights = {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in network.state_dict().items()}
    plain.load_state_dict(weights)
    return plain


def rows() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(ON_ITS_OWN.vocab_size, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def backward(network: torch.nn.Module) -> tuple[float, Tensor, int]:
    """Loss, gradient of the embedding and floating-point operations of a step."""
    with FlopCounterMode(display=False) as counter:
        loss = network(*rows())
        loss.backward()
    weight = network.get_parameter("tok_embeddings.weight")
    assert weight.grad is not None
    return loss.item(), weight.grad, counter.get_total_flops()


@pytest.mark.parametrize("recompute", ["none", "full", "selective_op"])
def test_the_loop_does_the_work_of_meshrunner(recompute: str) -> None:
    _, network = built(f"activation_checkpoint={recompute}")
    loss, gradient, flops = backward(network)
    plain = alike(network)
    plain.prepare(recompute, "eager")
    plain_loss, plain_gradient, plain_flops = backward(plain)
    assert plain_flops == flops
    assert abs(plain_loss - loss) < 1e-5 and (plain_gradient - gradient).norm() < 1e-5 * gradient.norm()


def test_fp32_copies_get_the_gradients_of_bf16_weights() -> None:
    torch.manual_seed(0)
    plain, twin = PlainLlama(ON_ITS_OWN, SEQ_LEN), PlainLlama(ON_ITS_OWN, SEQ_LEN)
    twin.load_state_dict(plain.state_dict())
    before = [weight.detach().clone() for weight in plain.parameters()]
    weights, masters = plain_loop.with_masters(plain)
    plain(*rows()).backward()
    assert all(weight.dtype == torch.bfloat16 and weight.grad is None for weight in weights)
    assert plain.cos.dtype == torch.float32
    twin(*rows()).backward()
    for start, master, other in zip(before, masters, twin.parameters(), strict=True):
        assert master.dtype == torch.float32 and torch.equal(master, start)
        assert master.grad is not None and other.grad is not None and master.grad.dtype == torch.float32
        assert (master.grad - other.grad).norm() < 0.05 * other.grad.norm()


def test_a_row_that_is_trained_otherwise_is_told() -> None:
    reference = [(6.0, 1.0), (5.5, 1.1)]
    assert grid.differs("precision=fp32", [(6.0002, 1.0), (5.5, 1.1005)], reference) == ""
    assert grid.differs("precision=fp32", [(6.0, 1.0), (5.52, 1.1)], reference) == (
        "the loss of step 2 is 5.52000, in the reference 5.50000"
    )
    assert grid.differs("precision=bf16", [(6.0, 1.0), (5.52, 1.1)], reference) == ""
    assert "the norm of step 1 is 2.0" in grid.differs("precision=bf16", [(6.0, 2.0), (5.5, 1.1)], reference)
    assert "loss of step 1 is nan" in grid.differs("precision=float8", [(float("nan"), 1.0), (5.5, 1.1)], reference)
    assert "1 steps" in grid.differs("precision=fp32", reference[:1], reference)
    assert grid.dtype_of("precision=fp32 precision.matmul=high") == "tf32"


FOUND = [
    Result("grid", grid.REFERENCE, "works", seconds=7.0, figures={"memory/peak_active_gib": 0.25}),
    Result("grid", "parallelism=ddp precision=float8", "refused", "ddp keeps one | copy"),
    Result("proofs", "resume, checkpoint=dcp", "failed", "failed: rank 0: no", "runs/x/logs/rank0.log"),
    Result("grid", "parallelism=tp precision=bf16", "not run", "this row needs 2 GPUs"),
    *(
        Result(
            *(part, figures.FIRST[0].loop if part == "loop" else figures.FIRST[0].what, "works"),
            figures={"wps": wps, "mfu": 50.0, "peak_active_gib": gib, "first_step_s": 9.0},
            round=round,
        )
        for part, wps, gib, round in [
            ("figures", 1010, 40.0, 1),
            ("loop", 1000, 41.0, 1),
            ("figures", 990, 40.0, 2),
            ("loop", 1000, 41.0, 2),
        ]
    ),
    Result("figures", "8B", "failed", "oom: out of device memory", figures={"wps": None}),
    Result("figures", "trace", "works", "trace: figures-007-trace.json.gz", figures={"wps": 900.0}),
    Result(
        "torchtitan",
        f"{figures.FIRST[0].loop} cuda_graphs=off",
        "works",
        figures={"wps": 2020, "peak_active_gib": 42.0},
    ),
    Result(
        "plan", figures.FIRST[0].what, "works", figures={"wps": 1100.0, "wps_error_pct": 20, "peak_active_gib": 39.5}
    ),
]
CALL = Call("2026-11-26 12:00", "python -m bench gpu", "1234567", MACHINES["one"])


def test_the_document_is_there_after_every_row(tmp_path: Path) -> None:
    document = Document(tmp_path / "docs" / "gpu.md")
    results = Results(tmp_path / "results.jsonl", document.write)
    results.begin(CALL)
    for number, result in enumerate(FOUND, 2):
        results.add(result)
        assert len((tmp_path / "results.jsonl").read_text().splitlines()) == number
        assert f"`{result.what}`" in document.path.read_text() or result.part == "loop"
    text = document.path.read_text()
    assert json.loads((tmp_path / "results.jsonl").read_text().splitlines()[1])["what"] == grid.REFERENCE
    assert "1 x NVIDIA H200, 140 GiB, 16 cores" in text and "has not ended" in text
    assert "- 2026-11-26 12:00: `python -m bench gpu` at commit 1234567" in text
    assert "8 works, 1 refused, 2 failed, 0 skipped, 1 not run" in text
    what = figures.FIRST[0].what
    ratio = r"1.000 (0.990-1.010) \*"
    assert f"| `{what}` | 1,000 (990-1,010) | 1,000 (1,000-1,000) | {ratio} | 50.0% | 50.0% | 40.00 | 41.00 |" in text
    assert "With one shard, FSDP2 casts every weight and copies it" in text
    assert "| `8B` | failed: oom: out of device memory | - | - | - | - | - | - |" in text
    assert "- `trace`: trace: figures-007-trace.json.gz" in text
    assert f"| `{figures.FIRST[0].loop} cuda_graphs=off` | 2,020 | 0.500 | 42.00 |" in text
    assert f"| `{what}` | 1,000 | 1,100 | 20% | 40.00 | 39.50 |" in text
    assert r"| refused | ddp keeps one \| copy | - |" in text
    assert "failed: rank 0: no (`runs/x/logs/rank0.log`)" in text
    assert "- `parallelism=tp precision=bf16`: this row needs 2 GPUs" in text
    document.ended = True
    results.write()
    assert "has not ended" not in document.path.read_text()


def test_rows_share_a_gpu_or_have_two_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert MACHINES["one"]._replace(exclusive=True).lanes() == [{}]
    assert MACHINES["one"].lanes() == [{}] * 4 and MACHINES["cpu"].lanes() == [{}]
    assert [lane["CUDA_VISIBLE_DEVICES"] for lane in MACHINES["node"].lanes()] == ["0,1", "2,3", "4,5", "6,7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,GPU-1")
    assert MACHINES["node"]._replace(gpus=3).lanes() == [{"CUDA_VISIBLE_DEVICES": "3,5"}]
