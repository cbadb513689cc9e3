"""Options and markers of all tests."""

from __future__ import annotations

import zlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample", type=int, default=1, metavar="N", help="run one in N of the slow tests, always the same ones"
    )


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by mark
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _is_slow_case(item):
            item.add_marker(pytest.mark.slow)
    every = config.getoption("--sample")
    left_out = [item for item in items if _is_left_out(item, every)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _is_slow_case(item: pytest.Item) -> bool:
    """
    Return whether a case of a parametrized test is a slow one.

    `slow_cases("fsdp1-2", "tp*")` makes the named cases slow, `slow_but("fsdp2-2")` all others. A name is a parameter id, or
    the beginning of some with `*` behind it; brackets are part of ids, so it is no shell pattern.
    """
    case = item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""

    def named(marker: pytest.Mark) -> bool:
        return any(case.startswith(name[:-1]) if name.endswith("*") else case == name for name in marker.args)

    slow, fast = item.get_closest_marker("slow_cases"), item.get_closest_marker("slow_but")
    return (slow is not None and named(slow)) or (fast is not None and not named(fast))


def _is_left_out(item: pytest.Item, every: int) -> bool:
    """Return whether a sample of one in `every` slow tests leaves a test out. `slow(sampled=True)` is in every sample."""
    slow = item.get_closest_marker("slow")
    return slow is not None and not slow.kwargs.get("sampled") and zlib.crc32(item.nodeid.encode()) % every > 0
