"""The keys of `hydra/launcher=slurm`, and what they mean for a run."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, NamedTuple

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


class Nodes(NamedTuple):
    """What a run asks of SLURM. The tasks of an array have to ask for the same."""

    number: int
    gpus: int | None
    """GPUs on each node; None: none."""
    whole: bool
    """Whether these are all GPUs of a node: no other job can use its CPUs and memory for more."""


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
    """Where and how SLURM runs the jobs."""

    partition: Line | None
    """Partition of the jobs; null: the cluster's default, and so for account, qos and constraint."""
    account: Line | None
    """Account that the jobs are charged to."""
    qos: Line | None
    """Quality of service."""
    constraint: Line | None
    """Features that the nodes must have, such as `h100`."""
    nodes: CountOrNull
    """Nodes of a run; null: its launch.nodes."""
    gpus_per_node: CountOrNull
    """GPUs that a run requests on each node; null: launch.workers (auto: the hardware's), where `hardware` names a GPU."""
    cpus_per_task: CountOrNull
    """
    CPUs of the one task on a node, which starts all its workers; null: all of the node, with its memory, where the run uses all
    its GPUs (`--exclusive --mem=0`), else `cpus_per_gpu`; what `extra` says of CPUs or memory replaces either.
    """
    cpus_per_gpu: CountOrNull
    """CPUs for each GPU of a run that does not use all of its nodes', as far as `hardware` says; null: the cluster's default."""
    time: Annotated[Line | None, BeforeValidator(_time)]
    """Limit of a job as quoted text, '12:00:00' or '2-00:00:00': YAML would read 12:00:00 as a number; null: the partition's."""
    max_parallel: CountOrNull
    """Tasks of a sweep's array that run at once; null: as many as fit."""
    max_requeues: Annotated[int, whole(at_least=0)]
    """How often a job that was preempted, reached its limit or lost a node is started again; it continues from its checkpoint."""
    notice_s: int = Field(ge=0, le=65535)
    """Seconds before the time limit at which a job is told to stop: time for a checkpoint."""
    extra: list[Line]
    """More lines for sbatch: ['--mail-type=END', '--exclude=node7']."""
    srun: list[Line]
    """More arguments of srun: ['--container-image=image.sqsh']."""
    preamble: str
    """Shell lines before srun: modules to load, NCCL variables."""
    command: Line | None
    """What starts meshrunner on a node: 'apptainer exec --nv image.sif meshrunner'; null: this installation."""
    wait: bool
    """Return when all jobs have ended, with the table."""
    dry_run: bool
    """Print the script and do nothing, as --dry-run."""

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

    def asked(self, experiment: Experiment) -> Nodes:
        """What a run asks for."""
        gpus, hardware = self.gpus(experiment), experiment.hardware
        whole = gpus is not None and isinstance(hardware, GPU) and gpus >= hardware.devices_per_node
        return Nodes(experiment.launch.nodes, gpus, whole)

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
