"""The shipped experiments: what they say about the run that each of their combinations is, on 8 devices and on a laptop."""

from __future__ import annotations

import pytest

from meshrunner.runner.config.consistency import fit
from tests.composed import CONF, experiment

LAPTOP = ("model=llama_tiny", "data=stdlib", "precision=fp32", "seq_len=128", "micro_batch=2", "steps=5")
ONE = {
    "fsdp1_vs_fsdp2": ("parallelism=fsdp1",),
    "pr165_1d": ("parallelism=fsdp1", "activation_checkpoint=selective_op"),
    "pr165_compile": ("activation_checkpoint=none", "micro_batch=6"),
    "playbook": ("model=llama3_8b", "parallelism.tensor=2"),
    "scaling": ("launch.workers=2",),
    "buffers_hybrid": ("parallelism.buffers=scheduled",),
    "moe_layouts": ("parallelism=ep", "activation_checkpoint=selective_op"),
    "dimensions": ("parallelism=fsdp2_pp_interleaved",),
    "schedules": ("parallelism.pipeline_schedule=zbv",),
    "pr165_2d": ("parallelism=fsdp2_tp", "activation_checkpoint=full"),
}


def test_every_shipped_experiment_is_here() -> None:
    assert {path.stem for path in (CONF / "experiment").glob("*.yaml")} == set(ONE)


@pytest.mark.parametrize("name", ONE)
def test_a_combination_fits(name: str) -> None:
    common = (f"experiment={name}", "hydra.mode=RUN", *ONE[name])
    fit(experiment(*common), 8)
    laptop = experiment(*common, *(word for word in LAPTOP if (name, word) != ("moe_layouts", "model=llama_tiny")))
    fit(laptop, 4)
    assert (laptop.model.dim, laptop.micro_batch, laptop.steps, laptop.precision.kind) == (256, 2, 5, "fp32")


def test_what_the_pull_request_compares() -> None:
    common = ("experiment=pr165_1d", "hydra.mode=RUN")
    fsdp1, fsdp2 = (experiment(*common, f"parallelism={kind}") for kind in ("fsdp1", "fsdp2"))
    assert (fsdp1.parallelism.reshard_after_forward, fsdp2.parallelism.reshard_after_forward) == (
        "always",
        "except_last",
    )
    assert (fsdp1.model.dim, fsdp1.model.n_layers, fsdp1.seq_len, fsdp1.micro_batch) == (4096, 32, 2048, 8)
    compiled = experiment("experiment=pr165_compile", "hydra.mode=RUN", "micro_batch=6", "activation_checkpoint=none")
    assert compiled.parallelism.reshard_after_forward == "never" and compiled.compile.kind == "per_block"
    assert experiment("experiment=pr165_2d", "hydra.mode=RUN", "parallelism=fsdp2_tp").parallelism.tensor == 2
    assert compiled.wrap.kind == "rules", "the units of the pull request"
