"""The examples of a custom model and a custom parallelism train as one process does, gradient by gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshrunner.recipes.errors import ConfigError, Incompatible
from meshrunner.runner.config.consistency import fit
from tests.composed import SMALL, experiment
from tests.dist.ranks import on_ranks
from tests.dist.test_layouts import compare, observe, relative

MODEL = (
    "--config-dir=examples/own_model",
    "model=gpt",
    *(each for each in SMALL if not each.startswith(("model.n_kv_heads", "model.ffn_dim"))),
)
LAYOUTS = [
    "parallelism=fsdp2",
    "parallelism=fsdp1 activation_checkpoint=full",
    "parallelism=ddp micro_batch=3",
    "parallelism=fsdp2 loss=chunked loss.tokens=13 wrap=rules wrap.rules=[{match:Block},{match:output}]",
]


def observe_all(layouts: list[tuple[str, ...]]) -> list[dict[str, Any]]:
    return [observe(overrides) for overrides in layouts]


@pytest.mark.slow
def test_the_own_model_under_every_kind_of_layout() -> None:
    ((expected,),) = on_ranks(1, observe_all, [(*MODEL, "parallelism=single", "micro_batch=12")])
    found, _ = on_ranks(2, observe_all, [(*MODEL, *layout.split()) for layout in LAYOUTS])
    assert len(found) == len(LAYOUTS)
    for layout, observed in zip(LAYOUTS, found, strict=True):
        for name, weight in expected["weights"].items():
            assert torch.equal(observed["weights"][name], weight), f"{layout}: initial {name} differs"
            apart = relative(observed["gradients"][name], expected["gradients"][name])
            assert apart < 1e-5, f"{layout}: the gradient of {name} is {apart:.1e} off"
        for key in ("losses", "norms"):
            assert observed[key] == pytest.approx(expected[key], rel=1e-5), layout
    assert expected["losses"][-1] < expected["losses"][0]


def test_the_own_model_says_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match=r"model: dim\(48\) is not a multiple of n_heads\(7\)"):
        experiment(*MODEL, "model.n_heads=7")
    with pytest.raises(Incompatible, match="no tensor-parallel plan"):
        fit(experiment(*MODEL, "parallelism=tp", "parallelism.tensor=2"), 2)


PARALLELISM = "--config-dir=examples/own_parallelism parallelism=averaged"


@pytest.mark.parametrize("layout", [PARALLELISM, f"{PARALLELISM} micro_batch=2"], ids=["whole", "accumulated"])
def test_the_own_parallelism_equals_one_process(layout: str) -> None:
    found = compare(2, layout)
    assert max(found) < 1e-5, found


def test_the_own_parallelism_rounds_what_it_sends_in_bf16() -> None:
    found = compare(2, f"{PARALLELISM} parallelism.reduce=bf16")
    assert 1e-4 < found.gradient < 1e-2, found
