"""The check: all problems at once, each with its place, what was expected and the nearest name."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import PydanticCustomError

from meshrunner.recipes.activation_checkpoint.base import ActivationCheckpoint
from meshrunner.recipes.checkpoint.base import Checkpoint
from meshrunner.recipes.compatibility import markdown_table
from meshrunner.recipes.compile.base import Compile
from meshrunner.recipes.data.base import Data
from meshrunner.recipes.errors import ConfigError, Incompatible
from meshrunner.recipes.evaluation.base import Evaluation
from meshrunner.recipes.loss.base import Loss
from meshrunner.recipes.model.base import Model
from meshrunner.recipes.optim.lr_schedule import LRSchedule
from meshrunner.recipes.optim.optimizer import Optimizer
from meshrunner.recipes.option import Option
from meshrunner.recipes.parallelism.base import Parallelism
from meshrunner.recipes.parallelism.wrap_policy import Wrap
from meshrunner.recipes.precision.base import Precision
from meshrunner.runner import shipped
from meshrunner.runner.config.consistency import fit, remarks
from meshrunner.runner.config.devices import check_on_devices
from meshrunner.runner.config.experiment import Experiment, Launch, Sweep, check
from meshrunner.runner.config.hardware import Hardware, known_gpus
from meshrunner.runner.profiler.base import Profiler
from meshrunner.runner.trackers.base import Tracker
from tests.composed import CONF, config, experiment, option

GROUPS: dict[str, type[Option]] = {
    "model": Model,
    "parallelism": Parallelism,
    "wrap": Wrap,
    "activation_checkpoint": ActivationCheckpoint,
    "compile": Compile,
    "loss": Loss,
    "precision": Precision,
    "optimizer": Optimizer,
    "lr_schedule": LRSchedule,
    "data": Data,
    "checkpoint": Checkpoint,
    "eval": Evaluation,
    "hardware": Hardware,
    "tracker": Tracker,
    "profiler": Profiler,
}


def changed(key: str, value: Any) -> dict[str, Any]:
    """The default configuration with one value replaced, even where Hydra would not allow it."""
    plain = config()
    here = plain
    *path, last = key.split(".")
    for part in path:
        here = here[part]
    here[last] = value
    return plain


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("steps", 0, "steps: expected a whole number of at least 1, got 0"),
        ("steps", True, "steps: expected a whole number of at least 1, got True"),
        ("steps", "30", "steps: expected a whole number of at least 1, got '30'"),
        ("global_batch", 1.5, "global_batch: expected a whole number of at least 1 or null, got 1.5"),
        ("launch.workers", "many", "launch.workers: expected a whole number of at least 1 or 'auto', got 'many'"),
        ("model.dmi", 3, "model.dmi: unknown key. Did you mean 'dim'?"),
        ("stepz", 3, "stepz: unknown key. Did you mean 'steps'?"),
        ("launch.worker", 3, "launch.worker: unknown key. Did you mean 'workers'?"),
        ("model.kind", "lama", "model.kind: unknown kind 'lama'. Did you mean 'llama'? Known: hf, hybrid, llama"),
        ("model.kind", "no_such_module:Net", "model.kind: cannot import 'no_such_module'"),
        ("model.kind", "json:loads", "'json:loads' is not a class derived from Model"),
        (
            "model.kind",
            "meshrunner.recipes.model.base:Model",
            "'meshrunner.recipes.model.base:Model' does not define flops_per_token, network; see meshrunner.recipes"
            ".model.base:Model",
        ),
        ("model.n_heads", 3, "model: dim(256) is not a multiple of n_heads(3)"),
        ("model", 7, "model: expected a mapping with 'kind', got 7"),
        ("optimizer.lr", float("nan"), "optimizer.lr"),
        ("optimizer.betas", [0.9], "optimizer.betas"),
        ("precision.matmul", "high", "precision.matmul: unknown key"),
        ("parallelism.reshard_after_forward", "sometimes", "parallelism.reshard_after_forward"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(key: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match="The configuration is wrong") as caught:
        check(changed(key, value))
    assert expected in str(caught.value)
    assert not isinstance(caught.value, Incompatible)
    assert len(str(caught.value).splitlines()) == 2, "one wrong value is one line"


def test_all_problems_are_listed_together() -> None:
    plain = changed("steps", 0)
    plain["model"]["dmi"] = 1
    plain["optimizer"]["lr"] = -1.0
    del plain["seed"]
    with pytest.raises(ConfigError) as caught:
        check(plain)
    text = str(caught.value)
    for part in ("steps:", "model.dmi:", "optimizer.lr:", "seed: this key is missing"):
        assert part in text


@pytest.mark.parametrize(
    ("overrides", "workers", "expected"),
    [
        (
            ["parallelism.shard=4", "parallelism.replicate=3"],
            8,
            "shard(4) x replicate(3) x tensor(1) = 12, but launch.nodes(1) x launch.workers(8) = 8",
        ),
        (
            ["parallelism.replicate=3"],
            4,
            "replicate(3) x tensor(1) = 3 does not divide launch.nodes(1) x launch.workers(4) = 4",
        ),
        (
            ["parallelism.shard=2", "parallelism.context=3"],
            8,
            "shard(2) x replicate(1) x context(3) x tensor(1) = 6, but launch.nodes(1) x launch.workers(8) = 8",
        ),
        (
            ["parallelism.context=3", "parallelism.tensor=2"],
            8,
            "replicate(1) x context(3) x tensor(2) = 6 does not divide launch.nodes(1) x launch.workers(8) = 8",
        ),
        (
            ["parallelism.context=2", "micro_batch=2", "global_batch=6"],
            4,
            "global_batch(6) is not a multiple of micro_batch(2) x data-parallel ranks(2) = 4",
        ),
        (
            ["parallelism.context=2", "seq_len=254"],
            2,
            "each sequence is cut into N equal pieces: N = context for ulysses, 2 x context for allgather",
        ),
        (
            ["parallelism.context=2", "parallelism.tensor=2", "seq_len=252"],
            4,
            "N is also multiplied by tensor; use a seq_len that is a multiple of N",
        ),
        (
            ["parallelism.context=3", "parallelism.context_method=ulysses", "seq_len=255"],
            3,
            "ulysses cannot divide a device's 8 query heads and 8 key heads among 3 devices",
        ),
        (
            ["parallelism.context=2", "parallelism.tensor=8", "parallelism.context_method=ulysses"],
            16,
            "1 query heads and 1 key heads among 2 devices; use allgather, or another parallelism.context",
        ),
        (["parallelism=single", "parallelism.context=2"], 2, "parallelism=single trains on one device"),
        (
            ["parallelism.pipeline=3", "parallelism.tensor=2"],
            8,
            "pipeline(3) x replicate(1) x tensor(2) = 6 does not divide launch.nodes(1) x launch.workers(8) = 8",
        ),
        (
            ["parallelism=fsdp1", "parallelism.pipeline=2"],
            4,
            "FSDP1 fails in the backward of a pipeline stage; use parallelism=fsdp2",
        ),
        (["parallelism=single", "parallelism.pipeline=2"], 4, "parallelism=single trains on one device"),
        (["parallelism.pipeline=2", "parallelism.buffers=max_pool"], 4, "planned buffers need a fixed order of units"),
        (["parallelism.pipeline=2", "model.tie_embeddings=true"], 4, "the embedding is in the first pipeline stage"),
        (["parallelism.pipeline=2", "compile.cuda_graph=true"], 4, "which a CUDA graph cannot capture"),
        (["parallelism.pipeline=2", "compile=whole_model"], 4, "use compile=per_block"),
        (
            ["parallelism=ddp", "parallelism.pipeline=2", "parallelism.pipeline_schedule=zbv"],
            4,
            "DDP would never reduce them",
        ),
        (
            ["parallelism.pipeline=2", "parallelism.pipeline_schedule=zbv"],
            4,
            "lose the gradients of FSDP2 units whose parameters are freed after forward",
        ),
        (
            ["parallelism.pipeline=2", "parallelism.pipeline_schedule=dualpipe_v", "activation_checkpoint=full"],
            2,
            "either fail, or recompute each block several times (once for each group of its weights)",
        ),
        (
            ["parallelism.pipeline=2", "parallelism.pipeline_schedule=zbv", "compile=per_block"],
            2,
            "repeat the backward of a compiled block",
        ),
        (
            ["parallelism.pipeline=2", "micro_batch=4", "global_batch=4"],
            2,
            "1f1b needs at least as many micro batches per step as stages, but 1 is less than pipeline(2) x",
        ),
        (
            [
                "parallelism.pipeline=4",
                "parallelism.pipeline_schedule=interleaved_1f1b",
                "micro_batch=1",
                "global_batch=9",
            ],
            4,
            "cannot divide the 9 micro batches of a step into 2 equal rounds",
        ),
        (["parallelism.pipeline=8"], 8, "pipeline(8) x pipeline_stages(1) = 8 stages, but the model has 6 blocks"),
        (
            ["parallelism.pipeline=2", "parallelism.pipeline_split=[1,2,3]"],
            2,
            "pipeline_split has 3 stages with 6 blocks",
        ),
        (["parallelism.pipeline=2", "parallelism.pipeline_stages=2"], 2, "1f1b needs pipeline_stages=1"),
        (
            ["parallelism.pipeline=2", "parallelism.pipeline_stages=3", "parallelism.pipeline_schedule=zbv"],
            2,
            "zbv needs pipeline_stages=2",
        ),
        (
            ["model=moe_tiny", "model.experts.balance=sequence_loss", "parallelism.pipeline=2"],
            2,
            "is computed from the experts of all blocks",
        ),
        (
            ["model=moe_tiny", "model.experts.balance=sequence_loss", "parallelism.context=2"],
            2,
            "sequence_loss needs all tokens of a sequence",
        ),
        (
            ["parallelism.context=2", "compile=per_block", "activation_checkpoint=memory_budget"],
            2,
            "knapsack partitioner, which cannot handle blocks with process groups",
        ),
        (
            ["global_batch=6", "micro_batch=2"],
            2,
            "global_batch(6) is not a multiple of micro_batch(2) x data-parallel ranks(2) = 4",
        ),
        (["parallelism=single"], 2, "parallelism=single trains on one device"),
        (["parallelism=single", "precision=float8"], 1, "use precision=bf16, or parallelism=fsdp2 parallelism.shard=1"),
        (
            ["precision=float8", "seq_len=24", "micro_batch=1"],
            1,
            "use a multiple of 16 (mxfp8: 32) for micro_batch x seq_len",
        ),
        (["precision=mxfp8", "seq_len=48", "micro_batch=1"], 1, "must be a multiple of 16 (mxfp8: 32)"),
        (["precision=mxfp8", "precision.emulate=true", "seq_len=48", "micro_batch=1"], 1, "(mxfp8: 32)"),
        (["precision=float8", "seq_len=64", "micro_batch=1", "parallelism.context=8"], 8, "tokens per rank"),
        (
            ["parallelism=ddp", "precision=bf16", "precision.reduce=bf16"],
            2,
            "ddp reduces gradients in fp32, the dtype of its parameters",
        ),
        (["parallelism.tensor=3"], 3, "parallelism.tensor(3) does not divide model.n_heads(8)"),
        (["parallelism=ddp", "parallelism.shard=2"], 2, "ddp does not shard, but shard is 2"),
        (
            ["parallelism=ddp", "parallelism.tensor=2"],
            4,
            "DDP would all-reduce tensor-parallel shards as if they were whole",
        ),
        (
            ["parallelism=fsdp1", "parallelism.reshard_after_forward=2"],
            4,
            "use parallelism.reshard_after_forward=always, never or except_last, or parallelism=fsdp2",
        ),
        (
            ["parallelism=fsdp1_tp", "global_batch=16", "parallelism.accumulate=hold"],
            4,
            "FSDP1 cannot hold unsharded gradients",
        ),
        (["compile=per_block", "compile.mode=reduce-overhead"], 2, "use compile.mode=max-autotune-no-cudagraphs, or"),
        (["compile=per_block", "compile.mode=max-autotune", "parallelism=fsdp1"], 2, "replay CUDA graphs"),
        (
            ["parallelism=ddp", "compile=per_block", "compile.mode=reduce-overhead", "micro_batch=2", "global_batch=8"],
            2,
            "use compile.mode=max-autotune-no-cudagraphs, or micro_batch = global_batch / data-parallel ranks",
        ),
        (
            ["parallelism=single", "compile=whole_model", "compile.mode=max-autotune", "global_batch=8"],
            1,
            "overwrite the gradients of earlier micro batches",
        ),
        *(
            (
                [*f"parallelism={layout}".split(), "compile.cuda_graph=true"],
                2,
                "use parallelism=single, or fsdp2 with expert=1, buffers=dynamic",
            )
            for layout in ("ddp", "fsdp1", "fsdp2 parallelism.buffers=max_pool", "fsdp2 parallelism.cpu_offload=true")
        ),
        (
            ["compile.cuda_graph=true", "measure_after=2"],
            2,
            "compile.cuda_graph captures its graph in step 3; use at least 3",
        ),
        (
            ["compile.cuda_graph=true", "optimizer.implementation=foreach"],
            2,
            "use optimizer=adamw optimizer.implementation=fused",
        ),
        (["compile.cuda_graph=true", "model=moe_tiny", "precision=fp32"], 2, "experts in fp32, the host must read"),
        (
            ["compile.cuda_graph=true", "model=moe_tiny", "parallelism=ep"],
            2,
            "in every step, the host waits for events or token counts (DDP, FSDP1, megatron_fsdp, expert > 1)",
        ),
        (
            ["compile=per_block", "compile.cuda_graph=true", "compile.mode=reduce-overhead"],
            2,
            "replay their own CUDA graphs, which a captured step cannot contain",
        ),
        *(
            (
                [*f"parallelism={layout}".split(), "compile.async_tensor_parallel=true"],
                4,
                "use compile=per_block with parallelism=fsdp2_tp or tp, or compile.async_tensor_parallel=false",
            )
            for layout in (
                "fsdp2 compile=per_block",
                "fsdp2_tp",
                "fsdp2_tp compile=per_block compile.backend=aot_eager",
                "fsdp2_tp compile=per_block parallelism.sequence_parallel=false",
            )
        ),
        (
            ["parallelism=tp", "compile=per_block", "compile.async_tensor_parallel=true", "launch.nodes=2"],
            1,
            "needs all 2 GPUs of a parallelism.tensor group on one node, but a node has 1",
        ),
        (
            ["parallelism=fsdp2_tp", "compile=per_block", "compile.async_tensor_parallel=true", "launch.emulate=0"],
            4,
            "an emulated rank cannot access other ranks' memory",
        ),
        (["parallelism=fsdp1_tp", "model.tie_embeddings=true"], 4, "FSDP1 does not keep parameters tied"),
        (["parallelism=fsdp2_tp", "seq_len=255"], 4, "parallelism.tensor does not divide seq_len"),
        (["model.freeze=[nothing.*]"], 2, "'nothing.*' matches no parameter"),
        (["optimizer.no_decay=[norm.*,nothing.*]"], 2, "optimizer.no_decay: 'nothing.*' matches no parameter"),
        (["optimizer=muon", "parallelism=fsdp1"], 2, "muon gathers every matrix"),
        (["optimizer=muon", "parallelism.cpu_offload=true"], 2, "muon gathers every matrix"),
        (["wrap=rules", "wrap.rules=[{match: Experts}]"], 2, "wrap.rules[0]: 'Experts' matches no module"),
        (["compile=per_block", "compile.backend=inductr"], 2, "no backend 'inductr'. Did you mean 'inductor'?"),
        (
            ["launch.emulate=8", "launch.nodes=2"],
            4,
            "launch.emulate(8): the last rank of launch.nodes(2) x launch.workers(4) is 7",
        ),
        (
            ["launch.emulate=0", "checkpoint=dcp"],
            4,
            "the weights of an emulated rank are meaningless; use checkpoint=none",
        ),
        (
            ["launch.emulate=0", "parallelism.buffers=process_group"],
            4,
            "takes memory from NCCL's pools, which exist only on a GPU; use launch.emulate=null",
        ),
        (["parallelism.reshard_after_forward=3"], 4, "reshard_after_forward(3) must be a proper divisor of shard(4)"),
    ],
)
def test_what_does_not_go_together_shows_its_arithmetic(overrides: list[str], workers: int, expected: str) -> None:
    with pytest.raises(Incompatible) as caught:
        fit(experiment(*overrides), workers)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallelism=single", "compile.cuda_graph=true"],
        [
            "compile=per_block",
            "compile.cuda_graph=true",
            "parallelism=fsdp2_tp",
            "checkpoint=dcp_async",
            "precision=float8",
        ],
        ["compile.cuda_graph=true", "model=moe_tiny", "precision=bf16", "global_batch=16"],
    ],
)
def test_graphs_that_can_be_captured(overrides: list[str]) -> None:
    given = experiment(*overrides)
    fit(given, 1 if "parallelism=single" in overrides else 4)
    assert given.compile.unsupported("cuda") is None


def test_a_cpu_captures_no_graph() -> None:
    with pytest.raises(Incompatible, match=r"cuda_graph: a CUDA graph needs a GPU; use compile\.cuda_graph=false"):
        check_on_devices(config("compile.cuda_graph=true", "hardware=cpu"))


def test_the_document_shows_the_table() -> None:
    assert (CONF.parent / "docs" / "compatibility.md").read_text() == markdown_table() + "\n"


def test_everything_that_does_not_go_together_is_listed() -> None:
    with pytest.raises(Incompatible) as caught:
        fit(experiment("parallelism.tensor=3", "parallelism.shard=4", "profiler=trace", "steps=2"), 2)
    for part in ("n_heads(8)", "n_kv_heads(8)", "= 12, but launch", "measure_after(3)"):
        assert part in str(caught.value)


def test_auto_precision_is_what_the_devices_are_for() -> None:
    found = experiment()
    assert found.precision.kind == "auto"
    assert {device: found.on(device).precision.model_dump() for device in ("cpu", "cuda")} == {
        "cpu": experiment("precision=fp32").precision.model_dump(),
        "cuda": experiment("precision=bf16").precision.model_dump(),
    }
    assert experiment("precision=fp32").on("cuda").precision.kind == "fp32"
    assert experiment("precision=bf16").on("cpu").precision.kind == "bf16"


@pytest.mark.parametrize("steps", [2, 3])
def test_a_run_too_short_to_be_measured_is_remarked_on(steps: int) -> None:
    short = experiment(f"steps={steps}")
    fit(short, 2)
    (remark,) = remarks(short)
    assert remark.startswith(f"measure_after=3 excludes all steps (steps={steps}): the speed")
    assert remarks(experiment("steps=4")) == []


@pytest.mark.parametrize("file", sorted(CONF.glob("*/*.yaml")), ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_shipped_option_lists_every_key_of_its_class(file: Path) -> None:
    """A key that the YAML lacks could only be set with `+key=`."""
    if file.parent.name in shipped.GLOBAL:
        return
    keys = option(file.parent.name, file.stem)
    assert set(keys) == set(GROUPS[file.parent.name].resolve(keys["kind"]).model_fields)


def test_the_top_level_lists_every_key() -> None:
    plain = config()
    assert set(plain) - {"experiment", "space"} == set(Experiment.model_fields)
    assert set(plain["launch"]) == set(Launch.model_fields)
    assert set(plain["sweep"]) == set(Sweep.model_fields)


def test_the_contract_of_defaults() -> None:
    default = experiment()
    assert (default.log_every, default.measure_after, default.seq_len, default.micro_batch) == ("auto", 3, 256, 4)
    assert (default.steps, default.launch.workers, default.launch.threads) == (30, "auto", "auto")
    assert default.parallelism.shard == "auto" and default.optimizer.lr == 1e-3
    assert [default.lr_schedule.factor(step) for step in (1, 5, 10, 11, 1000)] == [0.1, 0.5, 1.0, 1.0, 1.0]
    assert default.global_batch is None and default.objective == "perf/wps_median"


PUBLISHED = {
    "llama2_7b": 3e-4,
    "llama2_13b": 3e-4,
    "llama2_70b": 1.5e-4,
    "llama3_8b": 3e-4,
    "llama3_70b": 1.5e-4,
    "llama3_405b": 8e-5,
}


def test_a_model_brings_the_learning_rate_of_its_paper(tmp_path: Path) -> None:
    assert {name: experiment(f"model={name}").optimizer.lr for name in PUBLISHED} == PUBLISHED
    assert experiment("model=llama3_1b").optimizer.lr == 4e-4
    assert experiment("model=llama2_7b", "optimizer.lr=0.5").optimizer.lr == 0.5
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text((CONF / "model" / "llama2_7b.yaml").read_text())
    assert experiment(f"--config-dir={tmp_path}", "model=mine").optimizer.lr == 1e-3


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "H100 80GB"),
        ("NVIDIA H100", 95.0, "H100 96GB"),
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100 80GB"),
        ("NVIDIA B200", 178.0, "B200"),
        ("AMD Instinct MI300X", 191.5, "MI300X"),
        ("NVIDIA H100 PCIe", 79.1, "H100 PCIe"),
        ("NVIDIA H100 NVL", 93.1, "H100 NVL"),
        ("NVIDIA B300 SXM6 AC", 267.7, "B300"),
        ("NVIDIA GB200", 184.3, "GB200"),
        ("NVIDIA GB300", 277.0, None),
        ("NVIDIA H200 NVL", 139.8, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.8, None),
        ("NVIDIA A100-SXM4-80GB MIG 7g.80gb", 79.2, None),
        ("NVIDIA H100 PCIe MIG 3g.40gb", 39.4, None),
        ("NVIDIA GH200 480GB", 95.0, None),
        ("NVIDIA GeForce RTX 4090", 24.0, None),
    ],
)
def test_hardware_is_recognised_or_unknown(name: str, gib: float, expected: str | None) -> None:
    """A near name with other rates must not be taken: its MFU would be a guess."""
    found = experiment().hardware.found(name, gib)
    assert getattr(found, "name", None) == expected
    assert len(known_gpus()) == 10


def test_a_slice_of_a_gpu_has_no_peak_but_its_own() -> None:
    named = experiment("hardware=h100_80gb").hardware
    assert named.found("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.8) is None
    assert named.found("NVIDIA Graphics Device", 79.1) is named
    own = experiment("hardware=h100_80gb", "hardware.match='H100.*MIG 3g'", "hardware.peak.bf16=400").hardware
    assert own.found("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 39.4) is own


@pytest.mark.parametrize("kind", ["mine", "mine:", ":X", ".mine:X", "mine.:X", "a..b:X", "{}/mine:X", "mine:X"])
def test_a_kind_that_leads_nowhere_is_a_wrong_configuration(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("Y = 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        experiment(f"model.kind='{kind.format(tmp_path)}'")
    (line,) = str(caught.value).splitlines()[1:]
    assert line.startswith("  model.kind: ") and "AssertionError" not in line
    sys.modules.pop("mine", None)


@pytest.mark.parametrize("package", [True, False])
def test_a_users_own_package_comes_before_an_installed_one(
    package: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the kind is resolved and when a worker unpickles the option; what the package lacks is looked for elsewhere."""
    for folder, text in (("site", "raise ModuleNotFoundError"), ("work", "")):
        (tmp_path / folder / "twice").mkdir(parents=True)
        if package or folder == "site":
            (tmp_path / folder / "twice" / "__init__.py").write_text(text)
    (tmp_path / "work" / "twice" / "mine.py").write_text(
        "from meshrunner.recipes.optim.lr_schedule import Constant\n\nclass Mine(Constant):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.syspath_prepend(tmp_path / "site")
    option = LRSchedule.resolve("twice.mine:Mine")(kind="twice.mine:Mine", warmup_steps=4)
    pickled = pickle.dumps(option)
    for name in ("twice", "twice.mine"):
        monkeypatch.delitem(sys.modules, name)
    found = pickle.loads(pickled)
    assert found is not option and isinstance(found, LRSchedule) and found.factor(1) == 0.25
    for name in ("twice", "twice.mine"):
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(PydanticCustomError, match=r"cannot import 'twice\.other'"):
        LRSchedule.resolve("twice.other:Mine")


def test_checking_imports_no_torch() -> None:
    program = (
        "import sys; from tests.composed import experiment; experiment(); from meshrunner.runner import cli; "
        "from meshrunner.runner.launch import execute; from meshrunner.runner.sweep import combinations, execute_all; "
        "from meshrunner.runner.sweep import hydra_launchers; "
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=CONF.parent)
