"""The tests and measurements of each part of the GPU bench, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from bench.gpu import emulate, figures, grid, measure
from bench.gpu.commands import Commands
from bench.gpu.figures import Case
from bench.gpu.machine import Machine
from bench.gpu.results import Result, Results
from bench.gpu.rows import OUT_OF_MEMORY, Small, grid_row, out_of_memory_row, resumed_row
from bench.published_rows import Row

RESUMED = [
    *(f"parallelism=fsdp2 checkpoint={kind}" for kind in ("dcp", "dcp_async")),
    "parallelism=fsdp1 checkpoint=dcp",
]
REPEATS = 3
"""Number of measurements of each case in `figures.FIRST`."""
EXPECTED_S = {
    "eager": 20.0,
    "per_block": 40.0,
    "whole_model": 90.0,
    "plan": 30.0,
    "two runs": 50.0,
    "calibrate": 120.0,
    "emulated": 90.0,
}
"""Guessed seconds that a job of each kind takes. They are used until a job of this kind has worked."""


class Job(NamedTuple):
    """A test or measurement to run, which becomes a row of the document."""

    part: str
    """The row's table."""
    what: str
    """The row's name."""
    run: Callable[[dict[str, str]], Result]
    """Function that runs the row with the given environment variables, such as CUDA_VISIBLE_DEVICES."""
    kind: str = "eager"
    """Key of EXPECTED_S."""
    missing: str = ""
    """Reason why this machine cannot run the row, or ""."""
    round: int = 1

    @property
    def key(self) -> tuple[str, str, int]:
        return self.part, self.what, self.round


class Stage(NamedTuple):
    """Jobs that may start once the previous stage has ended."""

    jobs: list[Job]
    side_by_side: bool = False
    """Whether the jobs may run at the same time."""
    early: bool = False
    """Whether the stage runs before all stages that are not early, including those of other parts."""


class Jobs:
    """The jobs of one machine. `keep` is the folder of the results."""

    def __init__(self, machine: Machine, commands: Commands, results: Results, keep: Path) -> None:
        self.machine, self.commands, self.results, self.keep = machine, commands, results, keep
        self.small = Small.on(machine)
        self.number = 0

    def stages(self, parts: Iterable[str], every_combination: bool = False) -> list[Stage]:
        """Return the stages of some parts. A part is a key of PARTS."""
        found = [stage for part in parts for stage in PARTS[part](self)]
        found += [Stage([*map(self.row, grid.all_combinations())], True)] if every_combination else []
        return sorted(found, key=lambda stage: not stage.early)

    def options(self) -> list[Stage]:
        """Return the stages that test which options work together."""
        return [
            Stage([*map(self.row, [grid.REFERENCE, *grid.REFERENCES.values()])], True, early=True),
            Stage([*map(self.row, grid.FIRST), *map(self.resumed, RESUMED)], True, early=True),
            Stage([self.out_of_memory()]),
            Stage([self.row(row, devices) for row, devices in grid.SEVERAL.items()]),
            Stage([*map(self.row, [*grid.HYBRIDS, *grid.EXPERTS, *grid.REST, *grid.REFUSED])], True),
        ]

    def figures(self) -> list[Stage]:
        """Return the stages that measure speed and memory."""
        first, *again = (Stage(self.in_turn(figures.FIRST, round)) for round in range(1, REPEATS + 1))
        singly = [*figures.SETTINGS, *figures.BATCHES]
        case = figures.FIRST[0]
        titan = [
            self.titan(case._replace(compile=way), graphs) for way in ("per_block", "eager") for graphs in ("off", "on")
        ]
        return [
            first._replace(early=True),
            Stage([*map(self.measured, singly), *titan, *map(self.measured, figures.MODELS)]),
            *again,
            Stage(self.in_turn(figures.REST[:4])),
            Stage([*map(self.measured, figures.SEVERAL)]),
            Stage(self.in_turn(figures.REST[4:])),
            Stage([*map(self.planned, [*figures.FIRST, *figures.BATCHES, *figures.MODELS])], True),
            Stage([Job("proofs", "calibrate", self._calibrate, "calibrate", self._without("scipy"))]),
        ]

    def emulate(self) -> list[Stage]:
        """Return the stage that emulates one rank of each published run."""
        return [Stage([*map(self.emulated, emulate.ROWS)])]

    def row(self, row: str, devices: int | None = None) -> Job:
        number = self._next()
        alone = {"parallelism=single", "launch.workers=1"} & {*row.split()}
        ranks = 1 if alone else devices or self.machine.pair

        def run(lane: dict[str, str]) -> Result:
            reference = self._steps(grid.reference_of(row))
            return grid_row(row, number, self.small, self.commands, lane, reference, devices)

        return Job("grid", row, run, _compiled(row), grid.missing(row, self.machine, ranks))

    def resumed(self, options: str) -> Job:
        def run(lane: dict[str, str]) -> Result:
            return resumed_row(options, self.small, self.commands, lane, self._steps(grid.REFERENCE))

        return Job("proofs", f"resume, {options}", run, "two runs")

    def out_of_memory(self) -> Job:
        return Job("proofs", OUT_OF_MEMORY, lambda _: out_of_memory_row(self.small, self.commands), "two runs")

    def in_turn(self, cases: list[Case], round: int = 1) -> list[Job]:
        """Return the jobs that measure cases. After each group of cases with the same work, the loop does this work."""
        found = []
        for _, same in groupby(cases, key=lambda case: case.loop):
            alike = [*same]
            found += [*(self.measured(case, round) for case in alike), self.plain(alike[0], round)]
        return found

    def measured(self, case: Case, round: int = 1) -> Job:
        number = self._next()

        def run(_: dict[str, str]) -> Result:
            return measure.measured(case, number, self.machine, self.commands, self.keep)

        return Job("figures", case.what, run, case.compile, self._missing(case), round)

    def plain(self, case: Case, round: int = 1) -> Job:
        number = self._next()

        def run(_: dict[str, str]) -> Result:
            return measure.measured_plain(case, number, self.machine, self.commands, self._peak_tflops())

        return Job("loop", case.loop, run, case.compile, round=round)

    def titan(self, case: Case, graphs: str) -> Job:
        number = self._next()

        def run(_: dict[str, str]) -> Result:
            return measure.measured_titan(case, graphs, number, self.machine, self.commands, self._peak_tflops())

        return Job("torchtitan", measure.titan_row(case, graphs), run, case.compile, self._without("torchtitan"))

    def planned(self, case: Case) -> Job:
        number = self._next()

        def run(_: dict[str, str]) -> Result:
            return measure.predicted(case, number, self.machine, self.commands)

        return Job("plan", case.what, run, "plan", self._missing(case))

    def emulated(self, row: Row) -> Job:
        number = self._next()

        def run(_: dict[str, str]) -> Result:
            return emulate.emulated(row, number, self.machine, self.commands)

        return Job("emulate", emulate.what(row), run, "emulated", emulate.missing(row, self.machine))

    def _calibrate(self, _: dict[str, str]) -> Result:
        cases = {case.what for case in (*figures.FIRST, *figures.BATCHES, *figures.REST) if case.subject == "1B"}
        found = [each for each in self.results.all if each.part == "figures" and each.what in cases]
        folders = [each.figures["run_dir"] for each in found if each.state == "works" and each.round == 1]
        return measure.calibrated([each for each in folders if Path(each).is_dir()], self.commands, self.keep)

    def _missing(self, case: Case) -> str:
        return grid.missing(f"{case.layout} {case.more}", self.machine, case.devices)

    def _without(self, package: str) -> str:
        return "" if self.machine.version(package) else f"the package {package} is not installed"

    def _steps(self, row: str) -> grid.Steps:
        """Return loss and gradient norm of each step of a reference row, or [] if the row did not work."""
        found = self.results.find("grid", row)
        return [(loss, norm) for loss, norm in found.figures["steps"]] if found and found.state == "works" else []

    def _peak_tflops(self) -> float | None:
        peaks = (each.figures.get("peak_tflops") for each in self.results.all if each.part == "figures")
        return next((peak for peak in peaks if peak), None)

    def _next(self) -> int:
        self.number += 1
        return self.number


PARTS: dict[str, Callable[[Jobs], list[Stage]]] = {
    "options": Jobs.options,
    "figures": Jobs.figures,
    "emulate": Jobs.emulate,
}
"""Parts of the bench. `--part NAME` runs only one part."""


def _compiled(row: str) -> str:
    """Return the row's value of `compile`, which determines how long the row takes."""
    return next((word.removeprefix("compile=") for word in row.split() if word.startswith("compile=")), "eager")
