"""Read and write run directories (the files of one run) and sweep directories (the runs of a sweep). Each module is imported when
one of its public names is first used, so that Tab completion and `--help` start without pydantic."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshrunner.runner.rundir.damage import *  # noqa: F403
    from meshrunner.runner.rundir.events import *  # noqa: F403
    from meshrunner.runner.rundir.logs import *  # noqa: F403
    from meshrunner.runner.rundir.plain_yaml import *  # noqa: F403
    from meshrunner.runner.rundir.records import *  # noqa: F403
    from meshrunner.runner.rundir.run import *  # noqa: F403
    from meshrunner.runner.rundir.states import *  # noqa: F403
    from meshrunner.runner.rundir.summary import *  # noqa: F403
    from meshrunner.runner.rundir.sweep import *  # noqa: F403

PUBLIC = {
    "damage": "READERS find_damage inspect",
    "events": "StepRow Tail add_rows last_rows read_events",
    "logs": "last_exception last_lines last_stack",
    "plain_yaml": "parse_yaml",
    "records": "Environment Explanation Failure JsonFile PlanRecord RankError Submission TraceTable Tracking unreadable",
    "run": "Overrides key_of load_overrides options_in_force place_again place_run read_config read_overrides",
    "states": "CRASHED FINAL RESULTS Status claim condition heartbeat is_count owner_is_alive read_state read_status "
    "started_at update_status",
    "summary": "FITTING VERDICT Layouts Summary add_layout measured_rows only_of_completed predicted summarise write_summary",
    "sweep": "PlacedSweep add_runs in_round repeat_ending repeat_number repeat_of run_labels run_names short_override "
    "sweep_damage sweep_title varying_overrides write_run_list",
}
"""Public names of this package, keyed by the module that defines them."""
_MODULES = {name: module for module, names in PUBLIC.items() for name in names.split()}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
