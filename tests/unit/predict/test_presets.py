"""Everything that is shipped plans: each model, each option, each named experiment; and classes of a user's own."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from meshrunner.runner.config.compose import Composer
from meshrunner.runner.config.consistency import fit
from meshrunner.runner.config.devices import expected_device_type, expected_devices
from meshrunner.runner.predict.allocator.segments import GIB
from meshrunner.runner.predict.forecast import BORDERLINE, DOES_NOT_FIT, FITS, NOT_PLANNED, Forecast
from meshrunner.runner.predict.pool import _predicted
from meshrunner.runner.predict.predict import predict
from meshrunner.runner.shipped import defaults
from meshrunner.runner.sweep import ranking
from tests.composed import CONF, experiment

ANSWERS = (FITS, BORDERLINE, DOES_NOT_FIT)


def planned(*overrides: str) -> dict[str, Any]:
    """What `plan --active --json` prints, in this process."""
    chosen = experiment(*overrides)
    chosen = chosen.on(expected_device_type(chosen.hardware))
    device = expected_devices(chosen)
    fit(chosen, device.workers)
    return predict(chosen, device, active_only=True).as_json()


def shipped(group: str) -> list[str]:
    """The options of a group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


MODELS = shipped("model")
AROUND = {
    "hardware": [name for name in shipped("hardware") if name not in ("auto", "cpu")],
    "parallelism": ["fsdp2", "fsdp1", "hsdp2", "fsdp2_tp", "ddp"],
    "activation_checkpoint": ["none", "full", "selective_op", "selective_layer"],
    "loss": shipped("loss"),
    "precision": ["auto", "bf16", "fp32"],
    "wrap": ["blocks", "rules", "root_only"],
}
"""Options that every model is combined with some of."""


QUICK = ("hybrid_tiny", "llama3_405b", "mixtral_8x7b")


@pytest.mark.slow_but("hybrid_tiny")
@pytest.mark.parametrize(
    "model", [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in MODELS]
)
def test_every_model(model: str) -> None:
    """Each with other options, so that all of AROUND are taken."""
    number = MODELS.index(model)
    around = [f"{group}={options[number % len(options)]}" for group, options in AROUND.items()]
    found = planned(f"model={model}", "seq_len=1024", "micro_batch=1", *around)
    assert found["verdict"] in ANSWERS and found["memory/peak_active_gib"] > 0 and found["perf/wps"] > 0


ON_GPUS = ("model=llama3_1b", "hardware=h100_80gb", "seq_len=512", "micro_batch=1")
GROUPS = ("parallelism", "activation_checkpoint", "compile", "loss", "precision", "optimizer", "wrap")
OPTIONS = (
    *(f"{group}={option}" for group in GROUPS for option in shipped(group) if option != defaults()[group]),
    *(f"parallelism.buffers={buffers}" for buffers in ("max_pool", "scheduled", "process_group", "symmetric")),
    *("parallelism.cpu_offload=true", "parallelism.prefetch=2", "parallelism.reshard_after_forward=4"),
    *("optimizer.implementation=foreach", "optimizer.implementation=for_loop", "hardware=auto", "hardware=cpu"),
    *("global_batch=32", "model.freeze=[tok_embeddings.*]", "launch.nodes=512"),
    "precision=float8 precision.all_gather=true",
    "precision=float8 precision.scaling=rowwise parallelism=fsdp1",
    "precision=float8 parallelism=fsdp2_tp activation_checkpoint=selective_op",
)
NEEDS = {
    "parallelism=single": ("launch.workers=1",),
    "parallelism=ep": ("model=moe_tiny",),
    "parallelism=fsdp1_tp": ("model.tie_embeddings=false",),
    "parallelism=fsdp2_pp": ("model.tie_embeddings=false",),
    "parallelism=fsdp2_pp_interleaved": ("model.tie_embeddings=false",),
    "activation_checkpoint=memory_budget": ("compile=per_block",),
    "wrap=size": ("wrap.min_parameters=10000000",),
    "hardware=auto": ("model=llama_tiny",),
    "hardware=cpu": ("model=llama_tiny",),
}
"""Overrides that an option requires."""
REFUSED = {
    "parallelism=megatron_fsdp": "parallelism=megatron_fsdp uses a separate package",
    "parallelism.cpu_offload=true": "parallelism.cpu_offload moves parameters",
    "parallelism.buffers=process_group": "parallelism.buffers=process_group takes memory",
    "parallelism.buffers=symmetric": "parallelism.buffers=symmetric takes memory",
    "precision=mxfp8": "precision.scaling=mxfp8 uses Triton kernels",
}
"""Options that are not planned, and the beginning of the reason."""
COMPILED = ("compile=per_block", "compile=whole_model", "activation_checkpoint=memory_budget")
QUICK_OPTIONS = ("parallelism=ep", "parallelism=fsdp1_tp", "parallelism.buffers=scheduled", "loss=chunked", *REFUSED)


def check_options(*options: str) -> None:
    for option in options:
        found = planned(*ON_GPUS, *option.split(), *NEEDS.get(option, ()))
        if option in REFUSED:
            assert found["verdict"] == NOT_PLANNED and found["reason"].startswith(REFUSED[option]), option
            assert found["memory/peak_active_gib"] is None and found["perf/wps"] is None, option
        else:
            assert found["verdict"] in ANSWERS and found["memory/peak_active_gib"] > 0, option


@pytest.mark.slow_but("parallelism=megatron_fsdp", "parallelism.buffers=process_group")
@pytest.mark.parametrize(
    "option",
    [
        pytest.param(each, marks=[] if each in QUICK_OPTIONS else pytest.mark.slow)
        for each in OPTIONS
        if each not in COMPILED
    ],
)
def test_every_option(option: str) -> None:
    check_options(option)


@pytest.mark.slow
def test_every_option_that_compiles() -> None:
    """In a process of its own: this one does without the compiler."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(check_options, COMPILED)


def rows(name: str) -> list[ranking.Ranked]:
    """What `plan -m` answers for a named experiment, predicted in this process."""

    def predict_all(configs: list[dict[str, Any]], *, active_only: bool, **_: Any) -> list[Forecast]:
        return [_predicted(config, active_only=active_only) for config in configs]

    before, ranking.predict_all = ranking.predict_all, predict_all  # type: ignore[assignment]
    try:
        composer = Composer("plan", ["-m", f"experiment={name}", "hardware=h100_96gb"])
        return ranking.rank(composer, active_only=True)
    finally:
        ranking.predict_all = before


COMBINATIONS = {
    "buffers_hybrid": 3,
    "dimensions": 6,
    "fsdp1_vs_fsdp2": 2,
    "moe_layouts": 9,
    "pr165_1d": 4,
    "pr165_2d": 4,
    "pr165_compile": 6,
    "scaling": 2,
    "schedules": 7,
}
"""Number of combinations that each named experiment does not exclude."""


@pytest.mark.slow_cases("fsdp1_vs_fsdp2")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=[] if each == "fsdp1_vs_fsdp2" else pytest.mark.slow)
        for each in shipped("experiment")
        if each != "playbook"  # its 198 combinations take a quarter of an hour in one process
    ],
)
def test_every_named_experiment(name: str) -> None:
    if name == "pr165_compile":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(rows, (name,))
    else:
        found = rows(name)
    possible = [each.as_json() for each in found if each.forecast.verdict.answer != ranking.SKIPPED]
    assert len(possible) == COMBINATIONS[name]
    assert all(each["verdict"] in ANSWERS and each["perf/wps"] > 0 for each in possible), possible
    left_out = [reason for answer, reason in (each.forecast.verdict for each in found) if answer == ranking.SKIPPED]
    assert all(reason.startswith("sweep.exclude") for reason in left_out)


DEEP = (
    *("hardware=h100_80gb", "data=random", "model.n_layers=12", "model.dim=256", "model.ffn_dim=1024", "seq_len=16"),
    *("micro_batch=1", "model.vocab_size=512", "precision=bf16"),
)


@pytest.mark.slow
def test_custom_layout() -> None:
    """Its blocks may differ, so all are traced. Of the 6 that stay unsharded, 2 are unsharded at the peak of FSDP2 as well."""
    freed = planned(*DEEP, "parallelism.reshard_after_forward=always")
    own = planned(*DEEP, "parallelism.kind=tests.own_layout:EverySecondKept")
    of_a_block = 2 * (4 * 256**2 + 3 * 256 * 1024 + 2 * 256)
    more = [each["memory/by_category_gib"]["unsharded"] * GIB for each in (own, freed)]
    assert more[0] - more[1] == pytest.approx(4 * of_a_block)


@pytest.mark.slow
def test_custom_model_and_loss() -> None:
    """That of 2024 keeps more of the norm, and the logits in fp32."""
    outside = ("loss.kind=tests.titan2024:Logits", "parallelism.kind=tests.titan2024:FSDP2Then")
    own = planned(*DEEP, "model.kind=tests.titan2024:Titan2024", *outside)
    shipped = planned(*DEEP)
    assert own["memory/by_category_gib"]["activations"] > shipped["memory/by_category_gib"]["activations"]
    assert own["verdict"] == FITS and own["perf/wps"] > 0
