"""`meshrunner doctor` where parts are missing."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from meshrunner.runner.verbs.reference import doctor


def test_without_torch_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    known = metadata.version

    def version(package: str) -> str:
        if package == "torch":
            raise metadata.PackageNotFoundError(package)
        return known(package)

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises ImportError
    found = {part: (finding, why) for part, finding, why in doctor.findings()}
    assert found["torch"] == ("none", "install it: pip install torch")
    assert found["import torch"][0] == "no" and found["import torch"][1].startswith("no run can start: ")
    assert "SLURM" in found and "cache" in found
