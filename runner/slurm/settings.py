"""The keys of `hydra/launcher=slurm`, and what they mean for a run."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from omegaconf import OmegaConf
from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import Section, whole
from meshrunner.runner.config.compose import Composed, plain
from meshrunner.runner.config.devices import node_devices
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.hardware import GPU
from meshrunner.runner.config.validation import invalid

CountOrNull = Annotated[int | None, whole(None)]


def _time(value: Any) -> Any:
    """The value if it is text. YAML reads 1:00:00 as the number 3600, which SLURM would take for minutes."""
    if value is not None and not isinstance(value, str):
        raise PydanticCustomError(
            "time", "expected text like '1:00:00' or '2-00:00:00', got {got}", {"got": repr(value)}
        )
    return value


def seconds(time: str) -> int | None:
    """Seconds of a time limit as SLURM writes one: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S; None for any other text."""
    if not re.fullmatch(r"(\d+-\d+(:\d+){0,2})|(\d+(:\d+){0,2})", time):
        return None
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, rest_s = (*parts, 0, 0)[:3]
    else:
        hours, minutes, rest_s = parts if len(parts) == 3 else (0, *parts, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest_s


def _one_line(value: Any) -> Any:
    if isinstance(value, str) and "\n" in value:
        raise PydanticCustomError("line", "expected one line")
    return value


Line = Annotated[str, BeforeValidator(_one_line)]


class Slurm(Section):
    """Where and how SLURM runs the jobs. The keys are explained in conf/hydra/launcher/slurm.yaml."""

    partition: Line | None
    account: Line | None
    qos: Line | None
    constraint: Line | None
    nodes: CountOrNull
    gpus_per_node: CountOrNull
    cpus_per_task: CountOrNull
    time: Annotated[Line | None, BeforeValidator(_time)]
    max_parallel: CountOrNull
    max_requeues: Annotated[int, whole(at_least=0)]
    notice_s: int = Field(ge=0, le=65535)
    extra: list[Line]
    srun: list[Line]
    preamble: str
    command: Line | None
    wait: bool
    dry_run: bool

    @model_validator(mode="after")
    def _check_notice(self) -> Slurm:
        if self.time is not None and (limit := seconds(self.time)) is not None and 0 < limit <= self.notice_s:
            raise PydanticCustomError(
                "notice",
                "notice_s({notice}) is not before the limit time({limit}): every job would be requested to stop at its start",
                {"notice": self.notice_s, "limit": self.time},
            )
        return self

    @classmethod
    def read(cls, launcher: dict[str, Any]) -> Slurm:
        """The settings in `hydra.launcher` as composed; raises ConfigError that lists all wrong keys."""
        try:
            return cls.model_validate({key: value for key, value in launcher.items() if key != "_target_"})
        except ValidationError as error:
            raise invalid(error, lambda _: cls.model_fields, "hydra.launcher") from None

    @classmethod
    def shipped(cls) -> dict[str, Any]:
        """The keys and values of conf/hydra/launcher/slurm.yaml."""
        text = files("meshrunner.conf").joinpath("hydra/launcher/slurm.yaml").read_text()
        return {key: value for key, value in plain(OmegaConf.create(text)).items() if key != "_target_"}

    def apply_to(self, composed: Composed) -> Composed:
        """The configuration with `nodes` as its launch.nodes; raises ConfigError when that was given, too, and differs."""
        launch = composed.config["launch"]
        if self.nodes is None or launch["nodes"] == self.nodes:
            return composed
        if launch["nodes"] != 1:
            raise ConfigError(
                f"hydra.launcher.nodes({self.nodes}) is not launch.nodes({launch['nodes']}); give one of them"
            )
        return replace(composed, config=composed.config | {"launch": launch | {"nodes": self.nodes}})

    def fit(self, experiment: Experiment) -> None:
        """Raise ConfigError when a run that is placed already is for another number of nodes."""
        if self.nodes is not None and self.nodes != experiment.launch.nodes:
            raise ConfigError(
                f"hydra.launcher.nodes({self.nodes}): the run is placed with launch.nodes({experiment.launch.nodes}); "
                "submit it anew, in another directory, or change its config.yaml"
            )

    def workers(self, experiment: Experiment) -> int:
        """Workers per node of the cluster, as far as this machine can tell."""
        if experiment.launch.workers != "auto":
            return experiment.launch.workers
        return self.gpus(experiment) or node_devices(experiment).workers

    def gpus(self, experiment: Experiment) -> int | None:
        """GPUs that a run requests on each node; None: none."""
        if self.gpus_per_node is not None:
            return self.gpus_per_node
        if not isinstance(experiment.hardware, GPU):
            return None
        workers = experiment.launch.workers
        return experiment.hardware.devices_per_node if workers == "auto" else workers

    @property
    def program(self) -> str:
        """The shell words that start meshrunner."""
        if self.command is not None:
            return self.command
        beside = Path(sys.executable).with_name("meshrunner")
        return shlex.quote(str(beside)) if beside.exists() else f"{shlex.quote(sys.executable)} -m meshrunner"
