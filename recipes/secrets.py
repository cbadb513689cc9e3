"""Detect secret environment variables, which must not be copied into the configuration."""

import re
from typing import Any

from meshrunner.recipes.errors import ConfigError

SECRET = re.compile(r"(TOKEN|(?<!_P)KEY|SECRET|JWT|PASSWORD|PASSWD|CREDENTIAL)S?(_|$)", re.IGNORECASE)
FROM_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*([^,}\s]+)")
"""Pattern of OmegaConf interpolations such as ${oc.env:HOME}. Its group matches the name of the environment variable."""
WHERE = "the value would be written to config.yaml, the report page and trackers; set the variable in the shell instead"


def is_secret(name: str) -> bool:
    """Return whether a variable's name suggests a secret value (HF_TOKEN, WANDB_API_KEY, SLURM_JWT, but not NCCL_IB_PKEY)."""
    return SECRET.search(name) is not None


def refuse_secrets(value: Any, key: str = "") -> None:
    """Raise ConfigError if a value refers to a secret variable, such as ${oc.env:HF_TOKEN}. key: the value's dotted key."""
    if isinstance(value, dict | list):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            refuse_secrets(each, f"{key}.{name}".lstrip("."))
    elif isinstance(value, str):
        for name in filter(is_secret, FROM_ENVIRONMENT.findall(value)):
            raise ConfigError(f"{key}: the name in ${{oc.env:{name}}} suggests a secret value, and {WHERE}")
