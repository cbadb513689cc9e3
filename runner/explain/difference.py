"""Explains why a row is slower or faster than its baseline, with lines that add up to the difference between the step times."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.best import WORK, predicted_seconds
from meshrunner.runner.compare.noise import ALPHA, noise_of
from meshrunner.runner.compare.page.ledgers import (
    COMMUNICATION,
    COMPUTE,
    STEP_TIME,
    UNEXPLAINED,
    group_of,
    traced,
    traces,
    with_rest,
)
from meshrunner.runner.compare.runs import Row
from meshrunner.runner.explain.ledger import NEGLIGIBLE, Line, causes, compared, grouped, total
from meshrunner.runner.figures import figure_of, number

WPS = figure_of("perf/wps")
KINDS = {kind: WORK[kind] for kind in ("matmul", "attention", "optimizer")} | {"experts": WORK["matmul"]}
"""Lines of a prediction that a kind of traced compute covers, keyed by kind. All other kinds count as elementwise work."""
SURE = 2.0
"""Number of standard errors by which the speeds of single runs must differ before a cause is named."""
BLOCK = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""Pattern of a block's number in the name of a module."""
MOST = 0.8
"""If one block causes at least this share of a difference that is summed over all blocks, only this block is named."""


@dataclass(frozen=True)
class Difference:
    """The difference between the step times of a row and its baseline, divided into the lines of a ledger."""

    base: str
    own: str
    """Names of the baseline and of the row."""
    lines: list[Line]
    """All lines of the ledger, the largest difference first."""
    traced: bool
    """Whether the lines are measured. Otherwise, they are predicted."""
    within_noise: bool
    """Whether the step times differ so little that no cause can be named."""
    predicted: list[Line]
    """Predicted sum of the lines of each group; empty if `lines` are predicted, or if there is no prediction."""
    modules: list[Line]
    """Traced seconds of compute in each module, the largest difference first. In names, `*` means the sum over all blocks."""

    @property
    def whole(self) -> Line:
        """The sum of all lines: the step time."""
        return total("step time", self.lines)

    @property
    def seconds(self) -> float:
        """Seconds per step by which the row exceeds its baseline."""
        return self.whole.more

    @property
    def percent(self) -> float:
        return 100 * self.seconds / self.whole.base

    def groups(self) -> list[Line]:
        return grouped(self.lines, group_of)

    def sentence(self) -> str:
        """Return a sentence that names the main causes, or that says why it names none."""
        if self.within_noise or not self.seconds:
            return (
                f"{self.own} and {self.base} do not differ by more than noise ({self.percent:+.1f}% step time), "
                "so no cause is named"
            )
        kind = "" if self.traced else "predicted to be "
        size = f"{abs(self.percent):.1f}% {'slower' if self.seconds > 0 else 'faster'}"
        size = f"{self.own} is {kind}{size} than {self.base} ({_time(abs(self.seconds))} per step)"
        unexplained = next(line.more for line in self.lines if line.name == UNEXPLAINED)
        if abs(unexplained) >= abs(self.seconds):
            return f"{size}, but the ledger does not explain the difference, so no cause is named"
        equal = [
            line.name
            for line in self.groups()
            if line.name in (COMPUTE, COMMUNICATION) and abs(line.more) < NEGLIGIBLE * abs(self.seconds) and line.base
        ]
        rest = "; " + " and ".join(equal) + (" are" if len(equal) > 1 else " is") + " equal" if equal else ""
        return f"{size}: {causes(self.lines, _time)}{rest}"

    def modules_sentence(self) -> str:
        """Return a sentence that names the modules that differ most; "" if none explains a notable part of the difference."""
        named = [line for line in self.modules if line.more / self.seconds >= NEGLIGIBLE] if self.seconds else []
        if self.within_noise or not named:
            return ""
        listed = ", ".join(f"{line.name} ({1000 * line.more:+.2f} ms)" for line in named[:3])
        return f"Modules whose compute differs most: {listed}"

    def as_json(self) -> dict[str, Any]:
        """Return the ledger as a JSON object, in seconds per step."""
        lines, modules = ([line.as_json() for line in each] for each in (self.lines, self.modules))
        facts = {"baseline": self.base, "row": self.own, "traced": self.traced, "within_noise": self.within_noise}
        return {"sentence": self.sentence(), **facts, "difference_s": self.seconds, "lines": lines, "modules": modules}


def explain(base: Row, row: Row, names: tuple[str, str]) -> Difference:
    """Explain the difference between a row and its baseline. Raise ConfigError unless both are traced or both are predicted."""
    rows = (base, row)
    measured, planned = [traced(each) for each in rows], [_predicted(each) for each in rows]
    predicted = compared(*planned) if all(planned) else []
    if all(measured):
        groups = grouped(predicted, group_of)
        return Difference(*names, compared(*measured), True, _within_noise(base, row), groups, _modules(base, row))
    if predicted:
        return Difference(*names, predicted, False, False, [], [])
    states = [f"{name} ({each.state})" for name, each, lines in zip(names, rows, measured, strict=True) if not lines]
    raise ConfigError(
        f"why: no trace of {' and '.join(states)}, and at least one of the compared runs has no prediction; "
        "use sweep.explain=true to trace runs"
    )


def explain_prediction(row: Row, name: str) -> Difference:
    """Explain the difference between a traced row and its own prediction. Raise ConfigError without a trace or a prediction. The
    prediction names only kinds of work, so the lines of all parts of the step are added up by kind."""
    measured, planned = traced(row), _predicted(row)
    if not measured or not planned:
        missing = "trace; use sweep.explain=true" if planned else "predicted speed; name the hardware or calibrate it"
        raise ConfigError(f"why: {name} has no {missing}")
    sums = {line.name: line.own for line in grouped(compared({}, measured), _kind_of)}
    error = number(row.plan.get("perf/error_pct")) or 0.0
    lines = compared(planned, sums)
    whole = total("", lines)
    within = 100 * abs(whole.more) <= error * whole.base
    return Difference(f"its prediction (+-{error:.0f}%)", name, lines, True, within, [], [])


def _kind_of(line: str) -> str:
    """Return the line of a prediction to which a traced line belongs."""
    group = group_of(line)
    return KINDS.get(line.rpartition(" ")[2], WORK["memory"]) if group == COMPUTE else group


def _within_noise(base: Row, row: Row) -> bool:
    """Return whether the step times differ by no more than noise. Test them if both rows have enough repeats. Otherwise,
    compare their difference with the standard errors of the median speeds."""
    noise = noise_of(STEP_TIME, [base, row], [(row.key, base.key)])
    if (p_value := noise.p_value(row.key, base.key)) is not None:
        return p_value >= ALPHA
    errors = [fmean(found) for each in (row, base) if (found := each.errors(WPS))]
    times = [median(each.measured(STEP_TIME)) for each in (base, row)]
    return abs(times[1] / times[0] - 1) <= SURE * math.hypot(*errors)


def _modules(base: Row, row: Row) -> list[Line]:
    seconds: list[dict[str, float]] = []
    for each in (base, row):
        found = [trace.modules for _, trace in traces(each)]
        seconds.append({name: median(one.get(name, 0.0) for one in found) for one in found for name in one})
    lines = compared(*seconds)
    sums = grouped(lines, lambda name: BLOCK.sub("*", name))
    # If one block causes most of a difference, name this block instead of the sum over all blocks.
    most = {BLOCK.sub("*", line.name): line for line in reversed(lines)}
    ratios = {each.name: most[each.name].more / (each.more or math.inf) for each in sums}
    return [most[each.name] if MOST <= ratios[each.name] <= 1 / MOST else each for each in sums]


def _predicted(row: Row) -> dict[str, float]:
    """Return the predicted seconds of each ledger line; {} without a prediction. A line is a kind of work, such as matmuls."""
    lines, step_time = predicted_seconds(row), number(row.plan.get("perf/step_time_s"))
    return with_rest(lines, step_time) if lines and step_time else {}


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if round(seconds, 3) >= 0.1 else f"{1000 * seconds:.2f} ms"
