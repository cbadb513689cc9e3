"""Implement `compare --fail-if RULE`: compare tested differences with bounds, so that a CI job can stop at a regression."""

import math
import re
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.cells import OTHER
from meshrunner.runner.compare.comparison import NO_BASELINE, Against, Comparison
from meshrunner.runner.compare.keys import DIRECTORY, first_of
from meshrunner.runner.compare.runs import Row
from meshrunner.runner.compare.select import Field, named
from meshrunner.runner.figures import FIGURES, Figure, figure_of

RULE = re.compile(r"\s*(?P<name>[^\s<>]+)\s*(?P<sign><\s*-|>\s*\+)\s*(?P<size>\d+(\.\d+)?)\s*%\s*")
TESTED = {name: each for each in FIGURES if each.over_repeats for name in (each.key, each.summary_keys[0])}
"""Figures that a rule may name, keyed by their names in events.jsonl and in summary.json."""
SPEED, LOSS = "speed", "loss"
FAILED, UNDECIDED, PASSED = "failed", "not decided", "passed"


class Rule(NamedTuple):
    """A rule such as `speed<-5%`."""

    text: str
    figure: str
    """LOSS, SPEED or the key of another figure. SPEED means the figure by which the table compares speeds."""
    bound: float = 0.0
    """Allowed difference from the baseline in percent: a lower limit if the number is negative or -0, else an upper limit."""

    def outcome(self, row: Row, against: Against | None, comparison: Comparison) -> tuple[str, str]:
        """Return FAILED, UNDECIDED or PASSED for a row, and the difference in words."""
        if against is None:
            return UNDECIDED, NO_BASELINE
        if self.figure == LOSS:
            outcome = {"": UNDECIDED, "different data": UNDECIDED, "differs": FAILED}.get(against.verdict.kind, PASSED)
            return outcome, against.verdict.why or str(against.verdict)
        figure = comparison.speed if self.figure == SPEED else figure_of(self.figure)
        gain = against.speed if figure == comparison.speed else against.further[figure.key]
        if gain.percent is None:
            unknown = row if not row.measured(figure) else against.row
            why = f"the state of the {'row' if unknown is row else 'baseline'} is {unknown.state}"
            return UNDECIDED, f"{figure.title} is unknown" + (f": {why}" if not unknown.completed else "")
        words = " against ".join(figure.text(median(each.measured(figure))) for each in (row, against.row))
        words += f" {figure.title}, {gain.percent:+.1f}%"
        if gain.interval is None or against.other:
            return UNDECIDED, f"{words} ({OTHER.get(against.other, 'not tested')})"
        low, high = gain.interval
        words += f" ({low:+.1f}% to {high:+.1f}%)"
        if gain.within_noise:
            words += ", within noise"
        elif self._is_beyond(gain.percent):
            return FAILED, words
        return (UNDECIDED if self._is_beyond(low) or self._is_beyond(high) else PASSED), words

    def _is_beyond(self, percent: float) -> bool:
        return percent < self.bound if math.copysign(1, self.bound) < 0 else percent > self.bound


def parsed(text: str) -> Rule:
    """Parse a rule; raise ConfigError if `text` is not a rule or names an unknown figure."""
    if text.strip() == LOSS:
        return Rule(text, LOSS)
    found = RULE.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"--fail-if: expected a bound such as 'speed<-5%' or 'peak_active_gib>+2%', or the word 'loss', got '{text}'"
        )
    bound = float(f"{found['sign'][-1]}{found['size']}")
    if found["name"] == SPEED:
        return Rule(text, SPEED, bound)
    fields = {name: Field([]) for name in (SPEED, *TESTED)}
    return Rule(text, TESTED[named(found["name"], fields, "--fail-if")].key, bound)


def figures(rules: Iterable[Rule]) -> list[Figure]:
    """Return the figures in the rules, except speed and loss."""
    return [figure_of(rule.figure) for rule in rules if rule.figure not in (SPEED, LOSS)]


def checked(rules: Sequence[Rule], comparison: Comparison, *, strict: bool) -> tuple[bool, list[str]]:
    """Return whether any rule fails, and the lines to print: for each rule and outcome, a line that lists the rows with this
    outcome. If `strict` is set, undecided rules fail, too."""
    if comparison.baseline is None:
        raise ConfigError(
            "--fail-if: there is no baseline; add --baseline KEY=VALUE, or name the baseline's directory first"
        )
    lines, failed, used = [], False, {each.row.key for each in comparison.against if each}
    for rule in rules:
        rows: dict[str, list[str]] = {outcome: [] for outcome in (FAILED, UNDECIDED, PASSED)}
        for row, against in zip(comparison.rows, comparison.against, strict=True):
            if against is not None or not comparison.is_baseline(row):
                outcome, words = rule.outcome(row, against, comparison)
                rows[outcome].append(f"{comparison.name(row)}: {words}")
            elif comparison.baseline[0] == DIRECTORY and row.key not in used:
                rows[UNDECIDED].append(f"{comparison.name(row)}: no row is compared with this baseline")
        if not any(rows.values()):
            rows[UNDECIDED] = ["no row is compared"]
        failed = failed or bool(rows[FAILED] or (strict and rows[UNDECIDED]))
        lines += [f"{rule.text}: {outcome}: {first_of(each, between='; ')}" for outcome, each in rows.items() if each]
    return failed, lines
