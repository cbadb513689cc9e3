"""What holds for all tests of parts."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Enable garbage collection again: some verbs disable it, because their process ends soon."""
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine work is named that takes no time on an idle one; the tests of that have a limit of their own."""
    monkeypatch.setattr("meshrunner.runner.console.SILENT_S", 600.0)
