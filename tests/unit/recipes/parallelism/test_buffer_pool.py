"""The buffer pool: where it places buffers, and that it refuses requests that are not in its plan."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.parallelism.buffers import buffer_pool
from meshrunner.recipes.parallelism.buffers.buffer_pool import BufferPool
from meshrunner.recipes.parallelism.buffers.placement import PLANS, REDUCE_SCATTER_INPUTS, all_gather_outputs

CPU = torch.device("cpu")
SIZES = {"a": 1000, "b": 300, "c": 700}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_pool, "PATIENCE_S", 0.05)


def ask(pool: BufferPool, unit: str, elements: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    return pool.take(unit, SIZES.get(unit, 10) if elements is None else elements, dtype, CPU)


def planned(plan: str = "scheduled", in_flight: Any = None) -> BufferPool:
    """Return a pool after a step in which a, b and c requested in turn."""
    pool = BufferPool(PLANS[plan], in_flight or all_gather_outputs(1))
    for unit in SIZES:
        ask(pool, unit)
    assert pool.step_done() == 3
    return pool


@pytest.mark.parametrize("plan", PLANS)
def test_a_unit_keeps_its_address_and_nothing_is_allocated(plan: str) -> None:
    pool = planned(plan)
    addresses: dict[str, set[int]] = {}
    for _ in range(3):
        before = None
        for unit, size in SIZES.items():
            buffer = ask(pool, unit)
            assert buffer.shape == (size,) and buffer.dtype == torch.float32 and buffer.data_ptr() % 256 == 0
            buffer.fill_(size)
            addresses.setdefault(unit, set()).add(buffer.data_ptr())
            assert before is None or (before == len(before)).all(), "what is alive together lies apart"
            before = buffer
        del before, buffer
    assert all(len(each) == 1 for each in addresses.values())
    assert addresses["a"] == addresses["c"] != addresses["b"], "what is never alive together shares"
    assert pool.step_done() == 0


def test_memory_of_the_first_step_is_returned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.device] = []
    monkeypatch.setattr(buffer_pool, "empty_cache", calls.append)
    pool = planned()
    ask(pool, "a")
    assert pool.step_done() == 0 and calls == [CPU]


def test_reduce_scatter_inputs_share_one_range() -> None:
    pool = planned("max_pool", REDUCE_SCATTER_INPUTS)
    assert set(pool.offsets.values()) == {0}


@pytest.mark.parametrize("held", ["the buffer", "a view of it"])
def test_a_buffer_in_use_is_not_overwritten(held: str) -> None:
    pool = planned()
    first = ask(pool, "a")
    kept = first if held == "the buffer" else first.view(10, 100)[3]
    del first
    ask(pool, "b")
    pool.offsets["c"] = pool.offsets["a"]
    with pytest.raises(
        ConfigError, match=r"'c' would overwrite the buffer in use by 'a'; use parallelism.buffers=dynamic"
    ):
        ask(pool, "c")
    del kept
    ask(pool, "c")


def test_the_pool_waits_for_a_late_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_pool, "PATIENCE_S", 60.0)
    pool = planned()
    pool.offsets["b"] = pool.offsets["a"]
    late = [ask(pool, "a")]
    threading.Timer(0.05, late.clear).start()
    ask(pool, "b")
    assert not late


def test_a_second_buffer_of_a_unit_is_refused_while_the_first_is_in_use() -> None:
    for pool in (BufferPool(PLANS["max_pool"], all_gather_outputs(1)), planned()):
        first = ask(pool, "a")
        with pytest.raises(ConfigError, match="'a' requests a second buffer while its first buffer is in use"):
            ask(pool, "a")
        del first
        ask(pool, "a")


@pytest.mark.parametrize(
    ("unit", "elements", "dtype", "says"),
    [
        (
            "d",
            10,
            torch.float32,
            "'d' requests a buffer, but buffers were planned only for the units that requested one in the first step: a, b, c;",
        ),
        ("b", 301, torch.float32, "'b' requests 1,204 bytes of torch.float32, but its buffer has 1,200 bytes of"),
        (
            "b",
            300,
            torch.bfloat16,
            "'b' requests 600 bytes of torch.bfloat16, but its buffer has 1,200 bytes of torch.float32",
        ),
    ],
)
def test_a_request_that_is_not_in_the_plan_is_refused(unit: str, elements: int, dtype: torch.dtype, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ask(planned(), unit, elements, dtype)
    assert ask(planned(), "b", 200).shape == (200,), "less is no mistake"
