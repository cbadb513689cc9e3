"""`meshrunner schema`: print a JSON schema that lets editors complete and check YAML files."""

import json
from typing import Any

from meshrunner.runner import shipped
from meshrunner.runner.commands.parser import parse
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.reference import json_schema
from meshrunner.runner.console import say
from meshrunner.runner.verbs.reference.help import unknown


def schema(arguments: list[str]) -> int:
    """Print a JSON schema. Raise ConfigError if the group is unknown."""
    say(json.dumps(schema_of(parse("schema", arguments).group), indent=2))
    return 0


def schema_of(group: str | None) -> dict[str, Any]:
    """Return the schema of a group's files or, without a group, of a run's config.yaml."""
    if not group:
        return json_schema.resolved_schema(Experiment)
    if group in shipped.GLOBAL:
        return json_schema.file_schema(Experiment, hydra=json_schema.HYDRA, defaults=json_schema.DEFAULTS)
    if group == shipped.LAUNCHER:
        from meshrunner.runner.slurm.settings import Slurm

        return json_schema.file_schema(Slurm, _target_={"const": "hydra_plugins.meshrunner.SlurmLauncher"})
    if group not in shipped.groups():
        raise unknown(f"no such group: '{group}'", group, shipped.groups())
    base = Experiment.model_fields[group].annotation
    assert isinstance(base, type)
    return json_schema.file_schema(base)
