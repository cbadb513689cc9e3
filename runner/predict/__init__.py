"""
Predicts whether a run fits its devices and how fast it is, without these devices: trace -> replay -> forecast.

1. **Trace.** The package `trace` runs two optimizer steps of the recipe itself, with tensors on the meta device and as one rank
   of a fake process group. `record` logs every allocation, operator, collective and wait. `meta` replaces compiled code and the
   parts of torch that need a device. If the blocks of a model are equal, two models with fewer blocks may be traced instead.
2. **Replay.** `replay` sends the allocations of the trace through a model of the CUDA caching allocator (`allocator`). It sends
   the operators and collectives of the trace through a clock (`timing`) that knows the device's rates.
3. **Forecast.** `predict` judges whether the memory peak fits the device. It returns a `Forecast`: the verdict, predicted
   memory and speed, and remarks on settings that are not modelled.

`predict_config` predicts one configuration. `largest_that_fits` searches for the largest value of a configuration key with which
the run fits. `predict_all` predicts many configurations in several processes. Other packages import only the names in `__all__`.
Names whose modules need torch are imported on first use, because importing torch takes seconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshrunner.runner.predict.forecast import (
    BORDERLINE,
    DOES_NOT_FIT,
    FITS,
    NOT_PLANNED,
    Forecast,
    MemoryForecast,
    SpeedForecast,
    Verdict,
    why,
)
from meshrunner.runner.predict.pool import NOT_IN_TIME, Predicted, predict_all
from meshrunner.runner.predict.search import MOST, LargestThatFits, largest_that_fits, predict_config

if TYPE_CHECKING:
    from meshrunner.runner.predict.activations import recomputed_blocks
    from meshrunner.runner.predict.replay.page.render import write_page
    from meshrunner.runner.predict.workload import Workload, trace_workload

__all__ = [
    "BORDERLINE",
    "DOES_NOT_FIT",
    "FITS",
    "MOST",
    "NOT_IN_TIME",
    "NOT_PLANNED",
    "Forecast",
    "LargestThatFits",
    "MemoryForecast",
    "Predicted",
    "SpeedForecast",
    "Verdict",
    "Workload",
    "largest_that_fits",
    "predict_all",
    "predict_config",
    "recomputed_blocks",
    "trace_workload",
    "why",
    "write_page",
]
_NEED_TORCH = {
    "Workload": "workload",
    "recomputed_blocks": "activations",
    "trace_workload": "workload",
    "write_page": "replay.page.render",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
