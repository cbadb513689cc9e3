"""Names of environment variables whose values are nobody else's business."""

from __future__ import annotations

import re

SECRET = re.compile(r"(TOKEN|(?<!_P)KEY|SECRET|JWT|PASSWORD|PASSWD|CREDENTIAL)S?(_|$)", re.IGNORECASE)
FROM_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*([^,}\s]+)")
"""An interpolation of OmegaConf; the group is the variable's name."""
WHERE = "it would stand in config.yaml and go to the report page and the trackers; workers inherit the variables of the command"


def is_secret(name: str) -> bool:
    """Whether a variable's name says that its value is secret: HF_TOKEN, WANDB_API_KEY, SLURM_JWT; not NCCL_IB_PKEY."""
    return SECRET.search(name) is not None
