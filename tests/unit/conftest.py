"""What holds for all tests of parts."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine work is named that takes no time on an idle one; the tests of that have a limit of their own."""
    monkeypatch.setattr("meshrunner.runner.console.SILENT_S", 600.0)
