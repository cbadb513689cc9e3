"""The answer to `help TERM` for any key, group or option, the launcher's and Hydra's own included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import did_you_mean
from meshrunner.runner import shipped
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.reference import catalog, explain
from meshrunner.runner.config.reference.catalog import Key
from meshrunner.runner.config.reference.docstrings import documentation
from meshrunner.runner.verbs.reference.hydra_keys import HYDRA, explain_hydra

ABOUT = {
    shipped.EXPERIMENT: "A named sweep or set of keys. Works with -m and with other overrides. Yours: --config-dir.",
    shipped.LAUNCHER: "Executes the runs; `meshrunner submit` takes slurm.",
}
"""Group -> its explanation, for the groups that are no part of an Experiment."""


def explanation(term: str) -> str:
    """Explain a key, group or option; raises ConfigError with the nearest name for an unknown one."""
    name, _, option = term.lstrip("+~").partition("=")
    group = shipped.LAUNCHER if name == "hydra.launcher" else name
    if group not in shipped.groups() and group.rpartition("/")[0] in shipped.groups():  # the path of the file
        group, _, option = group.rpartition("/")
    keys = [*every_key()]
    if group in shipped.groups():
        return _explain_group(group, option, [key for key in keys if key.group == group and key.name != group])
    if matches := catalog.matching(name, keys):
        return explain.explain_keys(matches, keys)
    if text := explain_hydra(catalog.plain(name).replace("/", ".")):
        return text
    if having := [group for group in shipped.groups() if name in shipped.options(group)]:
        return "\n\n".join(_explain_group(group, name, [key for key in keys if key.group == group]) for group in having)
    options = [option for group in shipped.groups() for option in shipped.options(group)]
    names = [name for key in keys for name in (key.name, key.leaf)]
    raise unknown(f"'{name}': no key, group or option", name, [*names, *shipped.groups(), *options, *HYDRA])


def _explain_group(group: str, option: str, keys: list[Key]) -> str:
    """Explain a group, or one option of it."""
    if not option:
        return explain.explain_group(group, ABOUT.get(group) or documentation(Experiment)[group], keys)
    if option not in shipped.options(group):
        own = "" if shipped.own else "; for an option of your own add --config-dir DIR"
        error = unknown(f"{group}: unknown option '{option}'", option, shipped.options(group))
        raise ConfigError(f"{error}{own}")
    if (kind := shipped.values(group, option).get("kind")) in shipped.own_kinds(group):
        catalog.check_class(group, option, kind)
    return explain.explain_option(group, option, keys)


def every_key() -> Iterator[Key]:
    """Yield all keys, those of hydra/launcher=slurm and of the classes that `shipped.also_in` adds included."""
    yield from catalog.every_key()
    yield from launcher_keys()


def launcher_keys() -> Iterator[Key]:
    """Yield the keys of hydra/launcher=slurm."""
    from meshrunner.runner.slurm.settings import Slurm

    return catalog.keys_of("hydra.launcher", {"slurm": Slurm})


def unknown(problem: str, word: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown name."""
    return ConfigError(f"{problem}.{did_you_mean(word, known)} `meshrunner run --help` lists all keys")
