"""What holds for all tests."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

LONG = tuple(Path(__file__).with_name("slow.txt").read_text().splitlines())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample", type=int, default=1, metavar="N", help="run one in N of the slow tests, always the same ones"
    )


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by mark
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(LONG):
            item.add_marker(pytest.mark.slow)
    every = config.getoption("--sample")
    left_out = [item for item in items if item.get_closest_marker("slow") and zlib.crc32(item.nodeid.encode()) % every]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
