"""`meshrunner help TERM`: explain a group, an option or a key, including Hydra's keys. `help VERB` does not use this module."""

from collections.abc import Iterable, Iterator

from pydantic_core import PydanticCustomError

from meshrunner.recipes.config_keys import value_at
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import Option, did_you_mean
from meshrunner.runner import shipped
from meshrunner.runner.commands.parser import parse
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.hydra.no_effect import REFUSED, SET_BY_HYDRA, SILENT
from meshrunner.runner.config.reference import catalog, explain
from meshrunner.runner.config.reference.catalog import Key
from meshrunner.runner.config.reference.json_schema import documentation
from meshrunner.runner.console import in_two_columns, paragraph, say

ABOUT = {
    shipped.EXPERIMENT: "A named sweep or set of keys, which -m and other overrides can extend. --config-dir adds your own.",
    shipped.SPACE: "Values that a sweep or `meshrunner tune` varies. --config-dir adds your own spaces.",
    shipped.LAUNCHER: "Executes the runs; `meshrunner submit` uses slurm by default.",
}
"""Explanations of the groups `experiment`, `space` and `hydra/launcher`, which are not fields of class Experiment."""
DEFAULTS = "Options and files that a YAML file includes (Hydra's defaults list). _self_ is the position of the file's own keys."
HYDRA = {
    "hydra.run.dir": "Directory of a single run, the run directory.",
    "hydra.sweep.dir": "Directory of a sweep, which contains the run directories.",
    "hydra.mode": "RUN, or MULTIRUN to sweep without -m.",
    "hydra.sweeper.params": "The grid of a sweep: values of keys or groups, as in {seed: '1,2'}. Overrides replace it.",
    "hydra.sweeper.max_batch_size": "Maximum number of jobs that a sweeper passes to the launcher at once; null: all.",
    "hydra.sweeper": "Chooses the values of a sweep: basic tries all values; the plugin hydra/sweeper=optuna searches.",
    "hydra.launcher": "Executes the runs: hydra/launcher=local on this machine, hydra/launcher=slurm as SLURM jobs.",
    "hydra.launcher._target_": "The launcher's class; hydra/launcher=NAME sets it.",
    "hydra.searchpath": "More directories with options, like --config-dir. Works only in the primary configuration.",
    "hydra.job.name": "The text that ${hydra.job.name} inserts, for example in hydra.run.dir.",
    "hydra.job.id": "The id of a single run, inserted by ${hydra.job.id}.",
    "hydra.job.num": "The number of a single run, inserted by ${hydra.job.num}. A sweep numbers its runs itself.",
    "hydra.job.config.override_dirname": "Format of ${hydra.job.override_dirname}, set by kv_sep, item_sep and exclude_keys.",
    "hydra.help": "Your own text for --help: app_name, header, footer, template.",
    "hydra.hydra_help": "Your own text for --hydra-help: hydra_help, template.",
    "hydra": "Hydra's settings that work in meshrunner, and replacements for the settings that do not work.",
}
"""Explanations of the Hydra keys that have an effect in meshrunner. Class Experiment has no fields for these keys."""


def help(arguments: list[str]) -> int:
    """Explain a term. If the term is unknown, raise a ConfigError that suggests the nearest known name."""
    given = parse("help", arguments)
    with shipped.also_in(given.config_dir):
        say(explanation(given.term))
    return 0


def explanation(term: str) -> str:
    """Return an explanation of a key, group or option. If the term is unknown, raise a ConfigError that suggests a known name."""
    name, _, option = term.lstrip("+~").partition("=")
    group = shipped.LAUNCHER if name == "hydra.launcher" else name
    if group not in shipped.groups() and group.rpartition("/")[0] in shipped.groups():  # GROUP/OPTION, as in file names
        group, _, option = group.rpartition("/")
    keys = [*every_key()]
    if group in shipped.groups():
        return _explain_group(group, option, [key for key in keys if key.group == group and key.name != group])
    if matches := catalog.matching(name, keys):
        return explain.explain_keys(matches, keys)
    if text := _explain_hydra(catalog.plain(name).replace("/", ".")):
        return text
    if having := [group for group in shipped.groups() if name in shipped.options(group)]:
        return "\n\n".join(_explain_group(group, name, [key for key in keys if key.group == group]) for group in having)
    options = [option for group in shipped.groups() for option in shipped.options(group)]
    names = [name for key in keys for name in (key.name, key.leaf)]
    raise unknown(f"'{name}': no such key, group or option", name, [*names, *shipped.groups(), *options, *HYDRA])


def every_key() -> Iterator[Key]:
    """Yield all keys, including the keys of hydra/launcher=slurm and the keys of the user's own classes."""
    yield from catalog.every_key()
    yield from launcher_keys()


def launcher_keys() -> Iterator[Key]:
    """Yield the keys of hydra/launcher=slurm."""
    from meshrunner.runner.slurm.settings import Slurm

    return catalog.keys_of("hydra.launcher", {"slurm": Slurm})


def unknown(problem: str, word: str, known: Iterable[str]) -> ConfigError:
    return ConfigError(f"{problem}.{did_you_mean(word, known)} `meshrunner run --help` lists all keys")


def _explain_group(group: str, option: str, keys: list[Key]) -> str:
    if not option:
        return explain.explain_group(group, ABOUT.get(group) or documentation(Experiment)[group], keys)
    if option not in shipped.options(group):
        own = "" if shipped.own else "; for an option of your own, add --config-dir DIR"
        error = unknown(f"{group}: unknown option '{option}'", option, shipped.options(group))
        raise ConfigError(f"{error}{own}")
    if (kind := shipped.values(group, option).get("kind")) in shipped.own_kinds(group):
        base = Experiment.model_fields[group].annotation
        assert isinstance(base, type) and issubclass(base, Option)
        try:
            base.resolve(kind)
        except PydanticCustomError as problem:
            raise ConfigError(f"{group}={option}: {problem}") from None
    return explain.explain_option(group, option, keys)


def _explain_hydra(name: str) -> str:
    """Return an explanation of a Hydra key, or "" for any other name. For a key that is refused, explain why."""
    if name == "defaults" or name.endswith(".defaults"):
        return f"{name}\n{paragraph(DEFAULTS)}"
    full = next((key for key in (*HYDRA, *REFUSED, *SILENT) if key.endswith(f".{name}")), name)
    known = HYDRA | {key: f"Refused: {instead}." for key, instead in REFUSED.items()}
    known |= {key: f"Has no effect here: {why}." for key, why in SILENT.items()}
    known |= dict.fromkeys(SET_BY_HYDRA, "Hydra sets this key for every run; it cannot be overridden.")
    below = [(key, text) for key, text in known.items() if key.startswith(f"{full}.")]
    if full == "hydra" or (below and full not in known):  # such as hydra.run
        return f"{full}\n{paragraph(known.get(full, 'Settings of Hydra.'))}\n\n{in_two_columns(below)}"
    # The explanation of a mapping covers the keys below it, such as hydra.sweeper.params.seed.
    nearest = max((key for key in known if f"{full}.".startswith(f"{key}.") and key != "hydra"), key=len, default="")
    if not nearest:
        return ""
    value = value_at(shipped.top_level(), full)
    default = f"\n{in_two_columns([('default', explain.value_text(value))])}" if value is not ... else ""
    return f"{full}\n{paragraph(known[nearest])}{default}"
