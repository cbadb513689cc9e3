"""Explains why a row needs more or less memory than its baseline, with categories that add up to the peak of active memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshrunner.runner.compare.page.ledgers import live_memory, predicted_memory, with_rest
from meshrunner.runner.compare.runs import Row
from meshrunner.runner.explain.ledger import Line, causes, compared, total

EQUAL = 0.01
"""Relative difference up to which two memory peaks count as equal."""


@dataclass(frozen=True)
class MemoryDifference:
    """The difference between the memory peaks of a row and its baseline, in GiB, divided into categories of memory."""

    base: str
    own: str
    """Names of the baseline and of the row."""
    lines: list[Line]
    measured: bool
    """Whether `profiler=memory` measured the categories. Otherwise, they are predicted."""
    peaks_measured: bool
    """Whether the lines add up to measured peaks. Otherwise, they add up to predicted peaks."""
    phases: tuple[str, str]
    """Parts of the step in which the baseline and the row are predicted to reach their memory peaks; "" if unknown."""

    @property
    def whole(self) -> Line:
        return total("peak memory", self.lines)

    def sentence(self) -> str:
        """Return a sentence that names the categories that cause most of the difference."""
        whole, kind = self.whole, "needs" if self.peaks_measured else "is predicted to need"
        if abs(whole.more) <= EQUAL * whole.base:
            return f"{self.own} {kind} as much memory as {self.base} ({_gib(whole.own)} at the peak)"
        size = f"{_gib(abs(whole.more))} {'more' if whole.more > 0 else 'less'} memory than {self.base}"
        percent = f"{100 * whole.more / whole.base:+.1f}%"
        base, own = self.phases
        where = f"; the peak is in {own}" + (f" instead of {base}" if base != own else "") if own and base else ""
        return f"{self.own} {kind} {size} at the peak ({percent}): {causes(self.lines, _gib)}{where}"

    def as_json(self) -> dict[str, Any]:
        """Return the ledger as a JSON object, in GiB."""
        lines = [line.as_json() for line in self.lines]
        phases = {"baseline_phase": self.phases[0] or None, "row_phase": self.phases[1] or None}
        return {"sentence": self.sentence(), "measured": self.measured, **phases, "lines": lines}


def explain_memory(base: Row, row: Row, names: tuple[str, str]) -> MemoryDifference | None:
    """Explain the difference in memory between a row and its baseline. Return None unless the categories of memory were measured
    for both or predicted for both. `names`: names of the baseline and of the row."""
    rows = (base, row)
    phases = [str(each.plan.get("memory/phase") or "") for each in rows]
    peaks = [each.figures.get("memory/peak_active_gib") if each.completed else None for each in rows]
    live, ledgers = [live_memory(each) for each in rows], [predicted_memory(each) for each in rows]
    measured = all(live)
    if measured:
        ledgers = live
    elif not all(ledgers):
        return None
    elif None not in peaks:
        ledgers = [with_rest(lines, peak or 0.0) for lines, peak in zip(ledgers, peaks, strict=True)]
    return MemoryDifference(*names, compared(*ledgers), measured, measured or None not in peaks, (phases[0], phases[1]))


def _gib(value: float) -> str:
    return f"{value:.2f} GiB" if value >= 0.1 else f"{value * 1024:.2f} MiB"
