"""Memory over a step: the timeline, its thinning for the page, and the page's text."""

from __future__ import annotations

import json
import random
import re
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

import pytest

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.ledger.allocations import CATEGORIES, END, START, Allocation, Phase
from meshrunner.runner.predict.allocator.segments import GIB
from meshrunner.runner.predict.record.trace_events import Allocated, EventLog, Freed, Operator
from meshrunner.runner.predict.replay.page.render import PAGE, write_page
from meshrunner.runner.predict.replay.timeline import POINTS, Part, Point, Timeline, points_without_allocator, timeline
from meshrunner.runner.predict.trace.depth import step_peak
from meshrunner.runner.predict.trace.tracer import Trace, trace_recipe
from tests.composed import SMALL, experiment

STARTS, FORWARD, BACKWARD = Phase(-1, START), Phase(0, "forward"), Phase(0, "backward", 1)
EVERY_POINT = 10**9


def test_step_begins_with_the_memory_held() -> None:
    weights, copy = Allocation(7, "parameters", STARTS, 0, 0), Allocation(5, "activations", STARTS, 0, 0)
    batch = Allocation(3, "activations", FORWARD, 0, 0)
    events = [Allocated(weights), Allocated(copy), Freed(copy), Allocated(batch)]
    events += [Operator("aten::mm", "matmul", 0, BACKWARD, 0, "float32", 0), Freed(batch)]
    found = timeline(points_without_allocator(events, 0), 90, 100, EVERY_POINT)
    assert [(point.at, point.phase, point.total, point.reserved) for point in found.points] == [
        (0, FORWARD, 7, None),
        (1, FORWARD, 10, None),
        (2, BACKWARD, 10, None),
        (3, BACKWARD, 7, None),
    ]
    assert dict(zip(CATEGORIES, found.points[1].by_category, strict=True))["parameters"] == 7
    assert found.parts == [Part("forward", 0, 2), Part("backward", 2, 3)]
    assert (found.capacity, found.memory) == (90, 100)


@pytest.mark.parametrize(
    "events", [[], [Allocated(Allocation(7, "parameters", STARTS, 0, 0))]], ids=["nothing", "only the start"]
)
def test_a_step_in_which_nothing_happens(events: EventLog) -> None:
    assert timeline(points_without_allocator(events, 0), 90, 100)[:2] == ([], [])


@pytest.mark.parametrize("count", [POINTS - 1, 40_001])
def test_thinning_keeps_every_peak(count: int) -> None:
    """Peaks of the step, of each phase and of reserved memory stay, and so do the first and the last point."""
    chance = random.Random(count)
    phases = [Phase(0, part, block) for part in ("forward", "backward") for block in range(400)]
    nothing = [0] * (len(CATEGORIES) - 1)
    whole = [
        Point(at, phases[at * len(phases) // count], (chance.randrange(1000), *nothing), chance.randrange(10**6))
        for at in range(count)
    ]
    thin = timeline(whole, 90, 100).points
    assert len(thin) <= POINTS and set(thin) <= set(whole)
    assert [point.at for point in thin] == sorted({point.at for point in thin})
    assert (thin[0], thin[-1]) == (whole[0], whole[-1])
    assert max(point.reserved or 0 for point in thin) == max(point.reserved or 0 for point in whole)

    def peaks(points: list[Point]) -> dict[Phase, int]:
        highest: dict[Phase, int] = {}
        for point in points:
            highest[point.phase] = max(highest.get(point.phase, 0), point.total)
        return highest

    assert peaks(thin) == peaks(whole) and len(peaks(whole)) == len(phases)
    if count > POINTS:  # the lowest of a stretch is there, too: the outline is not the peaks' alone
        assert min(point.total for point in thin[1:]) == min(point.total for point in whole[1:])
        assert max(later.at - earlier.at for earlier, later in pairwise(thin)) < count / 200


@pytest.fixture(scope="module")
def trace() -> Trace:
    recipe = experiment(*SMALL, "launch.workers=2").on("cpu")
    return trace_recipe(recipe, nodes=1, workers=2, device_type="cpu")


def test_every_point_equals_the_ledger(trace: Trace) -> None:
    ledger, log = trace.ledger, trace.events
    found = timeline(points_without_allocator(log, trace.last_step), 0, 0, EVERY_POINT)
    moments = [
        (each.allocation.allocated_at, each.allocation.phase)
        if isinstance(each, Allocated)
        else (each.allocation.freed_at, None)
        for each in log
        if isinstance(each, Allocated | Freed)
    ]
    first = next(i for i, (_, phase) in enumerate(moments) if phase is not None and phase.step == trace.last_step)
    held = [point for before, point in pairwise(found.points) if point.by_category != before.by_category]
    assert len(held) > 500 and len(held) == len(moments) - first
    for (moment, _), point in zip(moments[first:], held, strict=True):
        assert moment is not None
        if point.at % 11 == 0:
            assert dict(zip(CATEGORIES, point.by_category, strict=True)) == ledger.by_category(moment)
    totals = accumulate(
        (each.allocation.nbytes if isinstance(each, Allocated) else -each.allocation.nbytes)
        for each in log
        if isinstance(each, Allocated | Freed)
    )
    assert [point.total for point in held] == list(totals)[first:]


def test_peak_equals_the_predicted_peak(trace: Trace) -> None:
    peak = step_peak(trace)
    for most in (EVERY_POINT, 100):
        thin = timeline(points_without_allocator(trace.events, trace.last_step), 0, 0, most).points
        highest = max(thin, key=lambda point: point.total)
        assert (highest.total, highest.phase) == (peak.total, peak.phase)
        assert dict(zip(CATEGORIES, highest.by_category, strict=True)) == peak.by_category
    assert thin[-1].total == thin[0].total, "the step ends as it began: the model is still alive"


def test_parts_follow_the_order_of_a_step(trace: Trace) -> None:
    found = timeline(points_without_allocator(trace.events, trace.last_step), 0, 0, EVERY_POINT)
    names = [part.name for part in found.parts]
    parts = ["forward", "loss", "backward", END, "update", "optimizer"]
    assert list(dict.fromkeys(names)) == parts, "the optimizer's, too, which allocates nothing"
    assert found.parts[0].begins == 0 and found.parts[-1].ends == found.points[-1].at
    assert all(one.ends == other.begins for one, other in pairwise(found.parts))
    # With accumulation each micro batch goes through the blocks.
    forward, backward = (
        [
            block
            for block, _ in groupby(p.phase.block for p in found.points if p.phase.part == part)
            if block is not None
        ]
        for part in ("forward", "backward")
    )
    micro = len(forward) // 3
    assert micro > 1 and forward == [0, 1, 2] * micro and backward == [2, 1, 0] * micro


def written(file: Path, over_time: Timeline | None, text: str = "fits") -> tuple[str, Any]:
    """The page without its script, and what that is given."""
    write_page(file, f"meshrunner plan {text}", text, [text], [(text, text)], [text], over_time)
    page = file.read_text()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None and "<" not in data[1]
    return page[: data.start()], json.loads(data[1])


def test_page_receives_the_timeline(tmp_path: Path) -> None:
    held = dict.fromkeys(CATEGORIES, 0) | {"parameters": 3 * GIB}
    whole = [
        Point(0, FORWARD, tuple(held.values()), 4 * GIB),
        Point(1, FORWARD, tuple((held | {"logits": GIB}).values()), 5 * GIB),
    ]
    _, data = written(tmp_path / "page.html", timeline(whole, 9 * GIB, 10 * GIB))
    assert data == {
        "at": [0, 1],
        "phase": [0, 0],
        "phases": ["forward"],
        "parts": [["forward", 0, 1]],
        "categories": {"parameters": [3, 3], "logits": [0, 1]},
        "reserved": [4, 5],
        "capacity": 9,
        "memory": 10,
    }
    assert written(tmp_path / "page.html", None)[1] is None
    assert written(tmp_path / "page.html", timeline([], 0, 0))[1] is None


def test_text_does_not_become_markup(tmp_path: Path) -> None:
    page, _ = written(tmp_path / "page.html", None, "</script><img src=x onerror=alert(1)>\x1b[31m")
    assert "<img" not in page and page.count("&lt;img") == 8 and "\x1b" not in page
    script = (PAGE / "memory.js").read_text()
    assert not re.search("innerHTML|outerHTML|insertAdjacentHTML|document.write|eval|Function|srcdoc", script)
    assert "require-trusted-types-for 'script'" in page and not re.search(
        r"(src|href)=", page.replace("&lt;img src", "")
    )


def test_every_category_has_a_colour() -> None:
    colours = re.search(r"const COLOUR = \{(.*?)\}", (PAGE / "memory.js").read_text(), re.DOTALL)
    assert colours is not None
    pairs = dict(re.findall(r'(\w+): "(#\w{6})"', colours[1]))
    assert set(pairs) == set(CATEGORIES) and len(set(pairs.values())) == len(CATEGORIES)


def test_unwritable_page_is_reported(tmp_path: Path) -> None:
    for file in (tmp_path / "nowhere" / "page.html", tmp_path):
        with pytest.raises(ConfigError, match=r"--html: .* cannot be written"):
            written(file, None)
    assert not list(tmp_path.iterdir())
