"""What several modules of tests of the command line start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import own_classes
from tests.e2e.wandb_stub import Stub, serving


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for all runs of a module, and not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHRUNNER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A current directory with the user's module `faulty` in it."""
    own_classes(tmp_path)
    return tmp_path


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """A server on this machine that takes what is meant for W&B."""
    with serving() as stub:
        monkeypatch.setenv("WANDB_BASE_URL", stub.url)
        monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
        yield stub
