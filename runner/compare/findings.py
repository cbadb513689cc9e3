"""Summarise a comparison in a few sentences. Gains over a baseline are quantified only if they were tested for noise."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from meshrunner.runner.compare.comparison import Against, Comparison
from meshrunner.runner.compare.keys import first_of, text
from meshrunner.runner.compare.noise import ALPHA, REPEATS, Noise
from meshrunner.runner.compare.parity import BATCH, short
from meshrunner.runner.compare.runs import Row
from meshrunner.runner.console import counted
from meshrunner.runner.figures import figure_of, number

LISTED = 3
"""Maximum number of rows that a sentence names."""
WORTH_NAMING = 0.02
"""Smallest relative difference that a sentence mentions, for figures other than the speed, such as memory."""
WORKLOAD = ("model", "seq_len")
"""Sections and keys that decide the work per token. No row is called the fastest if the work per token differs."""
TAKES = f"a test needs {REPEATS} completed runs of a combination (sweep.repeat={REPEATS} or auto)"
MAX_VALUES = 3
"""Maximum number of values in a description such as `parallelism=fsdp1 or fsdp2`."""
MAX_PARTS = 3
"""Maximum number of parts that `common` splits rows into."""

Values = dict[str, Any]
"""The varying keys of a row and their values."""


def findings(comparison: Comparison) -> list[str]:
    """Return the sentences to print above a table. Gains that are not tested are counted but not quantified."""
    shown = f"Shown: {comparison.selection}" if comparison.selection else ""
    found = [_best(comparison), *_against(comparison), _losses(comparison), _without_result(comparison), shown]
    return [f"{sentence}." for sentence in found if sentence]


def _best(comparison: Comparison) -> str:
    """Name the fastest row, the rows that no test distinguishes from the fastest row, and the row with the least memory."""
    speed = comparison.speed
    measured = [row for row in comparison.rows if row.measured(speed)]
    comparable = _comparable(comparison)
    if len(measured) < 2:
        return ""
    rows = [row for row in measured if comparison.noise.runs(row.key) >= REPEATS]
    if not rows:
        return _provisional(measured, comparison) if comparable else f"Differences are not tested for noise: {TAKES}"
    if len(rows) < 2 or not comparable:
        return ""
    fastest, equal = _leader(rows, comparison.noise)
    if len(equal) == len(rows) - 1:
        sentence = f"No tested row is faster than another by more than noise ({speed.title})"
    else:
        sentence = f"Fastest: {comparison.name(fastest)} ({speed.text(median(fastest.measured(speed)))} {speed.title})"
        sentence += _within_noise(equal, comparison)
    return sentence + _leanest(rows, comparison)


def _provisional(rows: Sequence[Row], comparison: Comparison) -> str:
    """Name the row that is fastest so far, if no row has enough runs for a test."""
    speed = comparison.speed
    speeds = [(median(row.measured(speed)), comparison.name(row)) for row in rows]
    (most, name), (second, _), *_ = sorted(speeds, reverse=True)
    each = "one run" if all(len(row.measured(speed)) == 1 for row in rows) else f"fewer than {REPEATS} runs"
    ahead = f"{100 * (most / second - 1):.1f}% ahead of the next row" if second > 0 else "ahead of the next row"
    leads = f"Fastest so far ({each} per row): {name} ({speed.text(most)} {speed.title}), {ahead}"
    return f"{leads}. The lead is not tested for noise: {TAKES}"


def _leader(rows: Sequence[Row], noise: Noise, sign: int = 1) -> tuple[Row, list[Row]]:
    """Return the row with the highest values (lowest if `sign` is -1), and the rows that no test distinguishes from that row."""
    leader = rows[0]
    for row in rows[1:]:
        difference = noise.difference(row.key, leader.key)
        if difference is not None and sign * difference.log_ratio > 0:
            leader = row
    p_values = [(row, noise.p_value(row.key, leader.key)) for row in rows if row is not leader]
    return leader, [row for row, p in p_values if p is None or p >= ALPHA]


def undecided(comparison: Comparison, among: Sequence[Row] | None = None) -> list[Row]:
    """Return the rows that a further round should repeat: rows within noise of their baseline, or of the fastest row. Ignore rows
    with two or more incomplete runs; a single run may have failed by chance. `among`: rows to consider, or None for all rows."""
    rows = comparison.rows if among is None else among
    usable = [row for row in rows if row.measured(comparison.speed) and len(row.runs) - len(row.completed) <= 1]
    if comparison.baseline and among is None:
        known = {row.key for row in usable}
        pairs = [
            (row.key, to.row.key)
            for row, to in zip(comparison.rows, comparison.against, strict=True)
            if to and to.speed.within_noise is not False and known.issuperset((row.key, to.row.key))
        ]
        return [row for row in usable if any(row.key in pair for pair in pairs)]
    tested = [row for row in usable if comparison.noise.runs(row.key) >= REPEATS]
    if not _comparable(comparison) or not (tested or among):
        return []
    found = [row for row in usable if row not in tested]
    if tested:
        fastest, equal = _leader(tested, comparison.noise)
        found = [fastest, *equal, *found]
    return found if len(found) > 1 else []


def _comparable(comparison: Comparison) -> bool:
    return not any(key.partition(".")[0] in WORKLOAD for key in comparison.keys)


def _within_noise(rows: Sequence[Row], comparison: Comparison) -> str:
    return f"; within noise of it: {first_of([comparison.name(row) for row in rows], LISTED)}" if rows else ""


def _leanest(rows: Sequence[Row], comparison: Comparison) -> str:
    """Name the row with the least memory; return "" if memory is unknown or about equal, or if no test finds a difference."""
    if (figure := comparison.memory) is None:
        return ""
    noise = comparison.noises[figure.key]
    rows = [row for row in rows if noise.runs(row.key) >= REPEATS]
    if len(rows) < 2:
        return ""
    least, equal = _leader(rows, noise, sign=-1)
    peak = {row.key: figure.values(row.summaries)[0] or 0.0 for row in rows}
    if len(equal) == len(rows) - 1 or max(peak.values()) < (1 + WORTH_NAMING) * peak[least.key]:
        return ""
    said = f"; least memory: {comparison.name(least)} ({figure.text(peak[least.key])} {figure.title})"
    return said + _within_noise(equal, comparison)


def _against(comparison: Comparison) -> Iterator[str]:
    """Yield a sentence about the gains of each value of the baseline's key: their median, range and number within noise."""
    if comparison.baseline is None:
        return
    key, baseline = comparison.baseline
    values: dict[str, list[Against]] = {}
    for row, against in zip(comparison.rows, comparison.against, strict=True):
        if against is not None and against.speed.percent is not None:
            values.setdefault(text(row.values.get(key)), []).append(against)
    for value, pairs in values.items():
        tested = [each.speed for each in pairs if each.speed.p_value is not None]
        gains = [each.percent for each in tested if each.percent is not None]
        if not gains:
            continue  # the first sentence says that no difference is tested
        title, noise = comparison.speed.title, sum(bool(each.within_noise) for each in tested)
        size = f"{median(gains):+.1f}%"
        if len(gains) > 1:
            size += f" at the median, {min(gains):+.1f}% to {max(gains):+.1f}% over {len(gains)} pairs"
        if noise == len(gains):
            repeats = min(each.repeats for each in tested)
            gain = f"no difference in {title} beyond the noise of {repeats} repeats ({size})"
        else:
            gain = f"{title} {size}" + (f", of which {noise} within noise" if noise else "")
        untested = len(pairs) - len(tested)
        more = f"; {counted(untested, 'more pair')} not tested" if untested else ""
        unlike = sum(each.other == "batch" for each in pairs)
        more += f"; the global batch differs in {counted(unlike, 'pair')}" if unlike else ""
        yield f"{value} against {baseline}: {gain}{more}{''.join(_further(pairs))}"


def _further(pairs: Sequence[Against]) -> Iterator[str]:
    """Yield a clause for each figure in `Against.further`, such as peak memory, that differs from the baseline beyond noise."""
    for key in pairs[0].further:
        gains = [each.further[key] for each in pairs]
        beyond = [each.percent or 0.0 for each in gains if each.within_noise is False]
        beyond = [each for each in beyond if abs(each) >= 100 * WORTH_NAMING]
        if beyond:
            how_many = f" in {len(beyond)} of {len(pairs)} pairs" if len(beyond) < len(pairs) else ""
            yield f"; {figure_of(key).title} {median(beyond):+.1f}%{how_many}"


def _losses(comparison: Comparison) -> str:
    """Return a sentence that says whether the losses of rows and their baselines agree; "" if no losses were compared."""
    kinds: dict[str, list[tuple[Row, Against]]] = {}
    for row, against in zip(comparison.rows, comparison.against, strict=True):
        if against is not None and against.verdict.kind:
            kinds.setdefault(against.verdict.kind, []).append((row, against))
    pairs = sum(map(len, kinds.values()))
    unlike = sum(each is not None and each.verdict.why == BATCH for each in comparison.against)
    rest = f"{counted(unlike, 'pair')} cannot be compared: {BATCH}" if unlike else ""
    if not pairs:
        return f"Losses of {rest}" if rest else ""
    bad = {"differs": "Losses differ", "different data": "The data is not the same"}
    parts = [
        f"{words} in {len(kinds[kind])} of {counted(pairs, 'pair')}: "
        + first_of([comparison.name(row) for row, _ in kinds[kind]], LISTED)
        for kind, words in bad.items()
        if kind in kinds
    ]
    if parts:
        return "; ".join([*parts, rest] if rest else parts)
    largest = max(each.verdict.difference or 0.0 for same in kinds.values() for _, each in same)
    how = "are identical" if set(kinds) == {"identical"} else f"agree (largest difference {short(f'{largest:.1e}')})"
    if rest:
        return f"Losses {how} in {pairs} of {counted(pairs + unlike, 'pair')}; {rest}"
    return f"Losses {how} in {'all ' * (pairs > 1)}{counted(pairs, 'pair')}"


def _without_result(comparison: Comparison) -> str:
    """Count rows that failed or were skipped, by state. Name the settings that distinguish rows in one state from other rows."""
    parts = []
    for state in dict.fromkeys(filter(None, map(_trouble, comparison.rows))):
        rows = [row.values for row in comparison.rows if _trouble(row) == state]
        # Ignore other rows that were skipped or have not ended, because they might have ended in the same state.
        never = () if state == "skipped" else ("skipped", "pending", "running")
        others = [row.values for row in comparison.rows if _trouble(row) != state and row.state not in never]
        causes = common(rows, others, comparison.keys)
        parts.append(", ".join(f"{count} {state}: {words}" for count, words in causes) or f"{len(rows)} {state}")
    return "; ".join(parts)


def _trouble(row: Row) -> str:
    """Return the state of a row's first run that ended without completing; "" if there is no such run."""
    return next((run.state for run in row.runs if run.state not in ("completed", "pending", "running")), "")


class _Pattern(NamedTuple):
    """A set of values of one key, and its description in words."""

    key: str
    values: frozenset[str]
    words: str

    def holds(self, row: Values) -> bool:
        return text(row.get(self.key)) in self.values


def common(rows: Sequence[Values], others: Sequence[Values], keys: Sequence[str]) -> list[tuple[int, str]]:
    """Describe `rows` in words that apply to none of `others`. Return (number of rows, description) pairs; [] if no words do.
    If no conjunction of patterns describes all `rows`, split `rows` by the values of one key into at most MAX_PARTS parts."""
    if not rows or not others:
        return []
    if words := _conjunction(rows, others, keys):
        return [(len(rows), words)]
    for key in keys:
        parts: dict[str, list[Values]] = {}
        for row in rows:
            parts.setdefault(text(row.get(key)), []).append(row)
        if 1 < len(parts) <= MAX_PARTS:
            described = [(len(part), _conjunction(part, others, keys)) for part in parts.values()]
            if all(words for _, words in described):
                return described
    return []


def _conjunction(rows: Sequence[Values], others: Sequence[Values], keys: Sequence[str]) -> str:
    """Return a short conjunction of patterns that matches all `rows` and none of `others`; "" if none is found."""
    patterns = [found for key in keys if (found := _pattern(key, rows, others)) is not None]

    def excludes_others(chosen: Sequence[_Pattern]) -> bool:
        return bool(chosen) and not any(all(each.holds(row) for each in chosen) for row in others)

    if not excludes_others(patterns):
        return ""
    # Drop redundant patterns, beginning with the pattern that matches the most rows of `others`.
    for pattern in sorted(patterns, key=lambda each: -sum(map(each.holds, others))):
        rest = [each for each in patterns if each is not pattern]
        if excludes_others(rest):
            patterns = rest
    first, *more = (pattern.words for pattern in patterns)
    return f"{first} with {', '.join(more)}" if more else first


def _pattern(key: str, rows: Sequence[Values], others: Sequence[Values]) -> _Pattern | None:
    """Return a pattern for a key's values in `rows`: `>=`, `<=` or a list of at most MAX_VALUES values. Return None if there is
    no such pattern, if a row does not have the key, or if the pattern would match all known values."""
    everywhere = {text(row[key]): row[key] for row in (*rows, *others) if key in row}
    mine = {text(row[key]): row[key] for row in rows if key in row}
    if not all(key in row for row in rows) or len(mine) == len(everywhere):
        return None
    values = frozenset(mine)
    if len(mine) > 1 and all(number(value) is not None for value in everywhere.values()):
        ascending = sorted(everywhere, key=lambda name: everywhere[name])
        if values == {*ascending[-len(mine) :]}:
            return _Pattern(key, values, f"{key} >= {ascending[-len(mine)]}")
        if values == {*ascending[: len(mine)]}:
            return _Pattern(key, values, f"{key} <= {ascending[len(mine) - 1]}")
    return _Pattern(key, values, f"{key}={' or '.join(mine)}") if len(mine) <= MAX_VALUES else None
