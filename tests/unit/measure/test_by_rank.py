"""Figures of every rank in the summary."""

from __future__ import annotations

import torch

from meshrunner.runner.figures import FIGURES
from meshrunner.runner.measure.rows import ByRank


def test_times_are_means_over_steps_without_compiling_and_memory_is_the_peak() -> None:
    ranks = ByRank(2)
    for seconds in (1.0, 3.0):
        ranks.add(torch.tensor([[9.0, seconds, 0.5, 8.0, 0.0], [9.0, 2 * seconds, 0.5, 4.0, 0.0]], dtype=torch.float64))
    ranks.add(torch.tensor([[9.0, 99.0, 0.5, 8.0, 0.0], [9.0, 99.0, 0.5, 4.0, 60.0]], dtype=torch.float64))
    memory = torch.tensor([[1.23456, 7.0], [2.0, 8.0]], dtype=torch.float64)
    assert ranks.summary(("memory/peak_rss_gib", "memory/alloc_retries"), memory) == {
        "memory/peak_rss_gib_by_rank": [1.235, 2.0],
        "perf/step_time_s_by_rank": [2.0, 4.0],
        "perf/data_time_s_by_rank": [0.5, 0.5],
        "perf/cpu_time_s_by_rank": [8.0, 4.0],
    }


def test_without_a_measured_step_there_are_no_times() -> None:
    assert set(ByRank(1).summary(("memory/peak_rss_gib",), torch.ones(1, 1))) == {"memory/peak_rss_gib_by_rank"}


def test_what_is_listed_by_rank_is_documented() -> None:
    documented = {figure.key for figure in FIGURES if figure.by_rank}
    peaks = {"memory/peak_active_gib", "memory/peak_reserved_gib", "memory/peak_rss_gib"}
    times = {"perf/step_time_s", "perf/data_time_s", "perf/cpu_time_s"}
    assert documented == times | peaks
