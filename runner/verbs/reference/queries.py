"""Answer Hydra's information flags (--help, --cfg, --info) without executing the verb."""

from meshrunner.runner.config.compose import Composer

LISTED = ("hydra.run.dir", "hydra.sweep.dir", "hydra.mode", "hydra.sweeper.params")
"""Hydra's keys that `run --help` lists."""


def answered(composer: Composer) -> bool:
    """Print the answer to an information flag and return True, or return False if no such flag is given."""
    helped = composer.helped()
    if helped is None:
        return composer.answer_query()
    from meshrunner.recipes.config_keys import value_at
    from meshrunner.runner import shipped
    from meshrunner.runner.commands import COMMANDS
    from meshrunner.runner.commands.usage import describe
    from meshrunner.runner.config.reference import catalog, explain
    from meshrunner.runner.console import in_two_columns, say
    from meshrunner.runner.verbs.reference.help import ABOUT, HYDRA, launcher_keys

    config, hydra = helped
    chosen = hydra["runtime"]["choices"]
    with shipped.also_in(composer.args.config_dir):
        parts = [describe(COMMANDS[composer.verb])]
        own = [key for key in catalog.every_key(config) if composer.verb == "tune" or key.group != "tune"]
        keys = [*own, *(launcher_keys() if chosen.get(shipped.LAUNCHER) == "slurm" else ())]
        parts += explain.explain_configuration(config | {"hydra": hydra}, keys, chosen)
        for group, about in ABOUT.items():
            if group != shipped.SPACE or composer.verb == "tune":
                parts.append(f"{group}: {about}\n{in_two_columns([('options:', ', '.join(shipped.options(group)))])}")
        values = [(key, value_at({"hydra": hydra}, key)) for key in LISTED]
        parts.append(in_two_columns(((f"{key} = {catalog.in_yaml(value)}", HYDRA[key]) for key, value in values), 0))
        say("\n\n".join(parts))
    return True
