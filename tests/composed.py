"""Configurations for tests, composed from the shipped options as the command line does it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra.types import RunMode
from omegaconf import OmegaConf

from meshrunner.runner.config.compose import Composer
from meshrunner.runner.config.experiment import Experiment, check

CONF = Path(__file__).parents[1] / "conf"
SMALL = (
    "data=random",
    "model.vocab_size=509",
    "model.dim=48",
    "model.n_layers=3",
    "model.n_heads=6",
    "model.n_kv_heads=2",
    "model.ffn_dim=100",
    "seq_len=34",
    "micro_batch=1",
    "global_batch=12",
    "steps=5",
    "max_grad_norm=0.2",
    "optimizer.lr=1e-3",
    "optimizer.eps=1e-2",
)
"""A model of odd shapes: no dimension divides evenly over 3 or 4 ranks, clipping bites (without a large eps Adam would
    not care how gradients are scaled)."""


@cache
def _files() -> Any:
    """Return the repository of the shipped YAML files, so that a process reads each of them once."""
    return Composer("run", []).hydra.config_loader.repository


def _composer(overrides: Sequence[str]) -> Composer:
    composer = Composer("run", list(overrides))
    if composer.args.config_dir is None:
        composer.hydra.config_loader.repository = _files()
    return composer


def config(*overrides: str) -> dict[str, Any]:
    """The resolved configuration of some overrides."""
    composed = _composer(overrides).single_run()
    assert composed is not None
    return composed.config


def option(group: str, name: str) -> dict[str, Any]:
    """The keys of a shipped option, those of the option it builds on included; `???` and interpolations as they stand."""
    composer = _composer([f"{group}={name}"])
    composed = composer.hydra.compose_config("run", composer.args.overrides, RunMode.RUN, with_log_configuration=False)
    keys = OmegaConf.to_container(composed[group])
    assert isinstance(keys, dict)
    return {str(key): value for key, value in keys.items()}


def experiment(*overrides: str) -> Experiment:
    """The checked experiment of some overrides."""
    return check(config(*overrides))
