"""A simulated device: its true speeds differ from the predicted ones by its constants, by the layout, by drift and by noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshrunner.runner.calibrate.fit import OF_GPU, constant
from meshrunner.runner.config.hardware import GPU, known_gpus
from meshrunner.runner.predict import Forecast, Verdict, not_planned
from meshrunner.runner.predict.forecast import DOES_NOT_FIT, FITS, MemoryForecast
from meshrunner.runner.predict.predict import REACH
from meshrunner.runner.rundir.files import STATUS, SUMMARY, write_json
from meshrunner.runner.rundir.run import read_config
from meshrunner.runner.rundir.states import read_state
from meshrunner.runner.tune.belief import Array

H100 = next(gpu for gpu in known_gpus() if gpu.name == "H100 80GB")
LAYOUTS = ("ddp", "fsdp1", "fsdp2")
GRID = (
    f"parallelism={','.join(LAYOUTS)}",
    "activation_checkpoint=none,full",
    "compile=eager,per_block",
    "micro_batch=2,4",
)
NOISE = 0.02


class Work(NamedTuple):
    """What decides the speed of a combination."""

    layout: str
    recompute: str
    compiled: bool
    batch: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Work:
        kinds = (config[group]["kind"] for group in ("parallelism", "activation_checkpoint", "compile"))
        layout, recompute, compiled = kinds
        return cls(layout, recompute, compiled != "eager", config["micro_batch"])


def log_speed(work: Work, constants: Array) -> Array:
    """Return the logarithms of a combination's speeds on devices with `constants` [devices, 5], by a roofline."""
    matmul, memory, attention, contention, host = np.exp(constants).T
    layout = LAYOUTS.index(work.layout)
    again = {"none": 0.0, "full": 0.3}[work.recompute]
    compute = (1 + again + 0.02 * layout) / matmul + 0.3 * (1 + again) / attention
    compute = compute + (0.35 if work.compiled else 0.56) / memory
    communication = (0.9 - 0.15 * layout) / work.batch
    issued = (0.3 if work.compiled else 0.5) * 2.5 / work.batch * host
    step = np.maximum(compute + 0.15 * communication * contention, 1.1 * communication)
    found: Array = 8 - np.log(np.maximum(step, issued) + 0.02)
    return found


def _forecast(answer: str, gib: float, speeds: tuple[float, ...]) -> Forecast:
    memory = MemoryForecast(gib, gib, None, None, None, 0.0, "forward", {}, None, 2.0)
    return Forecast(Verdict(answer, "memory"), memory, wps_on=speeds)


class Machine:
    """Predicts, and executes runs, in place of `predict_all` and `execute_all`."""

    def __init__(self, seed: int, *, limit_gib: float = 80.0) -> None:
        generator = np.random.default_rng(seed)
        self.generator, self.limit_gib = generator, limit_gib
        self.constants = np.log(generator.uniform(0.7, 1.3, (1, len(OF_GPU))))
        self.slow = str(generator.choice(LAYOUTS))
        self.executed: list[str] = []
        self.predicted = 0
        self.outcome: Callable[[Work], str] = lambda work: "completed"
        self.unpredicted: Callable[[Work], str] = lambda work: ""
        """Returns why a combination cannot be predicted, or "" if it can."""
        self.stop_after: int | None = None

    def truth(self, work: Work) -> float:
        return float(log_speed(work, self.constants)[0]) - math.log(1.1) * (work.layout == self.slow)

    @staticmethod
    def gib(work: Work) -> float:
        """Peak memory."""
        return 20.0 * work.batch * {"none": 1.0, "full": 0.4}[work.recompute]

    def fits(self, work: Work) -> bool:
        """Whether the run is predicted to fit."""
        return self.gib(work) <= self.limit_gib

    def predict_all(self, configs: Sequence[dict[str, Any]], *, variants: Sequence[GPU], **_: Any) -> list[Forecast]:
        points = np.log([[constant(gpu, each.key) / constant(H100, each.key) for each in OF_GPU] for gpu in variants])
        self.predicted += len(configs)
        found: list[Forecast] = []
        for config in configs:
            work = Work.of(config)
            if reason := self.unpredicted(work):
                found.append(not_planned(reason))
                continue
            answer = FITS if self.fits(work) else DOES_NOT_FIT
            speeds = tuple(np.exp(log_speed(work, points))) if self.gib(work) <= (1 + REACH) * self.limit_gib else ()
            found.append(_forecast(answer, self.gib(work), speeds))
        return found

    def execute_all(self, run_dirs: Sequence[Path], _: Any) -> tuple[int, bool]:
        drift = self.generator.normal(0, 0.02)
        for run_dir in run_dirs:
            work = Work.of(read_config(run_dir))
            if read_state(run_dir) != "pending":
                continue
            if self.stop_after is not None and len(self.executed) >= self.stop_after:
                raise KeyboardInterrupt
            self.executed.append(run_dir.name)
            state = self.outcome(work)
            write_json(run_dir / STATUS, {"state": state, "reason": "", "attempt": 1, "started": 100.0, "ended": 160.0})
            speed = math.exp(self.truth(work) + drift + self.generator.normal(0, NOISE))
            figures = dict.fromkeys(("perf/wps_median", "perf/wps_p10", "perf/wps_p90"), speed)
            write_json(run_dir / SUMMARY, {"state": state, **(figures if state == "completed" else {})})
        return 0, False
