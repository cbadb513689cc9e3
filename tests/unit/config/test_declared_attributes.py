"""Rules and engine read declared attributes of an option's base class; a user's own option inherits their defaults."""

from __future__ import annotations

import pytest

from meshrunner.recipes.compile.base import Compile
from meshrunner.recipes.data.base import Data, DataSpec, RandomSequences, Sequences
from meshrunner.recipes.option import Option
from meshrunner.recipes.parallelism.fsdp2 import FSDP2
from meshrunner.recipes.precision.base import FP32, Float8, Precision


class OwnPrecision(Precision):
    """Derived from nothing but the base class."""


class OwnCompile(Compile):
    """Derived from nothing but the base class."""


class OwnData(Data):
    """Derived from the base class, with nothing but the method that every option defines."""

    def open(self, spec: DataSpec) -> Sequences:
        return RandomSequences(spec)


@pytest.mark.parametrize(
    ("option", "defaults"),
    [
        (OwnPrecision, {"fp32_matmul": "highest", "gathers_float8": False, "scales_rows": False, "reduce_bytes": 4}),
        (OwnCompile, {"records_cuda_graphs": False, "autotunes": False, "is_partitioned": False}),
        (OwnData, {"local_path": None}),
    ],
)
def test_own_option_inherits_the_defaults(option: type[Option], defaults: dict[str, object]) -> None:
    own = option(kind="own:Option")
    assert {name: getattr(own, name) for name in defaults} == defaults


def test_renamed_key_fails_instead_of_disabling_a_rule() -> None:
    """An option without the key that a rule needs, as after a rename on one side only."""
    matmul, float8 = FP32.model_construct(kind="fp32"), Float8.model_construct(kind="float8")
    layout = FSDP2.model_construct(kind="fsdp2")
    object.__delattr__(matmul, "matmul")
    for read in (
        lambda: matmul.fp32_matmul,
        lambda: float8.gathers_float8,
        lambda: float8.scales_rows,
        lambda: layout.units_ahead,
        lambda: layout.offloads,
    ):
        with pytest.raises(AttributeError):
            read()
