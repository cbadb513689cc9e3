"""`meshrunner help KEY` and `run --help`: what keys mean, may be and are by default; `meshrunner schema`: for editors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.console import say

if TYPE_CHECKING:
    from meshrunner.runner.config.compose import Composer
    from meshrunner.runner.config.reference.keys import Key

USAGE = (
    "usage: meshrunner help KEY [--config-dir DIR], where KEY is such as optimizer.lr, lr, optimizer, optimizer=adamw or "
    "hydra.launcher.time"
)
CONFIG_DIR = ("--config-dir", "-cd")
SCHEMA_USAGE = "usage: meshrunner schema [GROUP]; without GROUP the schema of a run's config.yaml"
FLAGS = """\
usage: meshrunner {verb} [OVERRIDES] [FLAGS]

  OVERRIDES             key=value, group=option; +key=value adds a key, ~key removes one; with -m key=a,b tries both
  -m, --multirun        a sweep over every combination
  --run                 a single run, whatever hydra.mode says
  --config-dir DIR      a folder with groups and options of your own
  --config-name NAME    a file of your own in the place of run.yaml
  --cfg job|hydra|all   print the configuration; --resolve with interpolations resolved, --package KEY a part of it
  --info [WHAT]         how the configuration was composed: defaults, defaults-tree, config, plugins, searchpath
  --hydra-help          Hydra's own flags

`meshrunner help KEY` says more of one key, `help GROUP` or `help GROUP=OPTION` of a group or an option.
"""
DEFAULTS = (
    "Of a YAML file: the options and files that it builds on (Hydra's defaults list); _self_ stands for its own keys."
)
HYDRA = {
    "hydra.run.dir": "Folder of a single run, the run directory.",
    "hydra.sweep.dir": "Folder of a sweep; its runs are in it.",
    "hydra.mode": "RUN, or MULTIRUN: a sweep, also without -m.",
    "hydra.sweeper.params": "The grid of a sweep: keys and groups and their values, {seed: '1,2'}; overrides replace some.",
    "hydra.sweeper.max_batch_size": "Most jobs that a sweeper hands over at a time; null: all.",
    "hydra.sweeper": "What chooses the values of a sweep: basic tries all; hydra/sweeper=optuna, a plugin, searches.",
    "hydra.launcher": "What executes the runs: hydra/launcher=local here, hydra/launcher=slurm as jobs.",
    "hydra.launcher._target_": "The launcher's class; it comes with hydra/launcher=NAME.",
    "hydra.searchpath": "More folders of options, beside --config-dir; only in the primary configuration.",
    "hydra.job.name": "A name for ${hydra.job.name}, say in hydra.run.dir.",
    "hydra.job.id": "An id for ${hydra.job.id} of a single run.",
    "hydra.job.num": "A number for ${hydra.job.num} of a single run; a sweep numbers its runs.",
    "hydra.job.config.override_dirname": "How ${hydra.job.override_dirname} is written: kv_sep, item_sep, exclude_keys.",
    "hydra.help": "A text of your own for --help: app_name, header, footer, template.",
    "hydra.hydra_help": "A text of your own for --hydra-help: hydra_help, template.",
    "hydra": "Hydra's settings. What is of use here, and what there is in the place of the rest:",
}
"""Keys of Hydra's that mean something here."""
ABOUT = {
    "experiment": "A named sweep or set of keys; with -m, and with other overrides beside it. Your own: --config-dir.",
    "hydra/launcher": "What executes the runs; `meshrunner submit` takes slurm.",
}
"""Groups that are no part of a configuration."""
OF_RUNS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.mode", "hydra.sweeper.params")
"""Those that `run --help` lists."""


def help(arguments: list[str]) -> int:
    """Explain a key, group or option; raises ConfigError with the nearest name for an unknown one."""
    words, config_dir = split_config_dir(arguments)
    if len(words) != 1 or words[0].startswith("-") or config_dir == "":
        raise ConfigError(USAGE)
    from meshrunner.runner.shipped import also_in

    with also_in(config_dir):
        say(explanation(words[0]))
    return 0


def split_config_dir(arguments: Iterable[str]) -> tuple[list[str], str | None]:
    """The words beside `--config-dir DIR`, and DIR; empty where none follows."""
    words, config_dir, rest = [], None, iter(arguments)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        if flag in CONFIG_DIR:
            config_dir = value if equals else next(rest, "")
        else:
            words.append(argument)
    return words, config_dir


def schema(arguments: list[str]) -> int:
    """Print a JSON schema; raises ConfigError for an unknown group."""
    if len(arguments) > 1 or (arguments and arguments[0].startswith("-")):
        raise ConfigError(SCHEMA_USAGE)
    say(json.dumps(_schema(arguments[0] if arguments else ""), indent=2))
    return 0


def _schema(group: str) -> dict[str, Any]:
    from meshrunner.runner import shipped
    from meshrunner.runner.config.experiment import Experiment
    from meshrunner.runner.config.reference import schema

    if not group:
        return schema.configuration_schema()
    if group == shipped.EXPERIMENT:
        return schema.experiment_schema()
    if group == shipped.LAUNCHER:
        from meshrunner.runner.slurm.settings import Slurm

        return schema.option_schema(Slurm, _target_={"const": "hydra_plugins.meshrunner.SlurmLauncher"})
    if group not in shipped.groups():
        raise _unknown(f"there is no group '{group}'", group, shipped.groups())
    base = Experiment.model_fields[group].annotation
    assert isinstance(base, type)
    return schema.option_schema(base)


def answered(composer: Composer) -> bool:
    """Answer a query (--help, --cfg, --info); False when there is none."""
    helped = composer.helped()
    if helped is None:
        return composer.answer_query()
    from meshrunner.runner.shipped import also_in

    verb = composer.args.parser.prog.rpartition(" ")[2]
    with also_in(composer.args.config_dir):
        say("\n".join([FLAGS.format(verb=verb), *_parts(*helped)]))
    return True


def _parts(config: dict[str, Any], hydra: dict[str, Any]) -> Iterator[str]:
    """What --help says of a configuration, every key with its value."""
    from meshrunner.runner import shipped
    from meshrunner.runner.config.reference import explain, keys
    from meshrunner.runner.config.reference.keys import value_at
    from meshrunner.runner.config.reference.schema import in_yaml

    chosen = hydra["runtime"]["choices"]
    every = [*keys.every_key(config), *(_launcher_keys() if chosen.get(shipped.LAUNCHER) == "slurm" else ())]
    for part in explain.of_configuration(config | {"hydra": hydra}, every, chosen):
        yield f"{part}\n"
    for group in (shipped.EXPERIMENT, shipped.LAUNCHER):
        yield f"{group}: {ABOUT[group]}\n{explain.in_two_columns([('options:', ', '.join(shipped.options(group)))])}\n"
    yield explain.in_two_columns(
        ((f"{key} = {in_yaml(value_at({'hydra': hydra}, key))}", HYDRA[key]) for key in OF_RUNS), 0
    )


def explanation(word: str) -> str:
    """What is known of a key, group or option; raises ConfigError where there is no such thing."""
    from meshrunner.runner import shipped
    from meshrunner.runner.config.reference import explain
    from meshrunner.runner.config.reference.keys import found, plain

    name, _, value = word.lstrip("+~").partition("=")
    group = shipped.LAUNCHER if name == "hydra.launcher" else name
    if group not in shipped.groups() and group.rpartition("/")[0] in shipped.groups():  # as the file is called
        group, _, value = group.rpartition("/")
    keys = [*every_key()]
    if group in shipped.groups():
        return _of_group(group, value, [key for key in keys if key.group == group and key.name != group])
    if matches := found(name, keys):
        return explain.of_keys(matches, keys)
    if text := _of_hydra(plain(name).replace("/", ".")):
        return text
    if having := [group for group in shipped.groups() if name in shipped.options(group)]:
        return "\n\n".join(_of_group(group, name, [key for key in keys if key.group == group]) for group in having)
    options = [option for group in shipped.groups() for option in shipped.options(group)]
    raise _unknown(f"'{name}': no key, group or option", name, [*_names(keys), *shipped.groups(), *options, *HYDRA])


def _of_group(group: str, option: str, keys: list[Key]) -> str:
    from meshrunner.runner import shipped
    from meshrunner.runner.config.experiment import Experiment
    from meshrunner.runner.config.reference import explain
    from meshrunner.runner.config.reference.docstrings import documentation
    from meshrunner.runner.config.reference.keys import check_class

    if not option:
        return explain.of_group(group, ABOUT.get(group) or documentation(Experiment)[group], keys)
    if option not in shipped.options(group):
        own = "" if shipped.has_own() else "; one of your own needs --config-dir DIR, as for `run`"
        unknown = _unknown(f"{group}: unknown option '{option}'", option, shipped.options(group))
        raise ConfigError(f"{unknown}{own}")
    if (kind := shipped.values(group, option).get("kind")) in shipped.own_kinds(group):
        check_class(group, option, kind)
    return explain.of_option(group, option, keys)


def _of_hydra(name: str) -> str:
    """What a key of Hydra's means, or what there is in its place; empty for any other."""
    from meshrunner.runner import shipped
    from meshrunner.runner.config.no_effect import REFUSED, SET_BY_HYDRA, SILENT
    from meshrunner.runner.config.reference import explain
    from meshrunner.runner.config.reference.keys import value_at

    if name == "defaults" or name.endswith(".defaults"):
        return f"{name}\n{explain.paragraph(DEFAULTS)}"
    full = next((key for key in (*HYDRA, *REFUSED, *SILENT) if key.endswith(f".{name}")), name)
    known = HYDRA | {key: f"Refused: {instead}." for key, instead in REFUSED.items()}
    known |= {key: f"Has no effect here: {why}." for key, why in SILENT.items()}
    known |= dict.fromkeys(SET_BY_HYDRA, "Hydra sets it for every run; it cannot be given.")
    below = [(key, text) for key, text in known.items() if key.startswith(f"{full}.")]
    if full == "hydra" or (below and full not in known):  # hydra.run
        return f"{full}\n{explain.paragraph(known.get(full, 'Settings of Hydra.'))}\n\n{explain.in_two_columns(below)}"
    # What lies below one that is explained is explained with it: hydra.sweeper.params.seed.
    nearest = max((key for key in known if f"{full}.".startswith(f"{key}.") and key != "hydra"), key=len, default="")
    if not nearest:
        return ""
    value = value_at(shipped.top_level(), full)
    default = f"\n{explain.in_two_columns([('default', explain.value_text(value))])}" if value is not ... else ""
    return f"{full}\n{explain.paragraph(known[nearest])}{default}"


def every_key() -> tuple[Key, ...]:
    """All keys, those of hydra/launcher=slurm and of the classes that `shipped.also_in` adds included."""
    from meshrunner.runner.config.reference import keys

    return (*keys.every_key(), *_launcher_keys())


def _launcher_keys() -> Iterator[Key]:
    from meshrunner.runner.config.reference.keys import keys_of
    from meshrunner.runner.slurm.settings import Slurm

    return keys_of("hydra.launcher", {"slurm": Slurm})


def _names(keys: list[Key]) -> Iterator[str]:
    """Whole names and last parts."""
    for key in keys:
        yield from (key.name, key.leaf)


def _unknown(what: str, word: str, known: Iterable[str]) -> ConfigError:
    from meshrunner.recipes.option import did_you_mean

    return ConfigError(f"{what}.{did_you_mean(word, known)} `meshrunner run --help` lists all keys")
