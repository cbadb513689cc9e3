"""Spaces of which every combination was measured, with the predictions that a search of the same space made.

    python -m tests.unit.tune.recorded SEARCH SWEEP NAME

records a space from the directories of the search and of the sweep, which must have the same grid.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import yaml

from meshrunner.runner.calibrate.fit import OF_CPU, OF_GPU
from meshrunner.runner.figures import speed_figure
from meshrunner.runner.rundir import Summary, key_of, run_names
from meshrunner.runner.rundir.files import SUMMARY, SWEEP, TUNE
from meshrunner.runner.rundir.run import read_overrides
from meshrunner.runner.tune.answer import TUNED
from meshrunner.runner.tune.belief import PER_COEFFICIENT, Array, Prior, Response, points_for

RECORDED = Path(__file__).with_name("recorded")


def read(path: Path) -> tuple[Prior, Array]:
    """Return the belief before the first run, and the logarithms of the measured speeds [combinations]."""
    space = json.loads(path.read_text())
    predicted = np.log([each["predicted"] for each in space["combinations"]])
    spread = np.array(space["spread"])
    prior = Prior(Response(points_for(spread), predicted), spread, [each["options"] for each in space["combinations"]])
    return prior, np.log([np.median(each["measured"]) for each in space["combinations"]])


def record(search: Path, sweep: Path, name: str) -> None:
    predicted = [each["wps"] for each in json.loads((search / TUNE).read_text()).values()]
    device = yaml.safe_load((search / TUNED).read_text())
    constants = OF_GPU if device["kind"] == "gpu" else OF_CPU
    count = next(count for count in range(10) if PER_COEFFICIENT * (count + 1) * (count + 2) // 2 == len(predicted[0]))
    command = json.loads((sweep / SWEEP).read_text())["command"][1:]
    varied = {key_of(each) for each in command if "," in each}
    runs: dict[str, list[Path]] = {}
    for run in sorted(run_names(sweep)):
        runs.setdefault(run.partition("_")[0], []).append(sweep / run)
    combinations = [
        {
            "options": dict(each.split("=", 1) for each in read_overrides(repeats[0]).task if key_of(each) in varied),
            "measured": [_speed(each) for each in repeats],
            "predicted": wps,
        }
        for repeats, wps in zip(runs.values(), predicted, strict=True)
    ]
    space = {
        "command": " ".join(command),
        "device": device.get("name", "CPU"),
        "spread": [each.unknown for each in constants[:count]],
        "combinations": combinations,
    }
    text = json.dumps(space, indent=1)
    RECORDED.mkdir(exist_ok=True)
    (RECORDED / f"{name}.json").write_text(re.sub(r"(?<=\d,)\s+(?=\d)", " ", text) + "\n")


def _speed(run_dir: Path) -> float:
    figures = Summary.read(run_dir / SUMMARY).figures
    return round(float(figures[speed_figure([figures]).summary_keys[0]]), 1)


if __name__ == "__main__":
    record(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
