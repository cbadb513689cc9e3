"""Hydra's flags that ask for information (--help, --cfg, --info) in place of what the verb does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshrunner.runner.config.compose import Composer


def answered(composer: Composer) -> bool:
    """Answer a query; returns False if the command line has none."""
    helped = composer.helped()
    if helped is None:
        return composer.answer_query()
    from meshrunner.runner.commands import COMMANDS
    from meshrunner.runner.commands.usage import describe
    from meshrunner.runner.console import say
    from meshrunner.runner.shipped import also_in

    verb = composer.args.parser.prog.rpartition(" ")[2]
    with also_in(composer.args.config_dir):
        say("\n".join([f"{describe(COMMANDS[verb])}\n", *_configuration(*helped)]))
    return True


def _configuration(config: dict[str, Any], hydra: dict[str, Any]) -> Iterator[str]:
    """Yield paragraphs that explain every key of a configuration, with its value."""
    from meshrunner.runner import shipped
    from meshrunner.runner.config.reference import catalog, explain
    from meshrunner.runner.config.reference.expected import in_yaml
    from meshrunner.runner.console import in_two_columns
    from meshrunner.runner.verbs.reference import hydra_keys, terms

    chosen = hydra["runtime"]["choices"]
    keys = [*catalog.every_key(config), *(terms.launcher_keys() if chosen.get(shipped.LAUNCHER) == "slurm" else ())]
    for part in explain.explain_configuration(config | {"hydra": hydra}, keys, chosen):
        yield f"{part}\n"
    for group, about in terms.ABOUT.items():
        yield f"{group}: {about}\n{in_two_columns([('options:', ', '.join(shipped.options(group)))])}\n"
    values = [(key, catalog.value_at({"hydra": hydra}, key)) for key in hydra_keys.LISTED]
    yield in_two_columns(((f"{key} = {in_yaml(value)}", hydra_keys.HYDRA[key]) for key, value in values), 0)
