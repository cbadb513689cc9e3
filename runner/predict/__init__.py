"""Predicts whether a run fits its devices and how fast it is, without using the devices: trace -> replay -> forecast.

First, the package `trace` runs two optimizer steps of the recipe on the meta device, as one rank of a fake process group. The
package `record` logs every allocation, operator, collective and wait. The package `meta` replaces compiled code and the parts of
torch that need a device. If the blocks of a model are alike, `trace` may run two models with fewer blocks instead of the full
model. Next, `replay` sends the trace's allocations to a model of the CUDA caching allocator (`allocator`), and the trace's
operators and collectives to a clock (`timing`) that uses the device's rates. Finally, `predict` judges whether the memory peak
fits the device, and returns a `Forecast`: the verdict, predicted memory and speed, and remarks on settings that are not modelled.

Other packages import only the names in `__all__`. The module of a public name is imported when the name is first used, because
importing torch takes seconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshrunner.runner.predict.activations import *  # noqa: F403
    from meshrunner.runner.predict.facts import *  # noqa: F403
    from meshrunner.runner.predict.forecast import *  # noqa: F403
    from meshrunner.runner.predict.pool import *  # noqa: F403
    from meshrunner.runner.predict.replay.page.render import *  # noqa: F403
    from meshrunner.runner.predict.search import *  # noqa: F403
    from meshrunner.runner.predict.workload import *  # noqa: F403

PUBLIC = {
    "activations": "recomputed_blocks",
    "facts": "OF_CODE Fact Sections exact_facts",
    "forecast": "BORDERLINE DOES_NOT_FIT FITS NOT_PLANNED Forecast MemoryForecast SpeedForecast Verdict not_planned why",
    "pool": "NOT_IN_TIME predict_all",
    "replay.page.render": "write_page",
    "search": "Planned check_whole largest_of_each largest_that_fits predict_config",
    "workload": "Workload trace_workload",
}
"""Public names of this package, keyed by the module that defines them."""
_MODULES = {name: module for module, names in PUBLIC.items() for name in names.split()}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
