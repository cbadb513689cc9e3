"""Explanations of Hydra's own keys. They are no fields of an Experiment, so their texts stand here."""

from __future__ import annotations

from meshrunner.runner import shipped
from meshrunner.runner.config.hydra.no_effect import REFUSED, SET_BY_HYDRA, SILENT
from meshrunner.runner.config.reference import explain
from meshrunner.runner.config.reference.catalog import value_at
from meshrunner.runner.console import in_two_columns, paragraph

DEFAULTS = (
    "Options and files that a YAML file builds on (Hydra's defaults list). _self_ is the place of the file's own keys."
)
HYDRA = {
    "hydra.run.dir": "Directory of a single run, the run directory.",
    "hydra.sweep.dir": "Directory of a sweep. Its runs are below it.",
    "hydra.mode": "RUN, or MULTIRUN for a sweep without -m.",
    "hydra.sweeper.params": "The grid of a sweep, keys or groups with their values: {seed: '1,2'}. Overrides replace some.",
    "hydra.sweeper.max_batch_size": "Most jobs that a sweeper passes to the launcher at a time; null: all.",
    "hydra.sweeper": "Chooses the values of a sweep: basic tries all; hydra/sweeper=optuna, a plugin, searches.",
    "hydra.launcher": "Executes the runs: hydra/launcher=local on this machine, hydra/launcher=slurm as SLURM jobs.",
    "hydra.launcher._target_": "The launcher's class; hydra/launcher=NAME sets it.",
    "hydra.searchpath": "Directories of options in addition to --config-dir; only in the primary configuration.",
    "hydra.job.name": "A name that ${hydra.job.name} inserts, for example in hydra.run.dir.",
    "hydra.job.id": "An id of a single run that ${hydra.job.id} inserts.",
    "hydra.job.num": "A number of a single run that ${hydra.job.num} inserts. A sweep numbers its runs.",
    "hydra.job.config.override_dirname": "Form of ${hydra.job.override_dirname}: kv_sep, item_sep, exclude_keys.",
    "hydra.help": "Your own text for --help: app_name, header, footer, template.",
    "hydra.hydra_help": "Your own text for --hydra-help: hydra_help, template.",
    "hydra": "Hydra's settings: those that are useful here, and what replaces the others.",
}
"""Keys of Hydra's that have an effect here."""
LISTED = ("hydra.run.dir", "hydra.sweep.dir", "hydra.mode", "hydra.sweeper.params")
"""Keys that `run --help` lists."""


def explain_hydra(name: str) -> str:
    """Return the meaning of a key of Hydra's, or what replaces it; an empty string for any other name."""
    if name == "defaults" or name.endswith(".defaults"):
        return f"{name}\n{paragraph(DEFAULTS)}"
    full = next((key for key in (*HYDRA, *REFUSED, *SILENT) if key.endswith(f".{name}")), name)
    known = HYDRA | {key: f"Refused: {instead}." for key, instead in REFUSED.items()}
    known |= {key: f"Has no effect here: {why}." for key, why in SILENT.items()}
    known |= dict.fromkeys(SET_BY_HYDRA, "Hydra sets it for every run; you cannot.")
    below = [(key, text) for key, text in known.items() if key.startswith(f"{full}.")]
    if full == "hydra" or (below and full not in known):  # hydra.run
        return f"{full}\n{paragraph(known.get(full, 'Settings of Hydra.'))}\n\n{in_two_columns(below)}"
    # The explanation of a mapping covers what is below it: hydra.sweeper.params.seed.
    nearest = max((key for key in known if f"{full}.".startswith(f"{key}.") and key != "hydra"), key=len, default="")
    if not nearest:
        return ""
    value = value_at(shipped.top_level(), full)
    default = f"\n{in_two_columns([('default', explain.value_text(value))])}" if value is not ... else ""
    return f"{full}\n{paragraph(known[nearest])}{default}"
