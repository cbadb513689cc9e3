"""Explains why a row is slower or faster than its baseline: lines that add up to the difference of their step times."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, median
from typing import Any, NamedTuple

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.best import WORK
from meshrunner.runner.compare.noise import ALPHA, noise_of
from meshrunner.runner.compare.runs import Row
from meshrunner.runner.explain.step_lines import DATA, EXPOSED, HOST, WAIT
from meshrunner.runner.figures import figure_of, number
from meshrunner.runner.rundir import Explanation, PlanRecord
from meshrunner.runner.rundir.files import EXPLANATION

STEP_TIME, WPS = figure_of("perf/step_time_s"), figure_of("perf/wps")
UNEXPLAINED = "unexplained"
COMPUTE, COMMUNICATION = "compute", "exposed communication"
SHARE = 0.8
"""Share of a difference that the lines of the sentence must explain together."""
NAMED = 3
"""Maximum number of lines in the sentence."""
NEGLIGIBLE = 0.05
"""Share of the difference up to which a group of lines counts as equal."""
SURE = 2.0
"""Standard errors by which single runs must differ before a cause is named."""


@dataclass(frozen=True)
class StepLedger:
    """The mean step of a row."""

    step_time_s: float
    """Median step time of the row's runs, or the predicted step time."""
    seconds: dict[str, float]
    """Seconds per line. They add up to `step_time_s`, because UNEXPLAINED takes the remainder."""


class Line(NamedTuple):
    """A line of the ledger of a difference, in seconds per step."""

    name: str
    base: float
    own: float

    @property
    def more(self) -> float:
        return self.own - self.base


@dataclass(frozen=True)
class Difference:
    """The ledger of the difference between a row and its baseline."""

    base: str
    own: str
    """Names of the baseline and of the row."""
    lines: list[Line]
    """All lines, the largest difference first."""
    traced: bool
    """Whether the lines are measured. Otherwise, they are predicted."""
    within_noise: bool
    """Whether the step times differ so little that no cause can be named."""
    predicted: list[Line]
    """The predicted sums of each group, if the lines are measured; empty if unknown."""

    @property
    def whole(self) -> Line:
        """The sum of all lines: the step time."""
        return _sum("step time", self.lines)

    @property
    def seconds(self) -> float:
        """Seconds per step by which the row exceeds its baseline."""
        return self.whole.more

    @property
    def percent(self) -> float:
        return 100 * self.seconds / self.whole.base

    def groups(self) -> list[Line]:
        """Return the sum of the lines of each group, the largest difference first."""
        return _grouped(self.lines)

    def sentence(self) -> str:
        """Return a sentence that names the main causes, or that says why it names none."""
        if self.within_noise or not self.seconds:
            return f"{self.own} and {self.base} do not differ beyond noise ({self.percent:+.1f}% step time), so no cause is named"
        kind = "" if self.traced else "predicted to be "
        size = f"{abs(self.percent):.1f}% {'slower' if self.seconds > 0 else 'faster'}"
        size = f"{self.own} is {kind}{size} than {self.base} ({_time(abs(self.seconds))} per step)"
        unexplained = next(line.more for line in self.lines if line.name == UNEXPLAINED)
        if abs(unexplained) >= abs(self.seconds):
            return f"{size}, but the ledger does not explain the difference, so no cause is named"
        causes: list[str] = []
        explained = 0.0
        for line in sorted(self.lines, key=lambda line: -line.more / self.seconds):
            if len(causes) == NAMED or explained >= SHARE or line.more / self.seconds < NEGLIGIBLE:
                break
            causes.append(f"{_time(abs(line.more))} {'more' if line.more > 0 else 'less'} {line.name}")
            explained += line.more / self.seconds
        equal = [
            line.name
            for line in self.groups()
            if line.name in (COMPUTE, COMMUNICATION) and abs(line.more) < NEGLIGIBLE * abs(self.seconds) and line.base
        ]
        rest = "; " + " and ".join(equal) + (" are" if len(equal) > 1 else " is") + " equal" if equal else ""
        return f"{size}: {', '.join(causes)}{rest}"

    def as_json(self) -> dict[str, Any]:
        """Return the ledger as a JSON object, in seconds per step."""
        lines = [line._asdict() | {"difference": line.more} for line in self.lines]
        facts = {"baseline": self.base, "row": self.own, "traced": self.traced, "within_noise": self.within_noise}
        return {"sentence": self.sentence(), **facts, "difference_s": self.seconds, "lines": lines}


def group_of(line: str) -> str:
    """Return COMPUTE or COMMUNICATION, or the line itself if it belongs to neither."""
    if line.startswith(EXPOSED):
        return COMMUNICATION
    return line if line in (WAIT, DATA, HOST, UNEXPLAINED) else COMPUTE


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if round(seconds, 3) >= 0.1 else f"{1000 * seconds:.2f} ms"


def explain(base: Row, row: Row, names: tuple[str, str]) -> Difference:
    """Explain the difference between a row and its baseline. Raise ConfigError without traces or predictions of both.
    names: of the baseline and of the row."""
    traced = {name: ledger for name, each in zip(names, (base, row), strict=True) if (ledger := _traced(each))}
    planned = {name: ledger for name, each in zip(names, (base, row), strict=True) if (ledger := _predicted(each))}
    predicted = _between(*planned.values()) if len(planned) == len(names) else []
    if len(traced) == len(names):
        return Difference(*names, _between(*traced.values()), True, _within_noise(base, row), _grouped(predicted))
    if predicted:
        return Difference(*names, predicted, False, False, [])
    states = [f"{name} ({each.state})" for name, each in zip(names, (base, row), strict=True) if name not in traced]
    raise ConfigError(
        f"why: no trace of {' and '.join(states)}, and at least one of the two runs has no prediction; "
        "use sweep.explain=true to trace runs"
    )


def _between(before: StepLedger, after: StepLedger) -> list[Line]:
    keys = dict.fromkeys([*before.seconds, *after.seconds])
    lines = [Line(key, before.seconds.get(key, 0.0), after.seconds.get(key, 0.0)) for key in keys]
    return sorted(lines, key=lambda line: -abs(line.more))


def _grouped(lines: Sequence[Line]) -> list[Line]:
    found: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        found[group_of(line.name)].append(line)
    return sorted((_sum(name, same) for name, same in found.items()), key=lambda line: -abs(line.more))


def _sum(name: str, lines: Sequence[Line]) -> Line:
    return Line(name, math.fsum(line.base for line in lines), math.fsum(line.own for line in lines))


def _within_noise(base: Row, row: Row) -> bool:
    """Test the difference in step time between repeats. For single runs, use the errors of their median speeds."""
    noise = noise_of(STEP_TIME, [base, row], [(row.key, base.key)])
    if (p_value := noise.p_value(row.key, base.key)) is not None:
        return p_value >= ALPHA
    errors = [fmean(found) for each in (row, base) if (found := each.errors(WPS))]
    times = [median(each.measured(STEP_TIME)) for each in (base, row)]
    return abs(times[1] / times[0] - 1) <= SURE * math.hypot(*errors)


def _traced(row: Row) -> StepLedger | None:
    found: list[dict[str, list[float]]] = []
    for run in row.completed:
        record = Explanation.read(run.path / EXPLANATION)
        if record.seconds and record.steps[1] == run.summary.steps:  # else the run was continued without a trace
            predicted = run.figures.get("perf/communication_s_median")  # an emulated run waits for no other rank
            found.append(record.seconds | ({EXPOSED + "communication": [predicted]} if predicted else {}))
    times = row.measured(STEP_TIME)
    if not found or not times:
        return None
    names = dict.fromkeys(name for each in found for name in each)
    # A run without a line spent no time on it.
    lines = {name: median(chain.from_iterable(each.get(name, [0.0]) for each in found)) for name in names}
    step_time = median(times)
    return StepLedger(step_time, _with_rest(lines, step_time))


def _predicted(row: Row) -> StepLedger | None:
    """Return the ledger of the prediction. Its lines are kinds of work, without the part of the step."""
    plan = row.runs[0].record(PlanRecord).as_json()
    parts, step_time = plan.get("perf/seconds_by_part"), number(plan.get("perf/step_time_s"))
    if not isinstance(parts, dict) or not step_time:
        return None
    lines = {
        WORK.get(str(name), str(name)): number(each) or 0.0 for name, each in parts.items() if name != "communication"
    }
    lines[EXPOSED + "communication"] = number(plan.get("perf/exposed_communication_s")) or 0.0
    return StepLedger(step_time, _with_rest(lines, step_time))


def _with_rest(lines: Mapping[str, float], step_time_s: float) -> dict[str, float]:
    return {**lines, UNEXPLAINED: step_time_s - math.fsum(lines.values())}
