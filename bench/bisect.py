"""Plant a slow-down of 4%, a byte of memory or a change of the loss in one of 32 commits. Count correct answers of `bisect`."""

from __future__ import annotations

import math
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from random import Random
from statistics import fmean

from bench.verdict import BUSY, CALIBRATION, MESHRUNNER, MODEL, PLANTED, sweep

COMMITS, TRIES = 32, 10
STEPS = {"speed": 240, "memory": 4, "loss": 4}
CODE = """
from meshrunner.recipes.model.llama import Llama

VERSION, EXTRA, BYTES, SCALE = {version}, {extra}, {bytes}, {scale}


class Planted(Llama):
    def network(self, seq_len):
        network = super().network(seq_len)
        network.register_forward_pre_hook(planted)
        return network


def planted(module, given):
    import torch

    with torch.no_grad():
        for _ in range(EXTRA):
            torch.ones(32, 128) @ torch.ones(128, 128)
        module.kept = torch.empty(BYTES, dtype=torch.uint8)
        module.norm.weight.mul_(SCALE)
"""
"""The module of a user's model, formatted for each commit. The EXTRA matmuls are the same as in `bench.planted`."""


def bisect(folder: Path) -> None:
    """Plant each change at a random commit, TRIES times. Print how often `meshrunner bisect` names this commit."""
    with ExitStack() as stack:
        for _ in range(BUSY):
            stack.callback(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
        _, ratios = sweep(folder, f"EXTRA=0,{CALIBRATION}", 5)
        count = round(CALIBRATION * PLANTED / math.expm1(fmean(ratios)))
        print(f"{count} extra matmuls take {100 * PLANTED:.0f}% of a step", flush=True)
        for by, change in {
            "loss": {"scale": 1 + 1e-6},
            "memory": {"bytes": 1},
            "speed": {"extra": count},
        }.items():
            found = 0
            for i in range(1, TRIES + 1):
                culprit = Random(f"{by} {i}").randrange(1, COMMITS)
                repository = _repository(folder / f"{by}{i}", culprit, change)
                answer, runs = _bisect(repository, by)
                found += answer == f"Version {culprit}"
                print(
                    f"{by} {i}: planted in {culprit}, {answer}, {runs} runs; found in {found} of {i} tries", flush=True
                )


def _repository(folder: Path, culprit: int, change: dict[str, float]) -> Path:
    folder.mkdir()
    git = ["git", "-c", "user.name=bench", "-c", "user.email=bench@localhost", "-c", "commit.gpgsign=false"]
    subprocess.run([*git, "init", "-q"], cwd=folder, check=True)
    for version in range(COMMITS):
        values = {"extra": 0, "bytes": 0, "scale": 1.0} | (change if version >= culprit else {})
        (folder / "mine.py").write_text(CODE.format(version=version, **values))
        subprocess.run([*git, "add", "mine.py"], cwd=folder, check=True)
        subprocess.run([*git, "commit", "-q", "-m", f"Version {version}"], cwd=folder, check=True)
        subprocess.run([*git, "tag", f"v{version}"], cwd=folder, check=True)
    return folder


def _bisect(repository: Path, by: str) -> tuple[str, int]:
    """Return the subject of the commit that `meshrunner bisect` names (or its error message), and the number of runs."""
    own = [each for each in MODEL if not each.startswith(("steps=", "sweep.", "model.kind="))]
    overrides = [*own, "model.kind=mine:Planted", f"steps={STEPS[by]}", "measure_after=1"]
    ends = ["v0", f"v{COMMITS - 1}", "--by", by, "--dir", str(repository / "runs")]
    done = subprocess.run(
        [MESHRUNNER, "bisect", *ends, "--", *overrides], cwd=repository, capture_output=True, text=True, check=False
    )
    last = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1]
    runs = len(list(repository.glob("runs/*/config.yaml")))
    return last.partition(": ")[2].partition(" ")[2] if done.returncode == 0 else last, runs
